// Lines that will be read soon, asked for in small portions beside other work.
#pragma once

#include "cpu/kernels.h"

namespace rarefy::cpu {

// Of so many bytes, one at least.
constexpr int lines_of(std::int64_t bytes) { return bytes < 64 ? 1 : static_cast<int>(bytes / 64); }

// So many lines from one on, one after the other. Static, as units of several instruction sets have it;
// inline in any case, as GCC 12 removes calls of a function that does nothing else.
template <int Lines>
[[gnu::always_inline]] static inline void ask_for(Ask ask, const void* first) {
  const auto* line = static_cast<const char*>(first);
  if (ask == Ask::nothing) return;
  if (ask == Ask::l2) {
#pragma GCC unroll 32
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < Lines; ++i) __builtin_prefetch(line + 64 * i);
  }
}

// Asks L2 for lines, a few at a time: all at once they are waited for. A wide x (32×1's dY, 3072 features) is
// packed 64 features at a time, four lines of each row, which no hardware prefetcher sees coming.
template <class I>
class Asked {
 public:
  Asked(const Lines& lines, std::int64_t times)
      : left_(lines), share_(times > 0 ? (std::int64_t{lines.rows} * lines.lines + times - 1) / times : 0) {}

  void few() {
    for (std::int64_t i = 0; i < share_ && left_.rows != 0; ++i) {
      __builtin_prefetch(left_.first + std::int64_t{64} * line_, 0, 2);
      if (++line_ != left_.lines) continue;
      line_ = 0;
      left_.first += left_.row_bytes;
      --left_.rows;
    }
  }

 private:
  Lines left_;
  std::int64_t share_;
  std::int32_t line_ = 0;
};

}  // namespace rarefy::cpu
