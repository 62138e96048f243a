// What products in bf16 pairs derive from a weight, and what they do where a tile cannot: tokens with NaN or
// infinity, where an output block meets several block rows.
#include "cpu/pairs_weight.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace rarefy::cpu {

void prepare_groups(const GroupedShape& s, const std::int32_t* begin, const std::int32_t* columns,
                    void* data) {
  const Prepared prepared(s, data);
  const auto offset = [&](std::int64_t feature) { return static_cast<std::uint32_t>(s.place(feature)); };
  std::uint32_t* to = prepared.offsets;
  prepared.first[0] = 0;
  for (std::int64_t o = 0; o < s.out_blocks; ++o) {
    std::int64_t count = 0;
    const std::int64_t row = s.first_row(o), stop = s.stop_row(o);
    if (s.dense) {
      count = begin[row] < begin[stop] ? s.padded : 0;
      for (std::int64_t i = 0; i < count; i += s.step()) *to++ = offset(i);
    } else {
      for_each_column(begin, columns, row, stop, [&](std::int64_t column) {
        for (std::int64_t i = 0; i < s.red_block; i += s.step()) *to++ = offset(column * s.red_block + i);
        count += s.red_block;
      });
    }
    prepared.lines[o] = static_cast<std::int32_t>(ceil_div(count, s.line));
    prepared.first[o + 1] = prepared.first[o] + static_cast<std::int32_t>(ceil_div(count, s.group()));
    const std::uint32_t* end = prepared.offsets + prepared.first[o + 1] * s.offsets();
    while (to != end) *to++ = offset(s.padded - s.line);
  }
}

namespace {

// Where the pairs of an output block's columns go, in units of 32 bits: outputs beside each other, or pairs.
struct PairPlaces {
  bool by_token;
  std::int64_t pair, output;  // between the pairs of an output, and between outputs

  explicit PairPlaces(const PairsShape& s)
      : by_token(s.by_token()),
        pair(by_token    ? kTileRows
             : s.by_line ? s.out_block
                         : 1),
        output(by_token || s.by_line ? 1 : kGroup / 2) {}
  // Output r of a block row, and that of a pair in its group.
  std::int64_t of(std::int64_t r, std::int64_t p) const {
    const std::int64_t tile = by_token ? r / kTileRows * (kTileSize / 2 - kTileRows) : 0;
    return tile + r * output + p * pair;
  }
};

// Pairs of columns `low` and `high`, whose outputs are `stride` apart; none if `high` is null.
void put_pairs(const std::uint16_t* low, const std::uint16_t* high, std::int64_t stride, std::int64_t rows,
               const PairPlaces& places, std::int64_t pair, std::uint16_t* group) {
  const std::int64_t side = places.by_token ? kTileRows : rows;
  for (std::int64_t first = 0; first < rows; first += side, low += side * stride) {
    const std::int64_t count = std::min(side, rows - first), step = 2 * places.output;
    std::uint16_t* to = group + 2 * places.of(first, pair);
    if (high == nullptr) {
      for (std::int64_t r = 0; r < count; ++r) to[r * step] = low[r * stride];
      continue;
    }
    if (high == low + 1) {
      for (std::int64_t r = 0; r < count; ++r) std::memcpy(to + r * step, low + r * stride, 4);
    } else if (stride == 1 && step == 2) {  // as vectors
      for (std::int64_t r = 0; r < count; ++r) to[2 * r] = low[r], to[2 * r + 1] = high[r];
    } else {
      for (std::int64_t r = 0; r < count; ++r) {
        to[r * step] = low[r * stride], to[r * step + 1] = high[r * stride];
      }
    }
    high += side * stride;
  }
}

}  // namespace

void pack_pairs(const PairsShape& s, const PairsStored& stored, const Executor& executor, const void* data,
                void* packed) {
  const PairPlaces places(s);
  const Prepared prepared(s, data);
  const SparseOperand& w = stored.w;
  const int shift = std::countr_zero(static_cast<std::uint64_t>(s.step()));  // of columns to offsets
  const auto block = [&](std::int32_t e) {
    return static_cast<const std::uint16_t*>(w.values) + (w.perm == nullptr ? e : w.perm[e]) * w.block_size;
  };
  executor.parallel_for(s.out_blocks, [&](std::int64_t o, int) {
    const std::int32_t first = prepared.first[o], end = prepared.first[o + 1];
    if (first == end) return;
    auto* tiles = static_cast<std::uint16_t*>(packed) + first * s.tiles_size();
    // What is not stored: in the last group, or by some of the rows that meet.
    const std::int64_t whole = s.mixed() ? 0 : end - 1 - first;
    std::fill(tiles + whole * s.tiles_size(), tiles + (end - first) * s.tiles_size(), std::uint16_t{0});
    const std::uint32_t* offsets = prepared.offsets + first * s.offsets();
    for (std::int64_t row = s.first_row(o); row < s.stop_row(o); ++row) {
      const RowPart part(s, o, row);
      const std::int64_t top = 2 * places.of(part.top, 0), within = part.from * w.out_stride;
      // Columns at and at + 1 of the output block.
      const auto put = [&](std::int64_t at, const std::uint16_t* low, const std::uint16_t* high) {
        put_pairs(low, high, w.out_stride, part.count, places, at % kGroup / 2,
                  tiles + at / kGroup * s.tiles_size() + top);
      };
      const std::int32_t last = stored.begin[row + 1];
      std::int64_t at = 0;
      for (std::int32_t e = stored.begin[row]; e < last; ++e, at += s.red_block) {
        while (offsets[at >> shift] != w.index[e] * s.red_block * kPanelTokens) at += s.red_block;
        const std::uint16_t* from = block(e) + within;
        if (s.red_block == 1 && !s.mixed()) {  // two entries are a pair
          put(at, from, e + 1 < last ? block(e + 1) + within : nullptr);
          if (e + 1 < last) ++e, ++at;
          continue;
        }
        if (s.red_block % 2 == 0) {
          for (std::int64_t i = 0; i < s.red_block; i += 2) {
            put(at + i, from + i * w.red_stride, from + (i + 1) * w.red_stride);
          }
          continue;
        }
        for (std::int64_t i = 0; i < s.red_block; ++i) {  // pairs across blocks, one half at a time
          std::uint16_t* group = tiles + (at + i) / kGroup * s.tiles_size() + top;
          for (std::int64_t r = 0; r < part.count; ++r) {
            group[2 * places.of(r, (at + i) % kGroup / 2) + (at + i) % 2] =
                from[r * w.out_stride + i * w.red_stride];
          }
        }
      }
    }
  });
}

namespace {

bool is_finite(std::uint16_t bf16) { return (bf16 & 0x7f80U) != 0x7f80U; }

// Where a feature of a panel lies, and its tokens from there.
std::int64_t place(const PairKernels& kernels, PairSource source, std::int64_t feature, std::int32_t token) {
  if (source == PairSource::columns) return feature * kPanelTokens + kernels.token(token);
  return feature / 2 * kPairLine + 2 * token + feature % 2;
}

}  // namespace

// NOLINTBEGIN(readability-non-const-parameter): written to by reference
void find_unfinished(const PairKernels& kernels, const PairsShape& s, const std::uint16_t* panels,
                     std::int64_t panel_stride, std::int64_t tokens, std::uint32_t* unfinished) {
  // NOLINTEND(readability-non-const-parameter)
  for (std::int64_t m = 0; s.mixed() && m < tokens; m += kPanelTokens, panels += panel_stride) {
    std::uint32_t& found = unfinished[m / kPanelTokens];
    found = 0;
    if (kernels.finite(panels, s.panel_size())) continue;
    for (std::int64_t f = 0; f < s.padded; ++f) {
      for (std::int32_t t = 0; t < kPanelTokens; ++t) {
        if (!is_finite(panels[place(kernels, s.source, f, t)])) found |= 1U << t;
      }
    }
  }
}

void PairsWeight::sum_stored(std::int64_t block, const std::uint16_t* panel, std::uint32_t tokens,
                             float* sums) const {
  const SparseOperand& w = stored.w;
  const auto number = [](std::uint16_t bits) { return to_float(bfloat16{bits}); };
  for (; tokens != 0; tokens &= tokens - 1) {
    const int token = std::countr_zero(tokens);
    for (std::int64_t o = 0; o < shape.out_block; ++o) sums[token + o * kPanelTokens] = 0;
    for (std::int64_t row = shape.first_row(block); row < shape.stop_row(block); ++row) {
      const RowPart part(shape, block, row);
      float* sum = sums + token + part.top * kPanelTokens;
      for (std::int32_t e = stored.begin[row]; e < stored.begin[row + 1]; ++e) {
        const auto* values = static_cast<const std::uint16_t*>(w.values) +
                             (w.perm == nullptr ? e : w.perm[e]) * w.block_size + part.from * w.out_stride;
        for (std::int64_t i = 0; i < shape.red_block; ++i) {
          const std::int64_t feature = w.index[e] * shape.red_block + i;
          const float x = number(panel[place(kernels, shape.source, feature, token)]);
          for (std::int64_t r = 0; r < part.count; ++r) {
            sum[r * kPanelTokens] += number(values[r * w.out_stride + i * w.red_stride]) * x;
          }
        }
      }
    }
  }
}

}  // namespace rarefy::cpu
