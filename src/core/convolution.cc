// Convolutions as products of windows: who gathers which, on which thread, and where gradients go back.
#include "rarefy/convolution.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "core/checked.h"
#include "core/elements.h"
#include "core/memory.h"
#include "core/message.h"

namespace rarefy {

namespace {

// Windows of a piece, in bytes: with the columns of a product they stay in a core's L2.
constexpr std::int64_t kPieceBytes = 1 << 20;
// Those of a weight's gradient, which is rounded to 16 bits once a piece.
constexpr std::int64_t kGradientBytes = 4 << 20;
constexpr std::int64_t kLeastTokens = 256;  // of a piece, so that its weights are worth reading
// Tokens a thread from which each thread takes pieces of its own; with fewer, all share a product.
constexpr std::int64_t kLeastOfThread = 96;

Status check_sizes(std::string_view op, const Convolution& c, const BsrShape& w) {
  if (c.images < 0 || c.rows < 0 || c.cols < 0 || c.channels < 0)
    return invalid(op, "sizes of x must not be negative",
                   cat(c.images, " × ", c.rows, " × ", c.cols, " × ", c.channels));
  for (const std::int64_t size :
       {c.kernel_rows, c.kernel_cols, c.stride_rows, c.stride_cols, c.dilation_rows, c.dilation_cols}) {
    if (size < 1) return invalid(op, "kernel, stride and dilation must be at least 1", cat(size));
  }
  for (const std::int64_t zeros : {c.top, c.bottom, c.left, c.right})
    if (zeros < 0) return invalid(op, "padding must not be negative", cat(zeros));
  if (c.rows + c.top + c.bottom <= c.dilation_rows * (c.kernel_rows - 1) ||
      c.cols + c.left + c.right <= c.dilation_cols * (c.kernel_cols - 1)) {
    return invalid(op, "a window must fit into an image with its padding", cat(c.rows, " × ", c.cols));
  }
  if (c.window() == w.cols) return {};
  return invalid(op, cat("weight must have ", c.window(), " columns, kernel places times channels"),
                 cat(w.cols));
}

// Memory of one thread: windows, and what its products ask for.
struct Worker {
  Memory windows, workspace;
  std::int64_t bytes = 0;

  static void* provide(void* self, std::int64_t bytes) {
    auto& own = *static_cast<Worker*>(self);
    if (own.bytes < bytes) {
      own.workspace.reset();
      own.workspace = aligned_memory(bytes);
      own.bytes = own.workspace ? bytes : 0;
    }
    return own.workspace.get();
  }

  bool reserve(std::int64_t size) {
    if (!windows) windows = aligned_memory(std::max<std::int64_t>(1, size));
    return windows != nullptr;
  }

  Context context(const Executor& executor) { return {executor, nullptr, {nullptr, 0, &provide, this}}; }
};

// The rows of output, of all images one after another, in pieces, and who takes these: threads each for
// itself, or all together one after another.
struct Pieces {
  std::int64_t rows, per_piece, count;
  bool apart;

  Pieces(const Convolution& c, std::int64_t all, std::int64_t element, int threads,
         std::int64_t bytes = kPieceBytes)
      : rows(all) {
    const std::int64_t tokens = std::max<std::int64_t>(1, c.out_cols());
    const std::int64_t fit = bytes / std::max<std::int64_t>(1, tokens * c.window() * element);
    const std::int64_t most = std::max({std::int64_t{1}, fit, ceil_div(kLeastTokens, tokens)});
    apart = threads > 1 && rows * tokens >= threads * kLeastOfThread;
    count = ceil_div(rows, most);
    if (apart) count = ceil_div(count, threads) * threads;
    per_piece = std::max<std::int64_t>(1, ceil_div(rows, std::max<std::int64_t>(1, count)));
    count = ceil_div(rows, per_piece);
  }
};

class Windows {
 public:
  Windows(const Convolution& sizes, const ImagesView& x)
      : c_(sizes), x_(x), size_(static_cast<std::int64_t>(size_of(x.dtype))) {}

  std::int64_t bytes(std::int64_t rows) const { return rows * c_.out_cols() * c_.window() * size_; }

  // The windows of some rows of output, on all threads of the executor.
  void gather(std::int64_t first, std::int64_t count, void* to, const Executor& executor) const {
    executor.parallel_for(
        count, [&](std::int64_t i) { gather_row(first + i, static_cast<std::byte*>(to) + bytes(i)); });
  }

 private:
  void gather_row(std::int64_t row, std::byte* to) const {
    const std::int64_t y = row % c_.out_rows() * c_.stride_rows - c_.top;
    const auto* image =
        static_cast<const std::byte*>(x_.data) + row / c_.out_rows() * x_.image_stride * size_;
    const std::int64_t line = c_.kernel_cols * c_.channels * size_;
    for (std::int64_t o = 0; o < c_.out_cols(); ++o) {
      for (std::int64_t i = 0; i < c_.kernel_rows; ++i, to += line) {
        const std::int64_t r = y + i * c_.dilation_rows;
        if (r < 0 || r >= c_.rows) {
          std::memset(to, 0, static_cast<std::size_t>(line));
        } else {
          gather_line(image + r * x_.row_stride * size_, o * c_.stride_cols - c_.left, to);
        }
      }
    }
  }

  // Places q, q + dilation … of a row of an image.
  void gather_line(const std::byte* row, std::int64_t q, std::byte* to) const {
    const std::int64_t place = c_.channels * size_;
    if (c_.dilation_cols == 1 && x_.col_stride == c_.channels) {  // side by side
      const std::int64_t begin = std::clamp<std::int64_t>(-q, 0, c_.kernel_cols);
      const std::int64_t end = std::clamp<std::int64_t>(c_.cols - q, begin, c_.kernel_cols);
      std::memset(to, 0, static_cast<std::size_t>(begin * place));
      if (begin < end)
        std::memcpy(to + begin * place, row + (q + begin) * place,
                    static_cast<std::size_t>((end - begin) * place));
      std::memset(to + end * place, 0, static_cast<std::size_t>((c_.kernel_cols - end) * place));
      return;
    }
    for (std::int64_t j = 0; j < c_.kernel_cols; ++j, to += place, q += c_.dilation_cols) {
      if (q < 0 || q >= c_.cols) {
        std::memset(to, 0, static_cast<std::size_t>(place));
      } else {
        std::memcpy(to, row + q * x_.col_stride * size_, static_cast<std::size_t>(place));
      }
    }
  }

  const Convolution& c_;
  const ImagesView& x_;
  std::int64_t size_;
};

// Runs tasks that may fail; the first failure in time is told.
template <class Task>
Status run_all(const Executor& executor, std::int64_t tasks, Task&& task) {
  std::mutex mutex;
  Status first;
  executor.parallel_for(tasks, [&](std::int64_t i, int worker) {
    Status status = task(i, worker);
    if (status.ok()) return;
    const std::lock_guard lock(mutex);
    if (first.ok()) first = std::move(status);
  });
  return first;
}

Status no_memory(std::string_view op) {
  return error(StatusCode::out_of_memory, op, "windows must fit in memory", "an allocation failure");
}

// Adds gradients of windows, rows of output from `first` on, to rows [low, high) of an image's gradient.
template <class T, class Sum>
void scatter(const Convolution& c, const T* windows, std::int64_t first, std::int64_t count, std::int64_t low,
             std::int64_t high, Sum* image) {
  const std::int64_t line = c.kernel_cols * c.channels;
  for (std::int64_t y = first; y < first + count; ++y) {
    for (std::int64_t o = 0; o < c.out_cols(); ++o) {
      for (std::int64_t i = 0; i < c.kernel_rows; ++i, windows += line) {
        const std::int64_t r = y * c.stride_rows - c.top + i * c.dilation_rows;
        if (r < low || r >= high) continue;
        const T* from = windows;
        for (std::int64_t j = 0; j < c.kernel_cols; ++j, from += c.channels) {
          const std::int64_t q = o * c.stride_cols - c.left + j * c.dilation_cols;
          if (q < 0 || q >= c.cols) continue;
          Sum* to = image + (r * c.cols + q) * c.channels;
          for (std::int64_t k = 0; k < c.channels; ++k) to[k] += read(from + k);
        }
      }
    }
  }
}

// What an image's gradient is summed in: where it lies, or in float beside it.
template <class T>
class ImageSum {
 public:
  using Sum = SumOf<T>;
  ImageSum(std::int64_t count, T* to) : count_(count), to_(to) {
    if constexpr (!std::is_same_v<Sum, T>) own_.resize(static_cast<std::size_t>(count));
    std::fill_n(data(), count, Sum{0});
  }
  Sum* data() {
    if constexpr (std::is_same_v<Sum, T>)
      return to_;
    else
      return own_.data();
  }
  void finish() {
    if constexpr (!std::is_same_v<Sum, T>)
      for (std::int64_t i = 0; i < count_; ++i) write(to_ + i, own_[static_cast<std::size_t>(i)]);
  }

 private:
  std::int64_t count_;
  T* to_;
  std::vector<Sum> own_;
};

// One image's gradient, piece by piece.
template <class T>
Status image_gradient(std::string_view op, const Convolution& c, const T* dy, DType dtype, const BsrView& w,
                      T* dx, Worker& worker, const Executor& executor) try {
  const std::int64_t n = w.plan.shape.rows, tokens = c.out_cols(), k = c.window();
  const Pieces pieces(c, c.out_rows(), sizeof(T), 1);
  ImageSum<T> sum(c.rows * c.cols * c.channels, dx);
  if (!worker.reserve(pieces.per_piece * tokens * k * std::int64_t{sizeof(T)})) return no_memory(op);
  const auto* windows = static_cast<const T*>(worker.windows.get());
  for (std::int64_t p = 0; p < pieces.count; ++p) {
    const std::int64_t first = p * pieces.per_piece, rows = std::min(pieces.per_piece, c.out_rows() - first);
    const MatrixView from{dy + first * tokens * n, dtype, rows * tokens, n, n};
    const MutableMatrixView to{worker.windows.get(), dtype, rows * tokens, k, k};
    if (Status status = grad_input(from, w, to, worker.context(executor)); !status.ok()) return status;
    const std::int64_t chunk = std::max<std::int64_t>(1, ceil_div(c.rows, executor.threads));
    executor.parallel_for(ceil_div(c.rows, chunk), [&](std::int64_t task) {
      scatter(c, windows, first, rows, task * chunk, std::min(c.rows, (task + 1) * chunk), sum.data());
    });
  }
  sum.finish();
  return {};
} catch (const std::bad_alloc&) {
  return no_memory(op);
}

// total += piece, of stored values.
template <class T>
void add(const T* piece, std::int64_t count, SumOf<T>* total, const Executor& executor) {
  constexpr std::int64_t kEach = 1 << 14;
  executor.parallel_for(ceil_div(count, kEach), [&](std::int64_t task) {
    for (std::int64_t i = task * kEach; i < std::min(count, (task + 1) * kEach); ++i)
      total[i] += read(piece + i);
  });
}

template <class T>
Status weight_gradient(std::string_view op, const Convolution& c, const T* dy, const ImagesView& x,
                       const PlanView& plan, T* dvalues, const Context& context) try {
  const std::int64_t n = plan.shape.rows, tokens = c.out_cols(), k = c.window();
  const Pieces pieces(c, c.images * c.out_rows(), sizeof(T), 1, kGradientBytes);
  const Windows windows(c, x);
  Worker worker;
  if (!worker.reserve(windows.bytes(pieces.per_piece))) return no_memory(op);
  const std::int64_t count = plan.shape.value_count();
  std::vector<T> part(static_cast<std::size_t>(count));
  std::vector<SumOf<T>> total(static_cast<std::size_t>(count));
  for (std::int64_t p = 0; p < pieces.count; ++p) {
    const std::int64_t first = p * pieces.per_piece, rows = std::min(pieces.per_piece, pieces.rows - first);
    windows.gather(first, rows, worker.windows.get(), context.executor);
    const MatrixView from{dy + first * tokens * n, x.dtype, rows * tokens, n, n};
    const MatrixView in{worker.windows.get(), x.dtype, rows * tokens, k, k};
    if (Status status = grad_weight(from, in, plan, part.data(), x.dtype, worker.context(context.executor));
        !status.ok()) {
      return status;
    }
    add(part.data(), count, total.data(), context.executor);
  }
  for (std::int64_t i = 0; i < count; ++i) write(dvalues + i, total[static_cast<std::size_t>(i)]);
  return {};
} catch (const std::bad_alloc&) {
  return no_memory(op);
}

}  // namespace

Status convolution(std::string_view op, const Convolution& sizes, const ImagesView& x, const BsrView& w,
                   const void* bias, Activation activation, void* y, const Context& context) try {
  if (Status status = check_sizes(op, sizes, w.plan.shape); !status.ok()) return status;
  const auto size = static_cast<std::int64_t>(size_of(x.dtype));
  const std::int64_t n = w.plan.shape.rows, tokens = sizes.out_cols(), k = sizes.window();
  const Pieces pieces(sizes, sizes.images * sizes.out_rows(), size, context.executor.threads);
  const Windows windows(sizes, x);
  std::vector<Worker> workers(static_cast<std::size_t>(pieces.apart ? context.executor.threads : 1));
  const auto piece = [&](std::int64_t p, Worker& own, const Executor& executor) -> Status {
    const std::int64_t first = p * pieces.per_piece, rows = std::min(pieces.per_piece, pieces.rows - first);
    if (!own.reserve(windows.bytes(pieces.per_piece))) return no_memory(op);
    windows.gather(first, rows, own.windows.get(), executor);
    const MatrixView in{own.windows.get(), x.dtype, rows * tokens, k, k};
    void* const to = static_cast<std::byte*>(y) + first * tokens * n * size;
    return linear(in, w, bias, activation, {to, x.dtype, rows * tokens, n, n}, own.context(executor));
  };
  if (pieces.apart) {
    return run_all(context.executor, pieces.count, [&](std::int64_t p, int worker) {
      return piece(p, workers[static_cast<std::size_t>(worker)], Executor{});
    });
  }
  for (std::int64_t p = 0; p < pieces.count; ++p)
    if (Status status = piece(p, workers.front(), context.executor); !status.ok()) return status;
  return {};
} catch (const std::bad_alloc&) {
  return no_memory(op);
}

Status convolution_grad_input(std::string_view op, const Convolution& sizes, const void* dy, DType dtype,
                              const BsrView& w, void* dx, const Context& context) {
  if (Status status = check_sizes(op, sizes, w.plan.shape); !status.ok()) return status;
  const std::int64_t from = sizes.out_rows() * sizes.out_cols() * w.plan.shape.rows;
  const std::int64_t to = sizes.rows * sizes.cols * sizes.channels;
  Status status;
  visit_float(dtype, [&]<class T>(T) {
    const auto image = [&](std::int64_t i, Worker& worker, const Executor& executor) {
      return image_gradient(op, sizes, static_cast<const T*>(dy) + i * from, dtype, w,
                            static_cast<T*>(dx) + i * to, worker, executor);
    };
    const int threads = context.executor.threads;
    std::vector<Worker> workers(static_cast<std::size_t>(threads));
    if (threads > 1 && sizes.images >= threads) {
      status = run_all(context.executor, sizes.images, [&](std::int64_t i, int worker) {
        return image(i, workers[static_cast<std::size_t>(worker)], Executor{});
      });
      return;
    }
    for (std::int64_t i = 0; i < sizes.images && status.ok(); ++i)
      status = image(i, workers.front(), context.executor);
  });
  return status;
}

Status convolution_grad_weight(std::string_view op, const Convolution& sizes, const void* dy,
                               const ImagesView& x, const PlanView& plan, void* dvalues,
                               const Context& context) {
  if (Status status = check_sizes(op, sizes, plan.shape); !status.ok()) return status;
  Status status;
  visit_float(x.dtype, [&]<class T>(T) {
    status =
        weight_gradient(op, sizes, static_cast<const T*>(dy), x, plan, static_cast<T*>(dvalues), context);
  });
  return status;
}

}  // namespace rarefy
