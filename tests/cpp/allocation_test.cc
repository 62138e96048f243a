// Every entry of the library while memory runs out: the n-th allocation fails, or it and all after it, for
// n = 0, 1, … until the call succeeds. Each call must return out_of_memory (or the error it would return
// anyway), give back what it took, and leave files as they were. (The output matrix of a product may be
// partly written.) A binary of its own: it replaces operator new, and aligned_alloc.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <thread>

#include "rarefy/rarefy.h"

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::atomic<std::int64_t> until_failure{kNever};  // allocations that still succeed
std::atomic<bool> only_one{true};                 // of them fails; else all from there on
std::atomic<std::int64_t> live{0};                // allocations that nobody gave back

bool fails() {
  if (until_failure.load(std::memory_order_relaxed) == kNever) return false;
  const std::int64_t left = until_failure.fetch_sub(1);
  return only_one ? left == 0 : left <= 0;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (fails()) return nullptr;
  void* p = nullptr;
  if (::posix_memalign(&p, std::max(alignment, sizeof(void*)), bytes) != 0) return nullptr;
  ++live;
  return p;
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* p = allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

void release(void* p) {
  if (p != nullptr) --live;
  std::free(p);  // NOLINT(cppcoreguidelines-no-malloc)
}

}  // namespace

constexpr std::size_t kAlignment = __STDCPP_DEFAULT_NEW_ALIGNMENT__;
void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, kAlignment); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, kAlignment); }
void* operator new(std::size_t bytes, std::align_val_t a) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t bytes, std::align_val_t a) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(a));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, kAlignment); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, kAlignment);
}
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { release(p); }
// What the kernels' working memory comes from; free() gives it back uncounted.
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  if (fails()) return nullptr;
  void* p = nullptr;
  return ::posix_memalign(&p, alignment, bytes) == 0 ? p : nullptr;
}

namespace rarefy::test {
namespace {

// Allocations fail from construction on, until destruction.
class Shortage {
 public:
  Shortage(std::int64_t after, bool one) {
    only_one = one;
    until_failure = after;
  }
  ~Shortage() { until_failure = kNever; }
  Shortage(const Shortage&) = delete;
  Shortage& operator=(const Shortage&) = delete;

  static bool over() { return until_failure.load() > 0; }  // the call needed no more
};

// What all entries take: W is (40, 36) in 4×4 blocks, half of them stored; 70 tokens and 2.
struct Inputs {
  static constexpr std::int64_t kRows = 40, kCols = 36, kTokens = 70;
  std::vector<std::int32_t> crow{0}, col;
  std::vector<float> values, bias = std::vector<float>(kRows, 0.5F);
  std::vector<float> x = std::vector<float>(kTokens * kCols, 1), dy = std::vector<float>(kTokens * kRows, 2);
  std::vector<float> dense = std::vector<float>(kRows * kCols, 1);
  std::vector<float> out = std::vector<float>(kTokens * kRows);
  // For pruning: scores that differ, a mask, double weights, and I for H and both its relatives.
  std::vector<float> scores = std::vector<float>(kRows * kCols);
  std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(kRows * mask_row_bytes(kCols), 0xFF);
  std::vector<double> weight = std::vector<double>(kRows * kCols, 1),
                      identity = std::vector<double>(kCols * kCols);
  std::optional<Pattern> pattern, down, square;  // down: (36, 40), square: (40, 40), a block a row
  std::optional<BsrMatrix> bsr;
  std::optional<CsrMatrix> csr;
  std::optional<CscMatrix> csc;
  std::optional<CooMatrix> coo;
  SafetensorsFile tensors;
  BsrFile file;
  std::vector<std::byte> tensor_bytes, file_bytes;
  std::string directory, in_path, out_path, missing_path;

  Inputs() {
    for (std::int32_t i = 0; i < 10; ++i) {
      for (std::int32_t j = i % 2; j < 9; j += 2) col.push_back(j);
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    pattern = *Pattern::create({kRows, kCols, 4, 4, 0}, crow, col);
    const std::vector<std::int32_t> each{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    down = *Pattern::create({kCols, kRows, 4, 4, 0}, each, std::span(each).first(9));
    std::vector<std::int32_t> rows = each;
    rows.push_back(10);
    square = *Pattern::create({kRows, kRows, 4, 4, 0}, rows, each);
    for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 37 % 101);
    for (std::size_t i = 0; i < static_cast<std::size_t>(kCols); ++i) identity[i * (kCols + 1)] = 1;
    values.assign(static_cast<std::size_t>(pattern->shape().value_count()), 0.25F);
    const auto bytes = std::as_bytes(std::span(values));
    bsr = BsrMatrix{*pattern, DType::f32, {bytes.begin(), bytes.end()}};
    csr = *bsr_to_csr(bsr->view());
    csc = *csr_to_csc(*csr);
    coo = *csr_to_coo(*csr);
    tensors.tensors["a long name of a tensor, longer than a short string"] = {
        SafetensorsDType::f32, {2, 3}, std::vector<std::byte>(24)};
    tensors.tensors["b"] = {SafetensorsDType::i64, {4}, std::vector<std::byte>(32)};
    tensors.metadata["a key that does not fit in a short string"] = "a value that does not fit either";
    file.weights.emplace("model.layers.0.a_weight", *bsr);
    file.tensors = tensors.tensors;
    file.metadata = tensors.metadata;
    tensor_bytes = *serialize_safetensors(tensors);
    file_bytes = *serialize_bsr_file(file);
    directory = std::filesystem::temp_directory_path() / ("rarefy_allocation_" + std::to_string(::getpid()));
    std::filesystem::create_directories(directory);
    in_path = directory + "/in";
    out_path = directory + "/out";
    missing_path = directory + "/none";
    std::ofstream(in_path, std::ios::binary)
        .write(reinterpret_cast<const char*>(file_bytes.data()), std::ssize(file_bytes));
  }
  ~Inputs() { std::filesystem::remove_all(directory); }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  BsrView w() const { return {pattern->view(), values.data(), DType::f32, Device::cpu}; }
  MatrixView view(const std::vector<float>& m, std::int64_t rows, std::int64_t cols) const {
    return {m.data(), DType::f32, rows, cols, cols};
  }
};

// A mask of 40 × 36, 1 at even columns.
void alternate(Inputs& in) {
  for (std::uint8_t& byte : in.mask) byte = 0x55;
  for (std::size_t last = 4; last < in.mask.size(); last += 5) in.mask[last] = 0x05;
}

Status mask_of(Inputs& in, const Context& context, const PruneUnits& units, std::int64_t remove) {
  const MatrixView scores = in.view(in.scores, Inputs::kRows, Inputs::kCols);
  return prune_mask({scores, Importance::magnitude}, units, remove, in.mask.data(), context.executor)
      .status();
}

Reconstruction reconstruction_of(Inputs& in, const PruneUnits& units, std::int64_t remove) {
  return {in.weight.data(), Inputs::kRows, Inputs::kCols, units, remove, in.mask.data()};
}

struct Entry {
  const char* name;
  std::function<Status(Inputs&, const Context&)> call;
  StatusCode code = StatusCode::ok;  // of a call that memory does not fail
  const char* impl = nullptr;
};

void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.name; }

Status linear_of(Inputs& in, const Context& context, std::int64_t tokens) {
  return linear(in.view(in.x, tokens, Inputs::kCols), in.w(), in.bias.data(), Activation::gelu_tanh,
                {in.out.data(), DType::f32, tokens, Inputs::kRows, Inputs::kRows}, context);
}

Status feed_forward_of(Inputs& in, const Context& context, std::int64_t tokens) {
  const FeedForward layers{
      {in.w(), in.bias.data()}, {{in.down->view(), in.values.data()}}, Activation::silu, LayerView{in.w()}};
  return feed_forward(in.view(in.x, tokens, Inputs::kCols), layers,
                      {in.out.data(), DType::f32, tokens, Inputs::kCols, Inputs::kCols}, context);
}

std::vector<Entry> entries() {
  using C = const Context&;
  std::vector<Entry> all{
      {"Pattern",
       [](Inputs& in, C) { return Pattern::create(in.pattern->shape(), in.crow, in.col).status(); }},
      {"DenseToBsr",
       [](Inputs& in, C) {
         return dense_to_bsr(in.view(in.dense, Inputs::kRows, Inputs::kCols), {4, 3}).status();
       }},
      {"BsrToDense",
       [](Inputs& in, C) {
         return bsr_to_dense(in.w(),
                             {in.out.data(), DType::f32, Inputs::kRows, Inputs::kCols, Inputs::kCols});
       }},
      {"BsrToCsr", [](Inputs& in, C) { return bsr_to_csr(in.w()).status(); }},
      {"CsrToBsr",
       [](Inputs& in, C) {
         return csr_to_bsr(*in.csr, {4, 4}).status();
       }},
      {"CsrToCsc", [](Inputs& in, C) { return csr_to_csc(*in.csr).status(); }},
      {"CscToCsr", [](Inputs& in, C) { return csc_to_csr(*in.csc).status(); }},
      {"CsrToCoo", [](Inputs& in, C) { return csr_to_coo(*in.csr).status(); }},
      {"CooToCsr", [](Inputs& in, C) { return coo_to_csr(*in.coo).status(); }},
      {"BlockMaskByNorm",
       [](Inputs& in, C) {
         return block_mask_by_norm(in.view(in.dense, Inputs::kRows, Inputs::kCols), {4, 4}, 0.5).status();
       }},
      {"WorkspaceSize",
       [](Inputs&, C) {
         return workspace_size(make_problem(Op::linear, {40, 36, 4, 4, 9}, 8, DType::f32)).status();
       }},
      {"ForceImpl", [](Inputs&, C) { return force_impl(forced_impl()); }},
      {"ReadHeader", [](Inputs& in, C) { return read_safetensors_header(in.in_path).status(); }},
      {"ReadSafetensors", [](Inputs& in, C) { return read_safetensors(in.in_path).status(); }},
      {"ParseSafetensors", [](Inputs& in, C) { return parse_safetensors(in.tensor_bytes).status(); }},
      {"SerializeSafetensors", [](Inputs& in, C) { return serialize_safetensors(in.tensors).status(); }},
      {"WriteSafetensors", [](Inputs& in, C) { return write_safetensors(in.out_path, in.tensors); }},
      {"ReadBsrFile", [](Inputs& in, C) { return read_bsr_file(in.in_path).status(); }},
      {"ParseBsrFile", [](Inputs& in, C) { return parse_bsr_file(in.file_bytes).status(); }},
      {"SerializeBsrFile", [](Inputs& in, C) { return serialize_bsr_file(in.file).status(); }},
      {"WriteBsrFile", [](Inputs& in, C) { return write_bsr_file(in.out_path, in.file); }},
      {"PruneMask", [](Inputs& in, C c) { return mask_of(in, c, {}, 700); }},
      {"PruneMaskOfBlocks",
       [](Inputs& in, C c) {
         return mask_of(in, c, {{4, 4}}, 30);
       }},
      {"PruneMaskOfEachRow",
       [](Inputs& in, C c) {
         return mask_of(in, c, {{1, 1}, 0, 0, true}, 9);
       }},
      {"PruneMaskOfGroups",
       [](Inputs& in, C c) {
         return mask_of(in, c, {{1, 1}, 2, 4}, 200);
       }},
      {"AllocateGlobal",
       [](Inputs& in, C c) {
         const MatrixView scores = in.view(in.scores, Inputs::kRows, Inputs::kCols);
         const PruneLayer layers[] = {{{scores}, {}, 0, 1440}, {{scores}, {{4, 4}}, 0, 90}};
         std::int64_t removed[2] = {};
         return allocate_global(layers, 700, removed, c.executor);
       }},
      {"SparseGpt",
       [](Inputs& in, C c) {
         const Reconstruction problem = reconstruction_of(in, {{4, 4}}, 45);
         return sparse_gpt(problem, in.identity.data(), 16, false, 0, c.executor);
       }},
      {"LeastSquares",
       [](Inputs& in, C c) {
         alternate(in);
         const Reconstruction problem = reconstruction_of(in, {}, 0);
         return least_squares(problem, in.identity.data(), in.identity.data(), c.executor);
       }},
      {"BlockObs",
       [](Inputs& in, C c) {
         const Reconstruction problem = reconstruction_of(in, {{4, 4}, 0, 0, true}, 4);
         return block_obs(problem, in.identity.data(), 2, c.executor);
       }},
      {"BlockObsCosts",
       [](Inputs& in, C c) {
         const Reconstruction problem = reconstruction_of(in, {{4, 4}}, 0);
         double costs[90];
         return block_obs_costs(problem, in.identity.data(), 2, costs, c.executor);
       }},
      {"SparseGptToInt8",
       [](Inputs& in, C c) {
         alternate(in);
         const Reconstruction problem = reconstruction_of(in, {}, 0);
         return sparse_gpt(problem, in.identity.data(), 16, true, 127, c.executor);
       }},
      // Errors are texts, which take memory, too.
      {"SparseProduct",
       [](Inputs& in, C c) {
         const BsrView down{in.down->view(), in.values.data()};
         const Result<SparseProduct> product = sparse_product("test", in.w(), down, c.executor);
         if (!product.ok()) return product.status();
         std::int32_t words[1024];
         const std::span plan =
             std::span(words).first(static_cast<std::size_t>(row_plan_size(product->shape)));
         return write_product("test", in.w(), down, *product, plan, in.out.data(), c.executor);
       }},
      {"SampledProduct",
       [](Inputs& in, C c) {
         return sampled_product("test", in.w(), {in.down->view(), in.values.data()}, in.square->view(),
                                in.out.data(), c.executor);
       }},
      {"PatternOfBadIndices",
       [](Inputs& in, C) { return Pattern::create(in.pattern->shape(), in.col, in.crow).status(); },
       StatusCode::invalid_argument},
      {"LinearOfBadShape",
       [](Inputs& in, C context) {
         MatrixView x = in.view(in.x, 70, 35);
         return linear(x, in.w(), nullptr, Activation::none, {in.out.data(), DType::f32, 70, 40, 40},
                       context);
       },
       StatusCode::invalid_argument},
      {"ReadMissingFile", [](Inputs& in, C) { return read_bsr_file(in.missing_path).status(); },
       StatusCode::io_error},
      {"ParseGarbage",
       [](Inputs& in, C) { return parse_bsr_file(std::span(in.file_bytes).first(100)).status(); },
       StatusCode::invalid_argument},
  };
  for (const char* impl : {"avx512", "avx2", "neon", "scalar", "ref"}) {
    all.push_back({"Linear", [](Inputs& in, C c) { return linear_of(in, c, 70); }, StatusCode::ok, impl});
    all.push_back(
        {"LinearOfFewTokens", [](Inputs& in, C c) { return linear_of(in, c, 2); }, StatusCode::ok, impl});
    all.push_back(
        {"FeedForward", [](Inputs& in, C c) { return feed_forward_of(in, c, 70); }, StatusCode::ok, impl});
    all.push_back({"FeedForwardOfFewTokens", [](Inputs& in, C c) { return feed_forward_of(in, c, 2); },
                   StatusCode::ok, impl});
    all.push_back(
        {"GradInput",
         [](Inputs& in, C c) {
           return grad_input(in.view(in.dy, 70, 40), in.w(), {in.out.data(), DType::f32, 70, 36, 36}, c);
         },
         StatusCode::ok, impl});
    all.push_back({"GradWeight",
                   [](Inputs& in, C c) {
                     return grad_weight(in.view(in.dy, 70, 40), in.view(in.x, 70, 36), in.pattern->view(),
                                        in.out.data(), DType::f32, c);
                   },
                   StatusCode::ok, impl});
  }
  return all;
}

std::size_t file_count(const std::string& directory) {
  const std::filesystem::directory_iterator files(directory);
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class AllocationFailureTest : public ::testing::TestWithParam<Entry> {};

INSTANTIATE_TEST_SUITE_P(All, AllocationFailureTest, ::testing::ValuesIn(entries()), [](const auto& tested) {
  return std::string(tested.param.name) + (tested.param.impl != nullptr ? tested.param.impl : "");
});

TEST_P(AllocationFailureTest, IsAStatus) {
  const Entry& entry = GetParam();
  ASSERT_FALSE(backend_info().kernels.empty());  // the list of kernels is made once, and stays
  if (entry.impl != nullptr) {
    if (!force_impl(std::string("cpu:") + entry.impl).ok()) GTEST_SKIP() << "a build for another processor";
    const Explanation e = explain(make_problem(Op::grad_input, {40, 36, 4, 4, 9}, 8, DType::f32));
    if (e.kernel.empty()) {
      ASSERT_TRUE(force_impl("").ok());
      GTEST_SKIP() << "this machine has no " << entry.impl << ": " << e.why_none;
    }
  }
  Inputs in;
  for (const int threads : {1, 3}) {
    for (const bool one : {true, false}) {
      SCOPED_TRACE(::testing::Message() << threads << " threads, " << (one ? "one failure" : "all fail"));
      std::int64_t n = 0;
      for (bool over = false; !over; ++n) {
        ASSERT_LT(n, 10'000) << "the call never succeeds";
        std::ofstream(in.out_path) << "old";
        StatusCode code{};
        bool threw = false, silent = false;
        const std::int64_t before = live;
        // A thread of its own and a pool of its own have no working memory yet.
        std::thread([&] {
          ThreadPool pool(threads);
          const Context context{pool.executor()};
          Status status;
          {
            const Shortage shortage(n, one);
            try {
              status = entry.call(in, context);
            } catch (...) {
              threw = true;
            }
            over = Shortage::over();
          }
          code = status.code();
          silent = !status.ok() && status.message().empty();
        }).join();
        ASSERT_FALSE(threw) << "allocation " << n << " left the call as an exception";
        ASSERT_FALSE(silent) << "allocation " << n << ": a status without a word";
        ASSERT_EQ(live, before) << "allocation " << n << " leaked";
        if (over) {
          EXPECT_EQ(name(code), name(entry.code));
        } else {
          // An allocation that a call can do without may fail unseen.
          ASSERT_TRUE(code == StatusCode::out_of_memory || code == entry.code) << n << ": " << name(code);
          if (code != StatusCode::ok) {
            ASSERT_EQ(content(in.out_path), "old") << "allocation " << n << " failed and the file is another";
          }
        }
        ASSERT_EQ(file_count(in.directory), 2U) << "allocation " << n << " left a file behind";
      }
    }
  }
  ASSERT_TRUE(force_impl("").ok());
}

}  // namespace
}  // namespace rarefy::test
