// Drives linear and grad_input on pieces of rows (pieces.h). A task packs a panel of tokens and takes ranges
// of rows of W through it, a tile of X after the other: the tile stays in L1, the range's sums in L2. Where
// the pieces lie is prepared; the transposed product and 16-bit values have their values copied once a call,
// or, 16-bit values by a few panels of tokens, piece by piece.
#include "cpu/linear_pieces.h"

#include <algorithm>
#include <limits>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kColumnsApart = 4;  // in fours, between ranges: columns are copied by 16

struct Shape : ProductShape {
  DType dtype;        // of values
  std::int32_t part;  // entries of a part of a sum

  explicit Shape(const Problem& p)
      : ProductShape(p), dtype(p.weight.dtype), part(part_entries(static_cast<std::int32_t>(red_block))) {}

  std::int64_t block_size() const { return out_block * red_block; }
  bool parted() const { return red_blocks >= part + least_entries(part); }
  // Of the values: they lie otherwise, or are not floats. All of them once a call, or a tile's pieces.
  bool copies() const { return transposed || dtype != DType::f32; }
  bool copies_all(const PiecesBlocking& b) const { return copies() && b.by_piece == 0; }
  bool copies_pieces(const PiecesBlocking& b) const { return copies() && b.by_piece != 0; }
};

// W's entries by output block.
struct Entries {
  const std::int32_t *begin, *index;

  explicit Entries(const Call& call)
      : begin(call.problem.op == Op::linear ? call.plan.crow : call.plan.ccol),
        index(call.problem.op == Op::linear ? call.plan.col : call.plan.row) {}
};

// The pieces of range r and tile t, as i = r · tiles + t: [lists[4 i], lists[4 i + 1]) and, behind full
// parts, up to lists[4 i + 2]; their columns begin at 4 · lists[4 i + 3].
struct Prepared {
  std::int64_t tiles, ranges, most, bytes;
  std::int32_t* lists;
  Piece* pieces;
  std::uint16_t* columns;

  Prepared(const Shape& s, const PiecesBlocking& b, void* base)
      : tiles(std::max<std::int64_t>(1, ceil_div(s.red_blocks, std::max<std::int64_t>(1, b.columns)))),
        ranges(ceil_div(s.out_blocks, std::max<std::int64_t>(1, b.rows))) {
    Room room(base);
    lists = room.take<std::int32_t>(kPieceLists * tiles * ranges);
    most = s.out_blocks * tiles + s.entries / s.part + kPiecesAhead + 4;
    pieces = room.take<Piece>(most);
    columns = room.take<std::uint16_t>(s.entries + 4 * (most + kColumnsApart * ranges));
    bytes = room.bytes();
  }
  // Where the pieces of a range begin, and their columns in fours: behind all that the rows before could
  // have.
  std::int32_t first_piece(const Shape& s, const PiecesBlocking& b, const Entries& w,
                           std::int64_t range) const {
    return static_cast<std::int32_t>(range * b.rows * tiles + w.begin[range * b.rows] / s.part);
  }
  static std::int32_t first_column(const Entries& w, std::int64_t row, std::int32_t piece,
                                   std::int64_t range) {
    return w.begin[row] / 4 + piece + static_cast<std::int32_t>(kColumnsApart * range);
  }
};

struct Parts {
  float *start, *values;  // the bias; a copy
  std::int32_t* place;    // where an output block's next value goes
  float *x, *y, *total;   // a worker's
  float* floats;          // a worker's copy of a tile's values, and their pieces
  Piece* pieces;
};

struct Layout {
  std::int64_t shared, worker;  // bytes

  Layout(const Kernels& kernels, const Shape& s, const PiecesBlocking& b) {
    Parts parts{};
    Room all, own;
    take_shared(all, s, b, parts);
    take_worker(own, kernels, s, b, parts);
    shared = all.bytes();
    worker = own.bytes();
  }
  static void take_shared(Room& room, const Shape& s, const PiecesBlocking& b, Parts& parts) {
    parts.start = room.take<float>(s.out_blocks * s.out_block);
    parts.values = room.take<float>(s.copies_all(b) ? s.entries * s.block_size() : 0);
    parts.place = room.take<std::int32_t>(s.transposed ? s.out_blocks : 0);
  }
  static void take_worker(Room& room, const Kernels& kernels, const Shape& s, const PiecesBlocking& b,
                          Parts& parts) {
    const std::int64_t lanes = b.vectors * kernels.width;
    const std::int64_t sums = std::min(b.rows, s.out_blocks) * s.out_block * lanes;
    parts.x = room.take<float>(s.red_blocks * s.red_block * lanes);
    parts.y = room.take<float>(sums);
    parts.total = room.take<float>(s.parted() ? sums : 0);
    if (!s.copies_pieces(b)) return;
    parts.floats = room.take<float>(std::min(b.rows, s.out_blocks) * b.columns * s.block_size());
    parts.pieces = room.take<Piece>(2 * b.rows + kPiecesAhead);  // a row's in a tile: of one part or two
  }
};

float to_number(float value) { return value; }
float to_number(bfloat16 value) { return to_float(value); }
float to_number(float16 value) { return to_float(value); }

// One range. Ranges have room for all that their entries could become.
void prepare_range(const Kernels& kernels, const Shape& s, const PiecesBlocking& b, const Entries& w,
                   const Prepared& to, std::int64_t range) {
  const std::int64_t first = range * b.rows;
  const std::int32_t at = to.first_piece(s, b, w, range);
  const std::int32_t end = kernels.list_pieces(
      {w.begin + first, w.index, std::min(b.rows, s.out_blocks - first), s.entries, to.tiles,
       static_cast<std::int32_t>(b.columns), s.part, at, Prepared::first_column(w, first, at, range),
       to.lists + kPieceLists * range * to.tiles, to.pieces, to.columns});
  // What lies behind a list is read ahead.
  const std::int32_t next = range + 1 < to.ranges ? to.first_piece(s, b, w, range + 1) : end + kPiecesAhead;
  std::fill(to.pieces + end, to.pieces + std::min(end + kPiecesAhead, next), Piece{});
}

// Values of a block row after the other go to their columns, whose next places stay in L1: reading them by
// column is a miss for each (3072×768 at a density of 0.35, Zen 5: 5.3 ms). A task has a range of columns.
template <class T>
void transpose_values(const Call& call, const Shape& s, std::int32_t* place, float* to) {
  const std::int64_t size = s.out_block * s.red_block, tasks = call.problem.threads;
  const PlanView& plan = call.plan;
  const auto* values = static_cast<const T*>(call.values);
  std::copy_n(plan.ccol, s.out_blocks, place);
  call.executor.parallel_for(tasks, [&](std::int64_t task) {
    const std::int64_t first = s.out_blocks * task / tasks, last = s.out_blocks * (task + 1) / tasks;
    for (std::int64_t r = 0; r < s.red_blocks; ++r) {
      const std::int32_t* end = plan.col + plan.crow[r + 1];
      const std::int32_t* at = std::lower_bound(plan.col + plan.crow[r], end, first);
      for (; at != end && *at < last; ++at) {
        const T* from = values + (at - plan.col) * size;
        float* block = to + place[*at]++ * size;
        for (std::int64_t i = 0; i < s.red_block; ++i) {
          for (std::int64_t o = 0; o < s.out_block; ++o) block[o * s.red_block + i] = to_number(*from++);
        }
      }
    }
  });
}

// Values by output block as float, [entry][out_block][red_block].
void copy_values(const Kernels& kernels, const Call& call, const Shape& s, const Parts& parts) {
  const DType dtype = call.problem.weight.dtype;
  if (!s.transposed) {
    constexpr std::int64_t kChunk = 16384;
    const std::int64_t count = s.entries * s.out_block * s.red_block;
    return call.executor.parallel_for(ceil_div(count, kChunk), [&](std::int64_t task) {
      const std::int64_t first = task * kChunk;
      const char* from =
          static_cast<const char*>(call.values) + first * static_cast<std::int64_t>(size_of(dtype));
      kernels.unpack(storage(dtype), from, std::min(kChunk, count - first), parts.values + first);
    });
  }
  if (dtype == DType::f32) return transpose_values<float>(call, s, parts.place, parts.values);
  if (dtype == DType::bf16) return transpose_values<bfloat16>(call, s, parts.place, parts.values);
  transpose_values<float16>(call, s, parts.place, parts.values);
}

class Task {
 public:
  Task(const Kernels& kernels, const Call& call, const Shape& s, const PiecesBlocking& b, const Parts& parts)
      : k_(kernels),
        call_(call),
        s_(s),
        b_(b),
        parts_(parts),
        w_(call),
        prepared_(s, b, const_cast<void*>(call.derived.prepared)),
        in_(s.transposed ? call.dy : call.x),
        by_piece_(s.copies_pieces(b)),
        values_(s.copies_all(b) ? parts.values : static_cast<const float*>(call.values)) {}

  void run(std::int64_t first, std::int32_t tokens, std::int64_t begin, std::int64_t end) {
    const std::int64_t vectors = ceil_div(std::int64_t{tokens}, std::int64_t{k_.width});
    const std::int64_t lanes = vectors * k_.width;
    k_.pack(
        {{at(in_, first, 0), in_.row_stride, tokens, static_cast<std::int32_t>(in_.cols), storage(in_.dtype)},
         parts_.x,
         static_cast<std::int32_t>(lanes)});
    std::fill(parts_.x + in_.cols * lanes, parts_.x + s_.red_blocks * s_.red_block * lanes, 0.0F);
    for (std::int64_t range = begin; range < end; ++range) {
      const std::int64_t row = range * b_.rows, rows = std::min(b_.rows, s_.out_blocks - row);
      const std::int64_t from = row * s_.out_block, size = s_.out_block * lanes;
      for (std::int64_t o = 0; o < rows * s_.out_block; ++o) {
        std::fill_n(parts_.y + o * lanes, lanes, parts_.start[from + o]);
      }
      for (std::int64_t tile = 0; tile < prepared_.tiles; ++tile) {
        const std::int32_t* lists = prepared_.lists + kPieceLists * (range * prepared_.tiles + tile);
        PiecesTask task{prepared_.columns + std::int64_t{4} * lists[3],
                        values_,
                        static_cast<std::int32_t>(s_.out_block),
                        static_cast<std::int32_t>(s_.red_block),
                        prepared_.pieces + lists[0],
                        prepared_.pieces + lists[1],
                        prepared_.pieces + lists[2],
                        parts_.x + tile * b_.columns * s_.red_block * lanes,
                        parts_.y,
                        parts_.total,
                        static_cast<int>(vectors)};
        if (by_piece_) copy_pieces(task);
        k_.pieces(task);
      }
      for (std::int64_t o = 0; s_.parted() && o < rows; ++o) {
        if (w_.begin[row + o + 1] - w_.begin[row + o] < s_.part + least_entries(s_.part)) continue;
        for (std::int64_t i = o * size; i < (o + 1) * size; ++i) parts_.y[i] += parts_.total[i];
      }
      const std::int64_t features = std::min(from + rows * s_.out_block, call_.out.cols) - from;
      k_.store({parts_.y, static_cast<std::int32_t>(lanes), call_.activation, at(call_.out, first, from),
                call_.out.row_stride, tokens, static_cast<std::int32_t>(features), storage(call_.out.dtype)});
    }
  }

 private:
  // The values of a tile's pieces become floats that lie one behind the other.
  void copy_pieces(PiecesTask& task) const {
    const std::int64_t size = s_.block_size(), bytes = size * static_cast<std::int64_t>(size_of(s_.dtype));
    const auto* values = static_cast<const char*>(call_.values);
    Piece* to = parts_.pieces;
    std::int32_t at = 0;
    for (const Piece* p = task.piece; p != task.end; ++p, ++to) {
      __builtin_prefetch(values + p[kPiecesAhead].begin * bytes);
      k_.unpack(storage(s_.dtype), values + p->begin * bytes, p->count * size, parts_.floats + at * size);
      *to = *p;
      to->begin = at;
      at += p->count;
    }
    std::fill_n(to, kPiecesAhead, Piece{});
    task.after = parts_.pieces + (task.after - task.piece);
    task.end = to;
    task.piece = parts_.pieces;
    task.values = parts_.floats;
  }

  const Kernels& k_;
  const Call& call_;
  const Shape& s_;
  const PiecesBlocking& b_;
  const Parts& parts_;
  const Entries w_;
  const Prepared prepared_;
  const MatrixView& in_;
  const bool by_piece_;
  const float* values_;
};

Status check_cut(const Shape& s, const PiecesBlocking& b) {
  if (b.columns < 1 || b.columns > s.part || b.rows < 1 || b.rows > kMostPieceRows) {
    return invalid(
        "pieces",
        cat("columns and rows of the config must be in [1, ", s.part, "] and [1, ", kMostPieceRows, ']'),
        cat(b.columns, " and ", b.rows));
  }
  // Lists count pieces, and their columns in fours, in 32 bits: a piece for each row and tile, parts,
  // padding.
  const std::int64_t tiles = ceil_div(s.red_blocks, b.columns);
  const std::int64_t most = s.out_blocks * (tiles + 1) + s.entries / 2;
  if (most <= std::numeric_limits<std::int32_t>::max()) return {};
  return invalid("pieces", "columns of the config must leave fewer than 2^31 pieces", cat(b.columns));
}

Status check_blocking(const Kernels& kernels, const Shape& s, const PiecesBlocking& b) {
  if (Status status = check_cut(s, b); !status.ok()) return status;
  if (b.by_piece != 0 && s.transposed)
    return invalid("pieces", "by_piece of the config must be 0 for the transposed product", cat(b.by_piece));
  const std::int64_t ranges = ceil_div(s.out_blocks, b.rows);
  if (b.vectors >= 1 && b.vectors <= kernels.max_vectors && b.splits >= 1 && b.splits <= ranges) return {};
  return invalid(
      kernels.family,
      cat("vectors and splits of the config must be in [1, ", kernels.max_vectors, "] and [1, ", ranges, ']'),
      cat(b.vectors, " and ", b.splits));
}

// Tiles of X fill three quarters of L1; sums of a range a quarter of L2.
std::int64_t tile_floats(const Machine& machine) {
  return (machine.l1 > 0 ? machine.l1 : 32 << 10) / 4 * 3 / 4;
}

// Tiles and ranges for panels of so many vectors.
PiecesBlocking cut(const Kernels& kernels, const Shape& s, const Machine& machine, std::int64_t vectors) {
  PiecesBlocking b;
  b.vectors = vectors;
  const std::int64_t lanes = b.vectors * kernels.width;
  const std::int64_t most = std::clamp<std::int64_t>(tile_floats(machine) / (lanes * s.red_block), 1, s.part);
  b.columns = std::max<std::int64_t>(1, ceil_div(s.red_blocks, ceil_div(s.red_blocks, most)));
  const std::int64_t rows = panel_floats(machine) / 2 / (lanes * s.out_block);
  b.rows = std::clamp<std::int64_t>(rows, 1, std::min(kMostPieceRows, s.out_blocks));
  b.rows = ceil_div(s.out_blocks, ceil_div(s.out_blocks, b.rows));
  return b;
}

}  // namespace

Reason supports_pieces(const Kernels& kernels, const Problem& p, const Machine& machine) {
  const Shape s(p);
  if (s.entries == 0) return "takes a stored block or more";  // `cut` divides by what is there
  if (s.out_block > 2 || s.red_block > 2) {
    return cat("takes blocks of 1 or 2 outputs and inputs; got ", s.out_block, " and ", s.red_block);
  }
  if (p.op == Op::linear && p.tokens <= kFewTokens) {
    return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  }
  const PiecesBlocking b = cut(kernels, s, machine, kernels.max_vectors);
  // Of 2×1 gather reads a line for two FMAs already (768→3072 at .1 and .35: 1.86 and 6.9 ms, here 2.0, 5.2).
  const std::int64_t least = s.out_block > s.red_block ? 20 : 4;
  if (s.entries < least * s.out_blocks * ceil_div(s.red_blocks, b.columns)) {
    return cat("takes ", least, " blocks or more, on average, in a row's piece of ", b.columns, " columns");
  }
  return {};
}

Config configure_pieces(const Kernels& kernels, const Problem& p, const Machine& machine) {
  const Shape s(p);
  const std::int64_t all = std::max<std::int64_t>(1, ceil_div(p.tokens, std::int64_t{kernels.width}));
  const std::int64_t panels = ceil_div(all, std::int64_t{kernels.max_vectors});
  // What is held is for any number of tokens. Where pieces are listed in the call, few tokens have wider
  // tiles, so fewer pieces.
  const std::int64_t widest = p.derived == 0 ? ceil_div(all, panels) : kernels.max_vectors;
  PiecesBlocking b = cut(kernels, s, machine, widest);
  b.vectors = ceil_div(all, panels);
  // Values that become floats do so piece by piece, for each panel anew, where a copy of all would be memory
  // that the system maps anew in each call (one thread of a Zen 4, bf16 2×2, 4096→11008 at .5: 17 tokens
  // 66 → 22 ms, 256 188 → 139). A short piece costs a call: 2048² at .1 would take 1.8 to 2.7 times as long.
  constexpr std::int64_t kMostCopied = 8 << 20, kMostTimes = 6;
  if (s.copies() && !s.transposed && s.entries * s.block_size() > kMostCopied && panels <= kMostTimes)
    b.by_piece = 1;
  const std::int64_t ranges = ceil_div(s.out_blocks, b.rows);
  const double pack = kMove * static_cast<double>(s.red_blocks * s.red_block * b.vectors * kernels.width);
  const auto work = static_cast<double>(s.entries * s.out_block * s.red_block * b.vectors);
  b.splits = cheapest<PiecesBlocking>([&](auto&& visit) {
               for (PiecesBlocking one = b; one.splits <= ranges; ++one.splits) {
                 const std::int64_t rounds = ceil_div(panels * one.splits, std::int64_t{p.threads});
                 const auto most = static_cast<double>(ceil_div(ranges, one.splits));
                 visit(one, static_cast<double>(rounds) * (pack + work * most / static_cast<double>(ranges)));
               }
             }).splits;
  return to_config(b);
}

std::vector<Config> pieces_candidates(const Kernels& kernels, const Problem& p, const Machine& machine) {
  std::vector<Config> all{configure_pieces(kernels, p, machine)};
  const Shape s(p);
  for (const std::int64_t columns : {64, 96, 128, 192, 256}) {
    auto b = from_config<PiecesBlocking>(all[0]);
    b.columns = std::min<std::int64_t>(columns, s.part);
    for (b.vectors = 1; b.vectors <= kernels.max_vectors; ++b.vectors) all.push_back(to_config(b));
  }
  return all;
}

std::int64_t pieces_workspace(const Kernels& kernels, const Problem& problem, const Config& config) {
  const Layout layout(kernels, Shape(problem), from_config<PiecesBlocking>(config));
  return layout.shared + problem.threads * layout.worker;
}

std::int64_t pieces_variant(const Problem& /*problem*/, const Config& config) {
  const auto b = from_config<PiecesBlocking>(config);
  return b.columns * (kMostPieceRows + 1) + b.rows;
}

std::int64_t pieces_prepared_size(const Problem& problem, const Config& config) {
  return Prepared(Shape(problem), from_config<PiecesBlocking>(config), nullptr).bytes;
}

Status prepare_pieces(const Kernels& kernels, const Call& call, void* to) {
  const auto b = from_config<PiecesBlocking>(call.config);
  const Shape s(call.problem);
  if (Status status = check_cut(s, b); !status.ok()) return status;
  const Entries w(call);
  const Prepared prepared(s, b, to);
  call.executor.parallel_for(prepared.ranges,
                             [&](std::int64_t range) { prepare_range(kernels, s, b, w, prepared, range); });
  return {};
}

Status run_pieces(const Kernels& kernels, const Call& call) {
  const auto b = from_config<PiecesBlocking>(call.config);
  const Shape s(call.problem);
  if (Status status = check_blocking(kernels, s, b); !status.ok()) return status;
  const Layout layout(kernels, s, b);
  const Entries w(call);
  Parts shared{};
  Room all(call.workspace);
  Layout::take_shared(all, s, b, shared);
  std::fill_n(shared.start, s.out_blocks * s.out_block, 0.0F);
  if (call.bias != nullptr) unpack_bias(kernels, call.out.dtype, call.bias, call.out.cols, shared.start);
  if (s.copies_all(b)) copy_values(kernels, call, s, shared);
  const std::int64_t tokens = b.vectors * kernels.width, ranges = ceil_div(s.out_blocks, b.rows);
  const auto bound = [&](std::int64_t part) {
    if (part == b.splits) return ranges;
    return begin_of_part(w.begin, s.out_blocks, s.red_block, 12, part, b.splits) / b.rows;
  };
  const std::int64_t m = call.out.rows, sets = ceil_div(m, tokens);
  // Part by part of W, as in linear.cc.
  call.executor.parallel_for(sets * b.splits, [&](std::int64_t t, int worker) {
    const std::int64_t begin = bound(t / sets), end = bound(t / sets + 1);
    if (begin == end) return;
    Parts parts = shared;
    Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    Layout::take_worker(own, kernels, s, b, parts);
    const std::int64_t first = t % sets * tokens;
    Task(kernels, call, s, b, parts)
        .run(first, static_cast<std::int32_t>(std::min(tokens, m - first)), begin, end);
  });
  return {};
}

}  // namespace rarefy::cpu
