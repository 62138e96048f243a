// libFuzzer entry over the file readers: rarefy_file_fuzzer [corpus directory].
#include <cstdio>
#include <cstdlib>

#include "checks.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  for (const auto& outcome : {rarefy::fuzz::check_safetensors(bytes), rarefy::fuzz::check_bsr_file(bytes)}) {
    if (outcome.problem.empty()) continue;
    std::fprintf(stderr, "%s\n", outcome.problem.c_str());
    std::abort();
  }
  return 0;
}
