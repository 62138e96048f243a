// What runs a product on a table of kernels; one instantiation of the drivers serves every ISA. For each
// product: how it is configured, what working memory it needs, and the run.
#pragma once

#include <algorithm>
#include <optional>

#include "core/checked.h"
#include "core/message.h"
#include "core/registry.h"
#include "cpu/blocking.h"
#include "cpu/doubles.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

// linear and grad_input (linear.cc), told apart by problem.op.
Config configure_product(const Kernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> product_candidates(const Kernels& kernels, const Problem& problem,
                                       const Machine& machine);
std::int64_t product_workspace(const Kernels& kernels, const Problem& problem, const Config& config);
Status run_product(const Kernels& kernels, std::span<const Call> calls);  // of linear, several on one x

// linear or grad_input as out = W · in, with blocks of out_block × red_block.
struct ProductShape {
  std::int64_t out_blocks, red_blocks, out_block, red_block, entries;
  bool transposed;

  explicit ProductShape(const Problem& p)
      : out_blocks(p.weight.shape.row_count()),
        red_blocks(p.weight.shape.col_count()),
        out_block(p.weight.shape.block_rows),
        red_block(p.weight.shape.block_cols),
        entries(p.weight.shape.nnzb),
        transposed(p.op != Op::linear) {
    if (!transposed) return;
    std::swap(out_blocks, red_blocks);
    std::swap(out_block, red_block);
  }
};

// Bytes of W that surely come from memory.
inline constexpr std::int64_t kFar = 32 << 20;

// Tasks of a kernel that reads W once: the last ones to end are short.
inline constexpr std::int64_t kTasksPerThread = 4;

// linear for a few tokens (linear_few.cc).
struct FewSplit {
  std::int64_t tasks = 1;   // over the block rows
  std::int64_t stream = 0;  // 1: W comes from memory
  std::int64_t fours = 0;   // 1: x of four tokens by column for vectors of one column
  std::int64_t turned = 0;  // 1: by few_turned.h, other bits, where it takes the blocks
  std::int64_t ask = 0;     // an Ask
  std::int64_t again = 0;   // of later groups of tokens, which find W in L2
  std::int64_t piece = 1;   // block rows that all groups go through together
  std::int64_t eight = 0;   // from so many tokens on up to eight are a group; 0: no more than four
  static constexpr std::string_view kFields[] = {"tasks", "stream", "fours", "turned",
                                                 "ask",   "again",  "piece", "eight"};
};
// Tokens that its kernels have: 1, 2, 4 or 8.
inline std::int64_t few_tokens(std::int64_t tokens) {
  return tokens > kFewTokens ? kFewEight : tokens == 3 ? 4 : tokens;
}
// Whether 16 bits tell columns of single elements apart.
inline bool has_narrow_columns(const BsrShape& s) { return s.block_size() == 1 && s.cols <= 1 << 16; }
// What is held goes into places that follow from these.
inline Status other_columns() {
  return invalid("prepare", "the plan's columns must be those that it was made of", "other ones");
}
// each(i) for i < count, so many a task.
inline void for_each(const Executor& executor, std::int64_t count, std::int64_t at_once, const auto& each) {
  executor.parallel_for(ceil_div(count, at_once), [&](std::int64_t task) {
    const std::int64_t end = std::min(count, (task + 1) * at_once);
    for (std::int64_t i = task * at_once; i < end; ++i) each(i);
  });
}
Reason supports_few(const FewKernels& kernels, const Problem& problem, std::int64_t most = kFewTokens);
Reason supports_few_by_fours(const FewKernels& kernels, const Problem& problem);
Reason yields_few(const FewKernels& kernels, const Problem& problem, const Machine& machine);
Reason supports_few_scaled(const FewKernels& kernels, const Problem& problem);  // int8, x as it is
Config configure_few(const Problem& problem, const Machine& machine);
std::int64_t few_workspace(const FewKernels& kernels, const Problem& problem, const Config& config);
// Of single elements in up to 65,536 columns: these in 16 bits. `run` does without, in a third more bytes.
std::int64_t few_prepared_size(const Problem& problem, const Config& config);
Status prepare_few(const Call& call, void* to);
Status run_linear_few(const FewKernels& kernels, const Call& call);

// The same of single elements that are held in the order of windows.h (linear_windows.cc).
Reason supports_windows(const FewKernels& kernels, const Problem& problem);
std::int64_t windows_prepared_size(const Problem& problem, const Config& config);
Status prepare_windows(const FewKernels& kernels, const Call& call, void* to);
std::int64_t windows_packed_size(const Problem& problem, const Config& config);
Status pack_windows(const FewKernels& kernels, const Call& call, void* to);
std::int64_t windows_workspace(const Problem& problem, const Config& config);
Status run_windows(const FewKernels& kernels, const Call& call);

// linear of rows of W, X and Y by feature (linear_in_place.cc).
Reason supports_in_place(const Kernels& kernels, const Problem& problem);
Status run_in_place(const Kernels& kernels, const Call& call);

// linear and grad_input in f64 (linear_doubles.cc), and grad_weight (grad_weight_doubles.cc).
Reason supports_doubles(const DoubleKernels& kernels, const Problem& problem);
std::int64_t doubles_workspace(const DoubleKernels& kernels, const Problem& problem, const Config& config);
std::int64_t doubles_prepared_size(const Problem& problem, const Config& config);
Status run_doubles(const DoubleKernels& kernels, const Call& call);
Reason supports_grad_weight_doubles(const Problem& problem);
Config configure_grad_weight_doubles(const DoubleKernels& kernels, const Problem& problem,
                                     const Machine& machine);
std::int64_t grad_weight_doubles_workspace(const Problem& problem, const Config& config);
Status run_grad_weight_doubles(const DoubleKernels& kernels, const Call& call);

// Rows of `cols` elements as float, each padded with 0 to `padded`; rows past the last are 0.
void to_float(const Kernels& kernels, const MatrixView& from, std::int64_t rows, std::int64_t padded,
              float* to);

// linear of a bitmap (linear_bitmap.cc).
struct BitmapSplit {
  std::int64_t ranges = 1;  // of the rows of W
  std::int64_t groups = 1;  // of tokens; a task takes one through one range
  std::int64_t rows = 4;    // that a tile of X meets before the next
  std::int64_t ask = 3;     // an Ask
  std::int64_t apart = 0;   // 1: these rows are as many parts of a range's, one of each
  static constexpr std::string_view kFields[] = {"ranges", "groups", "rows", "ask", "apart"};
};
Config configure_bitmap(const Problem& problem, const Machine& machine);
std::int64_t bitmap_workspace(const Problem& problem, const Config& config);
Status run_linear_bitmap(const Kernels& kernels, const Call& call);

// feed_forward (feed_forward.h, feed_forward.cc): a panel of tokens goes through both products while its
// hidden features are in L2.
struct FeedForwardCut {
  std::int64_t vectors = 1;   // of a panel; the last one may be narrower
  std::int64_t features = 1;  // hidden features of a slice, which are in L2 at a time
  // 1: a task takes a panel from x to y. More: so many tasks a panel make the hidden features, all wait, and
  // so many make y.
  std::int64_t splits = 1;
  static constexpr std::string_view kFields[] = {"vectors", "features", "splits"};
};
Reason supports_feed_forward(const Kernels& kernels, const Problem& problem);
Reason yields_feed_forward(const Problem& problem, const Machine& machine);
Config configure_feed_forward(const Kernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> feed_forward_candidates(const Kernels& kernels, const Problem& problem,
                                            const Machine& machine);
std::int64_t feed_forward_workspace(const Kernels& kernels, const Problem& problem, const Config& config);
Status run_feed_forward(const Kernels& kernels, const Call& call);

// The same by the kernels of linear, one layer after the other, for what they do better
// (feed_forward_apart.cc).
struct FeedForwardApart {
  std::int64_t workspace = 0;  // bytes that a layer's kernel may use
  static constexpr std::string_view kFields[] = {"workspace"};
};
Config configure_feed_forward_apart(const Problem& problem, const Machine& machine);
std::int64_t feed_forward_apart_workspace(const Problem& problem, const Config& config);
Status run_feed_forward_apart(const Kernels& kernels, const Call& call);

// grad_weight (grad_weight.cc).
struct GradWeightTiling {
  std::int64_t chunk = 1;     // tokens packed at a time
  std::int64_t columns = 1;   // block columns of a tile, whose part of the X panel stays in L2
  std::int64_t ranges = 1;    // of block rows, with equal shares of the stored blocks; a task each per tile
  std::int64_t features = 1;  // that one packing task packs
  std::int64_t strips = 0;    // 1: packed by token, lanes along a side of the blocks (strips.h)
  static constexpr std::string_view kFields[] = {"chunk", "columns", "ranges", "features", "strips"};
};
Config configure_grad_weight(const Kernels& kernels, const Problem& problem, const Machine& machine);
Reason supports_grad_weight_dots(const Problem& problem);  // in bf16 pairs of tokens
std::int64_t grad_weight_workspace(const Kernels& kernels, const Problem& problem, const Config& config);
Status run_grad_weight(const Kernels& kernels, const Call& call);

// Nothing for a dtype that the kernels cannot load or store.
constexpr std::optional<Storage> storage_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return Storage::f32;
    case DType::bf16: return Storage::bf16;
    case DType::f16: return Storage::f16;
    case DType::f64:
    case DType::i8: break;
  }
  return std::nullopt;
}

// For what supports() let through.
constexpr Storage storage(DType dtype) { return *storage_of(dtype); }

// Whether two products of 512 bits start in a cycle: Zen 5 and Intel, told from Zen 4 by their L1.
inline bool starts_two(const Machine& machine) { return machine.l1 >= 48 << 10; }
inline bool is_zen5(const Machine& machine) { return machine.has("avx512_bf16_fast") && starts_two(machine); }

// Floats of a panel that is to stay in a core's L2 while other things stream by: half of it.
inline std::int64_t panel_floats(const Machine& machine) {
  const std::int64_t bytes = machine.l2 > 0 ? machine.l2 : 1 << 20;  // not told
  return std::clamp<std::int64_t>(bytes, 256 << 10, 2 << 20) / 2 / 4;
}

// The address of an element.
inline const char* at(const MatrixView& m, std::int64_t row, std::int64_t col) {
  return static_cast<const char*>(m.data) +
         (row * m.row_stride + col * m.col_stride) * static_cast<std::int64_t>(size_of(m.dtype));
}
inline char* at(const MutableMatrixView& m, std::int64_t row, std::int64_t col) {
  return const_cast<char*>(at(static_cast<const MatrixView&>(m), row, col));
}

// Terms of a part of a sum (kernels.h).
inline std::int32_t part_terms(const Problem& p) {
  return p.op != Op::grad_input && p.tokens <= kFewTokens ? kFewPartTerms : kPartTerms;
}

// `count` elements of the bias as float; −0 becomes +0, as if it were added to sums that start at 0.
inline void unpack_bias(const Kernels& kernels, DType dtype, const void* bias, std::int64_t count,
                        float* to) {
  kernels.unpack(storage(dtype), bias, count, to);
  for (std::int64_t i = 0; i < count; ++i) to[i] += 0.0F;
}

// What sums of `features` outputs from `first` on begin with, the bias, for `rows` tokens, `stride` apart;
// and what of the call's tokens goes out.
inline void begin_with_bias(const Kernels& kernels, const Call& call, std::int64_t first,
                            std::int64_t features, std::int64_t rows, float* sums, std::int64_t stride) {
  if (call.bias == nullptr) return;
  const auto size = static_cast<std::int64_t>(size_of(call.out.dtype));
  const char* bias = static_cast<const char*>(call.bias) + first * size;
  for (std::int64_t m = 0; m < rows; ++m) {
    unpack_bias(kernels, call.out.dtype, bias, features, sums + m * stride);
  }
}
inline void finish_tokens(const Kernels& kernels, const Call& call, std::int64_t first, std::int64_t features,
                          float* sums, std::int64_t stride) {
  for (std::int64_t m = 0; m < call.x.rows; ++m) {
    kernels.activate(call.activation, sums + m * stride, stride);
    kernels.round(storage(call.out.dtype), sums + m * stride, features, at(call.out, m, first));
  }
}

// W by its rows, or transposed.
SparseOperand operand(const BsrShape& shape, const void* values, DType dtype, const std::int32_t* index,
                      const std::int32_t* perm, bool transposed);
inline SparseOperand operand(const Call& call, const std::int32_t* index, const std::int32_t* perm,
                             bool transposed) {
  return operand(call.plan.shape, call.values, call.problem.weight.dtype, index, perm, transposed);
}

// Parts of a workspace, one after the other, each aligned to 64 bytes. Sized and cut up by the same calls:
// with a null base it only counts.
class Room {
 public:
  explicit Room(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    T* part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return part;
  }
  std::int64_t bytes() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

}  // namespace rarefy::cpu
