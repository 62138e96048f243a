// Drives linear and grad_input in f64 (doubles.h): up to four tokens and single elements read W once; others
// are panels of tokens by feature, packed unless X and Y lie so. Tasks are ranges of output blocks with equal
// shares of W.
#include <algorithm>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/double_panels.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kPiece = 64;  // rows of y that a panel takes at a time: 16 KB
constexpr std::int64_t kPerRow = 4;  // a row's price in stored elements

bool is_few(const Problem& p) {
  return p.op == Op::linear && p.tokens <= kFewTokens && p.weight.shape.block_size() == 1 &&
         p.in_layout == Layout::by_token;
}

constexpr std::int64_t kPanels = 16;  // that a range of W meets while caches hold it

struct DoubleLayout {
  std::int64_t lanes, panels, piece;  // of a panel; at a time; block rows
  std::int64_t shared = 0, worker = 0;

  DoubleLayout(const DoubleKernels& kernels, const Problem& p)
      : lanes(std::min(kDoublePanel, (p.tokens + kernels.width - 1) / kernels.width * kernels.width)),
        panels(std::clamp<std::int64_t>(ceil_div(p.tokens, kDoublePanel), 1, kPanels)),
        piece(std::max<std::int64_t>(1, kPiece / ProductShape(p).out_block)) {
    if (is_few(p) || p.in_layout == Layout::by_feature) return;
    const BsrShape& s = p.weight.shape;
    Room all, own;
    all.take<double>((p.op == Op::linear ? s.cols : s.rows) * lanes * panels);
    own.take<double>(piece * ProductShape(p).out_block * lanes);
    shared = all.bytes();
    worker = own.bytes();
  }
};

// The tasks of one panel or of all, as ranges of block rows.
template <class Each>
void for_ranges(const Call& call, std::int64_t tasks, Each&& each) {
  const ProductShape s(call.problem);
  const std::int32_t* entries = s.transposed ? call.plan.ccol : call.plan.crow;
  const auto begin_of = [&](std::int64_t task) {
    return begin_of_part(entries, s.out_blocks, s.out_block * s.red_block, kPerRow * s.out_block, task,
                         tasks);
  };
  call.executor.parallel_for(
      tasks, [&](std::int64_t task, int worker) { each(begin_of(task), begin_of(task + 1), worker); });
}

// Rows of bias and y from row `first` on.
const double* bias_of(const Call& call, std::int64_t first) {
  return call.bias == nullptr ? nullptr : static_cast<const double*>(call.bias) + first;
}

void run_few(const DoubleKernels& kernels, const Call& call, const FewSplit& split) {
  const PlanView& plan = call.plan;
  const auto tokens = static_cast<std::int32_t>(call.x.rows);
  FewTaskOf<double> all{};
  all.w = operand(plan.shape, call.values, DType::f32, plan.col, nullptr, false);
  all.entries = static_cast<std::int32_t>(plan.shape.nnzb);
  all.entry_begin = plan.crow;
  all.x = static_cast<const double*>(call.x.data);
  all.x_stride = call.x.row_stride;
  all.tokens = tokens;
  all.y_stride = call.out.row_stride;
  all.stream = split.stream != 0;
  all.columns = static_cast<const std::uint16_t*>(call.derived.prepared);
  for_ranges(call, split.tasks, [&](std::int32_t begin, std::int32_t end, int /*worker*/) {
    FewTaskOf<double> own = all;
    own.begin = begin;
    own.end = end;
    own.y = static_cast<double*>(call.out.data) + begin;
    const double* bias = bias_of(call, begin);
    for (std::int64_t m = 0; m < tokens; ++m) {
      double* y = own.y + m * own.y_stride;
      for (std::int32_t o = begin; o < end; ++o) y[o - begin] = bias == nullptr ? 0 : bias[o - begin] + 0.0;
    }
    kernels.few(own);
    if (call.activation != Activation::relu) return;
    for (std::int64_t m = 0; m < tokens; ++m) {
      double* y = own.y + m * own.y_stride;
      for (std::int32_t o = 0; o < end - begin; ++o) y[o] = y[o] < 0 ? 0 : y[o];  // NaN stays
    }
  });
}

InPlaceTaskOf<double> in_place_task(const Call& call) {
  const PlanView& plan = call.plan;
  const bool transposed = call.problem.op == Op::grad_input;
  InPlaceTaskOf<double> task{};
  task.w = operand(plan.shape, call.values, DType::f32, transposed ? plan.row : plan.col,
                   transposed ? plan.perm : nullptr, transposed);
  task.entry_begin = transposed ? plan.ccol : plan.crow;
  task.rows = transposed ? plan.shape.cols : plan.shape.rows;
  task.columns = transposed ? plan.shape.rows : plan.shape.cols;
  task.activation = transposed ? Activation::none : call.activation;
  // Short parts: rounded as results are, sums of 288 terms would be off by three times as much as MKL's.
  task.part = part_entries(task.w.red_block, kFewPartTerms);
  return task;
}

// X and Y by feature, as they lie: a panel's columns of X go through a range of rows before the next.
void run_by_feature(const DoubleKernels& kernels, const Call& call) {
  const BsrShape& s = call.plan.shape;
  InPlaceTaskOf<double> all = in_place_task(call);
  all.x_stride = call.x.col_stride;
  all.y_stride = call.out.col_stride;
  const std::int64_t tasks = std::clamp<std::int64_t>(kTasksPerThread * call.problem.threads, 1,
                                                      std::max<std::int64_t>(1, s.row_count()));
  for_ranges(call, tasks, [&](std::int32_t begin, std::int32_t end, int /*worker*/) {
    InPlaceTaskOf<double> own = all;
    own.begin = begin;
    own.end = end;
    const std::int64_t first = begin * s.block_rows;
    own.bias = bias_of(call, first);
    for (std::int64_t m = 0; m < call.x.rows; m += own.tokens) {
      const std::int64_t left = call.x.rows - m;
      own.tokens = left < kDoublePanel + kernels.width ? left : kDoublePanel;
      own.x = static_cast<const double*>(call.x.data) + m;
      own.y = static_cast<double*>(call.out.data) + first * own.y_stride + m;
      kernels.in_place(own);
    }
  });
}

// One panel through some output blocks, to rows of Y.
void run_panel(const DoubleKernels& kernels, const Call& call, InPlaceTaskOf<double> own, std::int64_t first,
               std::int64_t count, std::int64_t piece, std::int32_t begin, std::int32_t end) {
  const std::int64_t block = own.w.out_block;
  for (own.begin = begin; own.begin < end; own.begin = own.end) {
    own.end = static_cast<std::int32_t>(std::min<std::int64_t>(own.begin + piece, end));
    const std::int64_t row = own.begin * block, rows = std::min(own.end * block, own.rows) - row;
    own.bias = call.problem.op == Op::linear ? bias_of(call, row) : nullptr;
    kernels.in_place(own);
    for (std::int64_t m = 0; m < count; ++m) {
      double* y = static_cast<double*>(call.out.data) + (first + m) * call.out.row_stride + row;
      for (std::int64_t n = 0; n < rows; ++n) y[n] = own.y[n * own.y_stride + m];
    }
  }
}

// A range of W meets some panels, one after the other.
void run_panels(const DoubleKernels& kernels, const Call& call) {
  const ProductShape s(call.problem);
  const MatrixView& in = s.transposed ? call.dy : call.x;
  const DoubleLayout layout(kernels, call.problem);
  Room shared(call.workspace);
  auto* memory = shared.take<double>(in.cols * layout.lanes * layout.panels);
  const InPlaceTaskOf<double> all = in_place_task(call);
  const std::int64_t most = layout.lanes * layout.panels, chunks = ceil_div(in.cols, kDoublesPacked);
  const std::int64_t ranges = std::clamp<std::int64_t>(kTasksPerThread * call.problem.threads, 1,
                                                       std::max<std::int64_t>(1, s.out_blocks));
  const std::int32_t* entries = s.transposed ? call.plan.ccol : call.plan.crow;
  const auto begin_of = [&](std::int64_t range) {
    return begin_of_part(entries, s.out_blocks, s.out_block * s.red_block, kPerRow * s.out_block, range,
                         ranges);
  };
  for (std::int64_t m0 = 0; m0 < in.rows; m0 += most) {
    const std::int64_t panels = ceil_div(std::min(most, in.rows - m0), layout.lanes);
    const auto first_of = [&](std::int64_t panel) { return m0 + panel * layout.lanes; };
    const auto count_of = [&](std::int64_t panel) {
      return std::min(layout.lanes, in.rows - first_of(panel));
    };
    const auto lanes_of = [&](std::int64_t panel) {
      return ceil_div(count_of(panel), std::int64_t{kernels.width}) * kernels.width;
    };
    const auto panel_at = [&](std::int64_t panel) { return memory + panel * layout.lanes * in.cols; };
    call.executor.parallel_for(panels * chunks, [&](std::int64_t task) {
      const std::int64_t panel = task / chunks, begin = task % chunks * kDoublesPacked;
      pack_doubles(in, first_of(panel), count_of(panel), lanes_of(panel), begin,
                   std::min(in.cols, begin + kDoublesPacked), panel_at(panel));
    });
    call.executor.parallel_for(ranges * panels, [&](std::int64_t task, int worker) {
      const std::int64_t range = task / panels, panel = task % panels;
      Room room(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
      InPlaceTaskOf<double> own = all;
      own.x = panel_at(panel);
      own.x_stride = own.y_stride = own.tokens = lanes_of(panel);
      own.y = room.take<double>(layout.piece * s.out_block * layout.lanes);
      run_panel(kernels, call, own, first_of(panel), count_of(panel), layout.piece, begin_of(range),
                begin_of(range + 1));
    });
  }
}

}  // namespace

Reason supports_doubles(const DoubleKernels& kernels, const Problem& p) {
  for (const DType dtype : {p.in, p.weight.dtype, p.out}) {
    if (dtype != DType::f64) return cat("takes f64 alone; got ", name(dtype));
  }
  if (p.activation != Activation::none && p.activation != Activation::relu) {
    return cat("takes no activation but relu in f64; got ", name(p.activation));
  }
  if (p.op == Op::grad_input) return {};
  if (p.in_layout != p.out_layout) return "takes and gives matrices in one layout; got two";
  if (p.in_layout == Layout::by_feature && p.tokens < kernels.least) {
    return cat("takes ", kernels.least, " tokens and more by feature; got ", p.tokens);
  }
  return {};
}

std::int64_t doubles_workspace(const DoubleKernels& kernels, const Problem& problem,
                               const Config& /*config*/) {
  const DoubleLayout layout(kernels, problem);
  return layout.shared + problem.threads * layout.worker;
}

std::int64_t doubles_prepared_size(const Problem& problem, const Config& config) {
  return is_few(problem) ? few_prepared_size(problem, config) : 0;
}

Status run_doubles(const DoubleKernels& kernels, const Call& call) {
  const auto split = from_config<FewSplit>(call.config);
  if (split.tasks < 1)
    return invalid(kernels.family, "tasks of the config must be at least 1", cat(split.tasks));
  if (is_few(call.problem)) {
    run_few(kernels, call, split);
  } else if (call.problem.in_layout == Layout::by_feature) {
    run_by_feature(kernels, call);
  } else {
    run_panels(kernels, call);
  }
  return {};
}

}  // namespace rarefy::cpu
