// The tall kernel's launch: tensor maps and the choice of the instantiation.
#include "cuda/sm90/tall.h"

#include "cuda/sm90/tall_kernel.cuh"
#include "cuda/sm90/tensor_map.h"

namespace rarefy::sm90 {
namespace {

template <class T, Activation kActivation, int kRows>
cudaError_t launch_tile(const TallConfig& config, int workers, const TallParams& params,
                        cudaStream_t stream) {
  const auto kernel = tall_kernel<T, kActivation, kRows>;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes());
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(workers));
  launch.blockDim = dim3(384);
  launch.dynamicSmemBytes = static_cast<std::size_t>(config.shared_bytes());
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <class T, Activation kActivation>
cudaError_t launch_activation(const TallConfig& c, int workers, const TallParams& params,
                              cudaStream_t stream) {
  if (c.rows == 128) return launch_tile<T, kActivation, 128>(c, workers, params, stream);
  if (c.rows == 64) return launch_tile<T, kActivation, 64>(c, workers, params, stream);
  return cudaErrorInvalidConfiguration;
}

template <class T>
cudaError_t launch_type(rarefy::Activation activation, const TallConfig& c, int workers,
                        const TallParams& params, cudaStream_t stream) {
  switch (static_cast<device::Activation>(activation)) {
    case Activation::none: return launch_activation<T, Activation::none>(c, workers, params, stream);
    case Activation::relu: return launch_activation<T, Activation::relu>(c, workers, params, stream);
    case Activation::gelu_erf: return launch_activation<T, Activation::gelu_erf>(c, workers, params, stream);
    case Activation::gelu_tanh:
      return launch_activation<T, Activation::gelu_tanh>(c, workers, params, stream);
    case Activation::silu: return launch_activation<T, Activation::silu>(c, workers, params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch(const TallProblem& p, const TallConfig& config, const TallPlan& plan,
                   const TallOperands& o, cudaStream_t stream) {
  TallParams params{};
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  if (p.blocks > 0) {
    TensorShape w;  // [stored column][row of the block]
    w.size[0] = u(p.block_rows);
    w.size[1] = u(p.blocks);
    w.stride[0] = u(p.block_rows) * 2;
    w.box[0] = 64;
    w.box[1] = static_cast<std::uint32_t>(tall_columns(config.rows));
    const cudaError_t status = make_tensor_map(&params.w, p.dtype, o.values, w);
    if (status != cudaSuccess) return status;
  }
  TensorShape y;  // [token][feature]
  y.size[0] = u(p.rows);
  y.size[1] = u(p.tokens);
  y.stride[0] = u(p.y_stride) * 2;
  y.box[0] = y.box[1] = 64;
  const cudaError_t status = make_tensor_map(&params.y, p.dtype, o.y, y);
  if (status != cudaSuccess) return status;
  params.tile_range = o.plan;
  params.tiles = reinterpret_cast<const int4*>(o.plan + plan.tiles_at);
  params.col = o.col;
  params.x = o.x;
  params.values = o.values;
  params.bias = o.bias;
  params.x_bytes = static_cast<u32>(p.x_stride * 2);
  params.tokens = static_cast<int>(p.tokens);
  params.features = static_cast<int>(p.rows);
  params.block_rows = static_cast<int>(p.block_rows);
  params.slots = static_cast<u32>(config.slots);
  return p.dtype == DType::bf16
             ? launch_type<__nv_bfloat16>(p.activation, config, plan.workers, params, stream)
             : launch_type<__half>(p.activation, config, plan.workers, params, stream);
}

}  // namespace rarefy::sm90
