// RAREFY_API marks what the shared library exports; everything else is hidden. Included by all others.
#pragma once

#if __cplusplus < 202002L
#error "rarefy needs C++20: compile with -std=c++20"
#endif

#define RAREFY_API __attribute__((visibility("default")))
