// What the safetensors and the bsr-v1 code share: headers from bytes and to bytes.
#pragma once

#include <map>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/message.h"
#include "io/source.h"
#include "rarefy/convert.h"
#include "rarefy/safetensors.h"

namespace rarefy {

// A tensor to be written; the bytes belong to somebody else. With `sparse` they are those of that
// matrix made dense, and come into being while they are written.
struct TensorRef {
  std::string name;
  SafetensorsDType dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
  const BsrMatrix* sparse = nullptr;
};

using Metadata = std::map<std::string, std::string>;

Result<SafetensorsHeader> read_header(std::string_view op, const ByteSource& source);

Result<std::vector<std::byte>> read_data(std::string_view op, const ByteSource& source,
                                         const SafetensorsHeader& header, const StoredTensorInfo& info);

// Checks the tensors, sorts them into file order and returns all that precedes the data.
Result<std::string> format_header(std::string_view op, std::vector<TensorRef>& tensors,
                                  const Metadata& metadata);

Result<std::vector<std::byte>> pack(std::string_view op, std::vector<TensorRef> tensors,
                                    const Metadata& metadata);
Status save(std::string_view op, const std::string& path, std::vector<TensorRef> tensors,
            const Metadata& metadata);

// Runs a public entry's body; running out of memory becomes its status.
template <class Body>
auto guarded(std::string_view op, Body body) -> decltype(body()) {
  const auto failed = [&] {
    return error(StatusCode::out_of_memory, op, "the file must fit in memory", "an allocation failure");
  };
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return failed();
  } catch (const std::length_error&) {
    return failed();
  }
}

}  // namespace rarefy
