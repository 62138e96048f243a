// What runs a product on a table of kernels; one instantiation of the drivers serves every ISA.
#pragma once

#include <atomic>
#include <new>

#include "core/registry.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

Status run_linear(const Kernels& kernels, const LinearArgs& args, const Context& context);
bool takes_few(const Kernels& kernels, const LinearArgs& args);
Status run_linear_few(const Kernels& kernels, const LinearArgs& args, const Context& context);
Status run_grad_input(const Kernels& kernels, const GradInputArgs& args, const Context& context);
Status run_grad_weight(const Kernels& kernels, const GradWeightArgs& args, const Context& context);

constexpr bool has_storage(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

constexpr Storage storage(DType dtype) {
  return dtype == DType::bf16 ? Storage::bf16 : dtype == DType::f16 ? Storage::f16 : Storage::f32;
}

static_assert(static_cast<int>(PanelActivation::silu) == static_cast<int>(Activation::silu));

// W by its rows, or transposed.
SparseOperand operand(const BsrView& w, const std::int32_t* index, const std::int32_t* perm, bool transposed);

// parallel_for over tasks that may run out of memory. The caller's threads may be of any kind, so an
// exception must not leave a task: it is thrown again here, for the product that called to report.
template <class F>
void run_tasks(const Context& context, std::int64_t tasks, F body) {
  std::atomic<bool> out_of_memory{false};
  context.executor.parallel_for(tasks, [&](std::int64_t task) {
    try {
      body(task);
    } catch (const std::bad_alloc&) {
      out_of_memory.store(true, std::memory_order_relaxed);
    }
  });
  if (out_of_memory) throw std::bad_alloc();
}

}  // namespace rarefy::cpu
