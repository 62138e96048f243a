// For vectors without an instruction that expands: which of the first lanes each lane gets.
#pragma once

#include <cstdint>

namespace rarefy::cpu {

template <int kLanes>
struct ExpandTable {
  std::int8_t lane[1 << kLanes][kLanes] = {};  // for each set of lanes; -1 for those that get none
  std::uint8_t count[1 << kLanes] = {};

  constexpr ExpandTable() {
    for (unsigned set = 0; set < 1U << kLanes; ++set) {
      for (int i = 0; i < kLanes; ++i) {
        const bool gets = (set >> i & 1U) != 0;
        lane[set][i] = gets ? static_cast<std::int8_t>(count[set]++) : std::int8_t{-1};
      }
    }
  }
};

template <int kLanes>
static constexpr ExpandTable<kLanes> kExpand{};

}  // namespace rarefy::cpu
