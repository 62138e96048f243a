// rarefy inspect FILE: the tensors of a safetensors file; sparse weights with what they save. Reads
// the header only.
#include <cstdio>

#include "cli/common.h"
#include "core/checked.h"
#include "rarefy/bsr_file.h"

namespace rarefy::cli {

namespace {

using nlohmann::json;

struct Options {
  std::string path;
  bool as_json = false;
};

std::int64_t bytes_of(const SafetensorsHeader& header, const std::string& tensor) {
  return header.tensors.at(tensor).bytes();
}

json weight_json(const SafetensorsHeader& header, const std::string& weight, const BsrEntry& entry) {
  const BsrShape& shape = entry.shape;
  const double blocks = static_cast<double>(shape.row_count()) * static_cast<double>(shape.col_count());
  // Saturated: without stored blocks, an entry may describe a size that nobody could store.
  const bool scaled = entry.format == WeightFormat::int8;
  std::int64_t bytes = 0;
  for (const char* piece : {".values", ".crow_indices", ".col_indices", ".bitmap", ".scales"}) {
    const bool of_bitmap = entry.format == WeightFormat::bitmap;
    const std::string_view name = piece;
    if (name == ".scales" ? scaled : name == ".values" || (name == ".bitmap") == of_bitmap)
      bytes += bytes_of(header, weight + piece);
  }
  const DType dense_dtype = scaled ? *entry.x_dtype : entry.dtype;
  const std::int64_t dense =
      checked_mul(shape.rows * shape.cols, static_cast<std::int64_t>(size_of(dense_dtype)))
          .value_or(INT64_MAX);
  return {{"name", weight},
          {"format", name(entry.format)},
          {"dtype", name(entry.dtype)},
          {"x_dtype", name(entry.x_dtype.value_or(entry.dtype))},
          {"shape", {shape.rows, shape.cols}},
          {"block_shape", {shape.block_rows, shape.block_cols}},
          {"nnzb", shape.nnzb},
          {"density", blocks == 0 ? 0.0 : static_cast<double>(shape.nnzb) / blocks},
          {"bytes", bytes},
          {"dense_bytes", dense}};
}

json tensor_json(const std::string& name_in_file, const StoredTensorInfo& info) {
  return {
      {"name", name_in_file}, {"dtype", name(info.dtype)}, {"shape", info.shape}, {"bytes", info.bytes()}};
}

void print_text(const json& all) {
  if (!all["weights"].empty()) {
    std::vector<std::vector<std::string>> rows{
        {"SPARSE WEIGHT", "DTYPE", "SHAPE", "BLOCK", "DENSITY", "SPARSE", "DENSE"}};
    for (const json& weight : all["weights"]) {
      const std::string format = weight["format"];
      const bool blocks = format == name(WeightFormat::bsr) || format == name(WeightFormat::int8);
      rows.push_back({weight["name"], weight["dtype"], weight["shape"].dump(),
                      blocks ? weight["block_shape"].dump() : format, fixed(weight["density"], 4),
                      bytes_text(weight["bytes"]), bytes_text(weight["dense_bytes"])});
    }
    print_table(rows);
    std::printf("\n");
  }
  std::vector<std::vector<std::string>> rows{{"TENSOR", "DTYPE", "SHAPE", "BYTES"}};
  for (const json& tensor : all["tensors"]) {
    rows.push_back({tensor["name"], tensor["dtype"], tensor["shape"].dump(), bytes_text(tensor["bytes"])});
  }
  print_table(rows);
  std::printf("\n%zu sparse weights, %zu tensors, %s\n", all["weights"].size(), all["tensors"].size(),
              bytes_text(all["file_bytes"]).c_str());
}

Exit run(const Options& options) {
  const auto header = read_safetensors_header(options.path);
  if (!header.ok()) return fail(header.status());
  // A file whose sparse weights do not fit together is still shown, as the plain tensors it has.
  const auto entries = bsr_entries(*header);
  json all{{"file", options.path},
           {"file_bytes", header->file_bytes},
           {"metadata", header->metadata},
           {"weights", json::array()},
           {"tensors", json::array()}};
  std::map<std::string, StoredTensorInfo> others = header->tensors;
  if (entries.ok()) {
    for (const auto& [weight, entry] : *entries) {
      all["weights"].push_back(weight_json(*header, weight, entry));
      for (const char* suffix : {".values", ".crow_indices", ".col_indices"}) others.erase(weight + suffix);
    }
  }
  for (const auto& [tensor, info] : others) all["tensors"].push_back(tensor_json(tensor, info));
  if (!entries.ok()) all["error"] = entries.status().message();
  if (options.as_json) {
    print(all);
  } else {
    print_text(all);
  }
  return entries.ok() ? kOk : fail(entries.status());
}

}  // namespace

void add_inspect(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("inspect", "List the tensors and sparse weights of a safetensors file");
  command->add_option("FILE", options->path, "A safetensors file, dense or bsr-v1")->required();
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
