// Stands in for the CUDA back end in builds without nvcc: it registers nothing.
#include "core/registry.h"

namespace rarefy {

void register_cuda(Registry& /*registry*/) {}
bool cuda_built() { return false; }
const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> none;
  return none;
}
int current_cuda_device() { return 0; }

}  // namespace rarefy
