// The sm90 family's rows: problems of the core as the kernels' own, and their plans as prepared buffers.
#include "cuda/sm90/register.h"

#include <algorithm>
#include <vector>

#include "core/message.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall_decode.h"
#include "cuda/sm90/unions.h"
#include "cuda/sm90/whole_choice.h"
#include "cuda/status.h"

namespace rarefy::sm90 {

Reason supports_family(const Problem& p, const rarefy::Machine& machine) {
  if (machine.gpu.arch != 90) return cat("needs compute capability 9.0; got sm_", machine.gpu.arch);
  if (p.weight.dtype != p.in || p.out != p.in) {
    return cat("takes one dtype for inputs, values and outputs; got ", name(p.in), ", ", name(p.weight.dtype),
               " and ", name(p.out));
  }
  if (p.in_alignment < 16) return cat("needs inputs and values aligned to 16 bytes; got ", p.in_alignment);
  return {};
}

namespace {

// Up to 16 tokens ---------------------------------------------------------------------------------------

struct DecodeChoice {
  std::int64_t rows = 32, warps = 8, split = 1, loads = 8, shared = 0, late = 0;
  static constexpr std::string_view kFields[] = {"rows", "warps", "split", "loads", "shared", "late"};
  DecodeConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(rows), n(warps), n(split), n(loads), shared != 0, late != 0};
  }
};

Config decode_config(const DecodeConfig& c) {
  return to_config(DecodeChoice{c.rows, c.warps, c.split, c.loads, c.shared ? 1 : 0, c.late ? 1 : 0});
}

DecodeProblem decode_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in,         p.tokens, s.rows,      s.cols,       s.block_rows,
          s.block_cols, s.nnzb,   p.in_stride, p.out_stride, p.activation};
}

Reason supports_decode(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_family(p, machine);
  return reason.empty() ? unsupported(decode_problem(p)) : reason;
}

Config configure_decode(const Problem& p, const rarefy::Machine& machine) {
  return decode_config(configure(decode_problem(p), machine.gpu.sms));
}

std::vector<Config> candidates_decode(const Problem& p, const rarefy::Machine& /*machine*/) {
  std::vector<Config> all;
  for (const DecodeCandidate& c : decode_candidates(decode_problem(p))) {
    if (c.reason.empty()) all.push_back(decode_config(c.config));
  }
  return all;
}

double decode_microseconds(const Problem& p, const Config& /*config*/, const rarefy::Machine& machine) {
  const BsrShape& s = p.weight.shape;
  // Of 9 to 16 tokens: blocks of 16 columns read X by 16 lines of L1 a load (H200, 4096↔14336).
  const double inputs = p.tokens <= 8 ? 0 : s.block_cols % 32 == 0 ? .3 : 1.5;
  return reading_microseconds(s.value_count() * 2 + s.nnzb * 4, machine) + inputs;
}

Status run_decode(const Call& call) {
  const DecodeOperands operands{call.x.data,   call.values, call.plan.crow,
                                call.plan.col, call.bias,   call.out.data};
  const DecodeProblem problem = decode_problem(call.problem);
  const DecodeConfig config = from_config<DecodeChoice>(call.config).config();
  if (!valid(problem, config))
    return invalid("linear", "the config must be one that the blocks and tokens allow", config.text());
  return cuda::launch_status("linear",
                             launch(problem, config, operands, static_cast<cudaStream_t>(call.stream)));
}

struct TallDecodeChoice {
  std::int64_t rows = 64, warps = 8, split = 1, late = 0;
  static constexpr std::string_view kFields[] = {"rows", "warps", "split", "late"};
  TallDecodeConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(rows), n(warps), n(split), late != 0};
  }
};

Config tall_decode_config(const TallDecodeConfig& c) {
  return to_config(TallDecodeChoice{c.rows, c.warps, c.split, c.late ? 1 : 0});
}

TallDecodeProblem tall_decode_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in, p.tokens, s.rows, s.cols, s.block_rows, s.nnzb, p.in_stride, p.out_stride, p.activation};
}

Reason supports_tall_decode(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_family(p, machine);
  if (reason.empty() && p.weight.shape.block_cols != 1) return "takes blocks of one column";
  return reason.empty() ? unsupported(tall_decode_problem(p)) : reason;
}

// Of 16 rows inputs are as many bytes as weights: 4096→14336 at .5, 32 tokens 39 us, W whole 33. The tall
// kernel takes 4 us and more in any case, and less for each byte: 4096² at .1 (3.4 MB), 24 tokens 5.6
// and 6.7.
Reason yields_tall_decode(const Problem& p, const rarefy::Machine& /*machine*/) {
  constexpr std::int64_t kManyValues = 3 << 19;  // 3 MB
  const BsrShape& s = p.weight.shape;
  if (p.tokens <= 16) return {};
  if (s.block_rows % 64 == 0 && s.value_count() > kManyValues)
    return cat("leaves more than 16 tokens of large weights to the tall kernel; got ", p.tokens);
  if (s.block_rows % 32 == 0 || 20 * s.value_count() < 9 * s.rows * s.cols) return {};
  return cat("leaves more than 16 tokens of blocks of 16 rows to W packed whole; got ", p.tokens);
}

Config configure_tall_decode(const Problem& p, const rarefy::Machine& machine) {
  return tall_decode_config(configure(tall_decode_problem(p), machine.gpu.sms));
}

std::vector<Config> candidates_tall_decode(const Problem& p, const rarefy::Machine& /*machine*/) {
  std::vector<Config> all;
  for (const TallDecodeCandidate& c : tall_decode_candidates(tall_decode_problem(p))) {
    if (c.reason.empty()) all.push_back(tall_decode_config(c.config));
  }
  return all;
}

// Fitted to 138 layers and batches on an H200: 12 % off in the median, a fifth at most. Of more than 16
// tokens inputs are as many bytes as weights.
double tall_decode_microseconds(const Problem& p, const Config& /*config*/, const rarefy::Machine& machine) {
  const BsrShape& s = p.weight.shape;
  return reading_microseconds(s.value_count() * 2 + s.nnzb * 4, machine, p.tokens <= 16 ? .75 : .25) + .6 +
         .09 * static_cast<double>(std::min<std::int64_t>(p.tokens, 24));
}

Status run_tall_decode(const Call& call) {
  const TallDecodeOperands operands{call.x.data, call.values,   call.plan.crow, call.plan.col,
                                    call.bias,   call.out.data, call.workspace};
  const TallDecodeProblem problem = tall_decode_problem(call.problem);
  const TallDecodeConfig config = from_config<TallDecodeChoice>(call.config).config();
  if (!valid(problem, config))
    return invalid("linear", "the config must be one that the blocks and tokens allow", config.text());
  return cuda::launch_status("linear",
                             launch(problem, config, operands, static_cast<cudaStream_t>(call.stream)));
}

// Strips ------------------------------------------------------------------------------------------------

StripProblem strip_problem(const Problem& p) { return product<StripProblem>(p); }

Reason supports_strips(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(strip_problem(p));
}

Config configure_strips(const Problem& p, const rarefy::Machine& machine) {
  return choice_of(configure(strip_problem(p), sm90_machine(machine)), machine);
}

std::vector<Config> candidates_strips(const Problem& p, const rarefy::Machine& machine) {
  std::vector<Config> all;
  for (const StripCandidate& c : strip_candidates(strip_problem(p), sm90_machine(machine))) {
    if (c.reason.empty()) all.push_back(choice_of(c.config, machine));
  }
  return all;
}

// With few tokens it is reading W by boxes of 8 KB: at .7 of the memory's nominal rate and 5 us around it, in
// tiles of 64 tokens at .55 with less than one.
double strip_microseconds(const Problem& p, const Config& config, const rarefy::Machine& machine) {
  const double modelled = microseconds_of(strip_candidates(strip_problem(p), sm90_machine(machine)), config,
                                          [&](const StripConfig& c) { return choice_of(c, machine); });
  const bool few = p.tokens <= 64;
  const double reading = reading_microseconds(p.weight.shape.value_count() * 2, machine, few ? .55 : .7);
  return modelled > 0 ? std::max((few ? .6 : 5.1) + reading, modelled) : 0;
}

Status check_sms(Op op, std::int64_t sms) {
  if (sms >= 1 && sms <= kMostClusters) return {};
  return invalid(name(op), cat("sms of the config must be in [1, ", kMostClusters, ']'), cat(sms));
}

Status check_alone(Op op, std::int64_t alone, bool parts) {
  if (alone == 0 || parts) return {};
  return invalid(name(op), "alone of the config must be 0 where tiles have no parts", cat(alone));
}

template <class Choice>
int sms_of(const Config& config) {
  return static_cast<int>(from_config<Choice>(config).sms);
}

std::int64_t prepared_size(const Problem& p, const Config& config) {
  return StripPlan(strip_problem(p), sms_of<StripChoice>(config)).words *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status check_strips(Op op, const StripChoice& choice) {
  Status status = check_alone(op, choice.alone, choice.split > 1 && choice.cluster == 1);
  return status.ok() ? check_sms(op, choice.sms) : status;
}

Status prepare_strips(const Call& call, void* prepared) {
  const StripProblem problem = strip_problem(call.problem);
  const auto choice = from_config<StripChoice>(call.config);
  if (Status status = check_strips(call.problem.op, choice); !status.ok()) return status;
  const ProductIndex index = index_of(call);
  return cuda::launch_status(name(call.problem.op), prepare(problem, static_cast<int>(choice.sms), index,
                                                            static_cast<std::int32_t*>(prepared),
                                                            static_cast<cudaStream_t>(call.stream)));
}

Status run_strips(const Call& call) {
  const StripProblem problem = strip_problem(call.problem);
  const auto choice = from_config<StripChoice>(call.config);
  if (Status status = check_strips(call.problem.op, choice); !status.ok()) return status;
  const StripOperands operands{problem.transposed ? call.dy.data : call.x.data, call.values, call.bias,
                               call.out.data, static_cast<const std::int32_t*>(call.derived.prepared)};
  return cuda::launch_status(name(call.problem.op),
                             launch(problem, choice.config(), static_cast<int>(choice.sms), operands,
                                    static_cast<cudaStream_t>(call.stream)));
}

Kernel strips(Op op, std::string_view name) {
  return {.op = op,
          .device = Device::cuda,
          .family = "sm90",
          .name = name,
          .supports = supports_strips,
          .run = run_strips,
          .configure = configure_strips,
          .fields = StripChoice::kFields,
          .candidates = candidates_strips,
          .microseconds = strip_microseconds,
          .prepared_size = prepared_size,
          .prepare = prepare_strips};
}

// Unions ------------------------------------------------------------------------------------------------

struct UnionChoice {
  std::int64_t strips = 2, width = 64, tokens = 256, slots = 4, pieces = 32, buffers = 2, sms = 132,
               split = 1, pair = 1, alone = 0;
  static constexpr std::string_view kFields[] = {"strips",  "width", "tokens", "slots", "pieces",
                                                 "buffers", "sms",   "split",  "pair",  "alone"};

  UnionConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(strips), n(width), n(tokens), n(slots), n(pieces), n(buffers), n(split), n(pair), alone != 0};
  }
};

UnionProblem union_problem(const Problem& p) { return product<UnionProblem>(p); }

Reason supports_unions(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (Reason reason = refuses_f32(p); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(union_problem(p));
}

Reason yields_unions(const Problem& p, const rarefy::Machine& machine) {
  if (union_problem(p).fine()) {
    if (Reason reason = refuses_few(p); !reason.empty()) return reason;
  }
  return unions_yield_to_whole(p, machine);
}

Config choice_of(const UnionConfig& c, const rarefy::Machine& machine) {
  return to_config(UnionChoice{c.strips, c.width, c.tokens, c.slots, c.pieces, c.buffers, machine.gpu.sms,
                               c.split, c.pair, c.alone ? 1 : 0});
}

Config configure_unions(const Problem& p, const rarefy::Machine& machine) {
  return choice_of(configure(union_problem(p), sm90_machine(machine)), machine);
}

std::vector<Config> candidates_unions(const Problem& p, const rarefy::Machine& machine) {
  const UnionProblem problem = union_problem(p);
  const Machine sm90 = sm90_machine(machine);
  std::vector<Config> all;
  for (const UnionCandidate& c : union_candidates(problem, layouts_of(problem), sm90)) {
    if (c.reason.empty()) all.push_back(choice_of(c.config, machine));
  }
  return all;
}

double union_microseconds(const Problem& p, const Config& config, const rarefy::Machine& machine) {
  const UnionProblem problem = union_problem(p);
  return microseconds_of(union_candidates(problem, layouts_of(problem), sm90_machine(machine)), config,
                         [&](const UnionConfig& c) { return choice_of(c, machine); });
}

UnionPlan union_plan(const Problem& p, const Config& config) {
  return {union_problem(p), sms_of<UnionChoice>(config)};
}

std::int64_t union_prepared_size(const Problem& p, const Config& config) {
  return union_plan(p, config).words * static_cast<std::int64_t>(sizeof(std::int32_t));
}

std::int64_t union_packed_size(const Problem& p, const Config& config) {
  return union_plan(p, config).packed_bytes();
}

// A forced config may hold anything; sizes are asked for before it is refused.
Status check_choice(const Call& call, const UnionProblem& problem) {
  const auto choice = from_config<UnionChoice>(call.config);
  const auto refuse = [&](std::string_view requirement, std::int64_t got) {
    return invalid(name(call.problem.op), requirement, cat(got));
  };
  if (choice.strips != 2 && choice.strips != 3)
    return refuse("strips of the config must be 2 or 3", choice.strips);
  if (choice.pair != 1 && (choice.pair != 2 || choice.strips != 3))
    return refuse("pair of the config must be 1, or 2 of three strips", choice.pair);
  const bool parts = choice.split > 1 && choice.pair == 1;
  if (Status status = check_alone(call.problem.op, choice.alone, parts); !status.ok()) return status;
  const int width = layout_of(problem, static_cast<int>(choice.strips * choice.pair)).width;
  if (choice.width != width)
    return refuse(cat("width of the config must be what is prepared, ", width), choice.width);
  return check_sms(call.problem.op, choice.sms);
}

Status prepare_unions(const Call& call, void* prepared) {
  const UnionProblem problem = union_problem(call.problem);
  if (Status status = check_choice(call, problem); !status.ok()) return status;
  return cuda::launch_status(
      name(call.problem.op),
      prepare(problem, layouts_of(problem), sms_of<UnionChoice>(call.config), index_of(call),
              static_cast<std::int32_t*>(prepared), static_cast<cudaStream_t>(call.stream)));
}

Status pack_unions(const Call& call, void* packed) {
  const UnionProblem problem = union_problem(call.problem);
  if (Status status = check_choice(call, problem); !status.ok()) return status;
  return cuda::launch_status(name(call.problem.op),
                             pack(problem, sms_of<UnionChoice>(call.config), index_of(call),
                                  static_cast<const std::int32_t*>(call.derived.prepared), call.values,
                                  packed, static_cast<cudaStream_t>(call.stream)));
}

Status run_unions(const Call& call) {
  const UnionProblem problem = union_problem(call.problem);
  if (Status status = check_choice(call, problem); !status.ok()) return status;
  const UnionOperands operands{call.problem.op == Op::grad_input ? call.dy.data : call.x.data,
                               call.values,
                               index_of(call),
                               call.bias,
                               call.out.data,
                               static_cast<const std::int32_t*>(call.derived.prepared),
                               call.derived.packed};
  const UnionConfig config = from_config<UnionChoice>(call.config).config();
  return cuda::launch_status(name(call.problem.op), launch(problem, config, sms_of<UnionChoice>(call.config),
                                                           operands, static_cast<cudaStream_t>(call.stream)));
}

Kernel unions(Op op, std::string_view name) {
  return {.op = op,
          .device = Device::cuda,
          .family = "sm90",
          .name = name,
          .supports = supports_unions,
          .run = run_unions,
          .yields = yields_unions,
          .configure = configure_unions,
          .fields = UnionChoice::kFields,
          .candidates = candidates_unions,
          .microseconds = union_microseconds,
          .prepared_size = union_prepared_size,
          .prepare = prepare_unions,
          .packed_size = union_packed_size,
          .pack = pack_unions};
}

}  // namespace

double dense_microseconds(const Problem& p, const rarefy::Machine& machine) {
  if (!supports_family(p, machine).empty() || p.in == DType::f32) return 0;
  constexpr double kRate = 6e6;  // products and sums of an SM in a microsecond, of cuBLAS at its power limit
  const BsrShape& s = p.weight.shape;
  const double reading = reading_microseconds(s.rows * s.cols * 2, machine);
  const double products = 2 * static_cast<double>(s.rows) * static_cast<double>(s.cols) *
                          static_cast<double>(p.tokens) / (kRate * machine.gpu.sms);
  // What a gradient's tiles write comes behind their products.
  return p.op == Op::grad_weight ? reading + products : std::max(reading, 2 + products);
}

void add_rows(Registry& registry) {
  registry.push_back({.op = Op::linear,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_decode",
                      .supports = supports_decode,
                      .run = run_decode,
                      .configure = configure_decode,
                      .fields = DecodeChoice::kFields,
                      .candidates = candidates_decode,
                      .microseconds = decode_microseconds});
  registry.push_back(
      {.op = Op::linear,
       .device = Device::cuda,
       .family = "sm90",
       .name = "sm90_tall_decode",
       .supports = supports_tall_decode,
       .run = run_tall_decode,
       .yields = yields_tall_decode,
       .configure = configure_tall_decode,
       .fields = TallDecodeChoice::kFields,
       .candidates = candidates_tall_decode,
       .workspace = [](const Problem& p, const Config&) { return workspace_bytes(tall_decode_problem(p)); },
       .microseconds = tall_decode_microseconds});
  registry.push_back(strips(Op::linear, "sm90_strips_linear"));
  registry.push_back(strips(Op::grad_input, "sm90_strips_grad_input"));
  add_tall_rows(registry);
  add_tall_backward_rows(registry);
  add_tall_packed_rows(registry);
  registry.push_back(unions(Op::linear, "sm90_unions_linear"));
  registry.push_back(unions(Op::grad_input, "sm90_unions_grad_input"));
  add_whole_rows(registry);
  add_gradient_rows(registry);
  for (Kernel& kernel : registry) {
    if (kernel.family == "sm90") kernel.aligns_rows = true;
  }
}

}  // namespace rarefy::sm90
