// Stored blocks from the order of one pattern to that of another, whatever their dtype: block i of the result
// is block source[i] of what there was, or zeros where source[i] is −1. Both patterns list their blocks in
// ascending order, so the sources that are none of these ascend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "rarefy/executor.h"
#include "rarefy/linear.h"
#include "rarefy/status.h"

namespace rarefy {

// Sources must be −1, or ascend within [0, blocks).
Status check_sources(std::string_view op, std::span<const std::int64_t> source, std::int64_t blocks);

// From `from` to `to`, source.size() blocks, which do not overlap.
void move_blocks(const std::byte* from, std::span<const std::int64_t> source, std::int64_t block_bytes,
                 std::byte* to, const Executor& executor);

// Within one memory, of source.size() blocks; those that stay are not touched.
void move_blocks_in_place(std::byte* blocks, std::span<const std::int64_t> source, std::int64_t block_bytes);

// The same as move_blocks on a GPU; sources outside of [0, from_blocks) give zeros. src/cuda, or its
// stand-in.
Status move_device_blocks(std::string_view op, const std::byte* from, std::int64_t from_blocks,
                          const std::int64_t* source, std::int64_t blocks, std::int64_t block_bytes,
                          std::byte* to, const Context& context);

}  // namespace rarefy
