// What the processor and the operating system offer, read once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rarefy::cpu {

struct Features {
  bool avx2 = false;    // AVX2 + FMA + F16C: one cluster, as every machine with one has all
  bool avx512 = false;  // AVX-512 F + BW + DQ + VL
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
};

const Features& features();
std::vector<std::string> feature_names();

// Floats of a panel that is to stay in a core's L2 while other things stream by: half of it.
std::int64_t panel_floats();
std::string model_name();

}  // namespace rarefy::cpu
