// One border through several matrices: histograms of each, and limits on how much each may lose.
#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "core/message.h"
#include "prune/check.h"
#include "prune/cut.h"

namespace rarefy {

namespace prune {
namespace {

constexpr std::string_view op = "allocate_global";

// What the search asks of a layer of any dtype, with keys of one kind.
template <class Key>
struct Layer {
  virtual ~Layer() = default;
  virtual void count(const Digits<Key>& digits, Histogram& counts) = 0;
};

template <class T>
class LayerOf final : public Layer<typename Units<T>::Key> {
 public:
  LayerOf(const PruneLayer& layer, const Executor& executor)
      : units_(layer.scores, layer.units),
        scratch_(static_cast<std::size_t>(std::max(1, executor.threads))),
        counter_(units_, executor, scratch_) {
    units_.keep_keys(executor, scratch_);
  }
  void count(const Digits<typename Units<T>::Key>& digits, Histogram& counts) override {
    counter_.count(digits, counts);
  }

 private:
  Units<T> units_;
  std::vector<Scratch<typename Units<T>::Real>> scratch_;
  Counter<T> counter_;
};

// What is left over at the border, in proportion to the room of each layer; largest remainders get the rest.
void share(std::int64_t rest, const std::vector<std::int64_t>& room, std::span<std::int64_t> removed) {
  const auto all = static_cast<double>(std::accumulate(room.begin(), room.end(), std::int64_t{0}));
  std::vector<std::pair<double, std::size_t>> parts;
  std::int64_t given = 0;
  for (std::size_t i = 0; i < room.size(); ++i) {
    const double part = all > 0 ? static_cast<double>(rest) * (static_cast<double>(room[i]) / all) : 0;
    const auto whole = std::min(room[i], static_cast<std::int64_t>(part));
    removed[i] += whole;
    given += whole;
    if (whole < room[i]) parts.emplace_back(static_cast<double>(whole) - part, i);
  }
  std::sort(parts.begin(), parts.end());
  for (std::size_t p = 0; given < rest; p = (p + 1) % parts.size()) {
    ++removed[parts[p].second];  // rounding leaves fewer than one for each
    ++given;
  }
}

template <class Key>
void search(std::span<const PruneLayer> layers, std::vector<std::unique_ptr<Layer<Key>>>& views,
            std::int64_t remove, std::span<std::int64_t> removed) {
  const std::size_t n = layers.size();
  const auto limited = [&](std::size_t i, std::int64_t count) {
    return std::clamp(count, layers[i].least, layers[i].most);
  };
  std::vector<Histogram> counts(n);
  std::vector<std::int64_t> below(n, 0), at(n, 0);
  Digits<Key> digits;
  while (digits.shift > 0) {
    for (std::size_t i = 0; i < n; ++i) views[i]->count(digits, counts[i]);
    // The first digit up to which enough leave.
    std::size_t digit = 0;
    for (;; ++digit) {
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < n; ++i) sum += limited(i, below[i] + counts[i][digit]);
      if (sum >= remove || digit + 1 == counts[0].size()) break;
      for (std::size_t i = 0; i < n; ++i) below[i] += counts[i][digit];
    }
    for (std::size_t i = 0; i < n; ++i) at[i] = counts[i][digit];
    digits.append(static_cast<std::int64_t>(digit));
  }
  std::vector<std::int64_t> room(n);
  std::int64_t rest = remove;
  for (std::size_t i = 0; i < n; ++i) {
    removed[i] = limited(i, below[i]);
    room[i] = limited(i, below[i] + at[i]) - removed[i];
    rest -= removed[i];
  }
  if (rest > 0) share(rest, room, removed);
}

template <class Key>
void run(std::span<const PruneLayer> layers, std::int64_t remove, std::span<std::int64_t> removed,
         const Executor& executor) {
  std::vector<std::unique_ptr<Layer<Key>>> views;
  for (const PruneLayer& layer : layers) {
    visit_float(layer.scores.matrix.dtype, [&]<class T>(T) {
      if constexpr (std::is_same_v<typename Units<T>::Key, Key>) {
        views.push_back(std::make_unique<LayerOf<T>>(layer, executor));
      }
    });
  }
  search(layers, views, remove, removed);
}

}  // namespace
}  // namespace prune

Status allocate_global(std::span<const PruneLayer> layers, std::int64_t remove,
                       std::span<std::int64_t> removed, const Executor& executor) {
  using prune::op;
  if (removed.size() != layers.size()) {
    return invalid(op, cat("removed must have ", layers.size(), " elements, one a layer"),
                   cat(removed.size()));
  }
  std::int64_t least = 0, most = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const PruneLayer& layer = layers[i];
    const Result<std::int64_t> units = prune::check(op, layer.scores, layer.units);
    if (!units.ok()) return units.status();
    if (layer.units.each_row)
      return invalid(op, "units must be counted over the whole matrix", "in each row");
    if ((layer.scores.matrix.dtype == DType::f64) != (layers[0].scores.matrix.dtype == DType::f64)) {
      return mismatch(op, "scores must be f64 in all layers or in none", cat("layer ", i, " differs"));
    }
    if (layer.least < 0 || layer.least > layer.most || layer.most > *units) {
      return invalid(op, cat("limits must satisfy 0 <= least <= most <= ", *units, ", the layer's units"),
                     cat(layer.least, " and ", layer.most, " for layer ", i));
    }
    least += layer.least;
    most += layer.most;
  }
  if (remove < least || remove > most) {
    return invalid(op, cat("remove must be in [", least, ", ", most, "], what the layers' limits allow"),
                   cat(remove));
  }
  try {
    if (layers.empty()) return {};
    if (layers[0].scores.matrix.dtype == DType::f64) {
      prune::run<std::uint64_t>(layers, remove, removed, executor);
    } else {
      prune::run<std::uint32_t>(layers, remove, removed, executor);
    }
    return {};
  } catch (const std::bad_alloc&) {
    return prune::no_memory(op);
  }
}

}  // namespace rarefy
