// Products of a range of block rows on AMX's tiles (PairRange). Groups of columns or lines are put into pair
// order two steps before they are multiplied, whatever panel and block row they belong to: where that began
// anew with each block row, layers at .25 and .1 took up to a quarter more. Others are multiplied in place.
#pragma once

#include <type_traits>

#include "cpu/pair_kernels.h"
#include "cpu/simd/amx_squares.h"

namespace rarefy::cpu {

// A range in the order in which it is walked: pieces of up to 32 outputs of a block row, some of which leave
// together; all panels meet these before the next ones.
struct RangePieces {
  const PairRange& t;
  std::int32_t of_block, count, together;

  RangePieces(const PairRange& range, std::int32_t outputs)
      : t(range),
        of_block((t.rows + 31) / 32),
        count(t.blocks * of_block),
        together(outputs / (t.rows < 32 ? t.rows : 32)) {}
  std::int32_t block(std::int32_t piece) const { return piece / of_block; }
  std::int32_t row(std::int32_t piece) const { return piece % of_block * 32; }
  std::int32_t end(std::int32_t first) const { return first + together < count ? first + together : count; }
};

// Puts the halves of a group side by side, two tokens a step.
template <class E>
struct HalvesNext {
  const std::uint16_t* panel;  // null: there is none
  const std::uint32_t* offsets;
  std::uint16_t* to;

  bool any() const { return panel != nullptr; }
  [[gnu::always_inline]] void operator()(int pair) const {
    for (int token = 2 * pair; token < 2 * pair + 2; ++token) {
      const int half = token * kGroup / 2;
      E::join_halves(panel + offsets[0] + half, panel + offsets[1] + half, to + token * kGroup);
    }
  }
};

// The groups of a range in that order, each with a place in a ring where it is put into pair order: a ring of
// few places, as L1 holds lines of W and x, too.
template <class E, PairSource kSource>
class RangeGroups {
 public:
  using Group = std::conditional_t<kSource == PairSource::halves, HalvesNext<E>,
                                   typename GatherNext<E, kSource == PairSource::columns>::Group>;
  static constexpr std::int32_t kOffsets = offsets_of(kSource, E::kFeatures);
  static constexpr std::int32_t kSlots = E::kEarly + 1;

  explicit RangeGroups(const RangePieces& pieces)
      : p_(pieces), t_(pieces.t), stop_(p_.end(0)), group_(t_.first[0]), end_(t_.first[1]) {
    settle();
  }

  // The next one; none after the last.
  [[gnu::always_inline]] Group take() {
    if (group_ == end_) return {nullptr, nullptr, nullptr};
    const Group group{t_.panel + panel_ * t_.panel_stride,
                      t_.offsets + std::int64_t{group_ - t_.first[0]} * kOffsets, place(put_)};
    put_ = after(put_);
    ++group_;
    settle();
    return group;
  }
  void begin(std::int32_t, std::int32_t) {}
  // Where the one lies that is multiplied next.
  [[gnu::always_inline]] const std::uint16_t* x() {
    const std::uint16_t* at = place(get_);
    get_ = after(get_);
    return at;
  }

 private:
  std::uint16_t* place(std::int32_t slot) const { return t_.gathered + slot * kGroupSize; }
  static std::int32_t after(std::int32_t slot) { return slot + 1 == kSlots ? 0 : slot + 1; }

  // To a group that is there, or to the end.
  [[gnu::always_inline]] void settle() {
    while (group_ == end_ && next_piece()) {
      const std::int32_t block = p_.block(piece_);
      group_ = t_.first[block];
      end_ = t_.first[block + 1];
    }
  }
  [[gnu::always_inline]] bool next_piece() {
    if (++piece_ < stop_) return true;
    if (++panel_ == t_.panels) {
      panel_ = 0;
      unit_ = stop_;
      stop_ = p_.end(unit_);
    }
    piece_ = unit_;
    return piece_ < p_.count;
  }

  const RangePieces& p_;
  const PairRange& t_;
  std::int32_t unit_ = 0, stop_, piece_ = 0, panel_ = 0;  // pieces unit_ … stop_ leave together
  std::int32_t group_, end_, put_ = 0, get_ = 0;
};

// The same for groups that are multiplied as they lie in a panel.
class RangeInPlace {
 public:
  explicit RangeInPlace(const RangePieces& pieces) : t_(pieces.t) {}

  void begin(std::int32_t panel, std::int32_t group) {
    panel_ = t_.panel + panel * t_.panel_stride;
    offsets_ = t_.offsets + (group - t_.first[0]);
  }
  static NoWork take() { return {}; }
  [[gnu::always_inline]] const std::uint16_t* x() { return panel_ + *offsets_++; }

 private:
  const PairRange& t_;
  const std::uint16_t* panel_ = nullptr;
  const std::uint32_t* offsets_ = nullptr;
};

// All groups of outputs row … row + 32, or 16, of a block row for one panel.
template <class E, class Tiles, bool kTall, bool kWide, PairSource kSource, class Groups>
[[gnu::always_inline]] inline void multiply_piece(const PairRange& t, std::int32_t panel, std::int32_t block,
                                                  std::int32_t row, Groups& groups, float* sums) {
  constexpr bool kTokens = is_by_token(kSource);  // x is the first operand, and sums are rows of Y
  using Sums = std::conditional_t<kTokens, Squares<Tiles, kWide, kTall>, Squares<Tiles, kTall, kWide>>;
  const std::int64_t stride = std::int64_t{t.rows} * kGroup, from = std::int64_t{row} * kGroup;
  const std::int32_t count = t.first[block + 1] - t.first[block];
  const std::uint16_t* w = t.w + (t.first[block] - t.first[0]) * stride + from;
  // W's next outputs are asked for into L2, of each step's lines a share with each panel.
  const std::int32_t lines = (32 + t.panels - 1) / t.panels;
  const std::int64_t ahead =
      (row + 32 < t.rows ? 32 * kGroup : count * stride - from) + std::int64_t{panel} * lines * 32;
  Sums::zero();
  for (std::int32_t i = 0; i < count; ++i, w += stride) {
    for (std::int32_t l = 0; l < lines; ++l) __builtin_prefetch(w + ahead + l * 32, 0, 2);
    const std::uint16_t* x = groups.x();
    if constexpr (kTokens) {
      Sums::add(x, w, kGroup * 2, kTileSize, groups.take());
    } else {
      Sums::add(w, x, kPairLine * 2, 32, groups.take());
    }
  }
  Sums::store(sums);
}

template <class E, class Tiles, bool kWide, PairSource kSource>
void multiply_range_of(const PairRange& t) {
  constexpr bool kGather = kSource != PairSource::whole && kSource != PairSource::tokens;
  const RangePieces pieces(t, is_by_token(kSource) ? E::kTokensOutputs : E::kRangeOutputs);
  std::conditional_t<kGather, RangeGroups<E, kSource>, RangeInPlace> groups(pieces);
  for (std::int32_t i = 0; kGather && i < E::kEarly; ++i) {
    const auto group = groups.take();
    for (int pair = 0; pair < kGroup / 2 && group.any(); ++pair) group(pair);
  }
  for (std::int32_t first = 0; first < pieces.count; first += pieces.together) {
    for (std::int32_t p = 0; p < t.panels; ++p) {
      std::int32_t outputs = 0;
      for (std::int32_t piece = first; piece < pieces.end(first); ++piece) {
        const std::int32_t block = pieces.block(piece), row = pieces.row(piece);
        float* sums = t.sums + std::int64_t{outputs} * kPanelTokens;
        groups.begin(p, t.first[block]);
        if (t.rows - row >= 32) {
          multiply_piece<E, Tiles, true, kWide, kSource>(t, p, block, row, groups, sums);
          outputs += 32;
        } else {
          multiply_piece<E, Tiles, false, kWide, kSource>(t, p, block, row, groups, sums);
          outputs += kTileRows;
        }
      }
      t.done.call(t.done.context, p, pieces.block(first) * t.rows + pieces.row(first), outputs, t.sums);
    }
  }
}

template <class E, class Tiles>
void multiply_range(const PairRange& t) {
  const auto of = [&]<bool kWide>() {
    switch (t.source) {
      case PairSource::columns: return multiply_range_of<E, Tiles, kWide, PairSource::columns>(t);
      case PairSource::lines: return multiply_range_of<E, Tiles, kWide, PairSource::lines>(t);
      case PairSource::whole: return multiply_range_of<E, Tiles, kWide, PairSource::whole>(t);
      case PairSource::tokens: return multiply_range_of<E, Tiles, kWide, PairSource::tokens>(t);
      case PairSource::halves:
        if constexpr (E::kFeatures == 4) multiply_range_of<E, Tiles, kWide, PairSource::halves>(t);
    }
  };
  if (t.halves == 2) return of.template operator()<true>();
  of.template operator()<false>();
}

}  // namespace rarefy::cpu
