// What must hold for any bytes at all: a clear refusal, or an object that can be used. Shared by the
// seeded mutations and the libFuzzer entry.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rarefy/bsr_file.h"
#include "rarefy/convert.h"
#include "rarefy/linear.h"
#include "rarefy/safetensors.h"

namespace rarefy::fuzz {

// What happened; `problem` is empty unless something that must hold does not.
struct Outcome {
  bool accepted = false;
  std::string problem;
};

// A refusal blames the input, in the form "[op] requirement; got value".
inline Outcome refused(const Status& status) {
  const std::string& message = status.message();
  const bool formed =
      message.starts_with('[') && message.find("; got ") != message.npos && message.size() < 1000;
  const bool blames =
      status.code() == StatusCode::invalid_argument || status.code() == StatusCode::unsupported;
  return {false, formed && blames ? "" : "a refusal of the wrong form: " + message};
}

// The transposed index lists every stored block once, by column, with its row.
inline bool plan_is_sound(const PlanView& plan) {
  const BsrShape& shape = plan.shape;
  std::vector<bool> seen(static_cast<std::size_t>(shape.nnzb));
  for (std::int64_t c = 0; c < shape.col_count(); ++c) {
    for (std::int32_t entry = plan.ccol[c]; entry < plan.ccol[c + 1]; ++entry) {
      const std::int32_t e = plan.perm[entry], i = plan.row[entry];
      if (e < 0 || e >= shape.nnzb || seen[static_cast<std::size_t>(e)] || plan.col[e] != c) return false;
      if (i < 0 || i >= shape.row_count() || e < plan.crow[i] || e >= plan.crow[i + 1]) return false;
      seen[static_cast<std::size_t>(e)] = true;
    }
  }
  return std::find(seen.begin(), seen.end(), false) == seen.end();
}

// Runs what reads every index and value: conversion to dense, and a product with one row.
inline std::string use(const BsrMatrix& weight) {
  const BsrShape& shape = weight.pattern.shape();
  if (!plan_is_sound(weight.pattern.view())) return "an unsound plan";
  if (!view_plan("fuzz", shape, weight.pattern.plan()).ok()) return "a plan that is not its own";
  if (shape.rows > 1024 || shape.cols > 1024) return "";  // valid, and too large to try every time
  const auto matrix = [](std::vector<std::byte>& bytes, DType dtype, std::int64_t rows, std::int64_t cols) {
    bytes.resize(static_cast<std::size_t>(rows * cols) * size_of(dtype));
    return MutableMatrixView{bytes.data(), dtype, rows, cols, cols};
  };
  std::vector<std::byte> dense, x, y;
  if (Status status = bsr_to_dense(weight.view(), matrix(dense, weight.dtype, shape.rows, shape.cols));
      !status.ok()) {
    return status.message();
  }
  const DType out = weight.dtype == DType::i8 ? DType::f32 : weight.dtype;
  return linear(matrix(x, weight.dtype, 1, shape.cols), weight.view(), nullptr, Activation::none,
                matrix(y, out, 1, shape.rows))
      .message();
}

inline Outcome check_safetensors(std::span<const std::byte> bytes) {
  const auto file = parse_safetensors(bytes);
  if (!file.ok()) return refused(file.status());
  const auto again = serialize_safetensors(*file);
  if (!again.ok()) return {true, "cannot be written again: " + again.status().message()};
  const auto reread = parse_safetensors(*again);
  return {true, reread.ok() && *reread == *file ? "" : "changes when written and read again"};
}

inline Outcome check_bsr_file(std::span<const std::byte> bytes) {
  const auto file = parse_bsr_file(bytes);
  if (!file.ok()) return refused(file.status());
  for (const auto& [name, weight] : file->weights) {
    if (std::string problem = use(weight); !problem.empty()) return {true, problem};
  }
  const auto again = serialize_bsr_file(*file);
  if (!again.ok()) return {true, "cannot be written again: " + again.status().message()};
  const auto reread = parse_bsr_file(*again);
  return {true,
          reread.ok() && *serialize_bsr_file(*reread) == *again ? "" : "changes when written and read again"};
}

inline Outcome check_index_arrays(const BsrShape& shape, std::span<const std::int32_t> crow,
                                  std::span<const std::int32_t> col) {
  const Status status = check_indices("fuzz", shape, crow, col);
  const std::vector<std::int64_t> crow64(crow.begin(), crow.end()), col64(col.begin(), col.end());
  if (check_indices("fuzz", shape, crow64, col64).message() != status.message()) {
    return {status.ok(), "int32 and int64 indices are judged differently"};
  }
  // Without a valid shape there is no plan size; any buffer must then stay as it is. With one, indices are
  // checked in the plan, which gets its header last.
  constexpr std::int32_t kPoison = -77;
  const bool sized = check_shape("fuzz", shape).ok() && plan_size(shape) < (1 << 20);
  std::vector<std::int32_t> plan(sized ? static_cast<std::size_t>(plan_size(shape)) : 16, kPoison);
  const Status built = build_plan("fuzz", shape, crow, col, plan);
  const auto header = std::span(plan).first(sized ? 8 : plan.size());
  if (!built.ok() &&
      std::any_of(header.begin(), header.end(), [](std::int32_t word) { return word != kPoison; })) {
    return {false, "a refused pattern touched the plan's header"};
  }
  std::vector<std::int32_t> rows(sized ? static_cast<std::size_t>(row_plan_size(shape)) : 16);
  if (const Status wide = build_row_plan("fuzz", shape, crow, col64, rows);
      sized && wide.message() != status.message()) {
    return {status.ok(), "a row plan of int64 columns is judged differently: " + wide.message()};
  }
  if (!status.ok()) return built.ok() ? Outcome{false, "a plan of a refused pattern"} : refused(status);
  if (!sized) return {true, ""};
  if (!built.ok()) return {true, "no plan of a valid pattern: " + built.message()};
  const auto view = view_plan("fuzz", shape, plan);
  return {true, view.ok() && plan_is_sound(*view) ? "" : "an unsound plan"};
}

}  // namespace rarefy::fuzz
