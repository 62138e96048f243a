// The rows of tall kernels for blocks of any other shape, whose values are packed as columns of 64 or 128
// (tall_columns.h): linear; grad_input of the same columns, or, by linear's kernel, of those of the
// transpose; and grad_weight, made of columns and read out.
#include <algorithm>

#include "core/checked.h"
#include "cuda/sm90/register.h"
#include "cuda/sm90/rows.h"
#include "cuda/sm90/tall_choice.h"
#include "cuda/sm90/tall_columns.h"
#include "cuda/sm90/unions.h"
#include "cuda/status.h"

namespace rarefy::sm90 {
namespace {

TallColumns columns_of(const Problem& p) { return TallColumns(product<Product>(p)); }

// The weight of columns as one in place, with so many of them.
TallProblem packed_problem(const Problem& p, const TallColumns& columns, std::int64_t count) {
  return {p.in,
          p.tokens,
          columns.product.out_features(),
          columns.product.in_features(),
          columns.height,
          count,
          p.in_layout,
          p.out_layout,
          p.in_stride,
          p.out_stride,
          p.activation,
          p.out_padded};
}
TallProblem packed_problem(const Problem& p, const TallColumns& columns) {
  return packed_problem(p, columns, columns.most);
}

Reason supports_columns(const Problem& p, const rarefy::Machine& machine, const TallColumns& columns) {
  if (Reason reason = supports_family(p, machine); !reason.empty()) return reason;
  if (p.out_alignment < 16) return cat("needs outputs and bias aligned to 16 bytes; got ", p.out_alignment);
  const Product& stated = columns.product;
  if (!stated.transposed && stated.block_cols == 1 && stated.block_rows % 64 == 0)
    return "takes blocks whose columns want packing";
  return unsupported(columns);
}

double packed_microseconds(const Problem& p, const Machine& machine) {
  const TallColumns columns = columns_of(p);
  TallProblem tall = packed_problem(p, columns, columns.expected());
  tall.x_layout = Layout::by_token;
  return held_microseconds([&](std::int64_t tokens) {
    tall.tokens = tokens;
    return predicted_microseconds(tall, configure(tall, machine.sms, machine.shared_bytes), machine.sms);
  });
}

// Its times are 5 % too long where little is left out. Blocks that fill whole pieces of unions are packed in
// a third of the time there.
double union_microseconds(const Problem& p, const rarefy::Machine& machine) {
  const auto unions = product<UnionProblem>(p);
  return held_union_microseconds(unions, machine) * (unions.fine() ? .95 : .9);
}

Reason yields_to(double mine, double its, std::string_view name) {
  return mine <= its ? Reason() : why_held(mine, name, its);
}

Reason yields_to_unions(const Problem& p, const rarefy::Machine& machine) {
  const BsrShape& s = p.weight.shape;
  if (p.op == Op::linear && s.block_cols == 1 && s.block_rows % 32 == 0)
    return {};  // half of the zeros at most
  return yields_to(packed_microseconds(p, sm90_machine(machine)), union_microseconds(p, machine), "unions");
}

// Matrices by feature, which unions do not take: where columns are what callers hold for those by token.
Reason supports_packed(const Problem& p, const rarefy::Machine& machine) {
  const TallColumns columns = columns_of(p);
  if (Reason reason = supports_columns(p, machine, columns); !reason.empty()) return reason;
  if (p.op == Op::grad_input && p.activation != Activation::none) return "grad_input has no activation";
  if (p.in_layout == Layout::by_feature || p.out_layout == Layout::by_feature) {
    if (Reason reason = yields_to_unions(p, machine); !reason.empty()) return reason;
  }
  return unsupported(packed_problem(p, columns));
}

// Few tokens go where tall blocks' do.
Reason yields_packed(const Problem& p, const rarefy::Machine& machine) {
  if (Reason reason = refuses_few(p); !reason.empty()) return reason;
  if (Reason reason = yields_to_unions(p, machine); !reason.empty()) return reason;
  const BsrShape& s = p.weight.shape;
  const double margin = s.block_cols == 1 && s.block_rows % 32 == 0 ? 10 : 3;  // it takes Y by feature, too
  return yields_to_whole(p, machine, packed_microseconds(p, sm90_machine(machine)), margin);
}

Config configure_packed(const Problem& p, const rarefy::Machine& machine) {
  const TallColumns columns = columns_of(p);
  return to_config(tall_choice(packed_problem(p, columns, columns.expected()), machine));
}

Status check_packed(const Problem& p, const Config& config) {
  return check_choice(p.op, packed_problem(p, columns_of(p)), from_config<TallChoice>(config));
}

double run_microseconds(const Problem& p, const Config& config, const rarefy::Machine& /*machine*/) {
  if (!check_packed(p, config).ok()) return 0;
  const TallColumns columns = columns_of(p);
  const auto choice = from_config<TallChoice>(config);
  return in_a_chain(predicted_microseconds(packed_problem(p, columns, columns.expected()), choice.config(),
                                           static_cast<int>(choice.sms)));
}

int sms_of(const Config& config) { return static_cast<int>(from_config<TallChoice>(config).sms); }

std::int64_t packed_workspace(const Problem& p, const Config& config) {
  if (!check_packed(p, config).ok()) return 0;
  return from_config<TallChoice>(config).config().workspace(packed_problem(p, columns_of(p)));
}

// The columns, then what the tall kernel walks.
std::int64_t packed_prepared_size(const Problem& p, const Config& config) {
  if (!check_packed(p, config).ok()) return sizeof(std::int32_t);  // `prepare` says why
  const TallColumns columns = columns_of(p);
  const TallPlan plan(packed_problem(p, columns), from_config<TallChoice>(config).config(), sms_of(config));
  return (columns.words + plan.words) * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_packed(const Call& call, void* prepared) {
  const Problem& p = call.problem;
  if (Status status = check_packed(p, call.config); !status.ok()) return status;
  const TallColumns columns = columns_of(p);
  auto* const words = static_cast<std::int32_t*>(prepared);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  cudaError_t error = prepare(columns, index_of(call), words, stream);
  if (error == cudaSuccess)
    error = prepare(packed_problem(p, columns), from_config<TallChoice>(call.config).config(),
                    sms_of(call.config), columns.index(words).offsets, words + columns.words, stream);
  return cuda::launch_status(name(p.op), error);
}

std::int64_t packed_size(const Problem& p, const Config& /*config*/) { return columns_of(p).bytes(); }

Status pack_columns(const Call& call, void* packed) {
  if (Status status = check_packed(call.problem, call.config); !status.ok()) return status;
  return cuda::launch_status(
      name(call.problem.op),
      pack(columns_of(call.problem), index_of(call), static_cast<const std::int32_t*>(call.derived.prepared),
           call.values, packed, static_cast<cudaStream_t>(call.stream)));
}

Status run_packed(const Call& call) {
  const Problem& p = call.problem;
  if (Status status = check_packed(p, call.config); !status.ok()) return status;
  const TallColumns columns = columns_of(p);
  const auto* const words = static_cast<const std::int32_t*>(call.derived.prepared);
  const TallOperands operands{p.op == Op::grad_input ? call.dy.data : call.x.data,
                              call.derived.packed,
                              columns.index(words).others,
                              call.bias,
                              call.out.data,
                              words + columns.words,
                              call.workspace,
                              {columns.product, index_of(call), call.values}};
  return cuda::launch_status(name(p.op),
                             launch(packed_problem(p, columns), from_config<TallChoice>(call.config).config(),
                                    sms_of(call.config), operands, static_cast<cudaStream_t>(call.stream)));
}

Kernel packed(Op op, std::string_view name) {
  return {.op = op,
          .device = Device::cuda,
          .family = "sm90",
          .name = name,
          .supports = supports_packed,
          .run = run_packed,
          .yields = yields_packed,
          .any_layout = op == Op::linear,
          .configure = configure_packed,
          .fields = TallChoice::kFields,
          .workspace = packed_workspace,
          .microseconds = run_microseconds,
          .variant = [](const Problem& /*problem*/,
                        const Config& config) { return from_config<TallChoice>(config).rows; },
          .prepared_size = packed_prepared_size,
          .prepare = prepare_packed,
          .packed_size = packed_size,
          .pack = pack_columns};
}

// dX of W's columns -----------------------------------------------------------------------------------------

ProductIndex index_by_row(const Call& call) { return {call.plan.crow, call.plan.col, nullptr}; }

Product input_problem(const Problem& p, const TallColumns& columns) {
  return packed_input(columns, columns.most, p.tokens);
}

Reason supports_input(const Problem& p, const rarefy::Machine& machine) {
  const TallColumns columns = columns_of_weight(p);
  if (Reason reason = supports_columns(p, machine, columns); !reason.empty()) return reason;
  return tall_input_unsupported(input_problem(p, columns));
}

Reason yields_input(const Problem& p, const rarefy::Machine& machine) {
  const Machine sm90 = sm90_machine(machine);
  const double mine = held_input_microseconds(p, machine);
  if (Reason reason = yields_to(mine, packed_microseconds(p, sm90), "columns of the transpose");
      !reason.empty())
    return reason;
  Reason reason = yields_to(mine, union_microseconds(p, machine), "unions");
  return reason.empty() ? yields_to_whole(p, machine, mine) : reason;
}

double input_microseconds(const Problem& p, const Config& /*config*/, const rarefy::Machine& machine) {
  return in_a_chain(best_input(expected_input(p, p.tokens), machine).microseconds);
}

Config configure_input(const Problem& p, const rarefy::Machine& machine) {
  return to_config(input_choice(best_input(expected_input(p, p.tokens), machine).config, machine));
}

Status check_input(const Problem& p, const Config& config) {
  const auto choice = from_config<TallInputChoice>(config);
  if (valid(input_problem(p, columns_of_weight(p)), choice.config()) && choice.sms >= 1 &&
      choice.sms <= INT32_MAX)
    return {};
  return invalid("grad_input", "the config must be one that the blocks allow", choice.config().text());
}

std::int64_t input_prepared_size(const Problem& p, const Config& /*config*/) {
  const TallColumns columns = columns_of_weight(p);
  return (columns.words + tall_input_words(input_problem(p, columns))) *
         static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_input(const Call& call, void* prepared) {
  const TallColumns columns = columns_of_weight(call.problem);
  auto* const words = static_cast<std::int32_t*>(prepared);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  cudaError_t error = prepare(columns, index_by_row(call), words, stream);
  const ProductIndex index = columns.index(words);
  if (error == cudaSuccess)
    error = prepare_tall_input(input_problem(call.problem, columns), index.offsets, index.others,
                               words + columns.words, stream);
  return cuda::launch_status("grad_input", error);
}

std::int64_t input_packed_size(const Problem& p, const Config& /*config*/) {
  return columns_of_weight(p).bytes();
}

Status pack_input(const Call& call, void* packed) {
  return cuda::launch_status("grad_input", pack(columns_of_weight(call.problem), index_by_row(call),
                                                static_cast<const std::int32_t*>(call.derived.prepared),
                                                call.values, packed, static_cast<cudaStream_t>(call.stream)));
}

Status run_input(const Call& call) {
  const Problem& p = call.problem;
  if (Status status = check_input(p, call.config); !status.ok()) return status;
  const TallColumns columns = columns_of_weight(p);
  const auto choice = from_config<TallInputChoice>(call.config);
  const auto* const words = static_cast<const std::int32_t*>(call.derived.prepared);
  const TallInputOperands operands{call.dy.data,
                                   call.derived.packed,
                                   call.out.data,
                                   columns.index(words).others,
                                   {product<Product>(p), index_of(call), call.values},
                                   words + columns.words};
  return cuda::launch_status("grad_input", launch_tall_input(input_problem(p, columns), choice.config(),
                                                             static_cast<int>(choice.sms), operands,
                                                             static_cast<cudaStream_t>(call.stream)));
}

// dW ------------------------------------------------------------------------------------------------------

TallGradientProblem gradient_problem(const Problem& p, const TallColumns& columns, std::int64_t count) {
  const BsrShape& s = p.weight.shape;
  return {p.in, p.tokens, s.rows, s.cols, columns.height, count, p.in_stride, p.out_stride, p.out_layout};
}
TallGradientProblem gradient_problem(const Problem& p, const TallColumns& columns) {
  return gradient_problem(p, columns, columns.most);
}

TallGradientConfig gradient_config(const Config& config) {
  return from_config<TallGradientChoice>(config).config();
}

Reason supports_gradient(const Problem& p, const rarefy::Machine& machine) {
  if (p.in_layout == Layout::by_feature) return "takes dY by token";
  const TallColumns columns = columns_of(p);
  if (Reason reason = supports_columns(p, machine, columns); !reason.empty()) return reason;
  return unsupported(gradient_problem(p, columns));
}

double expected_share(const Problem& p) {  // of W, that columns hold
  const TallColumns columns = columns_of(p);
  const auto all = static_cast<double>(columns.groups * p.weight.shape.cols);
  return all == 0 ? 0 : static_cast<double>(columns.expected()) / all;
}

double gradient_microseconds(const Problem& p, const Config& /*config*/, const rarefy::Machine& /*machine*/) {
  return in_a_chain(FineGradientTimes(p.weight.shape, p.tokens).columns(expected_share(p)));
}

Reason yields_gradient(const Problem& p, const rarefy::Machine& machine) {
  const BsrShape& s = p.weight.shape;
  if (s.block_rows % 16 == 0 && s.block_cols % 16 == 0)
    return "leaves blocks of 16 to kernels with tiles of them";
  const double share = expected_share(p);
  const FineGradientTimes times(s, p.tokens), many(s, kManyTokens);
  const double mine = times.columns(share), plain = times.plain();
  if (mine > plain) return cat("takes ", mine, " us, a plain kernel ", plain);
  Problem of_many = p;
  of_many.tokens = kManyTokens;
  const double whole = std::min(many.whole(), whole_gradient_microseconds(of_many, machine));
  return many.columns(share) <= whole ? Reason() : "of so many columns all are as fast";
}

// Tiles and shares for as many columns as are expected; where there may be too many for that, for these.
Config configure_gradient(const Problem& p, const rarefy::Machine& machine) {
  const TallColumns columns = columns_of(p);
  const TallGradientProblem most = gradient_problem(p, columns);
  TallGradientChoice choice = gradient_choice(gradient_problem(p, columns, columns.expected()), machine);
  if (!valid(most, choice.config())) choice = gradient_choice(most, machine);
  return to_config(choice);
}

Status check_gradient(const Problem& p, const Config& config) {
  if (valid(gradient_problem(p, columns_of(p)), gradient_config(config))) return {};
  return invalid("grad_weight", "the config must be one that the blocks allow",
                 gradient_config(config).text());
}

// The columns' gradient lies before what the kernel takes.
std::int64_t column_bytes(const TallColumns& columns) { return ceil_div(columns.bytes(), 256) * 256; }

std::int64_t gradient_workspace(const Problem& p, const Config& config) {
  if (!check_gradient(p, config).ok()) return 0;
  const TallColumns columns = columns_of(p);
  return column_bytes(columns) + workspace(gradient_problem(p, columns), gradient_config(config));
}

std::int64_t gradient_prepared_size(const Problem& p, const Config& config) {
  if (!check_gradient(p, config).ok()) return sizeof(std::int32_t);  // `prepare` says why
  const TallColumns columns = columns_of(p);
  const TallGradientPlan plan(gradient_problem(p, columns), gradient_config(config));
  return (columns.words + plan.words) * static_cast<std::int64_t>(sizeof(std::int32_t));
}

Status prepare_gradient(const Call& call, void* prepared) {
  const Problem& p = call.problem;
  if (Status status = check_gradient(p, call.config); !status.ok()) return status;
  const TallColumns columns = columns_of(p);
  auto* const words = static_cast<std::int32_t*>(prepared);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  cudaError_t error = prepare(columns, index_of(call), words, stream);
  const ProductIndex index = columns.index(words);
  if (error == cudaSuccess)
    error = prepare(gradient_problem(p, columns), gradient_config(call.config), index.offsets, index.others,
                    words + columns.words, stream);
  return cuda::launch_status("grad_weight", error);
}

Status run_gradient(const Call& call) {
  const Problem& p = call.problem;
  if (Status status = check_gradient(p, call.config); !status.ok()) return status;
  const TallColumns columns = columns_of(p);
  const auto* const words = static_cast<const std::int32_t*>(call.derived.prepared);
  auto* const gradient = static_cast<std::byte*>(call.workspace);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  const TallGradientOperands operands{call.dy.data, call.x.data,           columns.index(words).others,
                                      gradient,     words + columns.words, gradient + column_bytes(columns)};
  cudaError_t error = launch(gradient_problem(p, columns), gradient_config(call.config), operands, stream);
  if (error == cudaSuccess) error = unpack(columns, index_of(call), words, gradient, call.dvalues, stream);
  return cuda::launch_status("grad_weight", error);
}

}  // namespace

void add_tall_packed_rows(Registry& registry) {
  registry.push_back(packed(Op::linear, "sm90_tall_packed"));
  registry.push_back({.op = Op::grad_input,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall_packed_grad_input",
                      .supports = supports_input,
                      .run = run_input,
                      .yields = yields_input,
                      .configure = configure_input,
                      .fields = TallInputChoice::kFields,
                      .microseconds = input_microseconds,
                      .prepared_size = input_prepared_size,
                      .prepare = prepare_input,
                      .packed_size = input_packed_size,
                      .pack = pack_input});
  registry.push_back(packed(Op::grad_input, "sm90_tall_packed_transposed"));
  registry.push_back({.op = Op::grad_weight,
                      .device = Device::cuda,
                      .family = "sm90",
                      .name = "sm90_tall_packed_gradient",
                      .supports = supports_gradient,
                      .run = run_gradient,
                      .yields = yields_gradient,
                      .any_layout = true,
                      .configure = configure_gradient,
                      .fields = TallGradientChoice::kFields,
                      .workspace = gradient_workspace,
                      .microseconds = gradient_microseconds,
                      .unheld = Unheld::made,
                      .prepared_size = gradient_prepared_size,
                      .prepare = prepare_gradient});
}

}  // namespace rarefy::sm90
