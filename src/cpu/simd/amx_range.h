// Products of a range of block rows on AMX's tiles (PairRange). Groups of columns or lines are put into pair
// order two steps before they are multiplied, whatever panel and block row they belong to: where that began
// anew with each block row, layers at .25 and .1 took up to a quarter more. Others are multiplied in place.
#pragma once

#include <type_traits>

#include "cpu/pair_kernels.h"
#include "cpu/simd/amx_squares.h"

namespace rarefy::cpu {

// Groups of a block row that all of its pieces may share once they are gathered: with W's they stay in L1.
// One thread, 768→3072 at .1: 128×1 .66 → .58 ms, 64×1 .66 → .62. Places for 8, which .25 has, were 29 %
// slower where they are not used, too.
inline constexpr std::int32_t kSharedGroups = 4;

// A range in the order in which it is walked: pieces of up to 32 outputs of a block row. All panels meet
// those before `end`, which leave together or share what is gathered, before the next ones.
struct RangePieces {
  const PairRange& t;
  std::int32_t of_block, count, together;
  bool tall;  // pieces share gathered groups, where there are few

  RangePieces(const PairRange& range, std::int32_t outputs, bool gathers)
      : t(range),
        of_block((t.rows + 31) / 32),
        count(t.blocks * of_block),
        together(outputs / (t.rows < 32 ? t.rows : 32)),
        tall(gathers && of_block > 1 && t.rows % 32 == 0 && groups(0, t.blocks) <= kSharedGroups * t.blocks) {
  }
  [[gnu::always_inline]] std::int32_t groups(std::int32_t block, std::int32_t end) const {
    return t.first[end] - t.first[block];
  }
  [[gnu::always_inline]] std::int32_t block(std::int32_t piece) const { return piece / of_block; }
  [[gnu::always_inline]] std::int32_t row(std::int32_t piece) const { return piece % of_block * 32; }
  // Whether all pieces of this one's block row share its groups.
  [[gnu::always_inline]] bool share(std::int32_t piece) const {
    return tall && piece < count && groups(block(piece), block(piece) + 1) <= kSharedGroups;
  }
  [[gnu::always_inline]] std::int32_t end(std::int32_t first) const {
    if (share(first)) return first + of_block;
    return first + together < count ? first + together : count;
  }
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
// few places, as L1 holds lines of W and x, too. Pieces after the first of a block row that share its groups
// find them there; nothing is gathered meanwhile.
template <class E, PairSource kSource>
class RangeGroups {
 public:
  using Group = std::conditional_t<kSource == PairSource::halves, HalvesNext<E>,
                                   typename GatherNext<E, kSource == PairSource::columns>::Group>;
  static constexpr std::int32_t kOffsets = offsets_of(kSource, E::kFeatures);

  explicit RangeGroups(const RangePieces& pieces)
      : p_(pieces),
        t_(pieces.t),
        slots_(E::kEarly + (p_.tall ? kSharedGroups : 1)),
        stop_(p_.end(0)),
        group_(t_.first[0]),
        end_(t_.first[1]) {
    settle();
  }

  // The next one; none after the last.
  [[gnu::always_inline]] Group take() {
    if (again_ || group_ == end_) return {nullptr, nullptr, nullptr};
    const Group group{t_.panel + panel_ * t_.panel_stride,
                      t_.offsets + std::int64_t{group_ - t_.first[0]} * kOffsets, place(put_)};
    put_ = after(put_);
    ++group_;
    settle();
    return group;
  }
  void begin(std::int32_t, std::int32_t, bool again) {
    again_ = again;
    if (again) {
      get_ = begun_;
    } else {
      begun_ = get_;
    }
  }
  // Where the one lies that is multiplied next.
  [[gnu::always_inline]] const std::uint16_t* x() {
    const std::uint16_t* at = place(get_);
    get_ = after(get_);
    return at;
  }

 private:
  std::uint16_t* place(std::int32_t slot) const { return t_.gathered + slot * kGroupSize; }
  std::int32_t after(std::int32_t slot) const { return slot + 1 == slots_ ? 0 : slot + 1; }

  // To a group that is there, or to the end.
  [[gnu::always_inline]] void settle() {
    while (group_ == end_ && next_piece()) {
      const std::int32_t block = p_.block(piece_);
      group_ = t_.first[block];
      end_ = t_.first[block + 1];
    }
  }
  [[gnu::always_inline]] bool next_piece() {
    if (++piece_ < stop_ && !p_.share(unit_)) return true;
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
  std::int32_t slots_, unit_ = 0, stop_, piece_ = 0, panel_ = 0;  // pieces unit_ … stop_
  std::int32_t group_, end_, put_ = 0, get_ = 0, begun_ = 0;
  bool again_ = false;
};

// The same for groups that are multiplied as they lie in a panel.
class RangeInPlace {
 public:
  explicit RangeInPlace(const RangePieces& pieces) : t_(pieces.t) {}

  void begin(std::int32_t panel, std::int32_t group, bool) {
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

// All groups of outputs row … row + 32, or 16, of a block row for one panel. The sums of the piece before
// leave along the way, while the steps at work are those gathered before: behind them, at once, they held up
// what is gathered (768→3072, 32×1: at .1 .66 → .63 ms, at .25 1.00 → .99; the last step was no better).
template <class E, class Tiles, bool kTall, bool kWide, PairSource kSource, class Groups, class Leave>
[[gnu::always_inline]] inline void multiply_piece(const PairRange& t, std::int32_t panel, std::int32_t block,
                                                  std::int32_t row, Groups& groups, float* sums,
                                                  const Leave& leave) {
  constexpr bool kTokens = is_by_token(kSource);  // x is the first operand, and sums are rows of Y
  using Sums = std::conditional_t<kTokens, Squares<Tiles, kWide, kTall>, Squares<Tiles, kTall, kWide>>;
  const std::int64_t stride = std::int64_t{t.rows} * kGroup, from = std::int64_t{row} * kGroup;
  const std::int32_t count = t.first[block + 1] - t.first[block];
  const std::uint16_t* w = t.w + (t.first[block] - t.first[0]) * stride + from;
  // W's next outputs, of each step's lines a share with each panel.
  const std::int32_t lines = t.ahead ? (32 + t.panels - 1) / t.panels : 0;
  const std::int64_t ahead =
      (row + 32 < t.rows ? 32 * kGroup : count * stride - from) + std::int64_t{panel} * lines * 32;
  Sums::zero();
  for (std::int32_t i = 0; i < count; ++i, w += stride) {
    if (i == E::kEarly) leave();
    for (std::int32_t l = 0; l < lines; ++l) __builtin_prefetch(w + ahead + l * 32, 0, 2);
    const std::uint16_t* x = groups.x();
    if constexpr (kTokens) {
      Sums::add(x, w, kGroup * 2, kTileSize, groups.take());
    } else {
      Sums::add(w, x, kPairLine * 2, 32, groups.take());
    }
  }
  leave();
  Sums::store(sums);
}

template <class E, class Tiles, bool kWide, PairSource kSource>
void multiply_range_of(const PairRange& t) {
  constexpr bool kGather = kSource != PairSource::whole && kSource != PairSource::tokens;
  constexpr std::int32_t kTogether = is_by_token(kSource) ? E::kTokensOutputs : E::kRangeOutputs;
  const RangePieces pieces(t, kTogether, kSource == PairSource::columns || kSource == PairSource::lines);
  std::conditional_t<kGather, RangeGroups<E, kSource>, RangeInPlace> groups(pieces);
  for (std::int32_t i = 0; kGather && i < E::kEarly; ++i) {
    const auto group = groups.take();
    for (int pair = 0; pair < kGroup / 2 && group.any(); ++pair) group(pair);
  }
  struct {
    std::int32_t panel, row, rows;
  } ready{0, 0, 0};  // sums that are to leave
  const auto leave = [&] {
    if (ready.rows == 0) return;
    t.done.call(t.done.context, ready.panel, ready.row, ready.rows, t.sums);
    ready.rows = 0;
  };
  for (std::int32_t first = 0, end; first < pieces.count; first = end) {
    end = pieces.end(first);
    const bool share = pieces.share(first);
    for (std::int32_t p = 0; p < t.panels; ++p) {
      std::int32_t outputs = 0;  // whose sums are there
      for (std::int32_t piece = first; piece < end; ++piece) {
        const std::int32_t block = pieces.block(piece), row = pieces.row(piece);
        float* sums = t.sums + std::int64_t{outputs} * kPanelTokens;
        groups.begin(p, t.first[block], share && piece > first);
        if (t.rows - row >= 32) {
          multiply_piece<E, Tiles, true, kWide, kSource>(t, p, block, row, groups, sums, leave);
          outputs += 32;
        } else {
          multiply_piece<E, Tiles, false, kWide, kSource>(t, p, block, row, groups, sums, leave);
          outputs += kTileRows;
        }
        if (piece + 1 < end && outputs < kTogether) continue;
        const std::int32_t row_end = block * t.rows + (row + 32 < t.rows ? row + 32 : t.rows);
        ready = {p, row_end - outputs, outputs};
        outputs = 0;
        if (!kGather) leave();
      }
    }
  }
  leave();
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
