// A sum as the reference adds it up.
#pragma once

#include <array>
#include <cstddef>

namespace rarefy::ref {

// Terms go to eight parts in turn. In f64, where they are rounded as the result is, one part would be off by
// up to three times as much as the sums of MKL's dense product, which has some dozen.
class Sum {
 public:
  void add(double term) {
    parts_[next_] += term;
    next_ = (next_ + 1) % parts_.size();
  }
  double total() const {
    return ((parts_[0] + parts_[1]) + (parts_[2] + parts_[3])) +
           ((parts_[4] + parts_[5]) + (parts_[6] + parts_[7]));
  }

 private:
  std::array<double, 8> parts_{};
  std::size_t next_ = 0;
};

}  // namespace rarefy::ref
