// linear of scaled int8 values with x as it is, by the kernels of int8 (quads.h): a token becomes a whole
// number of 24 bits for each feature, and its three bytes three tokens of int8, whose sums are exact. So W is
// read as int8 by any number of tokens, three products of int8 cost less than one of floats, and nothing is
// held as floats. A token with a NaN or an infinity is multiplied by the values as they lie.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <new>

#include "core/message.h"
#include "core/quantize.h"
#include "cpu/digits.h"
#include "cpu/linear_quads.h"
#include "cpu/quads_task.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kDigits = 3;
constexpr std::int64_t kWaiting = 192 << 10;  // bytes of those of digits, which wait in L2 for each other
// Values for each input and output feature from which they are faster. A Zen 4 gains a 64th of a cycle with
// each value and token, and digits cost it some 2.5 with each feature of x and y (768→3072 and 3072→768 at
// .25 are level, 4096² at .1 gains a tenth). On AMX those at .25 are 1.2 to 3 times as fast, 4096² at .05
// level.
constexpr std::int64_t kWorth = 160, kWorthOnTiles = 100;
constexpr std::int64_t kMostSets = 2;  // of three panels each

// What its kernels see: three times as many tokens of floats.
Problem digits_problem(const Problem& p) {
  Problem own = p;
  own.weight.scaling = Scaling::dynamic;
  own.tokens *= kDigits;
  own.in = own.out = DType::f32;
  return own;
}

// X = round(x · 2^bits), at most kMostOfDigits: an error of 2⁻²³ of the token's largest |x|, none in
// multiples of 2^−bits.
struct Fixed {
  bool finite = true;
  float up = 1, down = 1;  // 2^bits, 2^−bits

  Fixed(const float* x, std::int64_t count) {
    std::int32_t bits = 0;  // of the largest |x|: signed, which any instruction set compares
    for (std::int64_t k = 0; k < count; ++k) {
      bits = std::max(bits, static_cast<std::int32_t>(magnitude_bits(x[k])));
    }
    const auto largest = std::bit_cast<float>(bits);
    finite = std::isfinite(largest);
    if (!finite) return;
    const float most = std::max(largest, kSmallest);
    const int exponent = std::ilogb(most);
    int up_by = 22 - exponent;
    if (std::scalbn(most, up_by) > static_cast<float>(kMostOfDigits)) --up_by;
    up = std::scalbn(1.0F, up_by);
    down = std::scalbn(1.0F, -up_by);
  }
  // Byte 2 is the highest.
  float scale(std::int64_t byte) const { return down * static_cast<float>(1 << 8 * byte); }
};

// Where a set's rows are: the highest digits of up to a panel's tokens, then their others.
struct DigitRows {
  std::int64_t side, tokens;  // of a panel, of the set

  std::int64_t count() const { return tokens * kDigits; }
  std::int64_t tokens_from(std::int64_t first) const { return std::min(side, tokens - first); }
  std::int64_t token(std::int64_t row) const {
    const std::int64_t first = row / (side * kDigits) * side;
    return first + (row - first * kDigits) % tokens_from(first);
  }
  std::int64_t byte(std::int64_t row) const {
    const std::int64_t first = row / (side * kDigits) * side;
    return kDigits - 1 - (row - first * kDigits) / tokens_from(first);
  }
};

std::int64_t features_of(const QuadsShape& s) { return s.red_blocks * s.red_block; }

// A worker's memory beside that of the kernels.
struct DigitParts {
  Fixed* fixed;   // of each token
  float* x;       // of one token, where it is no float
  float* digits;  // of a panel, and the scales of its rows
  float* scales;
  float* sums;  // of some outputs: rows as DigitRows has them
};

struct DigitsLayout {
  std::int64_t tokens;       // of a set, at most
  PairsBlocking of_kernels;  // whose panels are three for one of tokens
  std::int64_t blocks;  // outputs whose sums are made at a time: whole groups of those that leave together
  std::int64_t stride;  // floats of a row of these
  std::int64_t shared, kernels_worker, worker;

  DigitsLayout(const QuadKernels& kernels, const QuadsShape& s, const PairsBlocking& b,
               std::int64_t all_tokens)
      : tokens(std::min(b.panels * s.tokens, all_tokens)), of_kernels{b.panels, b.splits} {
    const std::int64_t rows = tokens * kDigits;
    of_kernels.panels = ceil_div(rows, s.tokens);
    const QuadsLayout layout(kernels, s, of_kernels);
    const std::int64_t fit = kWaiting / (rows * s.out_block * static_cast<std::int64_t>(sizeof(float)));
    blocks = std::max<std::int64_t>(1, fit / s.finished()) * s.finished();
    stride = ceil_div(std::min(blocks * s.out_block, s.out_features()), kTileRows) * kTileRows;
    Room all;
    all.take<float>(s.out_features());  // the bias
    shared = layout.shared + all.bytes();
    kernels_worker = layout.worker;
    Room own;
    DigitParts parts{};
    take_worker(own, s, parts);
    worker = kernels_worker + own.bytes();
  }
  void take_worker(Room& room, const QuadsShape& s, DigitParts& parts) const {
    parts.fixed = room.take<Fixed>(tokens);
    parts.x = room.take<float>(features_of(s));
    parts.digits = room.take<float>(std::min(s.tokens, tokens * kDigits) * features_of(s));
    parts.scales = room.take<float>(s.tokens);
    parts.sums = room.take<float>(tokens * kDigits * stride);
  }
};

// A task's tokens and what it works with; `call` is the caller's, `own` what the kernels see.
struct DigitsTask {
  const QuadKernels& kernels;
  const Kernels& floats;
  const QuadsWeight& w;
  const Call& call;
  const QuadsParts& parts;
  const DigitParts& digits;
  DigitRows rows;
  std::int64_t first;  // token

  const float* token(std::int64_t m) const {
    const void* x = at(call.x, first + m, 0);
    if (call.problem.in == DType::f32) return static_cast<const float*>(x);
    floats.unpack(storage(call.problem.in), x, call.x.cols, digits.x);
    return digits.x;
  }

  // All panels of the set.
  void pack() const {
    const QuadsShape& s = w.shape;
    const QuadFew* few = few_of(kernels, s, rows.count());
    const auto pack = few != nullptr ? few->pack : kernels.pack;
    const std::int64_t cols = call.x.cols;
    for (std::int64_t m = 0; m < rows.tokens; ++m) new (digits.fixed + m) Fixed(token(m), cols);
    for (std::int64_t from = 0; from < rows.count(); from += s.tokens) {
      const std::int32_t count = s.rows_of(rows.count(), from);
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t m = rows.token(from + r), byte = rows.byte(from + r);
        const Fixed& fixed = digits.fixed[m];
        float* to = digits.digits + r * cols;
        digits.scales[r] = fixed.scale(byte);
        if (fixed.finite) {
          floats.digit(token(m), cols, fixed.up, static_cast<int>(byte), to);
        } else {
          std::fill_n(to, cols, 0.0F);
        }
      }
      pack({digits.digits, false, cols, count, static_cast<std::int32_t>(cols),
            static_cast<std::int32_t>(s.padded), order_of(s.source),
            reinterpret_cast<std::uint8_t*>(parts.panels + from / s.tokens * s.panel_size()),
            parts.tokens + from, digits.scales});
    }
  }

  // Output blocks begin … end, at most as many as there is room for.
  void multiply(std::int64_t begin, std::int64_t end, std::int64_t stride, const float* bias) const {
    const QuadsShape& s = w.shape;
    const std::int64_t from = begin * s.out_block;
    Call own = call;
    own.problem = digits_problem(call.problem);
    own.bias = nullptr;
    own.activation = Activation::none;
    own.out = {digits.sums, DType::f32, rows.count(), call.out.cols, stride};
    multiply_quads(w, own, parts, 0, rows.count(), begin, end, from);
    const std::int64_t features = std::min(end * s.out_block, call.out.cols) - from;
    for (std::int64_t panel = 0; panel < rows.tokens; panel += rows.side) {
      const std::int64_t tokens = rows.tokens_from(panel);
      float* sums = digits.sums + panel * kDigits * stride;
      for (std::int64_t m = 0; m < tokens; ++m) {
        float* y = sums + m * stride;
        if (!digits.fixed[panel + m].finite) {
          multiply_as_it_is(token(panel + m), begin, end, y);
          for (std::int64_t n = 0; n < features; ++n) y[n] += bias[from + n];
          continue;
        }
        floats.join_digits(y + 2 * tokens * stride, y + tokens * stride, bias + from, features, y);
      }
      Call part = call;
      part.x.rows = tokens;
      part.out.data = at(call.out, first + panel, 0);
      finish_tokens(floats, part, from, features, sums, stride);
    }
  }

  void multiply_as_it_is(const float* x, std::int64_t begin, std::int64_t end, float* y) const {
    const QuadsShape& s = w.shape;
    const auto* values = static_cast<const std::int8_t*>(call.values);
    const BsrShape& shape = call.plan.shape;
    for (std::int64_t n = begin * s.out_block; n < std::min(end * s.out_block, shape.rows); ++n) {
      const std::int64_t row = n / shape.block_rows, within = n % shape.block_rows;
      float sum = 0;
      for (std::int32_t e = call.plan.crow[row]; e < call.plan.crow[row + 1]; ++e) {
        const std::int64_t column = std::int64_t{call.plan.col[e]} * shape.block_cols;
        const std::int64_t cols = std::min(shape.block_cols, shape.cols - column);
        const std::int8_t* of = values + (e * shape.block_rows + within) * shape.block_cols;
        for (std::int64_t c = 0; c < cols; ++c) sum += static_cast<float>(of[c]) * x[column + c];
      }
      *y++ = sum * call.scales[n];
    }
  }
};

}  // namespace

Reason supports_digits(const QuadKernels& kernels, const Problem& p, const Machine& machine) {
  if (Reason reason = supports_scaled(p); !reason.empty()) return reason;
  return supports_quads(kernels, digits_problem(p), machine);
}

Reason yields_digits(const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  const std::int64_t worth = machine.has("amx_int8") ? kWorthOnTiles : kWorth;
  if (s.block_rows % kTileRows != 0) {
    return cat("blocks of a multiple of ", kTileRows, " outputs alone are faster than as floats; got ",
               s.block_rows);
  }
  if (s.value_count() >= worth * (s.rows + s.cols)) return {};
  return cat("less than ", worth, " values for each input and output feature are faster as floats; got ",
             s.value_count(), " for ", s.cols, " and ", s.rows);
}

namespace {

PanelWork digits_work(const QuadKernels& kernels, const Problem& p) {
  PanelWork work = quads_work(kernels, p);
  work.tile_cycles *= kDigits;
  work.packed *= 2 * kDigits;
  work.panel_size *= kDigits;
  work.most = kMostSets;
  return work;
}

}  // namespace

Config configure_digits(const QuadKernels& kernels, const Problem& problem, const Machine& machine) {
  return configure_panels(digits_work(kernels, problem), problem, machine);
}

std::vector<Config> digits_candidates(const QuadKernels& kernels, const Problem& problem,
                                      const Machine& machine) {
  return panel_candidates(digits_work(kernels, problem), problem, machine);
}

std::int64_t digits_workspace(const QuadKernels& kernels, const Problem& problem, const Config& config) {
  const QuadsShape s(kernels, problem.weight.shape);
  const DigitsLayout layout(kernels, s, from_config<PairsBlocking>(config), problem.tokens);
  return layout.shared + problem.threads * layout.worker;
}

Status run_digits(const QuadKernels& kernels, const Kernels& floats, const Call& call) {
  const QuadsShape s(kernels, call.problem.weight.shape);
  const auto b = from_config<PairsBlocking>(call.config);
  if (Status status = check_panels(kernels.family, b, s.out_blocks); !status.ok()) return status;
  const DigitsLayout layout(kernels, s, b, call.problem.tokens);
  QuadsParts shared{};
  Room all(call.workspace);
  QuadsLayout::take_shared(all, s, shared);
  auto* bias = all.take<float>(s.out_features());
  Call without_bias = call;
  without_bias.bias = nullptr;
  unpack_outputs(without_bias, s, shared, DType::f32);
  std::fill_n(bias, s.out_features(), 0.0F);
  begin_with_bias(floats, call, 0, call.out.cols, 1, bias, 0);
  const QuadsSection section = quad_section(kernels, call.problem.weight.shape);
  const QuadsWeight w(kernels, s, call.plan.crow, section.of(call.derived));
  for_each_part(
      call, b,
      [&](int worker, const PanelTasks::Task& task) {
        const std::int64_t begin = w.begin_of(task.part, task.parts);
        const std::int64_t end = w.begin_of(task.part + 1, task.parts);
        if (begin == end) return;
        QuadsParts parts = shared;
        DigitParts digits{};
        char* memory = static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker;
        Room own(memory), more(memory + layout.kernels_worker);
        QuadsLayout::take_worker(own, kernels, s, layout.of_kernels, parts);
        layout.take_worker(more, s, digits);
        const DigitsTask of{kernels, floats, w, call, parts, digits, {s.tokens, task.tokens}, task.first};
        kernels.enter();
        of.pack();
        for (std::int64_t at = begin; at < end; at += layout.blocks) {
          of.multiply(at, std::min(at + layout.blocks, end), layout.stride, bias);
        }
        kernels.leave();
      },
      s.tokens);
  return {};
}

}  // namespace rarefy::cpu
