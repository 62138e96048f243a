// Which matrices of a product are copied into aligned rows, and their way there and back.
#include "core/aligned_rows.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "core/by_feature.h"
#include "core/checked.h"
#include "core/products.h"

namespace rarefy {

namespace {

constexpr std::int64_t kBytes = 16;
constexpr std::int64_t kFewTokens = 16;  // of linear, whose kernels read X and W as they lie
// More than kLarge are made some tokens at a time, about kPart of them together. 8192×768→50257 takes up to 4
// % longer with parts of 256 MB, 13 % with 64 MB, and grad_input of tall vectors 20 and 109 %: it is for
// memory alone.
constexpr std::int64_t kLarge = 512 << 20, kPart = 256 << 20;

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

// Of `tokens`, p's or some of them.
Rows rows_of(const Problem& p, bool first, std::int64_t tokens) {
  const BsrShape& s = p.weight.shape;
  const bool by_token = (first ? p.in_layout : p.out_layout) == Layout::by_token;
  const std::int64_t features = (p.op == Op::linear) == first ? s.cols : s.rows;
  const bool read = first || p.op == Op::grad_weight;
  Rows rows{by_token ? tokens : features, by_token ? features : tokens, read ? p.in : p.out, true};
  const std::int64_t stride = first ? p.in_stride : p.out_stride;
  rows.aligned = is_even(stride, rows.dtype) && (stride >= rows.length || rows.count <= 1) &&
                 (read ? p.in_alignment : p.out_alignment) >= kBytes &&
                 (read || is_even(rows.length, rows.dtype));
  return rows;
}

std::int64_t bytes_of(const Problem& p, std::int64_t tokens) {
  return rows_of(p, true, tokens).bytes() + rows_of(p, false, tokens).bytes();
}

// By feature all together: a line of some tokens would begin anywhere.
std::int64_t tokens_of_part(const Problem& p) {
  const std::int64_t bytes = bytes_of(p, p.tokens);
  const bool by_token = p.in_layout == Layout::by_token && p.out_layout == Layout::by_token;
  if (bytes <= kLarge || !by_token || p.op == Op::grad_weight) return p.tokens;
  const std::int64_t tokens = ceil_div(ceil_div(p.tokens, ceil_div(bytes, kPart)), 128) * 128;
  return std::min(p.tokens, tokens);
}

// `m` in rows of their own.
template <class View, class Data>
View aligned(const View& m, Data* data) {
  const bool by_token = m.layout() == Layout::by_token;
  const std::int64_t stride = turned_stride(lines_of(m).length);
  return {data, m.dtype, m.rows, m.cols, by_token ? stride : 1, m.device, by_token ? 1 : stride};
}

// Tokens first … first + count of a matrix that is by token; a matrix that is by feature has all.
template <class View>
View tokens_of(const View& m, std::int64_t first, std::int64_t count) {
  if (m.rows == count) return m;
  using Byte = std::conditional_t<std::is_same_v<View, MatrixView>, const std::byte, std::byte>;
  View some = m;
  some.data = static_cast<Byte*>(m.data) + first * m.row_stride * static_cast<std::int64_t>(size_of(m.dtype));
  some.rows = count;
  return some;
}

}  // namespace

bool wants_aligned_rows(const Problem& p) {
  return p.device == Device::cuda && p.op != Op::feed_forward &&
         p.tokens > (p.op == Op::linear ? kFewTokens : 0) &&
         !(rows_of(p, true, p.tokens).aligned && rows_of(p, false, p.tokens).aligned);
}

Problem with_aligned_rows(const Problem& p) {
  Problem result = p;
  result.tokens = tokens_of_part(p);
  const Rows in = rows_of(p, true, result.tokens), out = rows_of(p, false, result.tokens);
  if (!in.aligned) result.in_stride = turned_stride(in.length);
  if (!out.aligned) result.out_stride = turned_stride(out.length);
  result.out_padded = !out.aligned && p.op != Op::grad_weight;
  result.in_alignment = result.out_alignment = p.weight_alignment;
  return result;
}

std::int64_t aligned_rows_bytes(const Problem& p) { return bytes_of(p, tokens_of_part(p)); }

double aligned_rows_microseconds(const Problem& p, double microseconds) {
  const std::int64_t tokens = tokens_of_part(p);
  for (const bool first : {true, false}) {
    const Rows rows = rows_of(p, first, tokens);
    if (!rows.aligned) microseconds += 2 + static_cast<double>(rows.bytes()) / 1.5e6;
  }
  return microseconds * static_cast<double>(ceil_div(p.tokens, tokens));
}

Status run_aligned(const Kernel& kernel, const Call& call, const Problem& p, void* copies) {
  const std::string_view op = name(p.op);
  const std::int64_t tokens = call.problem.tokens;
  const Rows first = rows_of(p, true, tokens), second = rows_of(p, false, tokens);
  auto* const second_copy = static_cast<std::byte*>(copies) + first.bytes();
  const auto read = [&](MatrixView& m, const Rows& rows, void* to) -> Status {
    if (rows.aligned) return {};
    const auto copy = aligned(
        MutableMatrixView{nullptr, m.dtype, m.rows, m.cols, m.row_stride, m.device, m.col_stride}, to);
    Status status = copy_rows(op, m, copy, true, call.stream);
    m = copy;
    return status;
  };
  for (std::int64_t begin = 0; begin < p.tokens; begin += tokens) {
    // Parts are alike: the last one begins within the one before, and gives the same there.
    const std::int64_t from = std::min(begin, p.tokens - tokens);
    Call part = call;
    for (MatrixView* m : {&part.x, &part.dy}) {
      if (m->data != nullptr) *m = tokens_of(*m, from, tokens);
    }
    if (Status status = read(p.op == Op::linear ? part.x : part.dy, first, copies); !status.ok())
      return status;
    if (p.op == Op::grad_weight) {
      if (Status status = read(part.x, second, second_copy); !status.ok()) return status;
      return kernel.run(part);
    }
    const MutableMatrixView out = tokens_of(call.out, from, tokens);
    part.out = second.aligned ? out : aligned(out, static_cast<void*>(second_copy));
    if (Status status = kernel.run(part); !status.ok()) return status;
    if (second.aligned) continue;
    if (Status status = copy_rows(op, part.out, out, false, call.stream); !status.ok()) return status;
  }
  return {};
}

}  // namespace rarefy
