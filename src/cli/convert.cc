// rarefy convert IN OUT: dense safetensors → bsr-v1, in BSR or CSR, or back with --to dense. Reads all of IN,
// then writes OUT in one step. Takes memory for IN, what becomes sparse, and a few times the largest weight.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <regex>

#include "cli/common.h"
#include "core/checked.h"
#include "core/message.h"
#include "rarefy/bsr_file.h"

namespace rarefy::cli {

namespace {

using nlohmann::json;

constexpr std::string_view op = "convert";

struct Options {
  std::string input, output;
  std::string to = "bsr";
  std::string block = "16x16";
  double density = 0.5;
  std::string include;
  std::uint64_t limit = 0;  // bytes; 0: by the size of IN
  bool force = false;
  bool as_json = false;
};

// Modules that look rows up instead of multiplying, as Hugging Face models call them.
constexpr std::string_view kMarks[] = {"emb", ".wte.", ".wpe.", ".shared.", "relative_attention_bias"};

bool is_embedding(const std::string& name) {
  const std::string padded = "." + name;
  return std::any_of(std::begin(kMarks), std::end(kMarks),
                     [&](std::string_view mark) { return padded.find(mark) != std::string::npos; });
}

// Without elements there is nothing to leave out, but indices as long as the file likes.
bool is_matrix(const StoredTensor& tensor) {
  return tensor.shape.size() == 2 && !tensor.data.empty() && from_safetensors(tensor.dtype);
}

// The tensors to make sparse: those --include matches in full, or else the weights of linear layers.
Result<std::vector<std::string>> chosen(const BsrFile& file, const std::string& include) {
  // The standard library's matcher recurses once a character.
  constexpr std::size_t kLongestName = 1024;
  std::optional<std::regex> pattern;
  try {
    if (!include.empty()) pattern.emplace(include);
  } catch (const std::regex_error&) {
    return invalid(op, "--include must be a regular expression (ECMAScript)", include);
  }
  std::vector<std::string> names;
  for (const auto& [name, tensor] : file.tensors) {
    if (!is_matrix(tensor) || name.size() > kLongestName) continue;
    const bool wanted =
        pattern ? std::regex_match(name, *pattern)
                : name.ends_with(".weight") && tensor.dtype != SafetensorsDType::i8 && !is_embedding(name);
    if (wanted) names.push_back(name);
  }
  if (names.empty()) {
    return invalid(
        op,
        pattern
            ? "--include must match the whole name of a 2-D tensor of f64, f32, bf16, f16 or i8 with elements"
            : "the file must have a 2-D float tensor named *.weight that is no embedding",
        pattern ? include : cat(file.tensors.size(), " tensors, none of that kind"));
  }
  return names;
}

json row(const std::string& name, const BsrMatrix& weight) {
  const BsrShape& shape = weight.pattern.shape();
  const auto index_bytes = static_cast<std::int64_t>(
      (weight.pattern.crow_indices().size() + weight.pattern.col_indices().size()) * sizeof(std::int32_t));
  return {{"name", name},
          {"shape", {shape.rows, shape.cols}},
          {"block_shape", {shape.block_rows, shape.block_cols}},
          {"density", weight.pattern.density()},
          {"sparse_bytes", static_cast<std::int64_t>(weight.values.size()) + index_bytes},
          {"dense_bytes", shape.rows * shape.cols * static_cast<std::int64_t>(size_of(weight.dtype))}};
}

Result<json> to_sparse(BsrFile& file, const Options& options) {
  const bool is_csr = options.to == name(WeightFormat::csr);
  const auto block = is_csr ? Result<BlockShape>(BlockShape{1, 1}) : parse_block(op, options.block);
  if (!block.ok()) return block.status();
  const auto names = chosen(file, options.include);
  if (!names.ok()) return names.status();
  json rows = json::array();
  for (const std::string& name : *names) {
    const StoredTensor& tensor = file.tensors.at(name);
    const MatrixView dense{tensor.data.data(), *from_safetensors(tensor.dtype), tensor.shape[0],
                           tensor.shape[1], tensor.shape[1]};
    const auto mask = block_mask_by_norm(dense, *block, options.density);
    if (!mask.ok()) return mask.status();
    auto weight = dense_to_bsr(dense, *block, *mask);
    if (!weight.ok()) return weight.status();
    rows.push_back(row(name, *weight));
    file.tensors.erase(name);
    file.weights.emplace(
        name, FileWeight(std::move(weight).value(), is_csr ? WeightFormat::csr : WeightFormat::bsr));
  }
  return rows;
}

// A file can describe empty weights of any size in a few bytes. What is written may be this large.
constexpr std::int64_t kFreeBytes = std::int64_t{1} << 30;
constexpr std::int64_t kTimesInput = 64;

Result<json> to_dense(const BsrFile& file, const Options& options, std::int64_t input_bytes) {
  if (file.weights.empty()) return invalid(op, "the file must have sparse weights for --to dense", "none");
  const std::int64_t limit =
      options.limit > 0 ? static_cast<std::int64_t>(std::min<std::uint64_t>(options.limit, INT64_MAX))
                        : std::max(kFreeBytes, checked_mul(input_bytes, kTimesInput).value_or(INT64_MAX));
  json rows = json::array();
  std::optional<std::int64_t> total = 0;
  for (const auto& [name, weight] : file.weights) {
    const BsrShape& shape = weight.pattern.shape();
    const DType dtype = weight.format == WeightFormat::int8 ? *weight.x_dtype : weight.dtype;
    const auto bytes = checked_mul(shape.rows * shape.cols, static_cast<std::int64_t>(size_of(dtype)));
    total = bytes ? checked_add(*total, *bytes) : std::nullopt;
    if (!total || *total > limit) {
      return error(
          StatusCode::unsupported, op,
          cat("the dense weights must have at most ", bytes_text(limit), " in all, or --limit be given"),
          cat("more, with \"", name, "\" of shape (", shape.rows, ", ", shape.cols, ')'));
    }
    json entry = row(name, weight);
    entry["dense_bytes"] = *bytes;
    entry["sparse_bytes"] = entry["sparse_bytes"].get<std::int64_t>() +
                            static_cast<std::int64_t>(weight.scales.size() * sizeof(float));
    rows.push_back(std::move(entry));
  }
  return rows;
}

void print_text(const json& all) {
  std::vector<std::vector<std::string>> rows{{"WEIGHT", "SHAPE", "BLOCK", "DENSITY", "SPARSE", "DENSE"}};
  for (const json& weight : all["weights"]) {
    rows.push_back({weight["name"], weight["shape"].dump(), weight["block_shape"].dump(),
                    fixed(weight["density"], 4), bytes_text(weight["sparse_bytes"]),
                    bytes_text(weight["dense_bytes"])});
  }
  print_table(rows);
  const std::int64_t before = all["input_bytes"], after = all["output_bytes"];
  std::printf("\n%zu weights; %lld → %lld bytes (%s → %s)\n", all["weights"].size(),
              static_cast<long long>(before), static_cast<long long>(after), bytes_text(before).c_str(),
              bytes_text(after).c_str());
}

Exit run(const Options& options) {
  std::error_code ignored;
  if (!options.force && std::filesystem::exists(options.output, ignored)) {
    return fail(invalid(op, "OUT must not exist, or --force be given", options.output));
  }
  auto file = read_bsr_file(options.input);
  if (!file.ok()) return fail(file.status());
  // Before OUT is written: it may be IN.
  const auto input_bytes = static_cast<std::int64_t>(std::filesystem::file_size(options.input, ignored));
  const bool dense = options.to == "dense";
  const auto rows = dense ? to_dense(*file, options, input_bytes) : to_sparse(file.value(), options);
  if (!rows.ok()) return fail(rows.status());
  const auto write = dense ? write_dense_file : write_bsr_file;
  if (Status status = write(options.output, *file); !status.ok()) return fail(status);
  const json all{
      {"input", options.input},
      {"output", options.output},
      {"to", options.to},
      {"weights", *rows},
      {"input_bytes", input_bytes},
      {"output_bytes", static_cast<std::int64_t>(std::filesystem::file_size(options.output, ignored))}};
  options.as_json ? print(all) : print_text(all);
  return kOk;
}

}  // namespace

void add_convert(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("convert", "Dense safetensors to bsr-v1, or back with --to dense");
  command->add_option("IN", options->input, "A safetensors file, dense or bsr-v1")->required();
  command->add_option("OUT", options->output, "The file to write")->required();
  command->add_option("--to", options->to, "bsr, csr (single weights) or dense")
      ->check(CLI::IsMember({"bsr", "csr", "dense"}))
      ->capture_default_str();
  command->add_option("--block", options->block, "Block shape of --to bsr, ROWSxCOLS")->capture_default_str();
  command
      ->add_option("--density", options->density, "Share of blocks to keep, in [0, 1]: those of largest norm")
      ->capture_default_str();
  command->add_option("--include", options->include,
                      "Regular expression; matches whole tensor names. Default: 2-D float tensors named "
                      "*.weight that are not embeddings");
  command
      ->add_option("--limit", options->limit,
                   "Most bytes of dense weights that --to dense may write, such as 8GiB. Default: 64 times "
                   "the size of IN, and at least 1GiB")
      ->transform(CLI::AsSizeValue(false));
  command->add_flag("--force", options->force, "Replace OUT if it exists");
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
