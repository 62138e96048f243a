// Hopper kernels: `check` compares every kernel and configuration with a double reference, `check-small` does
// so at sizes that compute-sanitizer can follow, `time` measures against cuBLAS. CSV goes to $OUT/hopper.csv.
// Runs on a machine with one Hopper GPU; needs libcublas at run time.
#include <ctime>

#include "hopper.h"

namespace bench {

void Report::open(const std::string& path) {
  csv = std::fopen(path.c_str(), "w");
  if (csv == nullptr) return;
  std::fprintf(csv,
               "op,M,N,K,block,density,dtype,kernel,config,us,us_q1,us_q3,dense_us,dense_q1,dense_q3,speedup,"
               "efficiency,GB_per_s,predicted_us,prepare_us,pack_us,machine,date,commit,repro\n");
}

void Report::add(const Row& r) {
  const double speedup = r.dense.median / r.time.median, efficiency = r.density * speedup;
  const double bandwidth = r.bytes / r.time.median * 1e-3;
  std::printf("%-10s %5ld x %5ld -> %5ld b%-7s d%-4g %-7s %7.1f us (%.1f-%.1f) dense %7.1f  %5.2fx  %5.1f %%",
              r.op.c_str(), r.m, r.k, r.n, r.block.c_str(), r.density, r.kernel.c_str(), r.time.median,
              r.time.q1, r.time.q3, r.dense.median, speedup, 100 * efficiency);
  if (r.bytes > 0) std::printf("  %6.0f GB/s", bandwidth);
  if (r.pack_us > 0) std::printf("  prepared in %.0f us, packed in %.1f", r.prepare_us, r.pack_us);
  std::printf("  [%s, predicted %.0f]\n", r.config.c_str(), r.predicted_us);
  if (csv == nullptr) return;
  std::fprintf(csv,
               "%s,%ld,%ld,%ld,%s,%g,%s,%s,%s,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.3f,%.4f,%.0f,%.1f,%.0f,%.1f,%"
               "s,%s,%s,%s\n",
               r.op.c_str(), r.m, r.n, r.k, r.block.c_str(), r.density, r.dtype.c_str(), r.kernel.c_str(),
               r.config.c_str(), r.time.median, r.time.q1, r.time.q3, r.dense.median, r.dense.q1, r.dense.q3,
               speedup, efficiency, bandwidth, r.predicted_us, r.prepare_us, r.pack_us, machine.c_str(),
               date.c_str(), commit.c_str(), repro.c_str());
  std::fflush(csv);
}

}  // namespace bench

int main(int argc, char** argv) {
  using namespace bench;
  const std::string what = argc > 1 ? argv[1] : "check";
  const std::string only = argc > 2 ? argv[2] : "";  // strips, decode, …
  const auto wanted = [&](const char* name) { return only.empty() || only == name; };
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
    std::printf("skipped: these kernels need a GPU of compute capability 9.0\n");
    return 77;
  }
  std::printf("%s, %d SMs\n", device.name, device.multiProcessorCount);
  if (what == "check" || what == "check-small") {
    const bool small = what == "check-small";
    bool good = true;
    if (wanted("strips")) good &= check_strips(small);
    if (wanted("unions")) good &= check_unions(small);
    if (wanted("decode")) good &= check_decode(small);
    if (wanted("tall")) good &= check_tall(small);
    if (wanted("tall-gradient")) good &= check_tall_gradient(small);
    if (wanted("tall-input")) good &= check_tall_input(small);
    if (wanted("gradient")) good &= check_gradient(small);
    return good ? 0 : 1;
  }
  Report report;
  const char* out = std::getenv("OUT");
  const char* commit = std::getenv("COMMIT");
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%F", std::gmtime(&now));
  report.machine = device.name;
  report.date = date;
  report.commit = commit == nullptr ? "" : commit;
  const char* flush = std::getenv("FLUSH");
  report.repro = (flush == nullptr ? "" : std::string("FLUSH=") + flush + " ") + "rarefy_hopper_bench " +
                 what + (only.empty() ? "" : " " + only);
  report.open(std::string(out == nullptr ? "." : out) + "/hopper" + (only.empty() ? "" : "-" + only) +
              ".csv");
  if (only == "floor") {
    time_floor();
    return 0;
  }
  if (only == "host") {
    time_host();
    return 0;
  }
  Dense dense;
  const bool every = what == "time-all";
  if (wanted("strips")) time_strips(report, dense, every);
  if (wanted("unions")) time_unions(report, dense, every);
  if (wanted("decode")) time_decode(report, dense, every);
  if (wanted("tall")) time_tall(report, dense, every);
  if (wanted("tall-gradient")) time_tall_gradient(report, dense, every);
  if (wanted("tall-input")) time_tall_input(report, dense, every);
  if (wanted("networks")) time_networks(report, dense, every);
  if (wanted("gradient")) time_gradient(report, dense, every);
  if (wanted("sm80")) time_sm80(report, dense, every);
  if (wanted("tf32")) time_tf32(report, dense, every);
  return 0;
}
