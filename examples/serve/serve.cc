// Runs a sparse model in a process without Python: an AOTInductor package, and the library with Rarefy's ops.
//   serve librarefy_torch.so FOLDER    with model.pt2, x.bin and y.bin of export_model.py
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

// A file of floats as a matrix with this many columns, which owns a copy.
at::Tensor read_matrix(const std::string& path, std::int64_t cols) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto rows = static_cast<std::int64_t>(bytes.size() / sizeof(float)) / cols;
  return at::from_blob(bytes.data(), {rows, cols}, at::kFloat).clone();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: serve librarefy_torch.so FOLDER\n");
    return 2;
  }
  // Loading the library registers its ops; libtorch is in this process already.
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    const std::string folder = argv[2];
    torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");
    const at::Tensor x = read_matrix(folder + "/x.bin", 64), wanted = read_matrix(folder + "/y.bin", 64);
    const at::Tensor y = model.run({x}).at(0);
    const double difference = (y - wanted).abs().max().item<double>();
    std::printf("%lld rows, largest difference %g\n", static_cast<long long>(y.size(0)), difference);
    return y.sizes() == wanted.sizes() && difference < 1e-5 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
