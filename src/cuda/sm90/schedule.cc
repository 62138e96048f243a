#include "cuda/sm90/schedule.h"

#include <algorithm>
#include <queue>

namespace rarefy::sm90 {

Schedule assign(std::vector<Tile> tiles, const std::vector<double>& clocks, std::int64_t workers) {
  const auto cost = [&](const Tile& t) { return clocks[static_cast<std::size_t>(t.group)]; };
  std::stable_sort(tiles.end() - std::min<std::ptrdiff_t>(std::ssize(tiles), 2 * workers), tiles.end(),
                   [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
  Schedule schedule;
  schedule.lists.resize(static_cast<std::size_t>(std::min<std::int64_t>(workers, std::ssize(tiles))));
  using Load = std::pair<double, std::size_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (std::size_t w = 0; w < schedule.lists.size(); ++w) loads.emplace(0, w);
  for (const Tile& tile : tiles) {
    auto [load, worker] = loads.top();
    loads.pop();
    schedule.lists[worker].push_back(tile);
    load += cost(tile);
    schedule.clocks = std::max(schedule.clocks, load);
    loads.emplace(load, worker);
  }
  return schedule;
}

std::vector<Tile> tile_order(std::int64_t groups, std::int64_t token_tiles, std::int64_t w_bytes) {
  const std::int64_t chunks = std::max<std::int64_t>(1, w_bytes / (20 << 20));
  std::vector<Tile> tiles;
  tiles.reserve(static_cast<std::size_t>(groups * token_tiles));
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::int64_t t = 0; t < token_tiles; ++t) {
      for (std::int64_t g = chunk; g < groups; g += chunks) {  // every chunk has long groups and short ones
        tiles.push_back({static_cast<int>(g), static_cast<int>(t)});
      }
    }
  }
  return tiles;
}

void pad_to_line(std::vector<std::int32_t>& words) { words.resize((words.size() + 31) / 32 * 32, 0); }

void append_ranges(const Schedule& schedule, std::vector<std::int32_t>& words) {
  words.push_back(0);
  for (const auto& list : schedule.lists)
    words.push_back(words.back() + static_cast<std::int32_t>(list.size()));
  pad_to_line(words);
}

}  // namespace rarefy::sm90
