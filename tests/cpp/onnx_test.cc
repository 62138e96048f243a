// The custom op for onnxruntime on a table of functions of its own: what becomes of failures and of what was
// borrowed. What it computes, tests/python/test_onnx.py asks onnxruntime itself.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "onnx/abi.h"

extern "C" ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base);

namespace {

// Of onnxruntime, as far as the op needs it: counts what is out, and fails at what it is told.
struct FakeRuntime {
  std::size_t failing = 0;  // a function; kCreateStatus: none
  int shapes = 0, statuses = 0;
  std::vector<const ort::CustomOp*> ops;
};
FakeRuntime fake;

struct FakeStatus {
  std::string text;
};

ort::Status* status_of(const std::string& text) {
  ++fake.statuses;
  return reinterpret_cast<ort::Status*>(new FakeStatus{text});
}
ort::Status* result_of(std::size_t function) {
  return fake.failing == function && function != 0 ? status_of("no room in the arena") : nullptr;
}

int object;  // what opaque pointers point to
ort::Api table() {
  ort::Api api{};
  const auto set = [&](std::size_t at, auto f) { api.functions[at] = reinterpret_cast<const void*>(+f); };
  set(ort::kCreateStatus, [](ort::ErrorCode, const char* text) { return status_of(text); });
  set(ort::kGetErrorMessage,
      [](const ort::Status* status) { return reinterpret_cast<const FakeStatus*>(status)->text.c_str(); });
  set(ort::kReleaseStatus, [](ort::Status* status) {
    auto* made = reinterpret_cast<FakeStatus*>(status);
    made->text.assign(made->text.size(), '?');
    delete made;
    --fake.statuses;
  });
  set(ort::kCreateCustomOpDomain, [](const char*, ort::CustomOpDomain** domain) {
    *domain = reinterpret_cast<ort::CustomOpDomain*>(&object);
    return result_of(ort::kCreateCustomOpDomain);
  });
  set(ort::kCustomOpDomainAdd, [](ort::CustomOpDomain*, const ort::CustomOp* op) {
    fake.ops.push_back(op);
    return result_of(ort::kCustomOpDomainAdd);
  });
  set(ort::kAddCustomOpDomain,
      [](ort::SessionOptions*, ort::CustomOpDomain*) { return result_of(ort::kAddCustomOpDomain); });
  set(ort::kGetAttributeInt, [](const ort::KernelInfo*, const char* name, std::int64_t* value) {
    *value = std::strcmp(name, "constant") == 0 ? 0 : std::strcmp(name, "threads") == 0 ? 1 : 4;
    return result_of(ort::kGetAttributeInt);
  });
  set(ort::kGetAttributeString, [](const ort::KernelInfo*, const char*, char*, std::size_t*) {
    return status_of("no such attribute");
  });
  set(ort::kGetInputCount, [](const ort::KernelContext*, std::size_t* count) {
    *count = 5;
    return result_of(ort::kGetInputCount);
  });
  set(ort::kGetInput, [](const ort::KernelContext*, std::size_t, const ort::Value** value) {
    *value = reinterpret_cast<const ort::Value*>(&object);
    return result_of(ort::kGetInput);
  });
  set(ort::kGetTensorShape, [](const ort::Value*, ort::Shape** shape) {
    if (auto* status = result_of(ort::kGetTensorShape)) return status;
    ++fake.shapes;
    *shape = reinterpret_cast<ort::Shape*>(&object);
    return static_cast<ort::Status*>(nullptr);
  });
  set(ort::kReleaseShape, [](ort::Shape*) { --fake.shapes; });
  set(ort::kGetElementType, [](const ort::Shape*, ort::ElementType* type) {
    *type = ort::f32;
    return result_of(ort::kGetElementType);
  });
  set(ort::kGetDimensionsCount, [](const ort::Shape*, std::size_t* count) {
    *count = 1;
    return result_of(ort::kGetDimensionsCount);
  });
  set(ort::kGetDimensions, [](const ort::Shape*, std::int64_t* sizes, std::size_t) {
    *sizes = 3;  // not in_features
    return result_of(ort::kGetDimensions);
  });
  set(ort::kGetTensorMutableData, [](ort::Value*, void** data) {
    *data = &object;
    return result_of(ort::kGetTensorMutableData);
  });
  return api;
}
const ort::Api kApi = table();
const ort::ApiBase kBase = {[](std::uint32_t) { return &kApi; }, nullptr};

// The text of a status, which goes.
std::string taken(ort::Status* status) {
  if (status == nullptr) return "";
  const std::string text =
      kApi.call<const char*>(ort::kGetErrorMessage, static_cast<const ort::Status*>(status));
  kApi.call<void>(ort::kReleaseStatus, status);
  return text;
}

std::string registered(std::size_t failing) {
  fake.failing = failing;
  return taken(RegisterCustomOps(nullptr, &kBase));
}

TEST(OnnxTest, FailuresSayWhatOnnxruntimeSaid) {
  fake = {};
  EXPECT_EQ(
      registered(ort::kCreateCustomOpDomain),
      "[com.rarefy::SparseLinear] onnxruntime must do what the op asks for; got an error of function 26: no "
      "room in the arena");
  EXPECT_EQ(fake.statuses, 0);
}

TEST(OnnxTest, ShapesGoBackWhateverFails) {
  fake = {};
  ASSERT_EQ(registered(0), "");
  if (fake.ops.empty()) GTEST_SKIP() << "registered before in this process";
  const ort::CustomOp* op = fake.ops.front();
  void* kernel = nullptr;
  ASSERT_EQ(taken(op->create_kernel_2(op, &kApi, nullptr, &kernel)), "");
  const auto run = [&](std::size_t failing) {
    fake.failing = failing;
    return taken(op->compute_2(kernel, nullptr));
  };
  EXPECT_EQ(run(0), "[com.rarefy::SparseLinear] x must end with in_features = 4; got (3)");
  for (const auto function : {ort::kGetTensorShape, ort::kGetElementType, ort::kGetDimensionsCount,
                              ort::kGetDimensions, ort::kGetTensorMutableData}) {
    EXPECT_NE(run(function).find(": no room in the arena"), std::string::npos) << function;
    EXPECT_EQ(fake.shapes, 0) << function;
  }
  EXPECT_EQ(fake.statuses, 0);
  op->destroy(kernel);
}

}  // namespace
