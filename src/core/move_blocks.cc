// Movement of blocks on the CPU: memory's speed is the limit, so neighbours that stay together move together.
#include "core/move_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/message.h"

namespace rarefy {

namespace {

// Bytes of one task: some pages, so that threads share what is left.
constexpr std::int64_t kTaskBytes = 1 << 20;

// Blocks begin … end, of a size that a register holds or of any other.
template <class Move>
void with_size(std::int64_t block_bytes, Move&& move) {
  switch (block_bytes) {
    case 1: return move(std::array<std::byte, 1>{});
    case 2: return move(std::array<std::byte, 2>{});
    case 4: return move(std::array<std::byte, 4>{});
    case 8: return move(std::array<std::byte, 8>{});
    case 16: return move(std::array<std::byte, 16>{});
    default: return move(std::array<std::byte, 0>{});
  }
}

template <class Block>
void move_range(const std::byte* from, std::span<const std::int64_t> source, std::int64_t block_bytes,
                std::byte* to, std::int64_t begin, std::int64_t end) {
  if constexpr (std::tuple_size_v<Block> != 0) {
    const auto* blocks = reinterpret_cast<const Block*>(from);
    auto* out = reinterpret_cast<Block*>(to);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t s = source[static_cast<std::size_t>(i)];
      out[i] = s < 0 ? Block{} : blocks[s];
    }
    return;
  }
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t s = source[static_cast<std::size_t>(i)];
    std::int64_t run = 1;  // of blocks that stay neighbours, or are all new
    const std::int64_t step = s < 0 ? 0 : 1;
    while (i + run < end && source[static_cast<std::size_t>(i + run)] == s + step * run) ++run;
    std::byte* at = to + i * block_bytes;
    const auto bytes = static_cast<std::size_t>(run * block_bytes);
    if (s < 0) {
      std::memset(at, 0, bytes);
    } else {
      std::memcpy(at, from + s * block_bytes, bytes);
    }
    i += run;
  }
}

}  // namespace

Status check_sources(std::string_view op, std::span<const std::int64_t> source, std::int64_t blocks) {
  std::int64_t last = -1;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == -1) continue;
    if (source[i] <= last || source[i] >= blocks) {
      return invalid(op, cat("source must be -1, or ascend within [0, ", blocks, ')'),
                     cat("source[", i, "]=", source[i]));
    }
    last = source[i];
  }
  return {};
}

void move_blocks(const std::byte* from, std::span<const std::int64_t> source, std::int64_t block_bytes,
                 std::byte* to, const Executor& executor) {
  const auto count = static_cast<std::int64_t>(source.size());
  const std::int64_t per_task =
      std::max<std::int64_t>(1, kTaskBytes / std::max<std::int64_t>(1, block_bytes));
  with_size(block_bytes, [&](auto block) {
    executor.parallel_for((count + per_task - 1) / per_task, [&](std::int64_t task) {
      const std::int64_t begin = task * per_task;
      move_range<decltype(block)>(from, source, block_bytes, to, begin, std::min(begin + per_task, count));
    });
  });
}

// Blocks that come from behind move in ascending order, those that come from before in descending order: then
// a place is only written to when what it held has left it, as sources ascend. Nothing comes to new ones.
void move_blocks_in_place(std::byte* blocks, std::span<const std::int64_t> source, std::int64_t block_bytes) {
  const auto count = static_cast<std::int64_t>(source.size());
  with_size(block_bytes, [&](auto block) {
    constexpr std::size_t fixed = std::tuple_size_v<decltype(block)>;
    const std::size_t bytes = fixed != 0 ? fixed : static_cast<std::size_t>(block_bytes);
    const auto move = [&](std::int64_t i, std::int64_t s) {
      std::memcpy(blocks + i * block_bytes, blocks + s * block_bytes, bytes);
    };
    for (std::int64_t i = 0; i < count; ++i) {
      if (const std::int64_t s = source[static_cast<std::size_t>(i)]; s > i) move(i, s);
    }
    for (std::int64_t i = count; i-- > 0;) {
      const std::int64_t s = source[static_cast<std::size_t>(i)];
      if (s < 0) {
        std::memset(blocks + i * block_bytes, 0, bytes);
      } else if (s < i) {
        move(i, s);
      }
    }
  });
}

}  // namespace rarefy
