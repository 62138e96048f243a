// The part of onnxruntime's C ABI that the custom op uses. No package that can be installed everywhere has
// its headers, and this much never changes: its table of functions only grows at the end (version 1 has 102),
// and a custom op says which version its own table is of. `make test` runs it in the onnxruntime that is
// installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

// Opaque: onnxruntime's own.
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct Shape;  // OrtTensorTypeAndShapeInfo

enum ElementType : int { undefined = 0, f32 = 1, i32 = 6, f16 = 10, f64 = 11, bf16 = 16 };
enum ErrorCode : int { fail = 1, invalid_argument = 2 };
enum Presence : int { required = 0, optional = 1 };

// Functions of the table, by position.
struct Api {
  const void* functions[102];

  template <class R, class... Args>
  R call(std::size_t position, Args... args) const {
    return reinterpret_cast<R (*)(Args...)>(const_cast<void*>(functions[position]))(args...);
  }
};

struct ApiBase {
  const Api* (*get_api)(std::uint32_t version);
  const char* (*get_version)();
};

enum Function : std::size_t {
  kCreateStatus = 0,           // (ErrorCode, const char*) → Status*
  kGetErrorMessage = 2,        // (const Status*) → const char*, the status's
  kCreateCustomOpDomain = 26,  // (const char*, CustomOpDomain**)
  kCustomOpDomainAdd = 27,     // (CustomOpDomain*, const CustomOp*)
  kAddCustomOpDomain = 28,     // (SessionOptions*, CustomOpDomain*)
  kGetTensorMutableData = 51,  // (Value*, void**)
  kGetElementType = 60,        // (const Shape*, ElementType*)
  kGetDimensionsCount = 61,    // (const Shape*, size_t*)
  kGetDimensions = 62,         // (const Shape*, int64_t*, size_t)
  kGetTensorShape = 65,        // (const Value*, Shape**)
  kGetAttributeInt = 86,       // (const KernelInfo*, const char*, int64_t*)
  kGetAttributeString = 87,    // (const KernelInfo*, const char*, char*, size_t*)
  kGetInputCount = 88,         // (const KernelContext*, size_t*)
  kGetInput = 90,              // (const KernelContext*, size_t, const Value**)
  kGetOutput = 91,             // (KernelContext*, size_t, const int64_t*, size_t, Value**)
  kReleaseStatus = 93,         // (Status*)
  kReleaseShape = 99,          // (Shape*)
};

// What an op is to onnxruntime; entries that stay null are never called at this version.
struct CustomOp {
  std::uint32_t version = 16;  // the first whose kernels return a Status: onnxruntime 1.16
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = nullptr;
  ElementType (*input_type)(const CustomOp*, std::size_t) = nullptr;
  std::size_t (*input_count)(const CustomOp*) = nullptr;
  ElementType (*output_type)(const CustomOp*, std::size_t) = nullptr;
  std::size_t (*output_count)(const CustomOp*) = nullptr;
  void (*compute)(void*, KernelContext*) = nullptr;
  void (*destroy)(void*) = nullptr;
  Presence (*input_presence)(const CustomOp*, std::size_t) = nullptr;
  Presence (*output_presence)(const CustomOp*, std::size_t) = nullptr;
  int (*input_memory)(const CustomOp*, std::size_t) = nullptr;
  int (*variadic[4])(const CustomOp*) = {};
  Status* (*create_kernel_2)(const CustomOp*, const Api*, const KernelInfo*, void**) = nullptr;
  Status* (*compute_2)(void*, KernelContext*) = nullptr;
};

}  // namespace ort
