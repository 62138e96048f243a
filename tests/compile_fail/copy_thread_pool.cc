// A pool owns its threads: it is passed on by reference.
#include "rarefy/executor.h"

#ifdef WRONG
int threads(rarefy::ThreadPool pool) { return pool.executor().threads; }
#else
int threads(rarefy::ThreadPool& pool) { return pool.executor().threads; }
#endif

int two() {
  rarefy::ThreadPool pool(2);
  return threads(pool);
}
