// A random sparse layer with its activations and gradients: on the host in double, and in the memory
// and dtype under test, with the three products into guarded outputs.
#pragma once

#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>

#include "memory.h"
#include "rarefy/backend.h"
#include "rarefy/linear.h"

namespace rarefy::test {

inline constexpr Layout kLayouts[] = {Layout::by_token, Layout::by_feature};

// Forces a family while it lives, on the device that has it; then what was forced before is again.
class Force {
 public:
  explicit Force(const std::string& forced) : before_(forced_impl()) { apply(forced); }
  ~Force() { apply(before_); }
  Force(const Force&) = delete;
  Force& operator=(const Force&) = delete;

 private:
  static void apply(const std::string& forced) {
    if (Status status = force_impl(forced); !status.ok()) throw std::runtime_error(status.message());
  }
  std::string before_;
};

struct ProblemSpec {
  std::int64_t m, n, k;
  std::int64_t block_rows, block_cols;
  double density = 0.5;
  DType dtype = DType::f32;
  bool integers = false;    // small ones: every sum is exact in every dtype
  std::int64_t stride = 3;  // row strides are this much longer than the rows; −1 broadcasts one row of x
  // In the memory under test, of x and dx, and of y and dy. By feature, columns are `stride` longer instead.
  Layout x_layout = Layout::by_token, y_layout = Layout::by_token;
  bool rounds_x = false;  // values are stored in bf16, and x may be rounded to it

  DType stored() const { return rounds_x ? DType::bf16 : dtype; }
  bool tf32 = false;  // the calls allow it
};

inline std::vector<std::byte> encode(std::span<const double> numbers, DType dtype) {
  std::vector<std::byte> bytes(numbers.size() * size_of(dtype));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto put = [&](auto value) { std::memcpy(&bytes[i * sizeof(value)], &value, sizeof(value)); };
    switch (dtype) {
      case DType::f64: put(numbers[i]); break;
      case DType::f32: put(static_cast<float>(numbers[i])); break;
      case DType::bf16: put(to_bfloat16(numbers[i])); break;
      case DType::f16: put(to_float16(numbers[i])); break;
      case DType::i8: put(static_cast<std::int8_t>(numbers[i])); break;
    }
  }
  return bytes;
}

inline std::vector<double> decode(std::span<const std::byte> bytes, DType dtype) {
  std::vector<double> numbers(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto get = [&]<class T>(T value) {
      std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
      return value;
    };
    switch (dtype) {
      case DType::f64: numbers[i] = get(double{}); break;
      case DType::f32: numbers[i] = get(float{}); break;
      case DType::bf16: numbers[i] = to_float(get(bfloat16{})); break;
      case DType::f16: numbers[i] = to_float(get(float16{})); break;
      case DType::i8: numbers[i] = get(std::int8_t{}); break;
    }
  }
  return numbers;
}

// The host half. All numbers are exact in spec.dtype; integers have zeros of both signs among them. x and dy
// lie by token here, whatever their layout in the memory under test.
struct Problem {
  ProblemSpec spec;
  Pattern pattern;
  std::vector<double> x, dy, values, bias;

  std::int64_t x_stride() const { return spec.stride < 0 ? 0 : spec.k + spec.stride; }
  std::int64_t y_stride() const { return spec.n + std::abs(spec.stride); }
  std::int64_t dx_stride() const { return spec.k + std::abs(spec.stride); }

  // Stored elements inside W of each of its rows, and of each of its columns: the terms of a sum.
  std::vector<double> stored_per_row() const { return stored(spec.n, true); }
  std::vector<double> stored_per_col() const { return stored(spec.k, false); }

 private:
  std::vector<double> stored(std::int64_t count, bool by_row) const {
    const PlanView& plan = pattern.view();
    std::vector<double> counts(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < plan.shape.row_count(); ++i) {
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const std::int64_t n0 = i * spec.block_rows, k0 = plan.col[e] * spec.block_cols;
        const std::int64_t rows = std::min(spec.block_rows, spec.n - n0);
        const std::int64_t cols = std::min(spec.block_cols, spec.k - k0);
        for (std::int64_t at = 0; at < (by_row ? rows : cols); ++at) {
          counts[static_cast<std::size_t>((by_row ? n0 : k0) + at)] +=
              static_cast<double>(by_row ? cols : rows);
        }
      }
    }
    return counts;
  }
};

inline Problem make_problem(const ProblemSpec& spec, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::bernoulli_distribution stored(spec.density);
  const BsrShape shape{spec.n, spec.k, spec.block_rows, spec.block_cols, 0};
  std::vector<std::int32_t> crow{0}, col;
  for (std::int32_t i = 0; i < shape.row_count(); ++i) {
    // Between densities 0 and 1, some block rows are empty and some are full.
    const bool mixed = spec.density > 0 && spec.density < 1;
    for (std::int32_t j = 0; j < shape.col_count(); ++j) {
      if (mixed && i % 5 == 4) continue;
      if ((mixed && i % 7 == 3) || stored(random)) col.push_back(j);
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  Result<Pattern> pattern = Pattern::create(shape, crow, col);
  if (!pattern.ok()) throw std::runtime_error(pattern.status().message());
  const auto numbers = [&](std::int64_t count, DType dtype) {
    std::vector<double> result(static_cast<std::size_t>(count));
    std::normal_distribution<> normal;
    std::uniform_int_distribution<> integer(-2, 2);
    for (double& number : result) {
      number = spec.integers ? integer(random) : normal(random);
      if (number == 0 && random() % 2 == 0) number = -0.0;
    }
    return decode(encode(result, dtype), dtype);
  };
  Problem problem{spec, *pattern, {}, {}, {}, {}};
  problem.x = numbers(problem.x_stride() == 0 ? spec.k : spec.m * problem.x_stride(), spec.dtype);
  problem.dy = numbers(spec.m * problem.y_stride(), spec.dtype);
  problem.values = numbers(pattern->shape().value_count(), spec.stored());
  problem.bias = numbers(spec.n, spec.dtype);
  return problem;
}

// The same for the product of tokens first … first + count alone.
inline Problem of_tokens(const Problem& problem, std::int64_t first, std::int64_t count) {
  Problem some = problem;
  some.spec.m = count;
  some.x.assign(problem.x.begin() + first * problem.x_stride(),
                problem.x.begin() + (first + count) * problem.x_stride());
  return some;
}

// The same in the memory of one device, with exactly as many bytes as it needs.
template <class Buffer>
class ProblemIn {
 public:
  explicit ProblemIn(const Problem& problem, Executor executor = {})
      : executor_(executor),
        spec_(problem.spec),
        host_(problem),
        plan_(Buffer::template upload<std::int32_t>(problem.pattern.plan())),
        x_(upload(laid_out(problem.x, spec_.k, problem.x_stride(), spec_.x_layout))),
        dy_(upload(laid_out(problem.dy, spec_.n, problem.y_stride(), spec_.y_layout))),
        values_(Buffer::template upload<std::byte>(encode(problem.values, spec_.stored()))),
        bias_(upload(problem.bias)),
        y_(output_bytes(spec_.n, spec_.y_layout)),
        dx_(output_bytes(spec_.k, spec_.x_layout)),
        dvalues_(problem.values.size() * size_of(spec_.dtype)) {}

  Status linear(Activation activation, bool with_bias = true, void* stream = nullptr) {
    rarefy::Problem asked = problem(Op::linear);
    asked.bias = with_bias;
    asked.activation = activation;
    return rarefy::linear(x_view(), w_view(asked, stream), with_bias ? bias_.data() : nullptr, activation,
                          y_view(), context(stream));
  }
  Status grad_input(void* stream = nullptr) {
    return rarefy::grad_input(dy_view(), w_view(problem(Op::grad_input), stream), dx_view(), context(stream));
  }
  Status grad_weight(void* stream = nullptr, bool accumulate = false) {
    return rarefy::grad_weight(dy_view(), x_view(), plan_view(), dvalues_.data(), spec_.dtype,
                               context(stream), w_view(problem(Op::grad_weight), stream).derived, accumulate);
  }

  // What the products ask for, without data.
  rarefy::Problem problem(Op op) const {
    rarefy::Problem asked = rarefy::make_problem(op, host_.pattern.shape(), spec_.m, spec_.dtype,
                                                 Buffer::kDevice, executor_.threads);
    const MatrixView in = op == Op::linear ? x_view() : dy_view();
    const MatrixView out = op == Op::linear ? y_view() : op == Op::grad_input ? dx_view() : x_view();
    asked.in_stride = in.stride();
    asked.in_layout = in.layout();
    asked.out_stride = out.stride();
    asked.out_layout = out.layout();
    set_weight(asked);
    asked.tf32 = spec_.tf32;
    return asked;
  }
  // From now on calls hold what their kernels derive from the weight, made at the first that wants it: for as
  // many tokens as it has, or for others.
  void hold_derived(std::int64_t tokens = 0) {
    hold_derived_ = true;
    derived_tokens_ = tokens;
  }
  void hold_prepared_alone() {
    hold_derived();
    hold_packed_ = false;
  }
  // Of kernels that pack nothing, for who does not hold values twice.
  void hold_of_the_pattern() {
    hold_derived();
    derived_asked_ = kAnyPrepared;
  }

  BsrView weight() { return w_view(problem(Op::linear), nullptr); }
  const void* bias() const { return bias_.data(); }
  MatrixView x_view() const { return view<MatrixView>(x_.data(), spec_.k, host_.x_stride(), spec_.x_layout); }

  Guarded<Buffer>& y() { return y_; }
  Guarded<Buffer>& dx() { return dx_; }
  Guarded<Buffer>& dvalues() { return dvalues_; }
  void poison() {
    for (Guarded<Buffer>* output : {&y_, &dx_, &dvalues_}) output->poison();
  }

 private:
  void set_weight(rarefy::Problem& asked) const {
    if (asked.op != Op::grad_weight) asked.weight.dtype = spec_.stored();
    if (asked.op == Op::linear) asked.weight.rounds_x = spec_.rounds_x;
  }
  Buffer upload(std::span<const double> numbers) const {
    return Buffer::template upload<std::byte>(encode(numbers, spec_.dtype));
  }
  // Rows of the host's, `stride` apart, in a layout: by feature with as large a gap after each column.
  std::vector<double> laid_out(const std::vector<double>& rows, std::int64_t cols, std::int64_t stride,
                               Layout layout) const {
    if (layout == Layout::by_token) return rows;
    const std::int64_t column = spec_.m + spec_.stride;
    std::vector<double> columns(static_cast<std::size_t>(cols * column), std::nan(""));
    for (std::int64_t m = 0; m < spec_.m; ++m) {
      for (std::int64_t c = 0; c < cols; ++c)
        columns[static_cast<std::size_t>(c * column + m)] = rows[static_cast<std::size_t>(m * stride + c)];
    }
    return columns;
  }
  std::size_t output_bytes(std::int64_t cols, Layout layout) const {
    const std::int64_t gap = std::abs(spec_.stride);
    const std::int64_t count = layout == Layout::by_token ? spec_.m * (cols + gap) : cols * (spec_.m + gap);
    return static_cast<std::size_t>(count) * size_of(spec_.dtype);
  }
  template <class View, class Data>
  View view(Data data, std::int64_t cols, std::int64_t row_stride, Layout layout) const {
    if (layout == Layout::by_token) return {data, spec_.dtype, spec_.m, cols, row_stride, Buffer::kDevice};
    return {data, spec_.dtype, spec_.m, cols, 1, Buffer::kDevice, spec_.m + spec_.stride};
  }

  // Workspace as it is asked for, poisoned where it grows.
  static void* provide(void* self, std::int64_t bytes) {
    auto* workspace = static_cast<std::optional<Buffer>*>(self);
    if (!*workspace || workspace->value().bytes() < static_cast<std::size_t>(bytes)) {
      workspace->emplace(static_cast<std::size_t>(bytes));
      workspace->value().fill(kPoison);
    }
    return workspace->value().data();
  }
  Context context(void* stream) {
    Context context{executor_, stream};
    context.tf32 = spec_.tf32;
    if (Buffer::kDevice == Device::cuda) {  // the CPU's is tested by select_test.cc
      context.workspace.provide = provide;
      context.workspace.provider = &workspace_;
    }
    return context;
  }
  PlanView plan_view() const {
    const auto words = static_cast<std::int64_t>(host_.pattern.plan().size());
    const auto* data = static_cast<const std::int32_t*>(plan_.data());
    return *view_device_plan("test", host_.pattern.shape(), data, words);
  }
  BsrView w_view(rarefy::Problem asked, void* stream) {
    BsrView w{plan_view(), values_.data(), spec_.stored(), Buffer::kDevice};
    w.rounds_x = spec_.rounds_x;
    if (!hold_derived_ || spec_.m == 0) return w;
    if (derived_tokens_ > 0) {  // as a front asks: by token, without gaps
      const Op op = asked.op;
      asked = rarefy::make_problem(op, host_.pattern.shape(), derived_tokens_, spec_.dtype, Buffer::kDevice,
                                   executor_.threads);
      set_weight(asked);
      asked.tf32 = spec_.tf32;
    }
    asked.derived = derived_asked_;
    const auto sizes = derived_sizes(asked);
    if (!sizes.ok() || sizes->key == 0) return w;  // the call says why there is no kernel
    const auto [held, made] = held_.try_emplace(sizes->key, static_cast<std::size_t>(sizes->prepared),
                                                static_cast<std::size_t>(sizes->packed));
    auto& [prepared, packed] = held->second;
    if (made) {
      prepared.fill(kPoison);  // kernels may read ahead of what they use
      packed.fill(kPoison);
      for (const Status& status :
           {sizes->prepared == 0 ? Status() : prepare(asked, w.plan, prepared.data(), context(stream)),
            pack(asked, w, prepared.data(), packed.data(), context(stream))}) {
        if (!status.ok()) throw std::runtime_error(status.message());
      }
    }
    w.derived = {sizes->key, prepared.data(), nullptr, sizes->prepared};
    if (hold_packed_) w.derived.packed = packed.data(), w.derived.packed_bytes = sizes->packed;
    return w;
  }
  MatrixView dy_view() const {
    return view<MatrixView>(dy_.data(), spec_.n, host_.y_stride(), spec_.y_layout);
  }
  MutableMatrixView y_view() const {
    return view<MutableMatrixView>(y_.data(), spec_.n, host_.y_stride(), spec_.y_layout);
  }
  MutableMatrixView dx_view() const {
    return view<MutableMatrixView>(dx_.data(), spec_.k, host_.dx_stride(), spec_.x_layout);
  }

  Executor executor_;
  ProblemSpec spec_;
  const Problem& host_;
  Buffer plan_, x_, dy_, values_, bias_;
  Guarded<Buffer> y_, dx_, dvalues_;
  bool hold_derived_ = false, hold_packed_ = true;
  std::int64_t derived_tokens_ = 0;
  std::uint64_t derived_asked_ = kAnyDerived;
  std::map<std::uint64_t, std::pair<Buffer, Buffer>> held_;  // prepared and packed, by their key
  std::optional<Buffer> workspace_;
};

}  // namespace rarefy::test
