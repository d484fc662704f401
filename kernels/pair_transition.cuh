// What the two transition kernels share: tiles, rings, producers, and the first products.
//
// A block takes 128 rows at a time, 64 for each of two warpgroups, and walks the hidden layer in
// slices of 64 units. The weights of a slice come from L2 through a ring of stages:
//   in   [kBlocks][128 units: 64 of a, 64 of b][64 channels]     out  [C channels][64 units]
// All tiles are 128 bytes wide, one swizzle atom, so each serves as a K-major and as an MN-major
// operand. One warp loads weights, another the rows of both warpgroups.
#pragma once
#include "pair.cuh"

constexpr int kC = TPF_CHANNELS;
constexpr int kStages = TPF_STAGES;
constexpr int kSources = TPF_SOURCES;  // row tensors: normed rows, and in the backward dout
constexpr int kBuffers = TPF_BUFFERS;  // of the rows of a warpgroup
static_assert(kC == 64 || kC == 128, "the channels are one or two swizzle atoms wide");

constexpr int kWarpgroups = 2;
constexpr int kBlockThreads = 128 * (kWarpgroups + 1);
constexpr int kBlockRows = 64 * kWarpgroups;
constexpr int kBlocks = kC / 64;  // of 64 channels
constexpr int kTile = 64 * 128;   // bytes of 64 rows
using Operand = Tile<128>;

constexpr int kIn = 2 * kBlocks * kTile, kOut = kBlocks * kTile;
constexpr int kStage = kIn + kOut;
constexpr int kRowBytes = kSources * kBlocks * kTile;  // rows of a warpgroup, one buffer
constexpr int kAtRows = kStages * kStage;
constexpr int kAtStaging = kAtRows + kWarpgroups * kBuffers * kRowBytes;
constexpr int kAtBarriers = kAtStaging + TPF_STAGING * kWarpgroups * kTile;
constexpr int kSharedBytes = 1024 + kAtBarriers + 16 * (kStages + kWarpgroups * kBuffers);
static_assert(kSharedBytes == TPF_SHARED, "the host counts the same shared memory");

struct Barriers {
  u32 base;
  __device__ u32 full(int stage) const { return base + 16 * stage; }
  __device__ u32 empty(int stage) const { return base + 16 * stage + 8; }
  __device__ u32 rows_full(int group, int buffer) const {
    return base + 16 * (kStages + group * kBuffers + buffer);
  }
  __device__ u32 rows_empty(int group, int buffer) const { return rows_full(group, buffer) + 8; }
};

// Position in a ring and the parity of its current lap.
template <int kLength>
struct Ring {
  int index = 0;
  u32 parity = 0;
  __device__ void advance() {
    if (++index == kLength) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Where a warpgroup's rows lie: source s of a buffer.
DEV u32 rows_at(u32 base, int group, int buffer, int source) {
  return base + kAtRows + (group * kBuffers + buffer) * kRowBytes + source * kBlocks * kTile;
}

DEV void init_barriers(Barriers bars) {
  for (int i = 0; i < kStages; ++i) {
    mbar_init(bars.full(i), 1);
    mbar_init(bars.empty(i), 4 * kWarpgroups);
  }
  for (int i = 0; i < kWarpgroups * kBuffers; ++i) {
    mbar_init(bars.rows_full(0, i), 1);
    mbar_init(bars.rows_empty(0, i), 4);
  }
  mbar_init_fence();
}

// w_in [2 E, C], rows of a before rows of b, and w_out [C, E]; boxes of 64 x 64 and C x 64.
DEV void load_weights(u32 base, Barriers bars, const TensorMap* w_in, const TensorMap* w_out,
                      int slices, int tiles) {
  Ring<kStages> ring;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int slice = 0; slice < slices; ++slice, ring.advance()) {
      const u32 bar = bars.full(ring.index), stage = base + ring.index * kStage;
      mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
      mbar_expect(bar, kStage);
      for (int block = 0; block < kBlocks; ++block) {
        const u32 to = stage + 2 * block * kTile;
        tma_load(to, w_in, bar, 64 * block, 64 * slice);
        tma_load(to + kTile, w_in, bar, 64 * block, 64 * (slices + slice));
      }
      tma_load(stage + kIn, w_out, bar, 64 * slice, 0);
    }
  }
}

// Rows beyond the end read as zeros.
DEV void load_rows(u32 base, Barriers bars, const TensorMap* const (&sources)[kSources],
                   int tiles) {
  Ring<kBuffers> ring;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ring.advance()) {
    for (int group = 0; group < kWarpgroups; ++group) {
      const u32 bar = bars.rows_full(group, ring.index);
      mbar_wait_idle(bars.rows_empty(group, ring.index), ring.parity ^ 1);
      mbar_expect(bar, kRowBytes);
      for (int s = 0; s < kSources; ++s)
        for (int block = 0; block < kBlocks; ++block)
          tma_load(rows_at(base, group, ring.index, s) + block * kTile, sources[s], bar, 64 * block,
                   tile * kBlockRows + 64 * group);
    }
  }
}

// Lets one lane of each warp count down a barrier once all lanes have read.
DEV void release(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbar_arrive(barrier);
}

// hidden[64 rows][64 units of a | 64 units of b] = rows . W_in^T of the slice in this stage.
DEV void hidden_products(float (&hidden)[64], u64 rows, u64 stage) {
#pragma unroll
  for (int step = 0; step < kC / 16; ++step) {
    const int block = step / 4;
    wgmma_ss<0, 0>(hidden, rows + block * (kTile >> 4) + step % 4 * Operand::STEP_COLS,
                   stage + block * (2 * kTile >> 4) + step % 4 * Operand::STEP_COLS, step > 0);
  }
}

// Warpgroup of this thread, known to be the same for its whole warp.
DEV int warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }
