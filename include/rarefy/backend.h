// What this build and machine can run, which kernel a problem gets and in which configuration, and why
// the others were passed over.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rarefy/export.h"
#include "rarefy/problem.h"
#include "rarefy/status.h"

namespace rarefy {

// One kernel of this build.
struct KernelInfo {
  Op op;
  Device device;
  std::string family;  // "ref", "scalar", "avx2", "avx512", "simt": what can be forced
  std::string name;    // "avx512_linear"
};

struct BackendInfo {
  std::string version;
  Machine machine;
  bool cuda_built = false;
  std::vector<DeviceInfo> cuda_devices;  // empty without a driver or a GPU
  std::string forced;                    // as RAREFY_FORCE_IMPL: "cpu:avx2,cuda:simt"; empty: nothing is
  std::vector<KernelInfo> kernels;       // in order of preference within an op and device
};

// Initialises the CUDA driver, after which a forked child cannot use CUDA: not for the time of an import.
RAREFY_API BackendInfo backend_info();

struct Candidate {
  KernelInfo kernel;
  std::string why_not;  // or why it leaves the problem to others; empty: it can run it
  bool chosen = false;
};

// Every kernel for the problem's op and device, in order of preference. The first that can run it, does not
// leave it to a later one, and that nothing forces away, is chosen.
struct Explanation {
  Problem problem;
  std::vector<Candidate> candidates;
  std::string kernel;               // of the chosen one; empty when there is none
  std::string config;               // its tuning choices, "scatter=0 vectors=4 …"; empty when it has none
  std::int64_t workspace = 0;       // bytes it wants from its caller
  std::int64_t aligned_copies = 0;  // of them: copies of matrices whose rows begin or end within 16 bytes
  std::string why_none;             // when no kernel is chosen
  // Predicted of a call with what is derived at hand, and of the dense product; 0: nobody can say.
  double microseconds = 0, dense_microseconds = 0;
};

RAREFY_API Explanation explain(const Problem& problem);
RAREFY_API std::string to_string(const Explanation& explanation);

// Narrows the choice, for this process: "cpu:avx2,cuda:simt", or a family alone, for its own device.
// Devices that are not named keep their choice; "" lifts all. A kernel with tuning choices in parentheses,
// "avx2_linear(vectors=2 panels=1)" or "avx2_linear()", goes before the others wherever it fits, with those
// choices. What the environment variable RAREFY_FORCE_IMPL held at the first call counts until then. Unknown
// names are refused.
RAREFY_API Status force_impl(std::string_view forced);
RAREFY_API std::string forced_impl();

// Bytes of working memory that the call of this problem wants in Context::workspace.
RAREFY_API Result<std::int64_t> workspace_size(const Problem& problem);

}  // namespace rarefy
