// The reference of linear for bitmaps: as that of 1×1 blocks, with columns counted off the bits.
#include "ref/bitmap.h"

#include "core/scalar.h"
#include "rarefy/bitmap.h"
#include "ref/activation.h"
#include "ref/sum.h"

namespace rarefy::ref {

Status linear_bitmap(const Call& call) {
  const BitmapPlanView plan{call.plan.shape, call.plan.crow, call.bits, false};
  const BsrShape& shape = plan.shape;
  const bool pairs = call.problem.weight.format == Format::two_of_four;
  visit_dtype(call.problem.in, [&]<class In>(In) {
    visit_dtype(call.problem.weight.dtype, [&]<class W>(W) {
      visit_float(call.problem.out, [&]<class Out>(Out) {
        call.executor.parallel_for(call.x.rows, [&](std::int64_t m) {
          const In* x = static_cast<const In*>(call.x.data) + m * call.x.row_stride;
          Out* y = static_cast<Out*>(call.out.data) + m * call.out.row_stride;
          for (std::int64_t n = 0; n < shape.rows; ++n) {
            const std::uint8_t* bits = plan.bits + n * plan.row_bytes();
            const W* w = static_cast<const W*>(call.values) + plan.crow[n];
            Sum terms;
            const auto add = [&](std::int64_t k) { terms.add(load(x + k * call.x.col_stride) * load(w++)); };
            for (std::int64_t k = 0; k < shape.cols && !pairs; ++k) {
              if ((bits[k / 8] >> (k % 8) & 1) != 0) add(k);
            }
            for (std::int64_t e = 0; e < shape.cols / 2 && pairs; ++e) {
              add(e / 2 * 4 + (bits[e / 4] >> (e % 4 * 2) & 3));
            }
            double sum = terms.total();
            if (call.bias != nullptr) sum += load(static_cast<const Out*>(call.bias) + n);
            store(y + n * call.out.col_stride, activate(call.activation, sum));
          }
        });
      });
    });
  });
  return {};
}

}  // namespace rarefy::ref
