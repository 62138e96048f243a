// Which matrices of a product are copied into aligned rows, and their way there and back.
#include "core/aligned_rows.h"

#include "core/by_feature.h"
#include "core/checked.h"
#include "core/products.h"

namespace rarefy {

namespace {

constexpr std::int64_t kBytes = 16;
constexpr std::int64_t kFewTokens = 16;  // of linear, whose kernels read X and W as they lie

bool is_even(std::int64_t elements, DType dtype) {
  return elements * static_cast<std::int64_t>(size_of(dtype)) % kBytes == 0;
}

// One of the two matrices of tokens: x and y, dy and dx, or, of grad_weight, dy and x.
struct Rows {
  std::int64_t count, length;  // by feature: features, and tokens
  DType dtype;
  bool aligned;

  std::int64_t bytes() const {
    const std::int64_t all = count * turned_stride(length) * static_cast<std::int64_t>(size_of(dtype));
    return aligned ? 0 : ceil_div(all, 256) * 256;
  }
};

Rows rows_of(const Problem& p, bool first) {
  const BsrShape& s = p.weight.shape;
  const bool by_token = (first ? p.in_layout : p.out_layout) == Layout::by_token;
  const std::int64_t features = (p.op == Op::linear) == first ? s.cols : s.rows;
  const bool read = first || p.op == Op::grad_weight;
  Rows rows{by_token ? p.tokens : features, by_token ? features : p.tokens, read ? p.in : p.out, true};
  const std::int64_t stride = first ? p.in_stride : p.out_stride;
  rows.aligned = is_even(stride, rows.dtype) && (stride >= rows.length || rows.count <= 1) &&
                 (read ? p.in_alignment : p.out_alignment) >= kBytes &&
                 (read || is_even(rows.length, rows.dtype));
  return rows;
}

// `m` in rows of their own.
template <class View, class Data>
View aligned(const View& m, Data* data) {
  const bool by_token = m.layout() == Layout::by_token;
  const std::int64_t stride = turned_stride(lines_of(m).length);
  return {data, m.dtype, m.rows, m.cols, by_token ? stride : 1, m.device, by_token ? 1 : stride};
}

}  // namespace

bool wants_aligned_rows(const Problem& p) {
  return p.device == Device::cuda && p.op != Op::feed_forward &&
         p.tokens > (p.op == Op::linear ? kFewTokens : 0) &&
         !(rows_of(p, true).aligned && rows_of(p, false).aligned);
}

Problem with_aligned_rows(const Problem& p) {
  Problem result = p;
  const Rows in = rows_of(p, true), out = rows_of(p, false);
  if (!in.aligned) result.in_stride = turned_stride(in.length);
  if (!out.aligned) result.out_stride = turned_stride(out.length);
  result.out_padded = !out.aligned && p.op != Op::grad_weight;
  result.in_alignment = result.out_alignment = p.weight_alignment;
  return result;
}

std::int64_t aligned_rows_bytes(const Problem& p) {
  return rows_of(p, true).bytes() + rows_of(p, false).bytes();
}

double aligned_rows_microseconds(const Problem& p) {
  const auto of = [](const Rows& rows) {
    return rows.aligned ? 0 : 2 + static_cast<double>(rows.bytes()) / 1.5e6;
  };
  return of(rows_of(p, true)) + of(rows_of(p, false));
}

Status align_rows(Call& call) {
  const Problem given = call.problem;
  const std::string_view op = name(given.op);
  auto* memory = static_cast<std::byte*>(call.workspace);
  const auto read = [&](MatrixView& m, const Rows& rows) -> Status {
    if (rows.aligned) return {};
    const auto copy = aligned(
        MutableMatrixView{nullptr, m.dtype, m.rows, m.cols, m.row_stride, m.device, m.col_stride}, memory);
    Status status = copy_rows(op, m, copy, true, call.stream);
    m = copy;
    memory += rows.bytes();
    return status;
  };
  const Rows first = rows_of(given, true), second = rows_of(given, false);
  if (Status status = read(given.op == Op::linear ? call.x : call.dy, first); !status.ok()) return status;
  if (given.op == Op::grad_weight) {
    if (Status status = read(call.x, second); !status.ok()) return status;
  } else if (!second.aligned) {
    call.out = aligned(call.out, memory);
    memory += second.bytes();
  }
  call.workspace = memory;
  call.problem = with_aligned_rows(given);
  return {};
}

Status return_rows(const Call& call, const MutableMatrixView& out) {
  if (call.problem.op == Op::grad_weight || call.out.data == out.data) return {};
  return copy_rows(name(call.problem.op), call.out, out, false, call.stream);
}

}  // namespace rarefy
