// Portable vectors of two doubles: what few_singles.h and in_place.h need.
#pragma once

#include <cstdint>

namespace rarefy::cpu {

struct ScalarDoubles {
  static constexpr int kWidth = 2;
  static constexpr int kRegisters = 16;
  struct Vec {
    double lane[kWidth];
  };

  static Vec zero() { return {}; }
  static Vec set1(double x) { return {x, x}; }
  static Vec load(const double* p) { return {p[0], p[1]}; }
  static void store(double* p, Vec v) {
    p[0] = v.lane[0];
    p[1] = v.lane[1];
  }
  static Vec add(Vec a, Vec b) { return {a.lane[0] + b.lane[0], a.lane[1] + b.lane[1]}; }
  static Vec fma(Vec a, Vec b, Vec c) {  // two roundings, as in Scalar
    return {a.lane[0] * b.lane[0] + c.lane[0], a.lane[1] * b.lane[1] + c.lane[1]};
  }
  static Vec max(Vec a, Vec b) {  // b if either is NaN
    return {a.lane[0] > b.lane[0] ? a.lane[0] : b.lane[0], a.lane[1] > b.lane[1] ? a.lane[1] : b.lane[1]};
  }
  static double sum(Vec v) { return v.lane[0] + v.lane[1]; }
  static void sum4(Vec a, Vec b, Vec c, Vec d, double* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
  }
  template <class Index>
  static Vec gather(const double* x, const Index* index) {
    return {x[index[0]], x[index[1]]};
  }
  template <class Index>
  static Vec gather_first(const double* x, const Index* index, int count) {
    return {count > 0 ? x[index[0]] : 0, count > 1 ? x[index[1]] : 0};
  }
  template <class Index>
  static Vec collect(const double* x, const Index* index) {
    return gather(x, index);
  }
  static Vec first(Vec v, int count) { return {count > 0 ? v.lane[0] : 0, count > 1 ? v.lane[1] : 0}; }
  static Vec load_first(const double* p, int count) { return {count > 0 ? p[0] : 0, count > 1 ? p[1] : 0}; }
};

}  // namespace rarefy::cpu
