// Drives linear for a few tokens and single elements that the caller holds as sell.h has them. Groups with a
// row that is much longer than others are not held: few_singles.h takes their rows as they lie.
#include "cpu/linear_sell.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kMostARow = 1024;  // elements, on average: beyond, ends of rows cost little
constexpr std::int64_t kLeast =
    512;  // elements: fewer take longer to sum in order (64×64 at .01: 13 for 11 µs)

// Sets of rows that are sorted, each with as many groups, whatever the matrix has of the last one's.
std::int64_t sets_of(const BsrShape& s) { return ceil_div(s.rows, std::int64_t{kSellRows}); }

// What is prepared.
struct Held {
  std::int64_t groups;
  std::int32_t* first;    // element of each group; then of what is behind the last
  std::uint16_t* length;  // of each place's row; of a group's first place kSellNotHeld if it is not
  std::uint8_t* row;      // of each place, from its set's first on
  void* columns;
  std::int64_t bytes;

  Held(const BsrShape& s, std::int32_t lanes, void* base) : groups(sets_of(s) * (kSellRows / lanes)) {
    Room room(base);
    first = room.take<std::int32_t>(groups + 1);
    length = room.take<std::uint16_t>(sets_of(s) * kSellRows);
    row = room.take<std::uint8_t>(sets_of(s) * kSellRows);
    columns = has_narrow_columns(s) ? static_cast<void*>(room.take<std::uint16_t>(s.nnzb + kSellRoom))
                                    : room.take<std::int32_t>(s.nnzb + kSellRoom);
    bytes = room.bytes();
  }
};

// Rows of a pattern; those behind its last are empty.
struct Rows {
  const PlanView& plan;
  std::int32_t begin(std::int64_t row) const { return plan.crow[std::min(row, plan.shape.rows)]; }
  std::int32_t length(std::int64_t row) const { return begin(row + 1) - begin(row); }
};

// Sorts a set's rows and says how many elements its groups hold, in first[group + 1].
void sort_rows(const Rows& rows, const Held& held, std::int32_t lanes, std::int64_t set) {
  const std::int64_t top = set * kSellRows;
  std::uint8_t* const order = held.row + top;
  std::iota(order, order + kSellRows, std::uint8_t{0});
  std::stable_sort(order, order + kSellRows, [&](std::uint8_t a, std::uint8_t b) {
    return rows.length(top + a) > rows.length(top + b);
  });
  for (std::int64_t place = 0; place < kSellRows; place += lanes) {
    std::int32_t count = 0;
    std::uint16_t* const length = held.length + top + place;
    for (std::int32_t i = 0; i < lanes; ++i) {
      const std::int32_t its = std::min(rows.length(top + order[place + i]), kSellLongest + 1);
      length[i] = static_cast<std::uint16_t>(its);
      count += its;
    }
    if (length[0] > kSellLongest) {
      length[0] = kSellNotHeld;
      count = 0;
    }
    held.first[(top + place) / lanes + 1] = count;
  }
}

// A group's elements from where rows have them to where steps do.
template <class From, class To>
void interleave(const Rows& rows, const Held& held, std::int32_t lanes, std::int64_t group, const From* from,
                To* to) {
  const std::int64_t place = group * lanes, top = place / kSellRows * kSellRows;
  const std::uint16_t* const length = held.length + place;
  if (length[0] == kSellNotHeld) return;
  to += held.first[group];
  for (std::int32_t s = 0; s < length[0]; ++s) {
    for (std::int32_t i = 0; i < lanes && length[i] > s; ++i) {
      *to++ = static_cast<To>(from[rows.begin(top + held.row[place + i]) + s]);
    }
  }
}

// each(set) for all, to prepare and pack.
void for_sets(const Call& call, const auto& each) {
  for_each(call.executor, sets_of(call.plan.shape), 8, each);
}

// The working memory: X for all, where it is not read as it lies; sums for each worker, by place and by row.
struct Layout {
  std::int64_t tokens;  // that the kernels have: 1, 2 or 4
  bool reads_x;
  std::int64_t shared, worker;

  explicit Layout(const Problem& p) : tokens(few_tokens(p.tokens)), reads_x(p.tokens == tokens) {
    Room all, own;
    all.take<float>(reads_x ? 0 : tokens * p.weight.shape.cols);
    own.take<float>(2 * tokens * kSellRows);
    shared = all.bytes();
    worker = own.bytes();
  }
};

}  // namespace

Reason supports_sell(const SellKernels& kernels, const Problem& p) {
  const BsrShape& s = p.weight.shape;
  if (Reason reason = supports_few(kernels.few, p); !reason.empty()) return reason;
  if (s.block_size() != 1) return "takes single elements";
  if (p.in != DType::f32 || p.weight.dtype != DType::f32) return "takes f32 inputs and values";
  if (s.nnzb < std::max(s.rows, kLeast)) {
    return cat("takes ", kLeast, " elements and one a row, on average; got ", s.nnzb, " in ", s.rows);
  }
  if (s.nnzb > kMostARow * s.rows) {
    return cat("takes rows of up to ", kMostARow, " elements, on average; got ", s.nnzb, " in ", s.rows);
  }
  return {};
}

std::int64_t sell_prepared_size(const SellKernels& kernels, const Problem& problem) {
  return Held(problem.weight.shape, kernels.lanes, nullptr).bytes;
}

std::int64_t sell_packed_size(const Problem& problem) {
  return (problem.weight.shape.nnzb + kSellRoom) * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t sell_workspace(const Problem& problem) {
  const Layout layout(problem);
  return layout.shared + problem.threads * layout.worker;
}

Status prepare_sell(const SellKernels& kernels, const Call& call, void* to) {
  const BsrShape& s = call.plan.shape;
  const Rows rows{call.plan};
  const Held held(s, kernels.lanes, to);
  const std::int32_t of_set = kSellRows / kernels.lanes;
  for_sets(call, [&](std::int64_t set) { sort_rows(rows, held, kernels.lanes, set); });
  held.first[0] = 0;
  std::partial_sum(held.first, held.first + held.groups + 1, held.first);
  const auto fill = [&]<class Index>(Index* columns) {
    std::atomic<bool> valid = true;
    for_sets(call, [&](std::int64_t set) {
      for (std::int64_t g = set * of_set; g < (set + 1) * of_set; ++g) {
        interleave(rows, held, kernels.lanes, g, call.plan.col, columns);
      }
      const auto wrong = [&](std::int32_t column) { return column < 0 || column >= s.cols; };
      const std::int64_t top = set * kSellRows;
      if (std::any_of(call.plan.col + rows.begin(top), call.plan.col + rows.begin(top + kSellRows), wrong)) {
        valid = false;
      }
    });
    std::fill_n(columns + held.first[held.groups], kSellRoom, Index{0});
    return valid.load();
  };
  const bool valid = has_narrow_columns(s) ? fill(static_cast<std::uint16_t*>(held.columns))
                                           : fill(static_cast<std::int32_t*>(held.columns));
  if (!valid) return other_columns();
  return {};
}

Status pack_sell(const SellKernels& kernels, const Call& call, void* to) {
  const Held held(call.plan.shape, kernels.lanes, const_cast<void*>(call.derived.prepared));  // read alone
  const std::int32_t of_set = kSellRows / kernels.lanes;
  auto* packed = static_cast<float*>(to);
  for_sets(call, [&](std::int64_t set) {
    for (std::int64_t g = set * of_set; g < (set + 1) * of_set; ++g) {
      interleave(Rows{call.plan}, held, kernels.lanes, g, static_cast<const float*>(call.values), packed);
    }
  });
  std::fill_n(packed + held.first[held.groups], kSellRoom, 0.0F);
  return {};
}

Status run_sell(const SellKernels& kernels, const Call& call) {
  const auto split = from_config<FewSplit>(call.config);
  if (split.tasks < 1) {
    return invalid(kernels.few.family, "tasks of the config must be at least 1", cat(split.tasks));
  }
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const Kernels& floats = kernels.few.rows;
  const Layout layout(call.problem);
  const auto tokens = static_cast<std::int32_t>(layout.tokens);
  const auto* x = static_cast<const float*>(call.x.data);
  std::int64_t x_stride = call.x.row_stride;
  if (!layout.reads_x) {
    auto* padded = Room(call.workspace).take<float>(layout.tokens * s.cols);
    to_float(floats, call.x, layout.tokens, s.cols, padded);
    x = padded;
    x_stride = s.cols;
  }
  const Held held(s, kernels.lanes, const_cast<void*>(call.derived.prepared));  // read alone
  const SparseOperand w = operand(call, plan.col, nullptr, false);

  // Sums of a set, by place.
  const auto multiply = [&](std::int64_t set, float* y) {
    const std::int64_t begin = set * (kSellRows / kernels.lanes), top = set * kSellRows;
    const std::int64_t end = begin + kSellRows / kernels.lanes;
    const auto is_held = [&](std::int64_t g) { return held.length[g * kernels.lanes] != kSellNotHeld; };
    std::int64_t g = begin;
    for (; g < end && !is_held(g); ++g) {  // the longest rows come first
      for (std::int64_t place = g * kernels.lanes; place < (g + 1) * kernels.lanes; ++place) {
        const std::int64_t row = top + held.row[place];
        float* const sum = y + place - top;
        for (std::int32_t m = 0; m < tokens; ++m) sum[m * kSellRows] = 0;
        if (row >= s.rows) continue;
        kernels.few.multiply({w, static_cast<std::int32_t>(s.nnzb), plan.crow, static_cast<std::int32_t>(row),
                              static_cast<std::int32_t>(row) + 1, x, x_stride, tokens, sum, kSellRows,
                              split.stream != 0});
      }
    }
    kernels.multiply({static_cast<const float*>(call.derived.packed), held.columns, has_narrow_columns(s),
                      held.first, held.length, g, end, x, x_stride, tokens, y + g * kernels.lanes - top,
                      kSellRows});
  };
  const auto finish = [&](std::int64_t set, float* sums, float* y) {
    const std::int64_t top = set * kSellRows;
    const std::int64_t features = std::min<std::int64_t>(kSellRows, s.rows - top);
    multiply(set, sums);
    std::fill_n(y, call.x.rows * kSellRows, 0.0F);
    begin_with_bias(floats, call, top, features, call.x.rows, y, kSellRows);
    for (std::int64_t m = 0; m < call.x.rows; ++m) {
      for (std::int32_t place = 0; place < kSellRows; ++place) {
        y[m * kSellRows + held.row[top + place]] += sums[m * kSellRows + place];
      }
    }
    finish_tokens(floats, call, top, features, y, kSellRows);
  };
  const auto first_of = [&](std::int64_t task) -> std::int64_t {
    if (task == split.tasks) return sets_of(s);
    return begin_of_part(plan.crow, s.rows, 1, 1, task, split.tasks) / kSellRows;
  };
  call.executor.parallel_for(split.tasks, [&](std::int64_t task, int worker) {
    Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    auto* sums = own.take<float>(2 * layout.tokens * kSellRows);
    const std::int64_t end = first_of(task + 1);
    for (std::int64_t set = first_of(task); set < end; ++set) {
      finish(set, sums, sums + layout.tokens * kSellRows);
    }
  });
  return {};
}

}  // namespace rarefy::cpu
