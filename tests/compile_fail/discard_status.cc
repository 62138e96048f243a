// A Status says whether anything happened: it cannot be dropped.
#include "rarefy/linear.h"

bool run(const rarefy::MatrixView& x, const rarefy::BsrView& w, const rarefy::MutableMatrixView& y) {
#ifdef WRONG
  rarefy::grad_input(x, w, y);
  return true;
#else
  return rarefy::grad_input(x, w, y).ok();
#endif
}
