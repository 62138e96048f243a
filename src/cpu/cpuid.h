// What the processor and the operating system offer, read once.
#pragma once

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
std::string model_name();

}  // namespace rarefy::cpu
