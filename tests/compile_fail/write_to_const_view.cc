// An output must be writable.
#include "rarefy/linear.h"

bool run(const rarefy::MatrixView& x, const rarefy::BsrView& w, const rarefy::MutableMatrixView& y) {
#ifdef WRONG
  const rarefy::MatrixView out = y;
#else
  const rarefy::MutableMatrixView out = y;
#endif
  return rarefy::grad_input(x, w, out).ok();
}
