// Which CPU kernels this machine can run, best first.
#include "cpu/cpuid.h"
#include "cpu/drivers.h"

namespace rarefy {

namespace {

template <const cpu::Kernels& kKernels>
void add_few(Registry& registry, std::string_view linear) {
  registry.linear.push_back({kKernels.impl, linear, Device::cpu,
                             [](const LinearArgs& args) { return cpu::takes_few(kKernels, args); },
                             [](const LinearArgs& args, const Context& context) {
                               return cpu::run_linear_few(kKernels, args, context);
                             }});
}

template <const cpu::Kernels& kKernels>
void add(Registry& registry, std::string_view linear, std::string_view grad_input,
         std::string_view grad_weight) {
  registry.linear.push_back({kKernels.impl, linear, Device::cpu,
                             [](const LinearArgs& args) { return cpu::has_storage(args.w.dtype); },
                             [](const LinearArgs& args, const Context& context) {
                               return cpu::run_linear(kKernels, args, context);
                             }});
  registry.grad_input.push_back({kKernels.impl, grad_input, Device::cpu,
                                 [](const GradInputArgs& args) { return cpu::has_storage(args.w.dtype); },
                                 [](const GradInputArgs& args, const Context& context) {
                                   return cpu::run_grad_input(kKernels, args, context);
                                 }});
  registry.grad_weight.push_back({kKernels.impl, grad_weight, Device::cpu,
                                  [](const GradWeightArgs& args) { return cpu::has_storage(args.x.dtype); },
                                  [](const GradWeightArgs& args, const Context& context) {
                                    return cpu::run_grad_weight(kKernels, args, context);
                                  }});
}

}  // namespace

void register_cpu(Registry& registry) {
#if defined(__x86_64__)
  if (cpu::features().avx512) {
    add_few<cpu::kAvx512>(registry, "avx512_linear_few");
    add<cpu::kAvx512>(registry, "avx512_linear", "avx512_grad_input", "avx512_grad_weight");
  }
  if (cpu::features().avx2) {
    add_few<cpu::kAvx2>(registry, "avx2_linear_few");
    add<cpu::kAvx2>(registry, "avx2_linear", "avx2_grad_input", "avx2_grad_weight");
  }
#endif
  add<cpu::kScalar>(registry, "scalar_linear", "scalar_grad_input", "scalar_grad_weight");
}

std::string cpu_model() { return cpu::model_name(); }
std::vector<std::string> cpu_features() { return cpu::feature_names(); }

}  // namespace rarefy
