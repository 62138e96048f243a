// Printed forms of problems and machines.
#include "rarefy/problem.h"

#include <algorithm>
#include <cmath>

#include "core/message.h"
#include "core/registry.h"

namespace rarefy {

std::string_view name(Op op) {
  switch (op) {
    case Op::linear: return "linear";
    case Op::grad_input: return "grad_input";
    case Op::grad_weight: return "grad_weight";
    case Op::feed_forward: return "feed_forward";
  }
  return "?";
}

std::string_view name(Format format) {
  switch (format) {
    case Format::bsr: return "bsr";
    case Format::bitmap: return "bitmap";
    case Format::two_of_four: return "2:4";
  }
  return "?";
}

std::string_view name(Scaling scaling) {
  switch (scaling) {
    case Scaling::none: return "none";
    case Scaling::weight: return "scaled";
    case Scaling::dynamic: return "dynamic";
  }
  return "?";
}

std::string_view name(Activation activation) {
  static_assert(kActivations == 5);
  switch (activation) {
    case Activation::none: return "none";
    case Activation::relu: return "relu";
    case Activation::gelu_erf: return "gelu_erf";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::silu: return "silu";
  }
  return "?";
}

std::string_view name(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

std::string_view name(Layout layout) { return layout == Layout::by_token ? "by token" : "by feature"; }

Problem make_problem(Op op, const BsrShape& shape, std::int64_t tokens, DType dtype, Device device,
                     int threads) {
  const DType out = dtype == DType::i8 ? DType::f32 : dtype;
  Problem problem;
  problem.op = op;
  problem.weight = {Format::bsr, shape, op == Op::grad_weight ? out : dtype};
  if (op == Op::feed_forward) {
    BsrShape down{shape.cols, shape.rows, shape.block_rows, shape.block_cols, 0};
    down.nnzb = std::min(shape.nnzb, down.row_count() * down.col_count());
    problem.down = {Format::bsr, down, dtype};
  }
  problem.in = dtype;
  problem.out = out;
  problem.tokens = tokens;
  const bool forward = op == Op::linear || op == Op::feed_forward;
  problem.in_stride = forward ? shape.cols : shape.rows;
  problem.out_stride = op == Op::linear ? shape.rows : shape.cols;
  problem.device = device;
  problem.threads = threads;
  return problem;
}

bool Machine::has(std::string_view feature) const {
  return std::find(features.begin(), features.end(), feature) != features.end();
}

std::string to_string(const Problem& p) {
  const auto weight = [](const WeightSpec& w) {
    const BsrShape& s = w.shape;
    return cat(name(w.format), ' ', s.rows, 'x', s.cols, " block ", s.block_rows, 'x', s.block_cols, " nnzb ",
               s.nnzb, ' ', name(w.dtype), w.scaling == Scaling::none ? "" : " ",
               w.scaling == Scaling::none ? "" : name(w.scaling), w.rounds_x ? " rounding x" : "");
  };
  std::string text = cat(name(p.op), ' ', weight(p.weight));
  if (p.gate != WeightSpec{}) text += cat(", gate ", weight(p.gate));
  if (p.op == Op::feed_forward) text += cat(", down ", weight(p.down));
  const auto matrix = [](DType dtype, Layout layout) {
    return cat(name(dtype), layout == Layout::by_feature ? " by feature" : "");
  };
  text += cat(", ", p.tokens, " tokens, ");
  if (p.op == Op::grad_weight) {  // both are read
    text += cat(matrix(p.in, p.in_layout), " and ", matrix(p.in, p.out_layout), " -> ", name(p.out));
  } else {
    text += matrix(p.in, p.in_layout);
    const BsrShape& s = p.weight.shape;
    const std::int64_t row = p.op == Op::grad_input ? s.rows : s.cols;
    if (p.in_stride != (p.in_layout == Layout::by_token ? row : p.tokens))
      text += cat(" stride ", p.in_stride);
    text += cat(" -> ", matrix(p.out, p.out_layout));
  }
  if (p.tf32) text += ", as tf32";
  if (p.accumulate) text += ", added";
  if (p.bias) text += ", bias";
  if (p.activation != Activation::none) text += cat(", ", name(p.activation));
  text += cat(", ", name(p.device));
  if (p.device == Device::cpu) text += cat(", ", p.threads, p.threads == 1 ? " thread" : " threads");
  if (p.device == Device::cuda && p.device_index != 0) text += cat(':', p.device_index);
  return text;
}

std::string to_string(const DeviceInfo& d) {
  if (d.name.empty()) return "none";
  return cat(d.name, " (sm_", d.arch, ", ", d.sms, " SMs, ", d.shared_memory / 1024, " KB shared, L2 ",
             d.l2 >> 20, " MB, ", d.memory >> 30, " GB at ", static_cast<std::int64_t>(d.bandwidth / 1e9),
             " GB/s)");
}

std::string to_string(const Machine& m) {
  std::string features;
  for (const std::string& feature : m.features) features += cat(features.empty() ? "" : " ", feature);
  std::string text = cat(m.cpu, " (", m.cores, " cores, ", m.vector_bits, "-bit vectors, L1 ", m.l1 >> 10,
                         " KB, L2 ", m.l2 >> 10, " KB, L3 ", m.l3 >> 20, " MB, ",
                         features.empty() ? "no instruction set that kernels ask for" : features, ')');
  if (!m.gpu.name.empty()) text += cat("; ", to_string(m.gpu));
  return text;
}

std::string to_string(const Explanation& e) {
  std::string text = cat(to_string(e.problem), '\n');
  for (const Candidate& candidate : e.candidates) {
    text += cat(candidate.chosen ? "* " : "  ", candidate.kernel.name, ": ");
    if (candidate.chosen) {
      text += cat("chosen", e.config.empty() ? "" : ", ", e.config);
      if (e.aligned_copies > 0) text += cat(", copies with aligned rows of ", e.aligned_copies, " bytes");
      if (e.microseconds > 0) text += cat(", some ", std::lround(e.microseconds), " us");
      if (e.dense_microseconds > 0) text += cat(", dense ", std::lround(e.dense_microseconds), " us");
    } else {
      text += candidate.why_not.empty() ? "could run, after the chosen one" : candidate.why_not;
    }
    text += '\n';
  }
  if (!e.why_none.empty()) text += cat(e.why_none, '\n');
  return text;
}

}  // namespace rarefy
