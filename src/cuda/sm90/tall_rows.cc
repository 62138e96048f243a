// The tall kernel's rows: linear of tall blocks in place, and a feed-forward network of two such layers,
// whose hidden features stay by feature between them.
#include "core/message.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall_choice.h"
#include "cuda/sm90/tall_decode.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

TallProblem tall_problem(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return {p.in,        p.tokens,     s.rows,      s.cols,       s.block_rows, s.nnzb,
          p.in_layout, p.out_layout, p.in_stride, p.out_stride, p.activation, p.out_padded};
}

Reason supports_tall(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.weight.shape.block_cols != 1)
    return cat("takes blocks of one column; got ", p.weight.shape.block_cols);
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  return unsupported(tall_problem(p));
}

Reason yields_few(const Problem& p, const rarefy::Machine& /*machine*/) { return refuses_few(p); }

Config configure_tall(const Problem& p, const rarefy::Machine& machine) {
  return to_config(tall_choice(tall_problem(p), machine));
}

Status check_tall(const Problem& p, const Config& config) {
  return check_choice(p.op, tall_problem(p), from_config<TallChoice>(config));
}

double tall_microseconds(const Problem& p, const Config& config, const rarefy::Machine& /*machine*/) {
  if (!check_tall(p, config).ok()) return 0;
  const auto choice = from_config<TallChoice>(config);
  return in_a_chain(predicted_microseconds(tall_problem(p), choice.config(), static_cast<int>(choice.sms)));
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
                        tall_sms(call.config), call.plan.crow, static_cast<std::int32_t*>(prepared),
                        static_cast<cudaStream_t>(call.stream)));
}

Status run_tall(const Call& call) {
  if (Status status = check_tall(call.problem, call.config); !status.ok()) return status;
  const TallOperands operands{call.x.data,    call.values,
                              call.plan.col,  call.bias,
                              call.out.data,  static_cast<const std::int32_t*>(call.derived.prepared),
                              call.workspace, {}};
  return cuda::launch_status("linear",
                             launch(tall_problem(call.problem), from_config<TallChoice>(call.config).config(),
                                    tall_sms(call.config), operands, static_cast<cudaStream_t>(call.stream)));
}

// Two layers --------------------------------------------------------------------------------------------

// Tokens that the hidden features have room for: whole pieces of 16 bytes, and more.
std::int64_t hidden_stride(const Problem& p) { return turned_stride(p.tokens); }

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
  if (p.tokens <= kMostDecoded)
    return cat("leaves up to ", kMostDecoded, " tokens to its layers; got ", p.tokens);
  Problem up = layer_problem(p, false);
  up.tokens = hidden_stride(p);  // what is written behind the last token is in the workspace, and not read
  if (Reason reason = supports_tall(up, machine); !reason.empty()) return cat("up: ", reason);
  if (Reason reason = supports_tall(layer_problem(p, true), machine); !reason.empty())
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
    const auto network = from_config<TallChoice>(call.config);
    one.config = to_config(tall_choice(
        with_tile(tall_problem(one.problem), network.config(), tall_sms(call.config)), network.sms));
    if (Status status = run_tall(one); !status.ok()) return status;
  }
  return {};
}

}  // namespace

void add_tall_rows(Registry& registry) {
  const auto variant = [](const Problem& /*problem*/, const Config& config) {
    return from_config<TallChoice>(config).rows;
  };
  registry.push_back({.op = Op::linear,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall",
                      .supports = supports_tall,
                      .run = run_tall,
                      .yields = yields_few,
                      .any_layout = true,
                      .configure = configure_tall,
                      .fields = TallChoice::kFields,
                      .workspace = tall_workspace,
                      .microseconds = tall_microseconds,
                      .variant = variant,
                      .prepared_size = tall_prepared_size,
                      .prepare = prepare_tall});
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
