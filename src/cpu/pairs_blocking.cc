// Which sets of panels a product is cut into: the cheapest by a count of cycles.
#include "cpu/pairs_blocking.h"

#include <cmath>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

// Cycles, measured (docs/design/cpu/bf16.md): packing and storing an element, the latter into the rows of
// more than two panels as well; a byte of W out of L2, where it stays.
constexpr double kPack = 0.3, kStore = 0.35, kStoreFar = 0.14, kWeightNear = 0.03;
// Where W is asked for ahead, half of L2 may hold it at next to no cost. Of more than four panels, or of more
// than a quarter of L2, rows of Y meet in one set of it if they lie a multiple of 4 KB apart; and where
// threads share a core, theirs meet, too (AMX, docs/design/cpu/amx.md).
constexpr double kStoreFarAhead = 0.04, kWeightNearAhead = 0.01, kStoreMany = 0.35;
constexpr double kFewPanels = 4, kPage = 4096;
// Lanes of outputs: they transpose nothing on the way out, and what a panel reads of W, a stream that is
// asked for ahead, costs little while it stays in L3.
constexpr double kStoreLanes = 0.2, kWeightLanes = 0.02, kInL3 = 12e6;
template <class F>
void for_each_blocking(const PanelWork& w, const Problem& p, const Machine& machine, F&& visit) {
  const auto out = static_cast<double>(w.out_features);
  const std::int64_t all = std::max<std::int64_t>(1, ceil_div(p.tokens, w.tokens));
  const double weight = 2 * kTileSize * w.tiles;      // bytes
  const std::int64_t l2 = panel_floats(machine) * 2;  // words of 16 bits in half of L2
  const std::int64_t fit = (w.ahead ? l2 + w.panel_size / 4 : l2) / w.panel_size;
  // From memory W comes once a set: two panels share it, also where they fill all of L2 (512 × 4096→11008,
  // 32×1 at 0.5, one thread of a Zen 5: 383 GFLOP/s with one, 448 with two, 440 with four).
  const std::int64_t most =
      std::clamp<std::int64_t>(fit, weight > kFromMemory ? 2 : 1, std::min(all, w.most));
  const bool near = weight <= static_cast<double>(w.ahead ? 2 * l2 : l2);  // a half, or a quarter, of L2
  const double weight_byte =
      near ? std::min(w.weight_byte, w.ahead ? kWeightNearAhead : kWeightNear) : w.weight_byte;
  const double row_bytes = out * static_cast<double>(size_of(p.out));
  const bool meets = w.ahead && (p.threads > 1 || std::fmod(row_bytes, kPage) == 0);
  const auto store = [&](double of) {
    const double far = w.ahead ? kStoreFarAhead : kStoreFar;
    const bool many = of > kFewPanels || of * static_cast<double>(w.panel_size) > static_cast<double>(l2) / 2;
    return kStore + (of > 2 ? far : 0) + (meets && many ? kStoreMany : 0);
  };
  for (std::int64_t panels = 1; panels <= most; ++panels) {
    const std::int64_t sets = ceil_div(all, panels);
    const auto packing = [&](double of) { return of * w.packed * kPack; };
    const auto working = [&](double of) {
      const double stored = out * of * static_cast<double>(w.tokens);
      if (w.alone_cycles > 0 && of <= 1) {
        const double byte = weight < kInL3 ? kWeightLanes : w.weight_byte;
        return w.tiles * of * w.alone_cycles + weight * byte + stored * kStoreLanes;
      }
      return w.tiles * of * w.tile_cycles + weight * weight_byte + stored * store(of);
    };
    const double pack = packing(static_cast<double>(panels)), work = working(static_cast<double>(panels));
    for (std::int64_t splits = 1; splits <= std::min<std::int64_t>(4 * p.threads, w.out_blocks); ++splits) {
      const std::int64_t rounds = ceil_div(sets * splits, p.threads);
      visit(PairsBlocking{panels, splits},
            static_cast<double>(rounds) * (pack + work / static_cast<double>(splits)));
    }
    const RestOfPanels r(all, panels, p.threads);
    if (r.rest == 0) continue;
    const auto rest = static_cast<double>(r.rest);
    visit(PairsBlocking{panels, 1, r.rest},
          static_cast<double>(r.sets) * (packing(r.each) + working(r.each)) + packing(rest) +
              working(rest) * part_of(w.out_blocks, p.threads));
  }
}

}  // namespace

Config configure_panels(const PanelWork& work, const Problem& problem, const Machine& machine) {
  return to_config(
      cheapest<PairsBlocking>([&](auto&& visit) { for_each_blocking(work, problem, machine, visit); }));
}

std::vector<Config> panel_candidates(const PanelWork& work, const Problem& problem, const Machine& machine) {
  std::vector<Config> all;
  for_each_blocking(work, problem, machine,
                    [&](const PairsBlocking& b, double) { all.push_back(to_config(b)); });
  return all;
}

Status check_panels(std::string_view family, const PairsBlocking& b, std::int64_t out_blocks) {
  const std::int64_t most = std::max<std::int64_t>(1, out_blocks);
  if (b.panels < 1 || b.panels > 4096 || b.splits < 1 || b.splits > most) {
    return invalid(family, cat("panels and splits of the config must be in [1, 4096] and [1, ", most, ']'),
                   cat(b.panels, " and ", b.splits));
  }
  if (b.rest < 0 || b.rest > b.panels) {
    return invalid(family, cat("rest of the config must be in [0, ", b.panels, "], its panels"), cat(b.rest));
  }
  return {};
}

}  // namespace rarefy::cpu
