// Shared by the kernels of the triangle multiplicative update: tiles, row statistics, weights.
//
// A work item is 64 positions that follow one another along the second pair axis of z [B, N, N, C].
// A tile holds them with 64 channels, 128 bytes a row and swizzled, either position-major (from z)
// or channel-major (from a, b, x [.., N, N]); tiles side by side hold all channels.
//
// The layer norms never touch the tiles. With mean m, inverse deviation r, affine (w, b) and weights
// W of the projection that follows, everything is a product with raw bf16 values:
//   W (w (z - m) r + b) = r (W' z) + (-r m) s + t,   W' = bf16(W w),  s = sum_c W',  t = sum_c W b
// (s from the rounded W', so the mean cancels exactly). Gates carry the factor -log2(e), so their
// sigmoid is 1 / (1 + 2^y). tri_mul_pack.cu writes W' as swizzled 64 x 64 tiles and (s, t).
// Constants: CZ, CH (channels of z, hidden channels; multiples of 16 up to 256, up to 128 in the
// backward).
#pragma once

#include "tile.cuh"

constexpr int ROWS = 64;     // positions of a work item
constexpr int BLOCK = 8192;  // bytes of a 64 x 64 tile
constexpr int CB = (CZ + 63) / 64, HB = (CH + 63) / 64;  // tiles for all channels
constexpr int Z_STEPS = CZ / 16, H_STEPS = CH / 16;      // k16 steps over channels
constexpr int UNITS = (2 * CH + 63) / 64;                // 64-channel units of [a; b]
constexpr int TEAM = UNITS > 1 ? 2 : 1;                  // units that share a tile in the backward
constexpr int PASSES = (UNITS + TEAM - 1) / TEAM;
constexpr int BOX = CH % 64 == 0 ? 64 : CH % 32 == 0 ? 32 : 16;  // channels of a box of a, b
constexpr float EPS = 1e-5f, LN2 = 0.6931471805599453f;
static_assert(CZ % 16 == 0 && CH % 16 == 0 && CZ >= 16 && CH >= 16, "whole k16 steps");
static_assert(CZ <= 256 && CH <= 256, "an operand of 64 positions must fit into the registers");
using Smem = Tile<128>;

// Layout of the packed weights (bytes), as tri_mul_pack.cu writes it.
constexpr int IN_BYTES = PASSES * TEAM * 2 * CB * BLOCK;  // [unit][value, gate][channels of z]
constexpr int OUT_BYTES = CB * (HB + CB) * BLOCK;         // [unit][z: hidden; g: channels of z]
constexpr int IN_VECTORS = PASSES * TEAM * 64 * 16;       // (s, t) of value, of gate for a row
constexpr int OUT_VECTORS = CB * 64 * 16;                 // (s, t) of linear_z, of linear_g

// Rows of the partial weight gradients (floats): tiles, then four sums for each operand.
constexpr int IN_ROW = 2 * CB * 64 + 8, OUT_ROW = (HB + CB) * 64 + 8;

struct Grid {
  int n, pitch;      // positions of a row; room for them in a, b, x and the statistics
  int row_tiles;     // work items of a row
  int tiles;         // work items
};

struct Item {
  int k, i, b;

  DEV Item at(const Grid& g, int index) {
    const int k = index % g.row_tiles * ROWS;
    index /= g.row_tiles;
    return {k, index % g.n, index / g.n};
  }
};

// Index in arrays [B, N, pitch] of the first position of a work item.
DEV i64 first_position(const Grid& g, int index) {
  return static_cast<i64>(index / g.row_tiles) * g.pitch + index % g.row_tiles * ROWS;
}
DEV int positions_left(const Grid& g, int index) { return g.n - index % g.row_tiles * ROWS; }

// Position in a ring of stages: address, index and the parity of its lap.
template <int Stages, int Bytes>
struct Ring {
  u32 base, stage;
  int index = 0;
  u32 parity = 0;

  __device__ explicit Ring(u32 at) : base(at), stage(at) {}
  __device__ void advance(int by) {
    index += by;
    stage += by * Bytes;
    if (index >= Stages) {
      index -= Stages;
      stage -= Stages * Bytes;
      parity ^= 1;
    }
  }
};

// Warpgroup of this thread, known to be the same for its whole warp.
DEV int warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

// Lets one lane of a warp count down a barrier when all lanes are done.
DEV void arrive_warp(u32 bar) {
  __syncwarp();
  if (elect_one()) mbar_arrive(bar);
}

// Descriptor offset of k16 step q of an operand whose columns are channels.
DEV u64 channel_step(int q) { return (q / 4) * (BLOCK >> 4) + q % 4 * Smem::STEP_COLS; }

// ------------------------------------------------------------------------------ fragments

// Address that this lane passes to ldmatrix or stmatrix for rows 16 * warp .. and columns 16 * q ..
// of the tile: of fragments whose rows are rows of the tile, or (trans) columns of the tile. Other
// tiles lie at constant distances (multiples of BLOCK).
DEV u32 fragment(u32 tile, int warp, int lane, int q) {
  return (tile + Smem::offset(16 * warp + lane % 16, 16 * (lane / 16))) ^ (32 * q);
}
DEV u32 fragment_trans(u32 tile, int warp, int lane, int q) {
  return tile + Smem::offset(8 * (lane / 16) + lane % 8, 32 * warp + 16 * (lane / 8 % 2)) + 2048 * q;
}

// Row sums of raw fragments about the first value of each row, which keeps the variance exact.
struct Moments {
  float mean[2], rstd[2];
};
template <int Steps>
DEV Moments moments(const u32 (&words)[4 * Steps], int lane) {
  constexpr float SHARE = 1.f / (16 * Steps);
  Moments m;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float origin = __shfl_sync(0xffffffffu, bf16_lo(words[r]), lane & ~3);
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = r; i < 4 * Steps; i += 2) {
      const float x = bf16_lo(words[i]) - origin, y = bf16_hi(words[i]) - origin;
      sum += x + y;
      squares = fmaf(x, x, fmaf(y, y, squares));
    }
    const float shift = quad_sum(sum) * SHARE;
    const float variance = fmaf(-shift, shift, quad_sum(squares) * SHARE);
    m.mean[r] = origin + shift;
    m.rstd[r] = rsqrt_fast(fmaxf(variance, 0.f) + EPS);
  }
  return m;
}

// ------------------------------------------------------------------------- gates and masks

DEV float sigmoid(float y) { return rcp(1.f + ex2(y)); }  // of a gate scaled by -log2(e)

// Mask [B, N, N] of any strides; kind 0 none, 1 bool, 2 fp32, 3 bf16.
struct Mask {
  const void* values;
  i64 stride[3];
  int kind;
};

DEV float mask_at(const Mask& m, const Grid& g, const Item& item, int row) {
  if (m.kind == 0) return 1.f;
  if (item.k + row >= g.n) return 0.f;
  const i64 at = item.b * m.stride[0] + item.i * m.stride[1] + (item.k + row) * m.stride[2];
  if (m.kind == 1) return static_cast<const unsigned char*>(m.values)[at] ? 1.f : 0.f;
  if (m.kind == 2) return static_cast<const float*>(m.values)[at];
  return bf16_lo(static_cast<const u16*>(m.values)[at]);
}

// ------------------------------------------------------------------ copies shared by kernels

// Loads the tiles of 64 positions of z or of anything shaped like it [B, N, N, C].
DEV void load_positions(u32 to, const TensorMap* map, u32 bar, const Item& item) {
#pragma unroll
  for (int c = 0; c < CB; ++c)
    tma_load(to + c * BLOCK, map, bar, 64 * c, item.k, item.i, item.b);
}
// Loads all hidden channels of 64 positions of x [B, H, N, N].
DEV void load_channels(u32 to, const TensorMap* map, u32 bar, const Item& item) {
#pragma unroll
  for (int h = 0; h < HB; ++h)
    tma_load(to + h * BLOCK, map, bar, item.k, item.i, 64 * h, item.b);
}
