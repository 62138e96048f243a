// Version of the headers; version() is the version of the library they are linked with.
#pragma once

#include "rarefy/export.h"

#define RAREFY_VERSION_MAJOR 0
#define RAREFY_VERSION_MINOR 1
#define RAREFY_VERSION_PATCH 0
#define RAREFY_VERSION "0.1.0"

namespace rarefy {

RAREFY_API const char* version();

}  // namespace rarefy
