// The kernels of pairs.h as templates over an engine E (simd/…): how pairs are made and multiplied and how
// tokens and features are transposed. Here is what all engines share: groups in chunks that stay in L1,
// gathered while the first outputs of a block row are at work. Rows come in and leave by pair_rows.h.
// What names no engine is always inlined: of weak twins in several units the linker would keep any.
#pragma once

#include "cpu/pair_rows.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kNoRing = -1;

// Some groups of a block row, as E::multiply sees them.
struct PairSteps {
  const std::uint16_t* w;  // tiles of the first group, from the first output on
  std::int64_t w_stride;   // to the next group's
  std::int32_t w_pair;     // to the next pair's: an output's are side by side, or those of all outputs
  std::int32_t w_ring;     // a mask of steps: those that are equal in it have one place
  const std::uint16_t* const* x;
  std::int32_t steps;
  std::int32_t last_pairs;  // of the last step
  float* sums;              // from the first output on
  bool first;               // the sums start from 0
  const char* ahead;        // weights of the next chunk: a share of it to ask for at each step, in lines
  std::int32_t ahead_lines;

  // Into L2. The hardware loses the stream while a chunk meets its panels.
  [[gnu::always_inline]] void fetch(std::int32_t step) const {
    const char* from = ahead + std::int64_t{step} * ahead_lines * 64;
    for (std::int32_t i = 0; i < ahead_lines; ++i) __builtin_prefetch(from + i * 64, 0, 2);
  }
};

// Some groups of a block row of few outputs, as E::multiply_few sees them: X as it lies in the panel.
struct PairLines {
  const std::uint16_t* w;
  const std::uint32_t* offsets;
  std::int32_t pairs;
  const std::uint16_t* panel;
  float* sums;
  bool first;
  std::int32_t ahead;  // bytes, after which w and offsets are asked for; 0: they are near
};

// What E::multiply does along its way: at(step), if there is any, is called for each pair. It is a value, for
// registers: stores to the ring might be to the lists of it, and three loads more a pair were a sixth of
// AMX's steps. Here: nothing.
struct NoWork {
  [[gnu::always_inline]] static constexpr NoWork at(std::int32_t /*step*/) { return {}; }
  [[gnu::always_inline]] static constexpr bool any() { return false; }
  [[gnu::always_inline]] void operator()(int /*pair*/) const {}
};

// Puts the groups that come one step later into pair order.
template <class E, bool kColumns>
struct GatherNext {
  struct Group {
    const std::uint16_t* panel;  // null: there is none
    const std::uint32_t* offsets;
    std::uint16_t* to;

    bool any() const { return panel != nullptr; }
    [[gnu::always_inline]] void operator()(int pair) const {
      if constexpr (kColumns && E::kFeatures == 4) {
        E::quad(panel, offsets + 4 * pair, to + pair * kPairLine);
      } else if constexpr (kColumns) {
        std::uint64_t both;  // by one load: AMX's steps took 2 to 5 % more with two
        __builtin_memcpy(&both, offsets + 2 * pair, sizeof(both));
        E::pair(panel + static_cast<std::uint32_t>(both), panel + (both >> 32), to + pair * kPairLine);
      } else {
        E::copy(panel + offsets[pair], to + pair * kPairLine);
      }
    }
  };
  const Group* next;  // to each step

  [[gnu::always_inline]] Group at(std::int32_t step) const {
    return {next[step].panel, next[step].offsets, next[step].to};
  }
};

// From an output's first pair of a group to the next output's.
template <class E>
inline constexpr std::int32_t kOutputStride = E::kByLine ? 2 : kGroup;

// All outputs of the block row, for one chunk of its groups and one panel; `s` goes along. By reference:
// copied, fresh fields were read by loads of 64 bytes, which wait until every store before has left, rows of
// Y among them: a tenth of a layer on AMX.
template <class E, int kHalves, PairSource kSource, class Work>
void multiply_chunk(std::int32_t rows, PairSteps& s, Work work) {
  std::int32_t row = 0;
  const auto outputs = [&]<int kRows>([[maybe_unused]] auto along) {
    if constexpr (kSource == PairSource::tokens) {
      E::template multiply_tokens<kHalves>(s);
    } else if constexpr (E::kByLine) {
      E::template multiply_lines<kRows, kHalves>(s, along);
    } else {
      E::template multiply<kRows, kHalves>(s, along);
    }
    s.w += kRows * kOutputStride<E>;
    s.sums += kRows * kPanelTokens;
    s.ahead_lines = 0;
    row += kRows;
  };
  if constexpr (E::kRows > kTileRows) {
    if (rows < E::kRows) return outputs.template operator()<kTileRows>(work);
  }
  outputs.template operator()<E::kRows>(work);
  // NOLINTNEXTLINE(bugprone-infinite-loop): outputs counts row up
  while (row + E::kRows <= rows) outputs.template operator()<E::kRows>(NoWork{});
  if constexpr (E::kRows > kTileRows) {
    if (row < rows) outputs.template operator()<kTileRows>(NoWork{});
  }
}

template <class E, int kHalves, PairSource kSource>
void multiply_groups(const PairProduct& t) {
  constexpr bool kGather = kSource == PairSource::columns || kSource == PairSource::lines;
  constexpr std::int32_t kOffsets = offsets_of(kSource, E::kFeatures);
  using Gather = GatherNext<E, kSource == PairSource::columns>;
  typename Gather::Group next[kMostChunk];
  const std::uint16_t* x[kMostChunk];
  constexpr std::int32_t kEarly = E::kEarly;
  const std::int64_t w_stride = std::int64_t{t.rows} * kGroup;
  const bool once = t.rows <= E::kRows;
  const std::int32_t fit = (once || !kGather ? kChunkSize : kChunkReused) / (t.rows * kGroup);
  const std::int32_t limit = once || kSource == PairSource::tokens ? kMostChunk : kMostReused;
  const std::int32_t most = fit < 1 ? 1 : fit < limit ? fit : limit;
  const std::int32_t chunks = (t.groups + most - 1) / most;
  const auto first_of = [&](std::int32_t chunk) { return t.groups * chunk / chunks; };
  // Gathered groups are used once if the block row has one tile of outputs, else until the chunk ends.
  const std::int32_t slots = once ? kEarly + 1 : most + kEarly;
  const auto gathered = [&](std::int32_t slot) { return t.gathered + std::int64_t{slot} * kGroupSize; };
  const auto after = [&](std::int32_t& slot) {
    const std::int32_t now = slot;
    slot = slot + 1 == slots ? 0 : slot + 1;
    return gathered(now);
  };
  std::int32_t slot = 0;
  // The groups in the order in which they are gathered, some steps before they are multiplied.
  struct {
    std::int32_t chunk, panel, group, end, slot;
  } ahead{0, 0, 0, first_of(1), 0};
  const auto take = [&]() -> typename Gather::Group {
    if (ahead.chunk == chunks) return {nullptr, nullptr, nullptr};
    const typename Gather::Group group{t.panel + ahead.panel * t.panel_stride,
                                       t.offsets + std::int64_t{ahead.group} * kOffsets, after(ahead.slot)};
    if (++ahead.group == ahead.end) {
      if (++ahead.panel == t.panels) {
        ahead.panel = 0;
        ++ahead.chunk;
        ahead.end = first_of(ahead.chunk + 1);
      }
      ahead.group = first_of(ahead.chunk);
    }
    return group;
  };
  if constexpr (kGather) {
    for (std::int32_t i = 0; i < kEarly; ++i) {
      next[i] = take();
      for (int pair = 0; pair < kGroup / 2 && next[i].any(); ++pair) next[i](pair);
    }
  }
  // Sums that are asked for one panel after the other have one place, which stays in L1.
  const std::int64_t sums_stride = chunks == 1 && t.done.call != nullptr ? 0 : t.sums_stride;
  for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int32_t group = first_of(chunk), end = first_of(chunk + 1);
    const std::int32_t steps = end - group;
    const std::uint16_t* panel = t.panel;
    const std::uint16_t* const chunk_w = t.w + group * w_stride;
    const std::int32_t ahead_lines = (t.rows + t.panels - 1) / t.panels;
    float* sums = t.sums;
    PairSteps s{chunk_w,
                w_stride,
                E::kByLine ? 2 * t.rows : 2,
                kNoRing,
                x,
                steps,
                end == t.groups ? t.pairs - (t.groups - 1) * (kGroup / 2) : kGroup / 2,
                sums,
                chunk == 0,
                reinterpret_cast<const char*>(t.w + end * w_stride),
                ahead_lines};
    for (std::int32_t p = 0; p < t.panels; ++p, panel += t.panel_stride) {
      if constexpr (kGather) {
        for (std::int32_t i = 0; i < steps; ++i) {
          x[i] = after(slot);
          next[i] = take();
        }
        multiply_chunk<E, kHalves, kSource>(t.rows, s, Gather{next});
      } else {
        for (std::int32_t i = 0; i < steps; ++i) x[i] = panel + t.offsets[group + i];
        multiply_chunk<E, kHalves, kSource>(t.rows, s, NoWork{});
      }
      if (end == t.groups && t.done.call != nullptr) t.done.call(t.done.context, p, 0, t.rows, sums);
      sums += sums_stride;
      s.w = chunk_w;
      s.sums = sums;
      s.ahead_lines = ahead_lines;
      s.ahead += std::int64_t{steps} * ahead_lines * 64;
    }
  }
}

// All of a block row that has no more outputs than fit in registers at once: its pairs are made where they
// are used, as nobody uses them twice.
template <class E, int kRows, int kHalves, PairSource kSource>
void multiply_few(const PairProduct& t) {
  constexpr std::int32_t kSize = kRows * kGroup, kMost = kChunkSize / kSize, kOffsets = offsets_of(kSource);
  for (std::int32_t group = 0; group < t.groups; group += kMost) {
    const std::int32_t end = t.groups - group < kMost ? t.groups : group + kMost;
    PairLines s{t.w + std::int64_t{group} * kSize,
                t.offsets + std::int64_t{group} * kOffsets,
                (end == t.groups ? t.pairs : end * (kGroup / 2)) - group * (kGroup / 2),
                t.panel,
                t.sums,
                group == 0,
                t.ahead};
    for (std::int32_t p = 0; p < t.panels;
         ++p, s.panel += t.panel_stride, s.sums += t.sums_stride, s.ahead = 0) {
      E::template multiply_few<kRows, kHalves, kSource>(s);
    }
  }
}

template <class E, int kHalves, PairSource kSource>
void multiply_rows(const PairProduct& t) {
  if constexpr (E::kLeast < kTileRows) {
    if (t.rows == E::kRows) return multiply_few<E, E::kRows, kHalves, kSource>(t);
    if (t.rows == E::kLeast) return multiply_few<E, E::kLeast, kHalves, kSource>(t);
  }
  multiply_groups<E, kHalves, kSource>(t);
}

template <class E, int kHalves>
void multiply_source(const PairProduct& t) {
  switch (t.source) {
    case PairSource::columns: return multiply_rows<E, kHalves, PairSource::columns>(t);
    case PairSource::lines: return multiply_rows<E, kHalves, PairSource::lines>(t);
    case PairSource::whole: return multiply_rows<E, kHalves, PairSource::whole>(t);
    case PairSource::tokens:
      if constexpr (E::kByToken) return multiply_groups<E, kHalves, PairSource::tokens>(t);
      break;
    case PairSource::halves: break;  // of ranges alone
  }
}

template <class E>
void multiply_pairs(const PairProduct& t) {
  if (t.groups == 0) {
    for (std::int32_t p = 0; p < t.panels; ++p) {
      float* sums = t.sums + p * t.sums_stride;
      __builtin_memset(sums, 0, sizeof(float) * t.rows * kPanelTokens);
      if (t.done.call != nullptr) t.done.call(t.done.context, p, 0, t.rows, sums);
    }
    return;
  }
  if (t.halves == 2) return multiply_source<E, 2>(t);
  multiply_source<E, 1>(t);
}

// The lines of a step to come, from where they lie to a ring of places.
template <class E>
struct GatherLines {
  static constexpr std::int32_t kRing = 3;  // a mask
  const PairDots* t;
  std::uint16_t* to;

  struct Step {
    const std::uint16_t* from;  // null: there is none
    const std::uint32_t* offsets;
    std::uint16_t* to;

    bool any() const { return from != nullptr; }
    [[gnu::always_inline]] void operator()(int pair) const {
      if (2 * pair >= E::kRows) return;
      E::copy_line(from + offsets[2 * pair], to + 2 * pair * kGroup);
      E::copy_line(from + offsets[2 * pair + 1], to + (2 * pair + 1) * kGroup);
    }
  };
  [[gnu::always_inline]] Step at(std::int32_t step) const { return lines(step + E::kEarly); }
  [[gnu::always_inline]] Step lines(std::int32_t step) const {
    return {step < t->steps ? t->lines + step * t->lines_stride : nullptr, t->offsets,
            to + (step & kRing) * E::kRows * kGroup};
  }
};

template <class E, int kHalves>
void multiply_dots(const PairDots& t) {
  alignas(64) std::uint16_t ring[(GatherLines<E>::kRing + 1) * E::kRows * kGroup];
  const std::uint16_t* lanes[kDotSteps];
  for (std::int32_t i = 0; i < t.steps; ++i) lanes[i] = t.lanes + i * t.lanes_stride;
  PairSteps s{t.lines, t.lines_stride, 2, kNoRing, lanes, t.steps, kGroup / 2, t.sums, true, nullptr, 0};
  PairDots rest = t;
  for (std::int32_t line = 0; line < t.count; line += E::kRows, s.sums += E::kRows * kPanelTokens) {
    if (t.offsets == nullptr) {
      s.w = t.lines + line * kGroup;
      if (t.count - line <= kTileRows && E::kRows > kTileRows) {
        E::template multiply<(E::kRows > kTileRows ? kTileRows : E::kRows), kHalves>(s, NoWork{});
      } else {
        E::template multiply<E::kRows, kHalves>(s, NoWork{});
      }
      continue;
    }
    rest.offsets = t.offsets + line;
    const GatherLines<E> gather{&rest, ring};
    for (std::int32_t step = 0; step < E::kEarly && step < t.steps; ++step) {
      for (int pair = 0; pair < kGroup / 2; ++pair) gather.lines(step)(pair);
    }
    s.w = ring;
    s.w_stride = E::kRows * kGroup;
    s.w_ring = GatherLines<E>::kRing;
    E::template multiply<E::kRows, kHalves>(s, gather);
  }
}

template <class E>
void dot_pairs(const PairDots& t) {
  if (t.halves == 2) return multiply_dots<E, 2>(t);
  multiply_dots<E, 1>(t);
}

template <class E>
constexpr PairKernels pair_table(const char* family, void (*lanes)(const LaneProduct&) = nullptr) {
  void (*multiply)(const PairProduct&) = nullptr;
  void (*range)(const PairRange&) = nullptr;
  if constexpr (requires { E::range; }) {
    range = E::range;
  } else {
    multiply = multiply_pairs<E>;
  }
  return {family,       E::kTileCycles,   E::kLeast,       E::kByToken,   E::kByLine,
          E::enter,     E::leave,         pack_pairs<E>,   multiply,      range,
          lanes,        E::spread,        store_pairs<E>,  keep_pairs<E>, pack_token_pairs<E>,
          dot_pairs<E>, deliver_pairs<E>, finite_pairs<E>, E::token};
}

}  // namespace rarefy::cpu
