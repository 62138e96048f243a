// The tall kernel's rows: linear, for blocks in place or packed, and a feed-forward network of two such
// layers, whose hidden features stay by feature between them.
#include "core/message.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

struct TallChoice {
  std::int64_t rows = 128, slots = 4, chunk = 512, sms = 132;
  static constexpr std::string_view kFields[] = {"rows", "slots", "chunk", "sms"};
  TallConfig config() const { return {static_cast<int>(rows), static_cast<int>(slots), chunk}; }
};

TallProblem tall_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in,        p.tokens,     s.rows,      s.cols,       s.block_rows, s.nnzb,
          p.in_layout, p.out_layout, p.in_stride, p.out_stride, p.activation};
}

Reason supports_tall(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.weight.shape.block_cols != 1)
    return cat("takes blocks of one column; got ", p.weight.shape.block_cols);
  if (Reason reason = refuses_few(p); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(tall_problem(p));
}

Reason supports_whole(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_tall(p, machine);
  return reason.empty() && tall_problem(p).in_pairs() ? "takes blocks whose rows are a multiple of 64"
                                                      : reason;
}

Reason supports_pairs(const Problem& p, const rarefy::Machine& machine) {
  Reason reason = supports_tall(p, machine);
  return reason.empty() && !tall_problem(p).in_pairs() ? "takes blocks whose rows are an odd multiple of 32"
                                                       : reason;
}

Config configure_tall(const Problem& p, const rarefy::Machine& machine) {
  const TallConfig c = configure(tall_problem(p), static_cast<int>(machine.gpu.shared_memory));
  return to_config(TallChoice{c.rows, c.slots, c.chunk, machine.gpu.sms});
}

// A forced config may hold anything; sizes are asked for before it is refused.
Status check_tall(const Problem& p, const Config& config) {
  const auto choice = from_config<TallChoice>(config);
  const auto refuse = [](std::string_view requirement, std::int64_t got) {
    return invalid("linear", requirement, cat(got));
  };
  if (choice.rows != 64 && !(choice.rows == 128 && p.weight.shape.block_rows % 128 == 0))
    return refuse("rows of the config must be 64, or 128 where a block has a multiple of 128", choice.rows);
  if (choice.slots < 2 || choice.slots > 8)
    return refuse("slots of the config must be in [2, 8]", choice.slots);
  if (choice.chunk < 512 || choice.chunk % 512 != 0)
    return refuse("chunk of the config must be a multiple of 512", choice.chunk);
  if (choice.sms < 1 || choice.sms > kMostClusters)
    return refuse(cat("sms of the config must be in [1, ", kMostClusters, ']'), choice.sms);
  return {};
}

int tall_sms(const Config& config) { return static_cast<int>(from_config<TallChoice>(config).sms); }

std::int64_t tall_workspace(const Problem& p, const Config& config) {
  if (!check_tall(p, config).ok()) return 0;
  return from_config<TallChoice>(config).config().workspace(tall_problem(p));
}

std::int64_t tall_prepared_size(const Problem& p, const Config& config) {
  if (!check_tall(p, config).ok()) return sizeof(std::int32_t);  // `prepare` says why
  return TallPlan(tall_problem(p), from_config<TallChoice>(config).config(), tall_sms(config)).words *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_tall(const Call& call, void* prepared) {
  if (Status status = check_tall(call.problem, call.config); !status.ok()) return status;
  return cuda::launch_status(
      "linear", prepare(tall_problem(call.problem), from_config<TallChoice>(call.config).config(),
                        tall_sms(call.config), call.plan.crow, call.plan.col,
                        static_cast<std::int32_t*>(prepared), static_cast<cudaStream_t>(call.stream)));
}

std::int64_t tall_packed_size(const Problem& p, const Config& /*config*/) {
  return tall_problem(p).packed_bytes();
}

Status pack_tall(const Call& call, void* packed) {
  if (Status status = check_tall(call.problem, call.config); !status.ok()) return status;
  return cuda::launch_status(
      "linear", pack(tall_problem(call.problem), from_config<TallChoice>(call.config).config(),
                     tall_sms(call.config), static_cast<const std::int32_t*>(call.derived.prepared),
                     call.values, packed, static_cast<cudaStream_t>(call.stream)));
}

Status run_tall(const Call& call) {
  if (Status status = check_tall(call.problem, call.config); !status.ok()) return status;
  const TallOperands operands{call.x.data,
                              call.values,
                              call.plan.crow,
                              call.plan.col,
                              call.bias,
                              call.out.data,
                              static_cast<const std::int32_t*>(call.derived.prepared),
                              call.workspace,
                              call.derived.packed};
  return cuda::launch_status("linear",
                             launch(tall_problem(call.problem), from_config<TallChoice>(call.config).config(),
                                    tall_sms(call.config), operands, static_cast<cudaStream_t>(call.stream)));
}

// Two layers --------------------------------------------------------------------------------------------

// Tokens that the hidden features have room for: whole pieces of 16 bytes, and more.
std::int64_t hidden_stride(const Problem& p) { return by_feature_stride(p.tokens); }

// A layer of the network as a problem of its own.
Problem layer_problem(const Problem& p, bool down) {
  const WeightSpec& weight = down ? p.down : p.weight;
  Problem one = make_problem(Op::linear, weight.shape, p.tokens, p.in, Device::cuda);
  one.weight = weight;
  const std::int64_t between = hidden_stride(p);
  if (down) {
    one.in_layout = Layout::by_feature;
    one.in_stride = between;
    one.out_layout = p.out_layout;
    one.out_stride = p.out_stride;
  } else {
    one.in_layout = p.in_layout;
    one.in_stride = p.in_stride;
    one.out_layout = Layout::by_feature;
    one.out_stride = between;
    one.activation = p.activation;
  }
  one.in_alignment = p.in_alignment;
  one.out_alignment = p.out_alignment;
  one.bias = p.bias;
  return one;
}

Reason supports_chain(const Problem& p, const rarefy::Machine& machine) {
  if (p.gate != WeightSpec{}) return "has no gate";
  Problem up = layer_problem(p, false);
  up.tokens = hidden_stride(p);  // what is written behind the last token is in the workspace, and not read
  if (Reason reason = supports_whole(up, machine); !reason.empty()) return cat("up: ", reason);
  if (Reason reason = supports_whole(layer_problem(p, true), machine); !reason.empty())
    return cat("down: ", reason);
  const auto rows = [&](bool down) {
    return from_config<TallChoice>(configure_tall(layer_problem(p, down), machine)).rows;
  };
  if (rows(false) != rows(true)) return "wants both layers in tiles of as many rows";
  return {};
}

Config configure_chain(const Problem& p, const rarefy::Machine& machine) {
  return configure_tall(layer_problem(p, false), machine);
}

// Hidden features, then up's own.
std::int64_t hidden_bytes(const Problem& p) { return p.weight.shape.rows * hidden_stride(p) * 2; }

std::int64_t chain_workspace(const Problem& p, const Config& config) {
  return hidden_bytes(p) + tall_workspace(layer_problem(p, false), config);
}

Status run_chain(const Call& call) {
  if (call.save.up.data != nullptr) {
    return error(StatusCode::unsupported, "feed_forward", "hidden features cannot be saved on CUDA",
                 "saved up");
  }
  auto* hidden = static_cast<std::byte*>(call.workspace);
  for (const bool down : {false, true}) {
    const LayerView& layer = down ? call.layers->down : call.layers->up;
    Call one;
    one.problem = layer_problem(call.problem, down);
    one.config = call.config;
    one.plan = layer.weight.plan;
    one.values = layer.weight.values;
    one.derived = layer.weight.derived;
    one.bias = layer.bias;
    one.x.data = down ? hidden : call.x.data;
    one.out.data = down ? call.out.data : hidden;
    one.workspace = hidden + hidden_bytes(call.problem);
    one.stream = call.stream;
    if (const std::int64_t size = tall_prepared_size(one.problem, one.config);
        one.derived.prepared == nullptr || one.derived.prepared_bytes < size) {
      return invalid("feed_forward",
                     cat("derived.prepared must have at least ", size, " bytes (derived_sizes)"),
                     cat(one.derived.prepared_bytes));
    }
    if (Status status = run_tall(one); !status.ok()) return status;
  }
  return {};
}

}  // namespace

void add_tall_rows(Registry& registry) {
  const auto variant = [](const Problem& /*problem*/, const Config& config) {
    return from_config<TallChoice>(config).rows;
  };
  Kernel whole{.op = Op::linear,
               .device = Device::cuda,
               .family = "sm90",
               .name = "sm90_tall",
               .supports = supports_whole,
               .run = run_tall,
               .any_layout = true,
               .configure = configure_tall,
               .fields = TallChoice::kFields,
               .workspace = tall_workspace,
               .variant = variant,
               .prepared_size = tall_prepared_size,
               .prepare = prepare_tall};
  Kernel pairs = whole;
  pairs.name = "sm90_tall_pairs";
  pairs.supports = supports_pairs;
  pairs.packed_size = tall_packed_size;
  pairs.pack = pack_tall;
  registry.push_back(whole);
  registry.push_back(pairs);
  registry.push_back({.op = Op::feed_forward,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall_feed_forward",
                      .supports = supports_chain,
                      .run = run_chain,
                      .any_layout = true,
                      .configure = configure_chain,
                      .fields = TallChoice::kFields,
                      .workspace = chain_workspace,
                      .derives_as = "sm90_tall",
                      .variant = variant});
}

}  // namespace rarefy::sm90
