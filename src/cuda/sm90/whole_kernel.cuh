// Y = X Wᵀ or Y = X W of a weight packed whole, device side. A tile is kFeatures features of Y × kTokens
// tokens. One thread copies steps of 64 features of X, a warpgroup for each 64 of Y multiplies, W as operand
// A.
#pragma once

#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma_64.cuh"
#include "cuda/sm90/device/wgmma_columns.cuh"
#include "cuda/sm90/tile/exchange.cuh"
#include "cuda/sm90/tile/repair.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/token_order.h"
#include "cuda/sm90/whole.h"

namespace rarefy::sm90 {

struct WholeParams {
  CUtensorMap x, x_last, w, y, y_rest;  // y_rest: the last tokens of a tile that has no whole 64s
  LastTokens last;                      // of X by token
  const void* bias;
  Activation activation;
  int features, tokens;  // of y
  int steps;             // of 64 features of x
  int feature_tiles, token_tiles;
  bool from_last;  // token_order.h
  int wide;        // of tiles of kWide tokens the first ones; the others have kNarrow
  int split;       // kSingle: thread blocks of a cluster
  u32 slots;
  Stored repairs;

  // The first one of a token tile of so many.
  __host__ __device__ int token_at(int token_tile, int tokens) const {
    if (tokens != WholeConfig::kWide) return token_tile * tokens;
    return token_tile * WholeConfig::kNarrow +
           (token_tile < wide ? token_tile : wide) * (WholeConfig::kWide - WholeConfig::kNarrow);
  }
};

template <int kFeatures, int kTokens>
struct WholeShape {
  static constexpr int kWarpgroups = kFeatures / 64;  // that multiply
  static constexpr u32 kXBytes = kTokens * 128, kPanelBytes = 64 * 128,
                       kSlotBytes = kXBytes + kWarpgroups * kPanelBytes;
  static constexpr int kThreads = 128 * (kWarpgroups + 1), kMultiplyRegisters = 232, kBringRegisters = 40;
};

// kMajorW: whether W lies along its sum (k) or along Y's features (mn); kMajorX: X by token (k) or by
// feature. kSingle: a thread block has one tile, or a part of its steps.
template <class T, Major kMajorW, Major kMajorX, bool kActivates, int kFeatures, int kTokens, bool kSingle>
struct WholeWarps {
  using Shape = WholeShape<kFeatures, kTokens>;
  static constexpr int kWide = WholeConfig::kWide, kNarrow = WholeConfig::kNarrow;
  // Products of 256 tokens that lie along them are slower than two of 128 (hopper/grad_weight.md, step 10).
  static constexpr int kPieces = kMajorX == Major::mn && kTokens == kWide ? 2 : 1;
  static constexpr int kSums = (kTokens / kPieces + 63) / 64 * 32;  // of a piece, for whole 64s
  static constexpr u64 kNextPiece = 2 * Shape::kPanelBytes >> 4;
  static constexpr bool kHasNarrow = kTokens == kWide && kPieces == 1 && !kSingle;
  const WholeParams& p;
  u32 slots, rank;
  RingState& ring;

  __device__ u32 full(u32 slot) const { return shared_address(&ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&ring.empty[slot]); }

  struct Tile {
    int feature, token;  // the first ones
    int tokens;
  };
  // Four token tiles with all features, then the next: tiles of one time share X and W in L2. (Two are as
  // good, eight 2 to 6 % slower: H100, 8192 × 4096 → 4096, → 14336 and 14336 → 4096.)
  __device__ Tile tile_at(int tile) const {
    constexpr int kSide = 4;
    const int band = kSide * p.feature_tiles, first = tile / band * kSide,
              side = min(kSide, p.token_tiles - first), within = tile % band;
    const int nth = first + within % side, row = p.from_last ? p.token_tiles - 1 - nth : nth;
    const int token = p.token_at(row, kTokens);
    return {within / side * kFeatures, token, p.token_at(row + 1, kTokens) - token};
  }
  __device__ int tiles() const { return p.feature_tiles * p.token_tiles; }
  __device__ int first_tile() const {
    const auto block = static_cast<int>(blockIdx.x);
    return kSingle ? block / p.split : block;
  }
  __device__ int next_tile(int tile) const { return kSingle ? tiles() : tile + static_cast<int>(gridDim.x); }
  // This thread block's steps of a tile.
  __device__ int first_step() const { return kSingle ? p.steps * static_cast<int>(rank) / p.split : 0; }
  __device__ int end_step() const {
    return kSingle ? p.steps * static_cast<int>(rank + 1) / p.split : p.steps;
  }

  __device__ void bring() const {
    Turn at;
    at.parity = 1;  // the first round is free
    for (int tile = first_tile(); tile < tiles(); tile = next_tile(tile)) {
      const Tile t = tile_at(tile);
      for (int step = first_step(); step < end_step(); ++step) {
        const u32 x = slots + at.slot * Shape::kSlotBytes, w = x + Shape::kXBytes, barrier = full(at.slot);
        wait(empty(at.slot), at.parity);
        if constexpr (kMajorX == Major::k) {
          const bool last = p.last.is(t.token);
          arrive_expect(barrier,
                        last ? Shape::kSlotBytes - Shape::kXBytes + p.last.count * 128 : Shape::kSlotBytes);
          load_box(x, last ? &p.x_last : &p.x, step * 64, t.token, barrier);
        } else {
          arrive_expect(barrier, Shape::kSlotBytes);
#pragma unroll
          for (int i = 0; i < kTokens / 64; ++i)
            load_box(x + i * Shape::kPanelBytes, &p.x, t.token + i * 64, step * 64, barrier);
        }
        if constexpr (kMajorW == Major::k) {
          load_box(w, &p.w, step * 64, t.feature, barrier);
        } else {
          load_box(w, &p.w, t.feature, step * 64, barrier);
          if constexpr (kFeatures == 128)
            load_box(w + Shape::kPanelBytes, &p.w, t.feature + 64, step * 64, barrier);
        }
        at.next(p.slots);
      }
    }
  }

  // Of kColumns tokens, or all of d.
  template <int kColumns, int sums>
  __device__ static void product(float (&d)[sums], u64 a, u64 b, bool add) {
    if constexpr (kColumns % 64 != 0 || kColumns == 192) {
      wgmma_columns<T, kColumns, kMajorW, kMajorX>(d, a, b, add);
    } else {
      wgmma<T, kMajorW, kMajorX>(d, a, b, add);
    }
  }

  __device__ void multiply(u32 group, StoreLane out) const {
    const Activations<kActivates> activations{p.activation};
    Turn at;
    const u32 panel = Shape::kXBytes + uniform(group) * Shape::kPanelBytes;
    const int first = uniform(first_step()), end = uniform(end_step());
    int next = uniform(first_tile());
    bool bad = false;  // a sum is NaN
    struct Share {     // of a tile's tokens, that leave here
      int first = 0, end = kTokens;
    };
    const auto share = [&] {
      if (!kSingle || p.split == 1) return Share{};
      const ShareOfTokens<kTokens> its(p.split, rank);
      return Share{its.first, its.end};
    };
    while (next < tiles()) {
      const Tile t = tile_at(next);
      const int feature = t.feature + static_cast<int>(group) * 64;
      float2 bias{0, 0};
      if (p.bias != nullptr) {
        const int row = feature + 16 * out.warp + out.lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) bias.x = static_cast<float>(b[row]);
        if (row + 8 < p.features) bias.y = static_cast<float>(b[row + 8]);
      }
      at = {uniform(at.slot), uniform(at.parity)};
      float d[kPieces][kSums];
      u32 before = 0;  // the slot of the step before
      const auto release = [&] {
        if (out.lane == 0) arrive(empty(before));
      };
      const auto multiply_steps = [&]<int kColumns>() {
        for (int step = first; step < end; ++step) {
          const u32 from = slots + at.slot * Shape::kSlotBytes;
          wait(full(at.slot), at.parity);
          const u64 a = operand(from + panel), b = operand(from, Shape::kPanelBytes);
          wgmma_fence();
#pragma unroll
          for (u32 k = 0; k < 4; ++k) {
            const u64 its_a = a + k * kNext16<kMajorW>, its_b = b + k * kNext16<kMajorX>;
#pragma unroll
            for (u32 piece = 0; piece < kPieces; ++piece)
              product<kColumns>(d[piece], its_a, its_b + piece * kNextPiece, step > first || k > 0);
          }
          wgmma_commit();
          wgmma_wait<1>();  // the step before has ended, and this one is on its way
          if (step > first) release();
          before = at.slot;
          at.next(p.slots);
        }
      };
      bool narrow = false;
      if constexpr (kHasNarrow) {
        narrow = uniform(t.tokens) == kNarrow;
        if (narrow) multiply_steps.template operator()<kNarrow>();
      }
      if (!narrow) multiply_steps.template operator()<kTokens>();
      wgmma_wait<0>();
      release();
      next = uniform(next_tile(next));  // here: operands of products stay in uniform registers
      if constexpr (kSingle) {
        if (p.split > 1)
          exchange_tile<kTokens, 128 * Shape::kWarpgroups>(d, p.split, rank, slots, p.tokens - t.token);
      }
      const auto its = share();
      const auto store_columns = [&]<int kColumns>() {  // no whole 64s
#pragma unroll
        for (int i = kColumns / 2; i < kSums; ++i) d[0][i] = 0;
        constexpr int kWhole64 = kColumns / 64 * 64;
        activations.apply_to([&]<Activation activation>() {
          store_tile<T, activation>(out, d[0], bias, &p.y, feature, t.token, 0, kWhole64);
          store_tile<T, activation>(out, d[0], bias, &p.y_rest, feature, t.token, kWhole64);
        });
      };
      if (narrow) {
        if constexpr (kHasNarrow) store_columns.template operator()<kNarrow>();
      } else if constexpr (kTokens % 64 != 0) {
        store_columns.template operator()<kTokens>();
      } else {
        activations.apply_to([&]<Activation activation>() {
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            const int behind = piece * (kTokens / kPieces);
            store_tile<T, activation>(out, d[piece], bias, &p.y, feature, t.token + behind,
                                      its.first - behind, its.end - behind);
          }
        });
      }
      const float all = sum_of_tokens(d, p.tokens - t.token, out.lane);
      bad |= all != all;
    }
    if (out.leads()) store_wait_read<0>();  // they end with the kernel
    // Behind the loop: in it, ptxas would take lanes for divergent, and move operands before each product.
    if (p.repairs.values == nullptr || !named_barrier_any(out.barrier, 128, bad)) return;
    wait_to_repair(out);
    const auto its = share();
    for (int tile = first_tile(); tile < tiles(); tile = next_tile(tile)) {
      const Tile t = tile_at(tile);
      repair(p.repairs, static_cast<const T*>(p.bias), activations,
             t.feature + static_cast<int>(group) * 64 + 16 * out.warp, t.token + its.first,
             min(its.end, t.tokens) - its.first, out.lane);
    }
  }
};

template <class T, Major kMajorW, Major kMajorX, bool kActivates, int kFeatures, int kTokens, bool kSingle>
__global__ void __launch_bounds__(WholeShape<kFeatures, kTokens>::kThreads, 1)
    whole_kernel(const __grid_constant__ WholeParams p) {
  using Shape = WholeShape<kFeatures, kTokens>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&p.x);
    prefetch_map(&p.x_last);
    prefetch_map(&p.w);
    prefetch_map(&p.y);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&ring.full[i]), 1);
      barrier_init(shared_address(&ring.empty[i]), 4 * Shape::kWarpgroups);
    }
    barrier_init_done();
  }
  __syncthreads();
  begin_behind_kernels();
  const WholeWarps<T, kMajorW, kMajorX, kActivates, kFeatures, kTokens, kSingle> warps{
      p, slots, kSingle ? cluster_rank() : 0, ring};
  constexpr int kMultiplying = 4 * Shape::kWarpgroups;  // warps
  if (warp < kMultiplying) {
    if constexpr (Shape::kWarpgroups == 2) take_registers<Shape::kMultiplyRegisters>();
    const auto group = static_cast<u32>(warp) / 4;
    const u32 buffers = slots + p.slots * Shape::kSlotBytes;
    warps.multiply(group, {buffers + group * kStoreBuffers * kStoreBytes, group + 1, warp % 4, lane});
  } else {
    if constexpr (Shape::kWarpgroups == 2) give_registers<Shape::kBringRegisters>();
    if (warp == kMultiplying && lane == 0) warps.bring();
    if constexpr (kSingle) {
      if (p.split > 1) watch_exchange();
    }
  }
}

}  // namespace rarefy::sm90
