// The rarefy command, run as users run it: what it prints, what it writes, how it fails.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "rarefy/bsr_file.h"
#include "raw_file.h"

namespace rarefy {
namespace {

using nlohmann::json;

struct Finished {
  int exit;
  std::string out, err;
  std::int64_t peak_bytes = 0;  // of its memory
};

class CliTest : public ::testing::Test {
 protected:
  Finished rarefy(const std::string& arguments) const {
    return shell("exec " RAREFY_CLI " " + arguments + " >" + path("out") + " 2>" + path("err"));
  }

  Finished shell(std::string command) const {
    char* const words[] = {const_cast<char*>("sh"), const_cast<char*>("-c"), command.data(), nullptr};
    pid_t child = 0;
    if (::posix_spawn(&child, "/bin/sh", nullptr, nullptr, words, environ) != 0) return {-1, "", "no shell"};
    int status = 0;
    struct rusage usage {};
    while (::wait4(child, &status, 0, &usage) < 0 && errno == EINTR) {
    }
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text(path("out")), text(path("err")),
            std::int64_t{usage.ru_maxrss} * 1024};
  }

  // What a run that must succeed printed with --json.
  json run_json(const std::string& arguments) const {
    const Finished run = rarefy(arguments + " --json");
    EXPECT_EQ(run.exit, 0) << run.err;
    EXPECT_EQ(run.err, "");
    return json::parse(run.out);
  }

  void expect_failure(const std::string& arguments, int exit, const std::string& message) const {
    const Finished run = rarefy(arguments);
    EXPECT_EQ(run.exit, exit) << arguments << run.err;
    EXPECT_NE(run.err.find(message), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "") << arguments;
  }

  std::string path(const std::string& name) const { return directory_.file(name); }

  static std::string text(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
  }

  // A model of two linear layers of (20, 12), an embedding, an int8 matrix and a bias.
  SafetensorsFile write_model() const {
    const auto matrix = [](float first) {
      std::vector<float> values(240);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
      return StoredTensor{SafetensorsDType::f32, {20, 12}, test::bytes_of(values)};
    };
    SafetensorsFile model;
    model.tensors["layer.0.weight"] = matrix(1);
    model.tensors["layer.1.weight"] = matrix(1000);
    model.tensors["embeddings.word.weight"] = matrix(5);
    model.tensors["codes.weight"] = {SafetensorsDType::i8, {4, 4}, test::counting_bytes(16)};
    model.tensors["layer.0.bias"] = {SafetensorsDType::f32, {20}, test::counting_bytes(80)};
    model.metadata["format"] = "pt";
    EXPECT_TRUE(write_safetensors(path("dense"), model).ok());
    return model;
  }

  std::string in_out(const std::string& in = "dense", const std::string& out = "sparse") const {
    return path(in) + ' ' + path(out) + ' ';
  }

 private:
  test::TemporaryDirectory directory_;
};

TEST_F(CliTest, HelpNamesEveryExitCodeAndSubcommand) {
  const Finished help = rarefy("--help");
  EXPECT_EQ(help.exit, 0);
  for (const char* word : {"info", "inspect", "verify", "convert", "bench", "0  done", "1  bad input",
                           "2  usage", "3  cannot"}) {
    EXPECT_NE(help.out.find(word), std::string::npos) << word;
  }
  for (const char* command : {"info", "inspect", "verify", "convert", "bench"}) {
    const Finished sub = rarefy(std::string(command) + " --help");
    EXPECT_EQ(sub.exit, 0);
    EXPECT_NE(sub.out.find("--json"), std::string::npos) << command;
  }
  EXPECT_EQ(rarefy("--version").out, "0.1.0\n");
}

TEST_F(CliTest, UsageErrorsExitWithTwo) {
  for (const char* arguments :
       {"", "nonsense", "info --nonsense", "verify", "convert one", "bench --op matmul", "bench --dtype f8",
        "bench --m many", "convert a b --to csc"}) {
    const Finished run = rarefy(arguments);
    EXPECT_EQ(run.exit, 2) << arguments;
    EXPECT_NE(run.err, "") << arguments;
  }
}

TEST_F(CliTest, OutputThatIsLostExitsWithThree) {
  write_model();
  run_json("convert " + in_out());
  const std::string sparse = path("sparse");
  for (const std::string& arguments :
       {std::string("info"), std::string("info --json"), std::string("--help"), std::string("bench --help"),
        std::string("--version"), "inspect " + sparse, "inspect --json " + sparse, "verify " + sparse,
        "verify --json " + sparse, "convert --force " + in_out(),
        std::string("bench --m 2 --n 8 --k 8 --repeats 1")}) {
    const Finished run = shell("exec " RAREFY_CLI " " + arguments + " >/dev/full 2>" + path("err"));
    EXPECT_EQ(run.exit, 3) << arguments;
    EXPECT_NE(run.err.find("[rarefy] the standard output must be writable; got "), std::string::npos)
        << arguments << ": " << run.err;
  }
}

TEST_F(CliTest, InfoNamesAKernelForEveryProductAndDType) {
  const json info = run_json("info");
  EXPECT_EQ(info["version"], "0.1.0");
  std::size_t cpu = 0;
  for (const json& row : info["selected"]) {
    if (row["device"] != "cpu") continue;
    ++cpu;
    EXPECT_TRUE(row["kernel"].is_string()) << row;
  }
  EXPECT_EQ(cpu, 15U);
  EXPECT_FALSE(info["kernels"].empty());
  EXPECT_NE(rarefy("info --block 4x1").out.find("In use for 4x1 blocks"), std::string::npos);
  expect_failure("info --block 4by1", 1, "[info] --block must be ROWSxCOLS");
}

TEST_F(CliTest, InfoExplainsOneProblem) {
  for (const char* op : {"linear", "grad_input", "grad_weight"}) {
    const json e = run_json(std::string("info --m 9 --n 8 --k 8 --block 4x4 --explain ") + op);
    EXPECT_EQ(e["problem"].get<std::string>().rfind(std::string(op) + " bsr 8x8", 0), 0U) << e;
    EXPECT_TRUE(e["kernel"].is_string()) << e;
    std::size_t chosen = 0;
    for (const json& candidate : e["candidates"]) {
      if (!candidate["chosen"]) continue;
      ++chosen;
      EXPECT_EQ(candidate["kernel"], e["kernel"]);
    }
    EXPECT_EQ(chosen, 1U);
  }
  // No CUDA kernel has int8: no name, and the reason instead.
  const json none = run_json("info --explain linear --device cuda --dtype i8");
  EXPECT_TRUE(none["kernel"].is_null()) << none;
  EXPECT_FALSE(none["why_none"].get<std::string>().empty());
  expect_failure("info --explain matmul", 2, "matmul");
}

TEST_F(CliTest, ConvertAtDensityOneComesBackBitForBit) {
  const SafetensorsFile model = write_model();
  const json report = run_json("convert " + in_out() + "--density 1 --block 8x5");
  EXPECT_EQ(report["weights"].size(), 2U);
  EXPECT_EQ(report["output_bytes"], std::filesystem::file_size(path("sparse")));
  run_json("convert " + in_out("sparse", "back") + "--to dense");
  EXPECT_EQ(*read_safetensors(path("back")), model);
  EXPECT_EQ(text(path("back")), text(path("dense")));
}

TEST_F(CliTest, ConvertKeepsTheLargestBlocksAndTheRestOfTheFile) {
  const SafetensorsFile model = write_model();
  run_json("convert " + in_out() + "--block 4x4 --density 0.4");
  const auto file = read_bsr_file(path("sparse"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(file->weights.size(), 2U);
  const BsrMatrix& weight = file->weights.at("layer.0.weight");
  EXPECT_EQ(weight.pattern.shape(), (BsrShape{20, 12, 4, 4, 6}));  // 6 of 15 blocks: the last two block rows
  EXPECT_TRUE(std::ranges::equal(weight.pattern.crow_indices(), std::vector{0, 0, 0, 0, 3, 6}));
  EXPECT_EQ(file->tensors.size(), 3U);
  for (const auto& [name, tensor] : file->tensors) EXPECT_EQ(tensor, model.tensors.at(name)) << name;
  EXPECT_EQ(file->metadata, model.metadata);
}

TEST_F(CliTest, IncludeChoosesByWholeName) {
  write_model();
  EXPECT_EQ(run_json("convert " + in_out() + "--include 'layer\\.1\\..*'")["weights"][0]["name"],
            "layer.1.weight");
  EXPECT_EQ(run_json("convert " + in_out("dense", "codes") + "--include 'codes.*'")["weights"].size(), 1U);
  expect_failure("convert " + in_out("dense", "x") + "--include layer", 1,
                 "--include must match the whole name");
  expect_failure("convert " + in_out("dense", "x") + "--include '('", 1, "must be a regular expression");
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

TEST_F(CliTest, ConvertOverwritesOnlyWhenForced) {
  write_model();
  std::ofstream(path("sparse")) << "mine";
  expect_failure("convert " + in_out(), 1, "OUT must not exist");
  EXPECT_EQ(text(path("sparse")), "mine");
  run_json("convert " + in_out() + "--force");
  EXPECT_EQ(rarefy("verify " + path("sparse")).exit, 0);
  run_json("convert " + in_out("dense", "dense") + "--force");  // in place
  EXPECT_EQ(text(path("dense")), text(path("sparse")));
}

TEST_F(CliTest, ConvertRefusesBadValuesAndWritesNothing) {
  write_model();
  for (const char* block : {"16", "x16", "16x", "0x16", "-4x4", "16x16x16", "16X16"}) {
    expect_failure("convert " + in_out() + "--block " + block, 1, "[convert] --block must be");
  }
  for (const char* density : {"1.5", "-0.1", "nan"}) {
    expect_failure("convert " + in_out() + "--density " + density, 1, "density");
  }
  expect_failure("convert " + in_out("dense", "x") + "--to dense", 1, "must have sparse weights");
  expect_failure("convert " + in_out("none", "x"), 3, "path must be a readable file");
  expect_failure("convert " + in_out("dense", "no/such/x"), 3, "path must be writable");
  EXPECT_FALSE(std::filesystem::exists(path("sparse")));
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

// A weight without blocks: a few hundred bytes, whatever its shape.
BsrFile nothing_of(const BsrShape& shape) {
  const std::vector<std::int32_t> crow(static_cast<std::size_t>(shape.row_count() + 1));
  BsrFile file;
  file.weights.emplace("w", BsrMatrix{Pattern::create(shape, crow, {}).value(), DType::f32, {}});
  return file;
}

TEST_F(CliTest, ADenseSizeFarBeyondTheFileIsRefused) {
  // One block row and one block column of nothing: a few bytes that say 2 EiB.
  ASSERT_TRUE(write_bsr_file(path("huge"), nothing_of({1 << 30, 1 << 29, 1 << 30, 1 << 29, 0})).ok());
  EXPECT_EQ(rarefy("verify " + path("huge")).exit, 0);
  EXPECT_EQ(rarefy("inspect " + path("huge")).exit, 0);
  expect_failure("convert " + in_out("huge", "x") + "--to dense", 3,
                 "the dense weights must have at most 1.0 GiB in all, or --limit be given");

  ASSERT_TRUE(write_bsr_file(path("small"), nothing_of({64, 64, 64, 64, 0})).ok());
  run_json("convert " + in_out("small", "x") + "--to dense --limit 16KiB");
  std::filesystem::remove(path("x"));
  expect_failure("convert " + in_out("small", "x") + "--to dense --limit 16383", 3, "at most 16.0 KiB");
  expect_failure("convert " + in_out("small", "x") + "--to dense --limit much", 2, "--limit");
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

TEST_F(CliTest, ConvertToDenseTakesMemoryForTheSparseFileAlone) {
  ASSERT_TRUE(write_bsr_file(path("sparse"), nothing_of({4096, 4096, 256, 256, 0})).ok());
  const std::int64_t verify = rarefy("verify " + path("sparse")).peak_bytes;
  const Finished run = rarefy("convert " + in_out("sparse", "back") + "--to dense");
  EXPECT_EQ(run.exit, 0) << run.err;
  EXPECT_GT(std::filesystem::file_size(path("back")), 64U << 20);
  EXPECT_LT(run.peak_bytes, verify + (16 << 20));
}

TEST_F(CliTest, ConvertLeavesMatricesWithoutElementsAlone) {
  // As sparse weights they would have indices for 2^27 rows, half a gigabyte.
  SafetensorsFile file;
  file.tensors["w.weight"] = {SafetensorsDType::f32, {1 << 27, 0}, {}};
  ASSERT_TRUE(write_safetensors(path("empty"), file).ok());
  expect_failure("convert " + in_out("empty", "x") + "--block 1x1", 1, "must have a 2-D float tensor");
  expect_failure("convert " + in_out("empty", "x") + "--block 1x1 --include '.*'", 1, "with elements");
  file.tensors["v.weight"] = {SafetensorsDType::f32, {4, 4}, test::counting_bytes(64)};
  ASSERT_TRUE(write_safetensors(path("both"), file).ok());
  EXPECT_EQ(run_json("convert " + in_out("both", "y"))["weights"].size(), 1U);
  EXPECT_EQ(read_bsr_file(path("y"))->tensors.at("w.weight"), file.tensors["w.weight"]);
}

TEST_F(CliTest, BlocksFarLargerThanTheMatrixAreRefused) {
  SafetensorsFile file;
  file.tensors["w.weight"] = {SafetensorsDType::f32, {4, 4}, test::counting_bytes(64)};
  ASSERT_TRUE(write_safetensors(path("dense"), file).ok());
  expect_failure("convert " + in_out() + "--block 268435456x1", 1, "block_shape must be at most (256, 256)");
  EXPECT_EQ(rarefy("convert " + in_out() + "--block 64x64").exit, 0);
}

TEST_F(CliTest, InspectShowsSparseAndDenseTensors) {
  write_model();
  run_json("convert " + in_out() + "--block 4x4 --density 0.4");
  const json all = run_json("inspect " + path("sparse"));
  ASSERT_EQ(all["weights"].size(), 2U);
  const json& weight = all["weights"][0];
  EXPECT_EQ(weight["name"], "layer.0.weight");
  EXPECT_EQ(weight["shape"], json({20, 12}));
  EXPECT_EQ(weight["block_shape"], json({4, 4}));
  EXPECT_EQ(weight["density"], 0.4);
  EXPECT_EQ(weight["bytes"], 6 * 64 + 4 * (6 + 6));
  EXPECT_EQ(weight["dense_bytes"], 960);
  EXPECT_EQ(all["tensors"].size(), 3U);
  const Finished text_run = rarefy("inspect " + path("sparse"));
  EXPECT_NE(text_run.out.find("layer.0.weight  f32    [20,12]  [4,4]  0.4000   432 B   960 B"),
            std::string::npos)
      << text_run.out;
}

TEST_F(CliTest, InspectStillListsAFileOfBrokenWeights) {
  SafetensorsFile file;
  file.tensors["w.crow_indices"] = {SafetensorsDType::i32, {0}, {}};
  file.tensors["\x1b[2J"] = {SafetensorsDType::u8, {0}, {}};
  ASSERT_TRUE(write_safetensors(path("broken"), file).ok());
  const Finished run = rarefy("inspect " + path("broken"));
  EXPECT_EQ(run.exit, 1);
  EXPECT_NE(run.out.find("w.crow_indices"), std::string::npos);
  EXPECT_EQ(run.out.find('\x1b'), std::string::npos);  // nothing from the file commands the terminal
  EXPECT_NE(run.err.find("[bsr_entries] metadata \"rarefy\" must describe"), std::string::npos);
}

TEST_F(CliTest, VerifySaysOkOrTheFirstError) {
  write_model();
  run_json("convert " + in_out());
  EXPECT_EQ(rarefy("verify " + path("sparse")).out, "OK: 2 sparse weights, 3 other tensors\n");
  EXPECT_EQ(run_json("verify " + path("dense"))["ok"], true);

  std::string bytes = text(path("sparse"));
  std::ofstream(path("short"), std::ios::binary) << bytes.substr(0, bytes.size() - 1);
  expect_failure("verify " + path("short"), 1, "[read_bsr_file] the file must hold");
  const Finished as_json = rarefy("verify --json " + path("short"));
  EXPECT_EQ(as_json.exit, 1);
  EXPECT_EQ(json::parse(as_json.out)["ok"], false);
  expect_failure("verify " + path("none"), 3, "No such file");
}

TEST_F(CliTest, BenchTimesEveryProduct) {
  for (const char* op : {"linear", "grad_input", "grad_weight"}) {
    const json run =
        run_json(std::string("bench --m 8 --n 40 --k 24 --block 4x4 --density 0.5 --threads 2 --repeats 3"
                             " --op ") +
                 op);
    EXPECT_EQ(run["op"], op);
    EXPECT_EQ(run["density"], 0.5);
    EXPECT_EQ(run["threads"], 2);
    EXPECT_GT(run["useful_gflops"], 0);
    EXPECT_LE(run["min_ms"], run["median_ms"]);
    EXPECT_LE(run["median_ms"], run["max_ms"]);
  }
  for (const char* dtype : {"f64", "bf16", "f16", "i8"}) {
    run_json(std::string("bench --m 2 --n 8 --k 8 --block 3x3 --repeats 1 --dtype ") + dtype);
  }
  EXPECT_EQ(run_json("bench --m 2 --n 8 --k 8 --repeats 1 --impl ref")["kernel"], "ref_linear");
}

TEST_F(CliTest, BenchRefusesBadValues) {
  expect_failure("bench --impl nonsense", 3, "RAREFY_FORCE_IMPL must name families of this build");
  expect_failure("bench --density 2", 1, "--density must be in [0, 1]; got 2");
  expect_failure("bench --density nan", 1, "--density must be in [0, 1]");
  expect_failure("bench --m 0", 1, "must be at least 1");
  expect_failure("bench --m 2000000000 --n 2000000000", 1, "at most");
  expect_failure("bench --repeats 0", 1, "--repeats must be in [1, 1000000]");
  expect_failure("bench --repeats 2147483647", 1, "--repeats must be in [1, 1000000]");
  expect_failure("bench --threads 100000", 1, "--threads must be in");
  expect_failure("bench --block 0x4", 1, "--block must be");
}

TEST_F(CliTest, CompletesCommandsAndOptionsInBash) {
  const Finished script = rarefy("completion bash");
  ASSERT_EQ(script.exit, 0) << script.err;
  std::ofstream(path("script")) << script.out;
  const auto completed = [&](const std::string& words, int at) {
    const Finished run = shell("exec bash -c 'source " + path("script") + "; COMP_WORDS=(rarefy " + words +
                               "); COMP_CWORD=" + std::to_string(at) + "; _rarefy; echo ${COMPREPLY[@]}' >" +
                               path("out") + " 2>" + path("err"));
    EXPECT_EQ(run.exit, 0) << run.err;
    return run.out;
  };
  EXPECT_EQ(completed("conv", 1), "convert\n");
  EXPECT_EQ(completed("--v", 1), "--version\n");
  EXPECT_EQ(completed("convert --dens", 2), "--density\n");
  EXPECT_EQ(completed("convert a.safetensors", 2), "\n");  // bash's own file names
  EXPECT_EQ(completed("none --", 2), "\n");

  const Finished zsh = rarefy("completion zsh");
  EXPECT_EQ(zsh.out.find("autoload -U +X bashcompinit"), 0U);
  EXPECT_NE(zsh.out.find(script.out), std::string::npos);
  EXPECT_EQ(rarefy("completion fish").exit, 2);
}

}  // namespace
}  // namespace rarefy
