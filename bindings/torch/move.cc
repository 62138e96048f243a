// Stored blocks from one pattern to another, for PatternChange: whole blocks as bytes, of any dtype.
#include <torch/csrc/stable/library.h>

#include <span>

#include "adapt.h"
#include "core/message.h"
#include "core/move_blocks.h"

namespace rarefy::binding {

namespace {

constexpr std::string_view op = "_move_blocks";

void check_arguments(const Call& call, const Tensor& blocks, const Tensor& source) {
  if (blocks.dim() != 2 || !blocks.is_contiguous() || blocks.scalar_type() != ScalarType::Byte) {
    raise(op, invalid(op, "blocks must be contiguous uint8 of 2 dimensions", "another tensor"));
  }
  call.check_device("source", source);
  if (source.dim() != 1 || !source.is_contiguous() || source.scalar_type() != ScalarType::Long) {
    raise(op, invalid(op, "source must be contiguous int64 of 1 dimension", "another tensor"));
  }
}

std::span<const std::int64_t> positions(const Tensor& source) {
  return {static_cast<const std::int64_t*>(source.data_ptr()), static_cast<std::size_t>(source.numel())};
}

std::byte* bytes_of(const Tensor& blocks) { return static_cast<std::byte*>(blocks.data_ptr()); }

Tensor move(const Tensor& blocks, const Tensor& source) {
  const Call call(op, "blocks", blocks);
  check_arguments(call, blocks, source);
  const std::int64_t count = blocks.size(0), bytes = blocks.size(1);
  const bool on_host = call.device() == Device::cpu;
  if (on_host) check(op, check_sources(op, positions(source), count));
  Tensor moved = call.empty_bytes(source.numel(), bytes);
  if (on_host) {
    move_blocks(bytes_of(blocks), positions(source), bytes, bytes_of(moved), call.context().executor);
  } else {
    check(op, move_device_blocks(op, bytes_of(blocks), count, positions(source).data(), source.numel(), bytes,
                                 bytes_of(moved), call.context()));
  }
  return moved;
}

void move_in_place(const Tensor& blocks, const Tensor& source) {
  const Call call(op, "blocks", blocks);
  check_arguments(call, blocks, source);
  if (source.numel() != blocks.size(0)) {
    raise(op, invalid(op, cat("source must have ", blocks.size(0), " elements"), cat(source.numel())));
  }
  check(op, check_sources(op, positions(source), blocks.size(0)));
  move_blocks_in_place(bytes_of(blocks), positions(source), blocks.size(1));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def("_move_blocks(Tensor blocks, Tensor source) -> Tensor");
  m.def("_move_blocks_(Tensor(a!) blocks, Tensor source) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_move_blocks", TORCH_BOX(&move));
  m.impl("_move_blocks_", TORCH_BOX(&move_in_place));
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) { m.impl("_move_blocks", TORCH_BOX(&move)); }

}  // namespace rarefy::binding
