// Which CPU kernels this machine can run, best first.
#include "core/registry.h"
#include "cpu/cpuid.h"

namespace rarefy {

void register_cpu(Registry& /*registry*/) {}

std::string cpu_model() { return cpu::model_name(); }
std::vector<std::string> cpu_features() { return cpu::feature_names(); }

}  // namespace rarefy
