// The whole public API of the Rarefy core.
#pragma once

#include "rarefy/activation.h"
#include "rarefy/backend.h"
#include "rarefy/bsr_file.h"
#include "rarefy/convert.h"
#include "rarefy/dtype.h"
#include "rarefy/executor.h"
#include "rarefy/feed_forward.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/problem.h"
#include "rarefy/prune.h"
#include "rarefy/prune_reconstruct.h"
#include "rarefy/safetensors.h"
#include "rarefy/status.h"
#include "rarefy/version.h"
#include "rarefy/view.h"
