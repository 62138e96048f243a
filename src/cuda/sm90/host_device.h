// RAREFY_HOST_DEVICE: of constexpr functions that the launch and the kernels share.
#pragma once

#ifdef __CUDACC__
#define RAREFY_HOST_DEVICE __host__ __device__
#else
#define RAREFY_HOST_DEVICE
#endif
