// Every kernel of every product, in order of preference; the reference is always last, so there is
// never a hole. A back end adds its rows in one register_* function and nothing else names a kernel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rarefy/backend.h"
#include "rarefy/linear.h"

namespace rarefy {

// Checked arguments of the three products, as kernels get them.
struct LinearArgs {
  MatrixView x;
  BsrView w;
  const void* bias = nullptr;
  Activation activation = Activation::none;
  MutableMatrixView y;
};

struct GradInputArgs {
  MatrixView dy;
  BsrView w;
  MutableMatrixView dx;
};

struct GradWeightArgs {
  MatrixView dy;
  MatrixView x;
  PlanView plan;
  void* dvalues = nullptr;
  DType dtype = DType::f32;
};

template <class Args>
struct Kernel {
  std::string_view impl;  // family, as in RAREFY_FORCE_IMPL
  std::string_view name;
  Device device;
  bool (*supports)(const Args&);
  Status (*run)(const Args&, const Context&);
};

struct Registry {
  std::vector<Kernel<LinearArgs>> linear;
  std::vector<Kernel<GradInputArgs>> grad_input;
  std::vector<Kernel<GradWeightArgs>> grad_weight;
};

// Built once, on first use, from what was compiled in and what cpuid reports.
const Registry& registry();

void register_cpu(Registry& registry);   // src/cpu: avx512, avx2, scalar, by cpuid
void register_cuda(Registry& registry);  // src/cuda, or its stand-in when built without CUDA
void register_ref(Registry& registry);   // src/ref

// What the CUDA back end knows of itself; empty without one.
bool cuda_built();
std::vector<std::string> cuda_devices();

// What the CPU back end knows of the machine.
std::string cpu_model();
std::vector<std::string> cpu_features();

std::string_view name(Device device);

// RAREFY_FORCE_IMPL as it is now; empty when unset.
std::string forced_impl();

// The first kernel, in order of preference, that runs on `device` and supports `args`; with
// RAREFY_FORCE_IMPL set, only kernels of that family count. Never null unless forced.
template <class Args>
const Kernel<Args>* select_kernel(const std::vector<Kernel<Args>>& kernels, Device device, const Args& args,
                                  std::string_view forced) {
  for (const Kernel<Args>& kernel : kernels) {
    if (kernel.device != device) continue;
    if (!forced.empty() && kernel.impl != forced) continue;
    if (kernel.supports(args)) return &kernel;
  }
  return nullptr;
}

}  // namespace rarefy
