// The example of docs/add_a_kernel.md: `linear` for blocks of R×1.
#pragma once

#include "core/registry.h"

namespace example {

// What configure() chooses: tokens of a task.
struct Split {
  std::int64_t tokens = 1;
  static constexpr std::string_view kFields[] = {"tokens"};
};

// Puts the kernels ahead of all others.
void register_columns(rarefy::Registry& registry);

}  // namespace example
