// The kernel of lanes.h as a template over an engine E: how a number of x is broadcast, multiplied with a
// vector of W and added, and what becomes of a complete sum.
#pragma once

#include "cpu/asked.h"
#include "cpu/gather.h"
#include "cpu/lanes.h"

namespace rarefy::cpu {

// Floats over a trait of simd/: W in any storage.
template <class I>
struct FloatLanes {
  using Isa = I;
  using Sum = Vec<I>;
  using Vector = Vec<I>;
  static constexpr bool kParts = true, kRounds = false;
  static constexpr std::int32_t kLine = kLaneTokens * 4;

  static Sum start(const LaneProduct& t, std::int32_t /*token*/, std::int32_t o) {
    return I::load(t.start + o);
  }
  static Vec<I> broadcast(const char* x) { return I::set1(*reinterpret_cast<const float*>(x)); }
  template <Storage kStorage>
  static Vec<I> weights(const char* w) {
    return load_as<I>(kStorage, w, 0);
  }
  static Sum dot(Sum sum, Vec<I> x, Vec<I> w) { return I::fma(w, x, sum); }

  // What a complete sum becomes: token m and vector v of a tile.
  template <int Vectors>
  struct Finish {
    Finish(const LaneProduct& /*t*/, std::int32_t /*first*/, std::int32_t /*row*/) {}
    Vec<I> operator()(Sum sum, int /*m*/, int /*v*/) const { return sum; }
  };
};

// Up to 8 tokens, whose lines have no more: reading W is most of the work.
template <class E>
inline constexpr bool kFewLanes = E::kLine < kLaneTokens * 4;

// Bytes of W asked for ahead: out of memory 2 KB took 1.4–1.7 times as long for a few tokens. And sets of
// sums, lines in turn, where few would wait for each other: in int8 alone, whose sums are exact.
template <class E>
inline constexpr std::int64_t kLaneAhead = kFewLanes<E> ? 14336 : 2048;
template <class E, class Work>
constexpr int lane_sets(int sums) {
  if (!kFewLanes<E> || sums > (Work::kAny ? 1 : 4)) return 1;
  return sums > 2 ? 2 : 4;
}

// Lines of x to be put together along the way: `to_do` says which, Line how, of so many features each.
template <class Line>
struct GatherLanes {
  static constexpr bool kAny = true;
  LaneGather to_do;
  std::int32_t steps;
  void operator()(std::int32_t left) const { take(steps - left); }
  void take(std::int32_t line) const {
    if (line < to_do.lines) Line::put(to_do, line, to_do.offsets + Line::kFeatures * line);
  }
};

// What is done along the way of the first sums, line by line: `left` counts down to 1. Here: nothing.
struct NoLaneWork {
  static constexpr bool kAny = false;
  [[gnu::always_inline]] void operator()(std::int32_t /*left*/) const {}
};

// Rows of `stride` floats to Y, of which `cols` exist at most.
template <class E, class I = typename E::Isa>
void lane_rows(const LaneProduct& t, float* out, std::int32_t stride, std::int32_t tokens, std::int32_t cols,
               char* y) {
  activate_all<I>(t.activation, out, std::int64_t{tokens} * stride);
  const std::int32_t count = cols < stride ? cols : stride;
  for (std::int32_t m = 0; m < tokens; ++m, out += stride, y += t.row_stride * bytes_of(t.out)) {
    std::int32_t n = 0;
    for (; n + I::kWidth <= count; n += I::kWidth) store_as<I>(t.out, y, n, I::load(out + n));
    if (n < count) store_part<I>(t.out, y, n, I::load(out + n), count - n);
  }
}

// Blocks of W by row: 16 rows of 16 lines are turned in registers, before their products.
template <class E>
struct TurnedLanes : E {};
template <class E>
inline constexpr bool kTurned = false;
template <class E>
inline constexpr bool kTurned<TurnedLanes<E>> = true;

// Tokens first … first + Tokens of outputs row … row + Vectors · width, with parts of sums in memory.
template <class E, Storage kStorage, bool kPermuted, bool kFirst, int Tokens, int Vectors, class Work>
void lane_tile(const LaneProduct& t, std::int32_t first, std::int32_t row, Work work) {
  using I = typename E::Isa;
  constexpr int w = I::kWidth;
  constexpr int sets = lane_sets<E, Work>(Tokens * Vectors);
  typename E::Sum sum[Tokens][Vectors];
  [[maybe_unused]] typename E::Sum others[sets][Tokens][Vectors];  // the first is `sum` itself
  const auto each = [](auto f) {
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) f(m, v);
    }
  };
  const std::int64_t y_stride = t.row_stride * bytes_of(t.out);
  char* const y = static_cast<char*>(t.y) + first * y_stride + row * bytes_of(t.out);
  // Y's lines, for ownership: they come while these sums are at work, where a store would wait for each.
  const char* ahead = y;
#pragma GCC unroll 16
  for (int m = 0; m < Tokens; ++m, ahead += y_stride) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) __builtin_prefetch(ahead + v * w * 4, 1);
  }
  each([&](int m, int v) { sum[m][v] = E::start(t, first + m, row + v * w); });
  if constexpr (sets > 1) {
    each([&](int m, int v) {
#pragma GCC unroll 4
      for (int i = 1; i < sets; ++i) others[i][m][v] = typename E::Sum{};
    });
  }
  const std::int64_t line = t.rows * bytes_of(kStorage);
  const char* values = static_cast<const char*>(t.w) + row * bytes_of(kStorage);
  const char* panel = static_cast<const char*>(t.panel) + first * 4;
  // As in gather.h, few addresses live in the loop: GCC would spill more of them to vector registers, where
  // reading them back waits behind the sums.
  const char* weights = values;
  const auto multiply = [&](std::int32_t from, std::int32_t end) {
    if constexpr (kTurned<E>) {
      const std::int64_t row_bytes = t.run * bytes_of(kStorage), block = t.rows * row_bytes;
      const char* of = static_cast<const char*>(t.w) + from * block + row * row_bytes;
      const std::int64_t next = t.ahead;
      for (std::int32_t b = from; b < end; ++b, of += block) {
        const char* x = panel + std::int64_t{t.index[b]} * t.run * E::kLine;
        for (std::int32_t c = 0; c < t.run; c += w) {
          Vec<I> v[w];
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i) {
            const char* at = of + i * row_bytes + c * bytes_of(kStorage);
            v[i] = load_as<I>(kStorage, at, 0);
            if constexpr (kFirst) __builtin_prefetch(at + next);
          }
          I::transpose(v);
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i, x += E::kLine) {
#pragma GCC unroll 16
            for (int m = 0; m < Tokens; ++m) sum[m][0] = E::dot(sum[m][0], E::broadcast(x + m * 4), v[i]);
          }
        }
      }
      return;
    } else {
      const std::int32_t* index = t.index + from;
      const std::int32_t* const stop = t.index + end;
      const auto add_line = [&](auto& to, const char* x) {
        typename E::Vector wv[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
          wv[v] = E::template weights<kStorage>(weights + v * w * bytes_of(kStorage));
          // The first to read them: the hardware loses the stream between the lines of x.
          if constexpr (kFirst) {
            if (v * w * bytes_of(kStorage) % 64 == 0)
              ask_for<1>(kFewLanes<E> ? t.ask : Ask::far,
                         weights + v * w * bytes_of(kStorage) + kLaneAhead<E>);
          }
        }
#pragma GCC unroll 16
        for (int m = 0; m < Tokens; ++m) {
          const auto xv = E::broadcast(x + m * 4);
#pragma GCC unroll 8
          for (int v = 0; v < Vectors; ++v) to[m][v] = E::dot(to[m][v], xv, wv[v]);
        }
        weights += line;
      };
      if constexpr (kFewLanes<E> && !Work::kAny) {  // blocks of a line or two, several at a time
        const auto several = [&]<int Lines>() {
          constexpr int kLines = 4;
          for (; stop - index >= kLines / Lines; index += kLines / Lines) {
#pragma GCC unroll 4
            for (int i = 0; i < kLines; ++i) {
              const char* x = panel + (std::int64_t{index[i / Lines]} * Lines + i % Lines) * E::kLine;
              i % sets == 0 ? add_line(sum, x) : add_line(others[i % sets], x);
            }
          }
        };
        if (t.run == 1) several.template operator()<1>();
        if (t.run == 2) several.template operator()<2>();
      }
      for (; index != stop; ++index) {
        if constexpr (kPermuted) {
          weights = values + reload(t.perm)[index - reload(t.index)] * (line * reload(t.run));
        }
        const char* x = panel + std::int64_t{*index} * reload(t.run) * E::kLine;
        std::int32_t i = reload(t.run);
        const auto add = [&](auto& to) {
          work(i);
          add_line(to, x);
          --i;
          x += E::kLine;
        };
        if constexpr (sets > 1) {
          while (i >= sets) {  // NOLINT(bugprone-infinite-loop): add counts i down
            add(sum);
#pragma GCC unroll 4
            for (int s = 1; s < sets; ++s) add(others[s]);
          }
        }
        while (i != 0) add(sum);  // NOLINT(bugprone-infinite-loop)
      }
    }
  };
  if constexpr (E::kParts) {
    const auto keep = [&](float* total, bool begun) {
      each([&](int m, int v) {
        float* to = total + (m * Vectors + v) * w;
        I::store(to, begun ? I::add(sum[m][v], I::load(to)) : sum[m][v]);
        sum[m][v] = I::zero();
      });
    };
    const std::int32_t last_part = t.blocks - least_entries(t.part);  // where it begins at the latest
    if (t.part > last_part) {
      multiply(0, t.blocks);
    } else {
      alignas(64) float total[Tokens * Vectors * w];  // of the parts before
      multiply(0, t.part);
      keep(total, false);
      std::int32_t b = t.part;
      for (; b + t.part <= last_part; b += t.part) {
        multiply(b, b + t.part);
        keep(total, true);
      }
      multiply(b, t.blocks);
      each([&](int m, int v) { sum[m][v] = I::add(I::load(total + (m * Vectors + v) * w), sum[m][v]); });
    }
  } else {
    multiply(0, t.blocks);
    if constexpr (sets > 1) {
      each([&](int m, int v) {
#pragma GCC unroll 4
        for (int i = 1; i < sets; ++i) sum[m][v] = E::add(sum[m][v], others[i][m][v]);
      });
    }
    if (!t.last) return each([&](int m, int v) { E::keep(t, first + m, row + v * w, sum[m][v]); });
  }
  const std::int32_t tokens = t.tokens - first < Tokens ? t.tokens - first : Tokens;
  const std::int32_t cols = t.cols - row;
  if constexpr (E::kRounds) {
    if (t.out == Storage::bf16) return E::template store<Tokens, Vectors>(t, sum, first, row);
  }
  const typename E::template Finish<Vectors> finish(t, first, row);
  if (t.out == Storage::f32 && t.activation == Activation::none && cols >= Vectors * w) {
    char* to = y;
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m, to += y_stride) {
      if (m >= tokens) break;
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        I::store(reinterpret_cast<float*>(to) + v * w, finish(sum[m][v], m, v));
      }
    }
    return;
  }
  alignas(64) float out[Tokens * Vectors * w];
  each([&](int m, int v) { I::store(out + (m * Vectors + v) * w, finish(sum[m][v], m, v)); });
  lane_rows<E>(t, out, Vectors * w, tokens, cols, y);
}

// All tokens in tiles of about as many each, `Most` at most: 13 as 7 and 6, as one alone would read W once
// more and leave sums waiting for each other. A tile with other work along it is as large as can be.
template <class E, Storage kStorage, bool kPermuted, int Vectors, int Most, class Work>
void lane_tokens(const LaneProduct& t, std::int32_t row, Work work) {
  for (std::int32_t m = 0; m < t.tokens;) {
    const std::int32_t left = t.tokens - m, tiles = Work::kAny && m == 0 ? 1 : (left + Most - 1) / Most;
    const std::int32_t tokens = (left + tiles - 1) / tiles;
    const auto some = [&]<int Tokens>() {
      if (m == 0) {
        lane_tile<E, kStorage, kPermuted, true, Tokens, Vectors>(t, m, row, work);
      } else {
        lane_tile<E, kStorage, kPermuted, false, Tokens, Vectors>(t, m, row, NoLaneWork{});
      }
      m += Tokens;
    };
    // Of the sizes there are, the least that holds them; products of gradients have fewer.
    const auto fits = [&]<int Tokens>() {
      if constexpr (Tokens <= Most) {
        if (tokens > Tokens) return false;
        some.template operator()<Tokens>();
        return true;
      } else {
        return false;
      }
    };
    constexpr bool kFine = !kPermuted && kStorage == Storage::f32;
    if (fits.template operator()<1>() || fits.template operator()<2>()) continue;
    if constexpr (kFine) {
      if (fits.template operator()<3>()) continue;
    }
    if (fits.template operator()<4>()) continue;
    if constexpr (kFine) {
      if (fits.template operator()<5>()) continue;
    }
    if (fits.template operator()<6>()) continue;
    if constexpr (kFine) {
      if (fits.template operator()<7>()) continue;
    }
    if (fits.template operator()<8>()) continue;
    if constexpr (kFine) {
      if (fits.template operator()<10>()) continue;
    }
    if (fits.template operator()<12>()) continue;
    some.template operator()<Most>();
  }
}

// Two vectors of outputs at a time share what is broadcast; the accumulators fill the registers. Or one,
// where a product needs some of these itself.
template <class E>
consteval int lane_vectors() {
  if constexpr (requires { E::kVectors; }) return E::kVectors;
  return 2;
}
template <class E, Storage kStorage, bool kPermuted, class Work>
void lane_outputs(const LaneProduct& t, Work work) {
  constexpr int w = E::Isa::kWidth;
  constexpr bool kMany = E::Isa::kRegisters >= 32;
  std::int32_t row = 0;
  if constexpr (lane_vectors<E>() == 1) {
    lane_tokens<E, kStorage, kPermuted, 1, 8>(t, 0, work);
    for (row = w; row < t.rows; row += w) lane_tokens<E, kStorage, kPermuted, 1, 8>(t, row, NoLaneWork{});
    return;
  }
  for (; row + 2 * w <= t.rows; row += 2 * w) {
    if (row == 0) {
      lane_tokens<E, kStorage, kPermuted, 2, kMany ? 12 : 6>(t, row, work);
    } else {
      lane_tokens<E, kStorage, kPermuted, 2, kMany ? 12 : 6>(t, row, NoLaneWork{});
    }
  }
  if (row == 0) return lane_tokens < E, kStorage, kPermuted, 1, kMany ? 16 : 8 > (t, row, work);
  if (row < t.rows) lane_tokens<E, kStorage, kPermuted, 1, kMany ? 16 : 8>(t, row, NoLaneWork{});
}

// Products whose lines are put together by the one before, E::Gather says how.
template <class E>
void multiply_gathering(const LaneProduct& t) {
  if (t.next.lines == 0) return lane_outputs<E, Storage::f32, false>(t, NoLaneWork{});
  const typename E::Gather gather{t.next, t.run};
  lane_outputs<E, Storage::f32, false>(t, gather);
  for (std::int32_t line = t.run; line < t.next.lines; ++line) gather.take(line);
}

// Of a few tokens a line is put together in one place, just before it is multiplied, with as many vectors of
// W as sums have room for: W goes by in order, where passes over 32 outputs each took 128×1 at 4096→11008 1.6
// ms and one over all of them .5.
template <class E>
struct OneLine : E {
  static constexpr std::int32_t kLine = 0;
};
template <class Line>
struct PutLine {
  static constexpr bool kAny = true;
  LaneGather to_do;
  [[gnu::always_inline]] void operator()(std::int32_t left) const {
    Line::put(to_do, 0, to_do.offsets + Line::kFeatures * (to_do.lines - left));
  }
};
// All outputs of tokens first … first + Tokens, up to Most vectors of them at a time.
template <class E, class Line, int Tokens, int Most>
void column_outputs(const LaneProduct& t, std::int32_t first) {
  std::int32_t row = 0;
  const auto some = [&]<int Vectors>() {
    if constexpr (Vectors <= Most) {
      constexpr std::int32_t kOutputs = Vectors * E::Isa::kWidth;
      for (; row + kOutputs <= t.rows; row += kOutputs) {
        lane_tile<OneLine<E>, Storage::f32, false, true, Tokens, Vectors>(t, first, row,
                                                                          PutLine<Line>{t.next});
      }
    }
  };
  some.template operator()<8>();
  some.template operator()<4>();
  some.template operator()<2>();
  some.template operator()<1>();
}

// Tokens from the first-th on, up to Tokens of them: the fewest that are compiled and hold what is left.
template <class E, class Line, int Tokens, int Most>
void column_tokens(const LaneProduct& t, std::int32_t first) {
  constexpr int kFewer = Line::kTokens == 4 ? Tokens - 1 : Tokens == 8 ? 6 : 0;  // 8: for 5 and more
  if constexpr (kFewer > 0) {
    if (t.tokens - first <= kFewer) return column_tokens<E, Line, kFewer, Most>(t, first);
  }
  column_outputs<E, Line, Tokens, Most>(t, first);
}

// As many tokens at a time as there are sums for. Where one pass does not do, they take turns with lines of W
// that L1 keeps.
template <class E, class Line, int Most>
void column_passes(const LaneProduct& t) {
  constexpr int kSums = (E::Isa::kRegisters >= 32 ? 16 : 8) / Most;
  constexpr int kTokens = kSums < Line::kTokens ? kSums : Line::kTokens;
  const auto pass = [](const LaneProduct& of) {
    for (std::int32_t m = 0; m < of.tokens; m += kTokens) column_tokens<E, Line, kTokens, Most>(of, m);
  };
  constexpr std::int32_t kBytes = 16384;
  const std::int32_t lines = kBytes / (t.rows * Line::kFeatures) + 1;
  if ((t.tokens <= kTokens && t.rows <= Most * E::Isa::kWidth) || t.run <= lines) return pass(t);
  LaneProduct part = t;
  for (std::int32_t line = 0; line < t.run; line += lines) {
    part.first = line == 0;
    part.last = line + lines >= t.run;
    part.run = part.next.lines = part.last ? t.run - line : lines;
    part.w = static_cast<const char*>(t.w) + std::int64_t{line} * t.rows * Line::kFeatures;
    part.next.offsets = t.next.offsets + Line::kFeatures * line;
    pass(part);
  }
}

template <class E, class Line>
void multiply_columns(const LaneProduct& t) {
  constexpr std::int32_t w = E::Isa::kWidth;
  if constexpr (E::Isa::kRegisters >= 32) {
    if (t.rows >= 8 * w) return column_passes<E, Line, 8>(t);
  }
  if (t.rows >= 4 * w) return column_passes<E, Line, 4>(t);
  if (t.rows >= 2 * w) return column_passes<E, Line, 2>(t);
  column_passes<E, Line, 1>(t);
}

template <class I, Storage kStorage>
void turned_outputs(const LaneProduct& t) {
  for (std::int32_t row = 0; row < t.rows; row += I::kWidth) {
    lane_tokens<TurnedLanes<FloatLanes<I>>, kStorage, false, 1, 12>(t, row, NoLaneWork{});
  }
}

template <class I>
void multiply_lanes(const LaneProduct& t) {
  dispatch_storage(t.storage, [&]<Storage kStorage>() {
    if constexpr (I::kWidth >= 16) {
      if (t.by_row) return turned_outputs<I, kStorage>(t);
    }
    if (t.perm != nullptr) return lane_outputs<FloatLanes<I>, kStorage, true>(t, NoLaneWork{});
    lane_outputs<FloatLanes<I>, kStorage, false>(t, NoLaneWork{});
  });
}

}  // namespace rarefy::cpu
