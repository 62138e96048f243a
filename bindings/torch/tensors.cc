// The tensors that ops return or keep: made by torch's allocator, in huge pages where they are large; sums of
// rows.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include "adapt.h"
#include "core/arguments.h"
#include "core/message.h"
#include "core/scalar.h"

namespace rarefy::binding {

namespace {

constexpr std::int64_t kMaxDimensions = 64;  // as of torch's own operators

std::int32_t raw_dtype(const Tensor& tensor) {
  std::int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// glibc gives memory of more than 32 MiB back to the system, so each such tensor has new pages: 80 MB took 50
// ms to touch in pages of 4 KB and 14 to 36 in huge ones, on a virtual Zen 4.
constexpr std::int64_t kFresh = 32 << 20;

void want_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t kPage = 4096;
  if (bytes < kFresh) return;
  auto* const first = static_cast<std::byte*>(data);
  const std::uintptr_t ahead = (kPage - reinterpret_cast<std::uintptr_t>(first) % kPage) % kPage;
  const std::uintptr_t length = (static_cast<std::uintptr_t>(bytes) - ahead) / kPage * kPage;
  madvise(first + ahead, length, MADV_HUGEPAGE);  // only advice: errors do not matter
#endif
}

}  // namespace

Tensor Call::empty(std::span<const std::int64_t> sizes, std::int32_t dtype) const {
  std::array<std::int64_t, kMaxDimensions> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0; stride *= std::max<std::int64_t>(sizes[i], 1))
    strides[i] = stride;
  AtenTensorHandle handle = nullptr;
  const auto type = device_ == Device::cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype, type, device_index_, &handle));
  Tensor tensor(handle);
  // By the number of elements first: asking a tensor costs small layers time.
  if (device_ == Device::cpu && stride >= kFresh / 8) {
    want_huge_pages(tensor.data_ptr(), stride * static_cast<std::int64_t>(tensor.element_size()));
  }
  return tensor;
}

Tensor Call::empty_rows(const Tensor& like, std::int64_t columns) const {
  const std::int64_t dimensions = like.dim();
  if (dimensions > kMaxDimensions) {
    raise(op_,
          invalid(op_, cat("inputs must have at most ", kMaxDimensions, " dimensions"), cat(dimensions)));
  }
  std::array<std::int64_t, kMaxDimensions> sizes{};
  for (std::int64_t i = 0; i + 1 < dimensions; ++i) sizes[static_cast<std::size_t>(i)] = like.size(i);
  sizes[static_cast<std::size_t>(dimensions - 1)] = columns;
  return empty({sizes.data(), static_cast<std::size_t>(dimensions)}, raw_dtype(like));
}

Tensor Call::empty_values(const BsrShape& shape, ScalarType dtype) const {
  return empty(std::array{shape.nnzb, shape.block_rows, shape.block_cols}, static_cast<std::int32_t>(dtype));
}

Tensor Call::empty_elements(std::int64_t count, ScalarType dtype) const {
  return empty(std::array{count}, static_cast<std::int32_t>(dtype));
}

Tensor Call::empty_matrix(std::int64_t rows, std::int64_t columns, ScalarType dtype) const {
  return empty(std::array{rows, columns}, static_cast<std::int32_t>(dtype));
}

Tensor Call::empty_bytes(std::int64_t count) const {
  return empty(std::array{count}, aoti_torch_dtype_uint8());
}

Tensor Call::empty_bytes(std::int64_t rows, std::int64_t columns) const {
  return empty(std::array{rows, columns}, aoti_torch_dtype_uint8());
}

Tensor Call::empty_words(std::int64_t count) const {
  return empty(std::array{count}, aoti_torch_dtype_int32());
}

Tensor Call::nothing(const Tensor& like) const { return empty(std::array{std::int64_t{0}}, raw_dtype(like)); }

Tensor Call::sum_rows(const Tensor& tensor, const MatrixView& matrix) const {
  // As many elements are summed here in the time that torch needs to get to its kernel.
  constexpr std::int64_t kFew = 4096;
  if (device_ == Device::cuda || matrix.rows * matrix.cols > kFew) {
    std::vector<std::int64_t> leading(static_cast<std::size_t>(tensor.dim() - 1));
    std::iota(leading.begin(), leading.end(), 0);
    return torch::stable::sum(tensor, leading);
  }
  Tensor sums = empty(std::array{matrix.cols}, raw_dtype(tensor));
  visit_dtype(matrix.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, std::int8_t>) {
      for (std::int64_t j = 0; j < matrix.cols; ++j) {
        double sum = 0;
        for (std::int64_t i = 0; i < matrix.rows; ++i) {
          sum += load(static_cast<const T*>(matrix.data) + i * matrix.row_stride + j);
        }
        store(static_cast<T*>(sums.data_ptr()) + j, sum);
      }
    }
  });
  return sums;
}

MutableMatrixView Call::output(const Tensor& tensor, const MatrixView& rows_of, std::int64_t columns) const {
  return {tensor.data_ptr(), rows_of.dtype, rows_of.rows, columns, columns, device_};
}

}  // namespace rarefy::binding
