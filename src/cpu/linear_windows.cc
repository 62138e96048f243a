// Drives linear for a few tokens and single elements that the caller holds in the order of windows.h. Groups
// of rows whose elements share too few windows have no steps: few_singles.h takes their values as they lie.
#include <algorithm>
#include <atomic>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kSparsest = 64;      // 1 / density: below, a step of random elements has fewer than 6
constexpr std::int64_t kGroupsAtOnce = 64;  // whose sums are in L1

std::int64_t groups_of(const BsrShape& s) { return ceil_div(s.rows, kWindowRows); }

// What is prepared.
struct Steps {
  std::int32_t* begin;  // of each group's; the next one's is the end
  WindowStep* steps;
  std::uint8_t* columns;
  std::int64_t bytes;

  Steps(const BsrShape& s, void* base) {
    Room room(base);
    begin = room.take<std::int32_t>(groups_of(s) + 1);
    steps = room.take<WindowStep>(s.nnzb / kWindowLeast + groups_of(s));
    columns = room.take<std::uint8_t>(s.nnzb + kWindowRoom);
    bytes = room.bytes();
  }
};

WindowGroup group_of(const PlanView& plan, std::int64_t group) {
  WindowGroup rows;
  for (std::int64_t r = 0; r < kWindowRows; ++r) {
    const std::int64_t row = group * kWindowRows + r;
    rows.begin[r] = plan.crow[std::min(row, plan.shape.rows)];
    rows.end[r] = plan.crow[std::min(row + 1, plan.shape.rows)];
  }
  rows.room = (rows.end[kWindowRows - 1] - rows.begin[0]) / kWindowLeast;
  return rows;
}

// each(group) for all, to prepare and pack.
void for_groups(const Call& call, const auto& each) {
  for_each(call.executor, groups_of(call.plan.shape), 64, each);
}

// The working memory: X for all, sums for each worker.
struct Layout {
  std::int64_t tokens;  // that the kernels have: 1, 2 or 4
  std::int64_t lanes;   // of a row of x, padded
  std::int64_t shared, worker;
  static constexpr std::int64_t kStride = kGroupsAtOnce * kWindowRows;  // of sums

  explicit Layout(const Problem& p) {
    tokens = few_tokens(p.tokens);
    lanes = ceil_div(p.weight.shape.cols, kWindowGrain) * kWindowGrain + kWindowColumns;
    Room all, own;
    all.take<float>(tokens * lanes);
    own.take<float>(tokens * kStride);
    shared = all.bytes();
    worker = own.bytes();
  }
};

}  // namespace

Reason supports_windows(const FewKernels& kernels, const Problem& p) {
  const BsrShape& s = p.weight.shape;
  if (kernels.windows == nullptr) return "has no kernel for them";
  if (Reason reason = supports_few(kernels, p); !reason.empty()) return reason;
  if (s.block_size() != 1) return "takes single elements";
  if (p.in != DType::f32 || p.weight.dtype != DType::f32) return "takes f32 inputs and values";
  if (s.cols > (std::int64_t{1} << 16) * kWindowGrain) return cat("takes 2²⁰ columns; got ", s.cols);
  if (s.nnzb * kSparsest < s.rows * s.cols) return cat("too few elements share a window: ", s.nnzb);
  return {};
}

std::int64_t windows_prepared_size(const Problem& problem, const Config& /*config*/) {
  return Steps(problem.weight.shape, nullptr).bytes;
}

std::int64_t windows_packed_size(const Problem& problem, const Config& /*config*/) {
  return (problem.weight.shape.nnzb + kWindowRoom) * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t windows_workspace(const Problem& problem, const Config& /*config*/) {
  const Layout layout(problem);
  return layout.shared + problem.threads * layout.worker;
}

Status prepare_windows(const FewKernels& kernels, const Call& call, void* to) {
  const PlanView& plan = call.plan;
  const Steps made(plan.shape, to);
  std::atomic<bool> valid = true;
  // Each group at first where there is room for as many as it may have.
  const auto place = [&](std::int64_t g) {
    return made.steps + plan.crow[g * kWindowRows] / kWindowLeast + g;
  };
  std::int32_t* const count = made.begin + 1;
  for_groups(call, [&](std::int64_t g) {
    const WindowGroup group = group_of(plan, g);
    count[g] = kernels.windows->make_steps(group, plan.col, plan.shape.cols, place(g),
                                           made.columns + group.begin[0]);
    if (count[g] < 0) valid = false;
  });
  if (!valid) {
    return other_columns();
  }
  made.begin[0] = 0;
  for (std::int64_t g = 0; g < groups_of(plan.shape); ++g) {  // then one after the other
    std::copy_n(place(g), count[g], made.steps + made.begin[g]);
    count[g] += made.begin[g];
  }
  std::fill_n(made.columns + plan.shape.nnzb, kWindowRoom, std::uint8_t{0});
  return {};
}

Status pack_windows(const FewKernels& kernels, const Call& call, void* to) {
  const PlanView& plan = call.plan;
  const Steps made(plan.shape, const_cast<void*>(call.derived.prepared));  // read alone
  const auto* values = static_cast<const float*>(call.values);
  auto* packed = static_cast<float*>(to);
  for_groups(call, [&](std::int64_t g) {
    const WindowGroup group = group_of(plan, g);
    kernels.windows->take_values(group, made.steps + made.begin[g], made.begin[g + 1] - made.begin[g], values,
                                 packed + group.begin[0]);
  });
  std::fill_n(packed + plan.shape.nnzb, kWindowRoom, 0.0F);
  return {};
}

Status run_windows(const FewKernels& kernels, const Call& call) {
  const auto split = from_config<FewSplit>(call.config);
  if (split.tasks < 1)
    return invalid(kernels.family, "tasks of the config must be at least 1", cat(split.tasks));
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const Layout layout(call.problem);
  const auto tokens = static_cast<std::int32_t>(layout.tokens);
  auto* x = Room(call.workspace).take<float>(layout.tokens * layout.lanes);
  to_float(kernels.rows, call.x, layout.tokens, layout.lanes, x);
  const Steps held(s, const_cast<void*>(call.derived.prepared));  // read alone
  const SparseOperand w = operand(call, plan.col, nullptr, false);

  // Groups begin … end, at most kGroupsAtOnce, onto sums.
  const auto multiply = [&](std::int64_t begin, std::int64_t end, float* y) {
    for (std::int64_t g = begin, next = g; g < end; y += kWindowRows * (next - g), g = next) {
      while (next < end && held.begin[next + 1] > held.begin[next]) ++next;
      if (next > g) {
        kernels.windows->multiply({static_cast<const float*>(call.derived.packed), held.columns, held.steps,
                                   held.begin, plan.crow, g, next, x, layout.lanes, tokens, y,
                                   Layout::kStride});
        continue;
      }
      const std::int64_t first = next++ * kWindowRows, last = std::min(first + kWindowRows, s.rows);
      kernels.multiply({w, static_cast<std::int32_t>(s.nnzb), plan.crow, static_cast<std::int32_t>(first),
                        static_cast<std::int32_t>(last), x, layout.lanes, tokens, y, Layout::kStride,
                        split.stream != 0});
    }
  };
  const auto finish = [&](std::int64_t begin, std::int64_t end, float* sums) {
    const std::int64_t first = begin * kWindowRows, features = std::min(end * kWindowRows, s.rows) - first;
    std::fill_n(sums, layout.tokens * Layout::kStride, 0.0F);
    begin_with_bias(kernels.rows, call, first, features, layout.tokens, sums, Layout::kStride);
    multiply(begin, end, sums);
    finish_tokens(kernels.rows, call, first, features, sums, Layout::kStride);
  };
  const auto first_of = [&](std::int64_t task) -> std::int64_t {
    if (task == split.tasks) return groups_of(s);
    return begin_of_part(plan.crow, s.rows, 1, 0, task, split.tasks) / kWindowRows;
  };
  call.executor.parallel_for(split.tasks, [&](std::int64_t task, int worker) {
    Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    auto* sums = own.take<float>(layout.tokens * Layout::kStride);
    const std::int64_t end = first_of(task + 1);
    for (std::int64_t g = first_of(task); g < end; g += kGroupsAtOnce) {
      finish(g, std::min(g + kGroupsAtOnce, end), sums);
    }
  });
  return {};
}

}  // namespace rarefy::cpu
