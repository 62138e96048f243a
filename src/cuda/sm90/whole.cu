// The dense product of packed weights: tensor maps and the choice of the instantiation.
#include <utility>

#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/token_order.h"
#include "cuda/sm90/whole_launch.cuh"

namespace rarefy::sm90 {
namespace {

std::uint64_t u(std::int64_t x) { return static_cast<std::uint64_t>(x); }
int n(std::int64_t x) { return static_cast<int>(x); }
int tiles(std::int64_t size, int of) { return n((size + of - 1) / of); }

}  // namespace

cudaError_t launch(const WholeProblem& p, const WholeConfig& config, int sms, const WholeWeight& weight,
                   const WholeOperands& o, cudaStream_t stream) {
  WholeParams params{};
  params.token_tiles = n(config.token_tiles(p.tokens));
  params.wide = config.more == 0 ? params.token_tiles
                                 : tiles(p.tokens, 8) - params.token_tiles * (WholeConfig::kNarrow / 8);
  const bool by_feature = p.x_layout == Layout::by_feature;
  TensorShape x;  // [token][feature]: 64 features × a tile's tokens; [feature][token]: 64 × 64
  x.size[by_feature ? 1 : 0] = u(p.in_features());
  x.size[by_feature ? 0 : 1] = u(p.tokens);
  x.stride[0] = u(p.x_stride) * 2;
  x.box[0] = 64;
  x.box[1] = by_feature ? 64 : static_cast<std::uint32_t>(config.tokens);
  cudaError_t status = make_tensor_map(&params.x, p.dtype, o.x, x);
  if (status != cudaSuccess) return status;
  if (!by_feature) {
    params.last = LastTokens(p.tokens, params.token_at(params.token_tiles - 1, config.tokens));
    x.box[1] = params.last.count;
  }
  status = make_tensor_map(&params.x_last, p.dtype, o.x, x);
  if (status != cudaSuccess) return status;

  // Along its sum: a tile's features × 64 of the sum; else 64 of the sum × 64 features.
  const Major major = weight.by_column == p.transposed ? Major::k : Major::mn;
  TensorShape w;
  w.size[0] = u(weight.by_column ? p.rows : p.cols);
  w.size[1] = u(weight.lines);
  w.stride[0] = u(weight.pitch) * 2;
  w.box[0] = 64;
  w.box[1] = major == Major::k ? static_cast<std::uint32_t>(config.features) : 64;
  status = make_tensor_map(&params.w, p.dtype, o.packed, w);
  if (status != cudaSuccess) return status;

  TensorShape y;  // [token][feature]: 64 features × 64 tokens
  y.size[0] = u(p.out_features());
  y.size[1] = u(p.tokens);
  y.stride[0] = u(p.y_stride) * 2;
  y.box[0] = y.box[1] = 64;
  status = make_tensor_map(&params.y, p.dtype, o.y, y);
  if (status != cudaSuccess) return status;

  params.y_rest = params.y;
  if (const int rest = (config.more > 0 ? WholeConfig::kNarrow : config.tokens) % 64; rest > 0) {
    y.box[1] = static_cast<std::uint32_t>(rest);
    status = make_tensor_map(&params.y_rest, p.dtype, o.y, y);
    if (status != cudaSuccess) return status;
  }

  params.bias = o.bias;
  params.activation = static_cast<Activation>(p.activation);
  params.from_last = begins_with_last_tokens();
  params.features = n(p.out_features());
  params.tokens = n(p.tokens);
  params.steps = tiles(p.in_features(), 64);
  params.feature_tiles = tiles(p.out_features(), config.features);
  params.split = config.split;
  params.slots = static_cast<u32>(config.slots());
  params.repairs = stored_of(p, o.stated, o.x, o.y);
  if (by_feature) std::swap(params.repairs.x_stride, params.repairs.x_feature);
  const int all = params.feature_tiles * params.token_tiles,
            blocks = config.single() ? all * config.split : std::min(sms, all);
  const auto run = p.dtype == DType::bf16 ? launch_whole_bf16 : launch_whole_f16;
  return run(major, by_feature ? Major::mn : Major::k, config, blocks, params, stream);
}

}  // namespace rarefy::sm90
