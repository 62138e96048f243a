// A pattern is immutable: its indices can be read, not written.
#include "rarefy/pattern.h"

int first(const rarefy::Pattern& pattern) {
#ifdef WRONG
  pattern.col_indices()[0] = 1;
#endif
  return pattern.col_indices()[0];
}
