// The parts of the Hopper bench.
#pragma once

#include "harness.cuh"

namespace bench {

struct Row {
  std::string op;
  std::int64_t m, n, k;
  std::string block;
  double density;
  std::string kernel, config;
  Times time, dense;
  double predicted_us = 0, prepare_us = 0;
  double bytes = 0;  // of W and index, where the kernel is bound by them
  double pack_us = 0;
  std::string dtype = "bf16";
};

// Prints rows and writes them as CSV.
struct Report {
  std::FILE* csv = nullptr;
  std::string machine, date, commit, repro;
  void open(const std::string& path);
  void add(const Row& row);
};

bool check_strips(bool small);
void time_strips(Report& report, Dense& dense, bool every_config);

bool check_decode(bool small);
void time_decode(Report& report, Dense& dense, bool every_config);
void time_floor();
void time_host();
bool check_tall(bool small);
void time_tall(Report& report, Dense& dense, bool every_config);
bool check_tall_gradient(bool small);
void time_tall_gradient(Report& report, Dense& dense, bool every_config);
bool check_tall_input(bool small);
void time_tall_input(Report& report, Dense& dense, bool every_config);
void time_networks(Report& report, Dense& dense, bool every_config);
bool check_unions(bool small);
void time_unions(Report& report, Dense& dense, bool every_config);
bool check_gradient(bool small);
void time_gradient(Report& report, Dense& dense, bool every_config);
void time_sm80(Report& report, Dense& dense, bool every_config);
void time_tf32(Report& report, Dense& dense, bool every_config);

}  // namespace bench
