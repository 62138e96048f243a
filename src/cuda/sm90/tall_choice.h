// Configurations of the tall kernels as the registry keeps them, for the rows of tall blocks in place and of
// columns packed as such.
#pragma once

#include "core/message.h"
#include "core/registry.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_columns.h"
#include "cuda/sm90/tall_grad_input.h"
#include "cuda/sm90/tall_gradient.h"
#include "cuda/sm90/whole_choice.h"

namespace rarefy::sm90 {

struct TallChoice {
  std::int64_t rows = 128, slots = 4, chunk = 512, sms = 132, split = 1, tokens = 256, tile_rows = 128,
               columns = 64;
  static constexpr std::string_view kFields[] = {"rows",  "slots",  "chunk",     "sms",
                                                 "split", "tokens", "tile_rows", "columns"};
  TallConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(rows), n(slots), chunk, n(split), {n(tile_rows), n(tokens), n(columns)}};
  }
};

inline TallChoice tall_choice(const TallConfig& c, std::int64_t sms) {
  return {c.rows, c.slots, c.chunk, sms, c.split, c.tile.tokens, c.tile.rows, c.tile.columns};
}
inline TallChoice tall_choice(const TallProblem& p, const rarefy::Machine& machine) {
  return tall_choice(configure(p, machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory)),
                     machine.gpu.sms);
}

// A forced config may hold anything; sizes are asked for before it is refused.
inline Status check_choice(Op op, const TallProblem& p, const TallChoice& choice) {
  const auto refuse = [&](std::string_view requirement, std::int64_t got) {
    return invalid(name(op), requirement, cat(got));
  };
  if (choice.rows != 64 && !(choice.rows == 128 && p.block_rows % 128 == 0))
    return refuse("rows of the config must be 64, or 128 where a block has a multiple of 128", choice.rows);
  if (choice.tile_rows != 64 && choice.tile_rows != choice.rows)
    return refuse("tile_rows of the config must be 64, or its rows", choice.tile_rows);
  if (!choice.config().is_compiled())
    return invalid(name(op), "tile_rows, tokens and columns of the config must be a tile that there is",
                   cat(choice.tile_rows, ", ", choice.tokens, ", ", choice.columns));
  if (choice.slots < 2 || choice.slots > 8)
    return refuse("slots of the config must be in [2, 8]", choice.slots);
  if (choice.chunk < 512 || choice.chunk % 512 != 0)
    return refuse("chunk of the config must be a multiple of 512", choice.chunk);
  if (choice.split < 1 || choice.split > 4)
    return refuse("split of the config must be in [1, 4]", choice.split);
  const TallConfig config = choice.config();
  // Warpgroups with 64 rows of their tokens each.
  if (!parts_fit(config.split, config.tile.mine(), config.tile.warpgroups(),
                 config.slots * config.tile.slot_bytes()))
    return refuse("slots of the config must have room for the sums of its parts", choice.slots);
  if (choice.sms < 1 || choice.sms > kMostClusters)
    return refuse(cat("sms of the config must be in [1, ", kMostClusters, ']'), choice.sms);
  return {};
}

struct TallGradientChoice {
  std::int64_t rows = 128, split = 1, slots = 4, sms = 132, columns = TallGradientConfig::kMost, pairs = 0,
               turns = 1, long_steps = 0, turners = 0, last = 0;
  static constexpr std::string_view kFields[] = {"rows",  "split", "slots",      "sms",     "columns",
                                                 "pairs", "turns", "long_steps", "turners", "last"};
  TallGradientConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(rows),  n(split), n(slots),        n(sms),     n(columns),
            n(pairs), n(turns), long_steps != 0, n(turners), n(last)};
  }
};

inline TallGradientChoice gradient_choice(const TallGradientProblem& p, const rarefy::Machine& machine) {
  const TallGradientConfig c = configure(p, machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory));
  return {c.rows,    c.split, c.slots, c.sms, c.columns, c.pairs, c.turns, c.long_steps ? 1 : 0,
          c.turners, c.last};
}

struct TallInputChoice {
  std::int64_t scatter = 0, tokens = 256, columns = 128, slots = 4, sms = 132;
  static constexpr std::string_view kFields[] = {"scatter", "tokens", "columns", "slots", "sms"};
  TallInputConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {scatter != 0, n(tokens), n(columns), n(slots)};
  }
};

inline TallInputChoice input_choice(const TallInputConfig& c, const rarefy::Machine& machine) {
  return {c.scatter ? 1 : 0, c.tokens, c.columns, c.slots, machine.gpu.sms};
}

inline TallInputCandidate best_input(const Product& p, const rarefy::Machine& machine) {
  return tall_input_best(p, machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory));
}

// Those of W by rows, whatever the product.
inline TallColumns columns_of_weight(const Problem& p) {
  auto stated = product<Product>(p);
  stated.transposed = false;
  return TallColumns(stated);
}

// grad_input of these columns of W, so many of them.
inline Product packed_input(const TallColumns& columns, std::int64_t count, std::int64_t tokens) {
  Product packed = columns.product;
  packed.transposed = true;
  packed.tokens = tokens;
  packed.block_rows = columns.height;
  packed.block_cols = 1;
  packed.blocks = count;
  return packed;
}

// Of those that are expected, for the choice of a kernel and its config.
inline Product expected_input(const Problem& p, std::int64_t tokens) {
  const TallColumns columns = columns_of_weight(p);
  return packed_input(columns, columns.expected(), tokens);
}

inline double held_input_microseconds(const Problem& p, const rarefy::Machine& machine) {
  return held_microseconds(
      [&](std::int64_t tokens) { return best_input(expected_input(p, tokens), machine).microseconds; });
}

}  // namespace rarefy::sm90
