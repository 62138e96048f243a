// Which kernel a problem gets, in which configuration, and why: one walk over the registry for calls,
// explain(), the command line, the bench and the tests.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/aligned_rows.h"
#include "core/checked.h"
#include "core/message.h"
#include "core/registry.h"

namespace rarefy {

namespace {

constexpr std::string_view kVariable = "RAREFY_FORCE_IMPL";

// What is forced: the text as given, the family for each device, and configurations by kernel.
struct Forced {
  std::string text;
  std::string family[2];
  std::vector<std::pair<const Kernel*, std::string>> configs;
  Status status;  // of a text that cannot be: calls report it
};

bool has_family(Device device, std::string_view family) {
  return std::ranges::any_of(
      registry(), [&](const Kernel& kernel) { return kernel.device == device && kernel.family == family; });
}

std::string families() {
  std::string list;
  for (const Device device : {Device::cpu, Device::cuda}) {
    std::string_view last;
    for (const Kernel& kernel : registry()) {
      if (kernel.device != device || kernel.family == last || kernel.op != Op::grad_input) continue;
      last = kernel.family;
      list += cat(list.empty() ? "" : ", ", name(device), ':', last);
    }
  }
  return list;
}

// One item of the list: "cpu:avx2", "avx2", or "avx2_linear(vectors=2 panels=1)". Says whether it means
// something in this build.
bool parse_item(std::string_view item, Forced& forced) {
  if (const auto open = item.find('('); open != std::string_view::npos && item.ends_with(')')) {
    const std::string_view config = item.substr(open + 1, item.size() - open - 2);
    for (const Kernel& kernel : registry()) {
      if (kernel.name != item.substr(0, open)) continue;
      forced.configs.emplace_back(&kernel, config);
      return parse_config(kernel, {}, config).ok();
    }
    return false;
  }
  const auto colon = item.find(':');
  const std::string_view family = colon == std::string_view::npos ? item : item.substr(colon + 1);
  bool known = false;
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (colon != std::string_view::npos && item.substr(0, colon) != name(device)) continue;
    if (!has_family(device, family)) continue;
    forced.family[static_cast<int>(device)] = family;
    known = true;
  }
  return known;
}

Forced parse_forced(std::string_view text) {
  Forced forced{std::string(text), {}, {}, {}};
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    if (parse_item(item, forced)) continue;
    forced.status = error(StatusCode::unsupported, "force_impl",
                          cat(kVariable, " must name families of this build (", families(),
                              "), or kernels with a config, avx2_linear(vectors=2)"),
                          cat('"', item, '"'));
  }
  return forced;
}

// The environment is read once: getenv beside another thread's setenv is a race.
struct ForcedState {
  std::mutex mutex;
  std::shared_ptr<const Forced> current;
  std::atomic<std::uint64_t> generation{1};

  ForcedState() {
    const char* value = std::getenv(kVariable.data());  // NOLINT(concurrency-mt-unsafe)
    current = std::make_shared<Forced>(parse_forced(value == nullptr ? "" : value));
  }
};

ForcedState& forced_state() {
  static ForcedState state;
  return state;
}

std::shared_ptr<const Forced> forced_now() {
  ForcedState& state = forced_state();
  const std::lock_guard lock(state.mutex);
  return state.current;
}

// Rows that share derived data share the key; names are unique, and variants are the row's own.
std::uint64_t key_of(const Kernel& kernel, const Problem& problem, const Config& config) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  const std::string_view shared = kernel.derives_as.empty() ? kernel.name : kernel.derives_as;
  for (const char c : shared) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  const std::int64_t variant = kernel.variant == nullptr ? 0 : kernel.variant(problem, config);
  hash = (hash ^ static_cast<std::uint64_t>(variant)) * 0x100000001b3U;
  hash ^= hash >> 29;
  return (hash >> 1) | 1U;  // 0 means nothing, and an int64 holds it
}

Config configuration(const Kernel& kernel, const Problem& problem, const Machine& machine) {
  return kernel.configure == nullptr ? Config{} : kernel.configure(problem, machine);
}

bool holds(const Problem& problem, std::uint64_t key) {
  return problem.derived == key || problem.derived == kAnyDerived || problem.derived == kAnyPrepared;
}

// What the caller has to give: the kernel's own workspace, and what is made ahead of it.
std::int64_t whole_workspace(const Problem& problem, const Choice& choice) {
  const bool held = holds(problem, choice.derived.key);
  return made_in_call(choice, held, held).bytes() + choice.workspace + bytes_to_add(problem, choice);
}

// Why this kernel cannot have the problem; empty when it can.
Reason why_not(const Kernel& kernel, const Problem& problem, const Machine& machine,
               std::string_view forced_family) {
  if (!forced_family.empty() && kernel.family != forced_family) {
    return cat(kVariable, " forces ", forced_family);
  }
  if (problem.weight.format != kernel.format) {
    return cat("takes weights in ", name(kernel.format), "; got ", name(problem.weight.format));
  }
  const bool by_token = problem.in_layout == Layout::by_token && problem.out_layout == Layout::by_token;
  if (!by_token && !kernel.any_layout) return "takes and gives matrices by token; got one by feature";
  if (Reason reason = kernel.supports(problem, machine); !reason.empty()) return reason;
  if (!kernel.derives() || kernel.unheld != Unheld::refused || problem.derived == kAnyDerived) return {};
  if (problem.derived == 0) return "its prepared or packed weight is not at hand";
  if (problem.derived == kAnyPrepared) {
    return kernel.pack == nullptr ? Reason() : "its packed weight is not at hand";
  }
  if (problem.derived == key_of(kernel, problem, configuration(kernel, problem, machine))) return {};
  return "the prepared or packed weight at hand is another kernel's";
}

Status no_kernel(const Registry& kernels, const Problem& problem, const Machine& machine,
                 std::string_view forced_family) {
  std::string reasons;
  for (const Kernel& kernel : kernels) {
    if (kernel.op != problem.op || kernel.device != problem.device) continue;
    if (!forced_family.empty() && kernel.family != forced_family) continue;
    reasons += cat("; ", kernel.name, ": ", why_not(kernel, problem, machine, forced_family));
  }
  if (!forced_family.empty()) {
    return error(StatusCode::unsupported, name(problem.op),
                 cat(kVariable, " must name an implementation that this machine and these inputs can use"),
                 cat('"', forced_family, "\" on ", name(problem.device), reasons));
  }
  return error(StatusCode::unsupported, name(problem.op), "a kernel of this build must fit the problem",
               cat(to_string(problem), reasons.empty() ? "; no kernel for this device" : reasons));
}

bool is_named(const Kernel& kernel, const Forced& forced) {
  return std::ranges::any_of(forced.configs, [&](const auto& named) { return named.first == &kernel; });
}

// Why a kernel that fits leaves the problem to a later one; empty when it does not.
Reason why_later(const Kernel& kernel, const Problem& problem, const Machine& machine) {
  return kernel.yields == nullptr ? Reason() : kernel.yields(problem, machine);
}

// Of kernels that fit the first that is forced by name, or that does not yield, or that does; or null.
const Kernel* first_fit(const Registry& kernels, const Problem& problem, const Machine& machine,
                        std::string_view forced_family, const Forced& forced) {
  const auto fits = [&](const Kernel& kernel) {
    return kernel.op == problem.op && kernel.device == problem.device &&
           why_not(kernel, problem, machine, forced_family).empty();
  };
  for (const Kernel& kernel : kernels) {
    if (is_named(kernel, forced) && fits(kernel)) return &kernel;
  }
  const Kernel* yielding = nullptr;
  for (const Kernel& kernel : kernels) {
    if (!fits(kernel)) continue;
    if (why_later(kernel, problem, machine).empty()) return &kernel;
    if (yielding == nullptr) yielding = &kernel;
  }
  return yielding;
}

// A kernel's choice for copies of the problem's matrices.
Choice aligned(const Kernel& kernel, const Problem& problem, const Config& config) {
  Choice choice = configured(kernel, with_aligned_rows(problem), config);
  choice.aligns_rows = true;
  choice.workspace += aligned_rows_bytes(problem);
  return choice;
}

// The kernel's own choices, but for those that are forced; `run` refuses what is out of range.
Choice with_forced_config(const Forced& forced, const Problem& problem, Choice choice) {
  for (const auto& [kernel, text] : forced.configs) {
    if (kernel != choice.kernel) continue;
    const Config config = *parse_config(*kernel, choice.config, text);
    choice = choice.aligns_rows ? aligned(*kernel, problem, config) : configured(*kernel, problem, config);
  }
  return choice;
}

std::uint64_t hash_of(const Problem& p) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, a word at a time
  const auto mix = [&](std::int64_t word) {
    hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x100000001b3U;
    hash ^= hash >> 29;
  };
  const BsrShape& s = p.weight.shape;
  for (const std::int64_t word :
       {s.rows, s.cols, s.block_rows, s.block_cols, s.nnzb, p.tokens, p.in_stride, p.out_stride}) {
    mix(word);
  }
  mix(static_cast<std::int64_t>(p.op) | static_cast<std::int64_t>(p.weight.dtype) << 8 |
      static_cast<std::int64_t>(p.in) << 16 | static_cast<std::int64_t>(p.activation) << 24 |
      static_cast<std::int64_t>(p.threads) << 32);
  mix(p.in_alignment | p.out_alignment << 6 | static_cast<int>(p.tf32) << 12 |
      static_cast<int>(p.accumulate) << 13 | static_cast<int>(p.in_layout) << 14 |
      static_cast<int>(p.out_layout) << 15 | p.device_index << 16 |
      static_cast<std::int64_t>(p.weight.scaling) << 32 | static_cast<std::int64_t>(p.weight.rounds_x) << 40 |
      static_cast<std::int64_t>(p.weight.format) << 48 | static_cast<std::int64_t>(p.weight_alignment) << 52 |
      static_cast<std::int64_t>(p.out_padded) << 58);
  mix(static_cast<std::int64_t>(p.derived));
  if (p.op == Op::feed_forward) {
    for (const WeightSpec* w : {&p.down, &p.gate}) {
      mix(w->shape.rows);
      mix(w->shape.nnzb);
    }
  }
  return hash;
}

}  // namespace

Choice configured(const Kernel& kernel, const Problem& problem, const Config& config) {
  const std::uint64_t key = kernel.derives() ? key_of(kernel, problem, config) : 0;
  Problem own = problem;  // as the kernel sees it: what is at hand is its own, or nothing
  if (!holds(problem, key)) own.derived = 0;
  const auto bytes = [&](auto of) { return of == nullptr ? 0 : of(own, config); };
  DerivedSizes derived{key, bytes(kernel.prepared_size), bytes(kernel.packed_size)};
  if (kernel.unheld == Unheld::runs && derived.prepared + derived.packed == 0) derived.key = 0;
  return {&kernel, config, bytes(kernel.workspace), derived};
}

std::int64_t bytes_to_add(const Problem& problem, const Choice& choice) {
  if (!problem.accumulate || choice.kernel->accumulates) return 0;
  const WeightSpec& w = problem.weight;
  return ceil_div(w.shape.value_count() * static_cast<std::int64_t>(size_of(w.dtype)), 256) * 256;
}

Made made_in_call(const Choice& choice, bool holds_prepared, bool holds_packed) {
  if (!holds_prepared && choice.kernel->unheld != Unheld::made) return {};
  const auto whole = [](std::int64_t bytes) { return ceil_div(bytes, 256) * 256; };
  return {holds_prepared ? 0 : whole(choice.derived.prepared),
          holds_packed ? 0 : whole(choice.derived.packed)};
}

namespace {

// The first kernel that fits, configured; a null one: none does. Where rows are not aligned, one that copies
// them comes first.
Choice first_choice(const Registry& kernels, const Problem& problem, const Machine& machine,
                    std::string_view forced_family, const Forced& forced) {
  if (wants_aligned_rows(problem)) {
    const Problem copied = with_aligned_rows(problem);
    const Kernel* kernel = first_fit(kernels, copied, machine, forced_family, forced);
    if (kernel != nullptr && kernel->aligns_rows)
      return aligned(*kernel, problem, configuration(*kernel, copied, machine));
  }
  const Kernel* kernel = first_fit(kernels, problem, machine, forced_family, forced);
  if (kernel == nullptr) return {};
  return configured(*kernel, problem, configuration(*kernel, problem, machine));
}

}  // namespace

Result<Choice> choose_from(const Registry& kernels, const Problem& problem, const Machine& machine,
                           std::string_view forced_family) {
  const Choice choice = first_choice(kernels, problem, machine, forced_family, {});
  if (choice.kernel == nullptr) return no_kernel(kernels, problem, machine, forced_family);
  return choice;
}

namespace {

// What a thread remembers of its last problems; a null kernel: none fits.
struct Remembered {
  Problem problem;
  std::uint64_t generation = 0;
  Choice choice;
};

// The place of this problem with what holds for it now, or why that cannot be said.
Result<const Choice*> remember(const Problem& problem) {
  thread_local std::array<Remembered, 64> slots;  // a model's layers, forward and backward: 20 KB
  ForcedState& state = forced_state();
  const std::uint64_t generation = state.generation.load(std::memory_order_acquire);
  Remembered& slot = slots[hash_of(problem) % slots.size()];
  if (slot.generation == generation && slot.problem == problem) return &slot.choice;
  const std::shared_ptr<const Forced> forced = forced_now();
  if (!forced->status.ok()) return forced->status;
  Choice choice = first_choice(registry(), problem, machine_of(problem),
                               forced->family[static_cast<int>(problem.device)], *forced);
  if (choice.kernel != nullptr) choice = with_forced_config(*forced, problem, choice);
  slot = {problem, generation, choice};
  return &slot.choice;
}

}  // namespace

Result<Choice> choose(const Problem& problem) {
  try {
    const auto remembered = remember(problem);
    if (!remembered.ok()) return remembered.status();
    if ((*remembered)->kernel != nullptr) return **remembered;
    return no_kernel(registry(), problem, machine_of(problem),
                     forced_now()->family[static_cast<int>(problem.device)]);
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, name(problem.op), "the list of kernels must fit in memory",
                 "an allocation failure");
  }
}

bool has_kernel(const Problem& problem) try {
  const auto remembered = remember(problem);
  return remembered.ok() && (*remembered)->kernel != nullptr;
} catch (const std::bad_alloc&) {
  return false;
}

Explanation explain(const Problem& problem) {
  Explanation result;
  result.problem = problem;
  const std::shared_ptr<const Forced> forced = forced_now();
  const std::string& family = forced->family[static_cast<int>(problem.device)];
  const Machine machine = machine_of(problem);
  Choice choice;
  Problem copied = problem;
  if (forced->status.ok()) choice = first_choice(registry(), problem, machine, family, *forced);
  if (choice.kernel != nullptr) {
    choice = with_forced_config(*forced, problem, choice);
    result.kernel = choice.kernel->name;
    result.config = to_string(*choice.kernel, choice.config);
    result.workspace = whole_workspace(problem, choice);
    if (choice.aligns_rows) {
      result.aligned_copies = aligned_rows_bytes(problem);
      copied = with_aligned_rows(problem);
    }
    if (choice.kernel->microseconds != nullptr)
      result.microseconds = choice.kernel->microseconds(copied, choice.config, machine);
    if (choice.aligns_rows && result.microseconds > 0)
      result.microseconds = aligned_rows_microseconds(problem, result.microseconds);
  }
  result.dense_microseconds = dense_microseconds(problem, machine);
  for (const Kernel& kernel : registry()) {
    if (kernel.op != problem.op || kernel.device != problem.device || kernel.format != problem.weight.format)
      continue;
    const bool chosen = &kernel == choice.kernel;
    const Problem& asked = kernel.aligns_rows ? copied : problem;
    Reason reason = chosen ? Reason() : why_not(kernel, asked, machine, family);
    if (reason.empty() && !chosen) reason = why_later(kernel, asked, machine);
    result.candidates.push_back({info(kernel), std::move(reason), chosen});
  }
  if (!forced->status.ok()) {
    result.why_none = forced->status.message();
  } else if (result.kernel.empty()) {
    result.why_none = no_kernel(registry(), problem, machine, family).message();
  }
  return result;
}

Status force_impl(std::string_view text) {
  try {
    auto forced = std::make_shared<Forced>(parse_forced(text));
    if (!forced->status.ok()) return forced->status;
    ForcedState& state = forced_state();
    const std::lock_guard lock(state.mutex);
    state.current = std::move(forced);
    state.generation.fetch_add(1, std::memory_order_release);
    return {};
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, "force_impl", "the families must fit in memory",
                 "an allocation failure");
  }
}

const RowKernels* chosen_row_kernels() {
  const std::shared_ptr<const Forced> forced = forced_now();
  const std::string& family = forced->family[static_cast<int>(Device::cpu)];
  if (family == "ref" || family == "scalar") return nullptr;
  const auto of_family = [&](const RowKernels& row) { return row.family == family; };
  const bool any = family.empty() || std::ranges::none_of(row_kernels(), of_family);  // such as AMX
  for (const RowKernels& row : row_kernels()) {
    if ((any || of_family(row)) && cpu_machine().has(row.feature)) return &row;
  }
  return nullptr;
}

std::string forced_impl() { return forced_now()->text; }

Result<std::int64_t> workspace_size(const Problem& problem) {
  if (Status status = check_problem("workspace_size", problem); !status.ok()) return status;
  const auto choice = choose(problem);
  if (!choice.ok()) return choice.status();
  return whole_workspace(problem, *choice);
}

}  // namespace rarefy
