// A random instance of the three products, for timing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rarefy/backend.h"
#include "rarefy/convert.h"
#include "rarefy/linear.h"

namespace rarefy::cli {

// Everything the products read and write. X is (m, cols), Y is (m, rows) of the weight.
struct Problem {
  std::int64_t m = 0;
  BsrMatrix weight;
  DType out_dtype;  // int8 products are f32
  std::vector<std::byte> x, y, dy, dx, dvalues;
};

// round(density · blocks) blocks anywhere; normal floats, or any int8.
Result<Problem> random_problem(std::int64_t m, const BsrShape& shape, double density, DType dtype,
                               std::uint64_t seed);

Status run_once(Op product, Problem& problem, const Context& context);

// Stored elements of the matrix itself, padding left out: what useful work is counted by.
std::int64_t stored_elements(const PlanView& plan);

}  // namespace rarefy::cli
