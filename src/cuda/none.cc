// Stands in for the CUDA back end in builds without nvcc: it registers nothing.
#include "core/registry.h"

namespace rarefy {

void register_cuda(Registry& /*registry*/) {}
bool cuda_built() { return false; }
std::vector<std::string> cuda_devices() { return {}; }

}  // namespace rarefy
