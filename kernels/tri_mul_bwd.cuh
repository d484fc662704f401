// Shared by the two main kernels of the backward of the triangle multiplicative update.
//
// Gradients D of a layer-normed input, divided by its deviation, are sums over channels j of
//   D[pos, c] = sum_j d[j, pos] W'[j, c],   d[j, pos] = bf16(gradient of y_j * r_pos)
// and the weight gradients follow from the same bf16 d and from raw z (m, r as in tri_mul.cuh):
//   G[j, c] = sum_pos d (z - m) = sum_pos d z - u_j,   u_j = sum_pos d m,   v_j = sum_pos d / r
//   dW = w_c G + b_c v_j;   layer norm: dw_c = sum_j W G,   db_c = sum_j W v
// Each block keeps sum d z, u and v of its items in FP32 registers and leaves them as one partial;
// u and v come from products with eight columns, four for each operand: m and 1 / r in two bf16
// terms each (16 bits), so that one accumulator serves two operands.
#pragma once

#include "tri_mul.cuh"

static_assert(CZ <= 128 && CH <= 128, "weight gradients must fit into the registers");
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int TERMS = 1024, PAIRS = 512;  // bytes of one table

// Of a stage. full: operands are there; empty: and used; ready: d of all members is in the stage.
// A part of the stage lives longer, as the result takes its place: late: it is there; done: the
// result is; free: and stored.
template <int Stages>
struct BarriersOf {
  static constexpr int BYTES = 48 * Stages + 8;
  u32 base;
  __device__ u32 full(int i) const { return base + 8 * i; }
  __device__ u32 empty(int i) const { return base + 8 * (Stages + i); }
  __device__ u32 ready(int i) const { return base + 8 * (2 * Stages + i); }
  __device__ u32 late(int i) const { return base + 8 * (3 * Stages + i); }
  __device__ u32 done(int i) const { return base + 8 * (4 * Stages + i); }
  __device__ u32 free(int i) const { return base + 8 * (5 * Stages + i); }
  __device__ u32 weights() const { return base + 48 * Stages; }

  // members: warpgroups that share an item
  __device__ void init(int members) const {
    for (int i = 0; i < Stages; ++i) {
      mbar_init(full(i), 3);
      mbar_init(empty(i), 4 * members);
      mbar_init(ready(i), 4 * members);
      mbar_init(late(i), 1);
      mbar_init(done(i), 4);
      mbar_init(free(i), 1);
    }
    mbar_init(weights(), 1);
    mbar_init_fence();
  }
};

// What products and gates need of a position, from its (r, -r m). pairs: (r, r', -r m, -r' m') of
// two neighbours. terms: two tables of eight columns, m and 1 / r in two terms each in the first
// four columns of one and in the last four of the other, zeros elsewhere; eight positions of all
// columns lie together (matrix operand without swizzle).
DEV void write_position(u32 terms, u32 pairs, int pos, float rstd, float offset) {
  const u32 at = pairs + pos / 2 * 16 + pos % 2 * 4;
  sts32f(at, rstd);
  sts32f(at + 8, offset);
  terms += pos / 8 * 128 + pos % 8 * 2;
  float x = rcp(rstd);
#pragma unroll
  for (int column = 2; column >= 0; column -= 2) {
    const u16 high = to_bf16(x), low = to_bf16(x - bf16_lo(high));
    sts16(terms + 16 * column, high);
    sts16(terms + 16 * column + 16, low);
    sts16(terms + TERMS + 16 * column + 64, high);
    sts16(terms + TERMS + 16 * column + 80, low);
    x *= -offset;
  }
}
DEV void clear_terms(u32 terms, int pos) {
  terms += pos / 8 * 128 + pos % 8 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sts16(terms + 64 + 16 * i, 0);
    sts16(terms + TERMS + 16 * i, 0);
  }
}
DEV u64 terms_descriptor(u32 address) {
  return (address & 0x3ffff) >> 4 | static_cast<u64>(128 >> 4) << 16;
}
constexpr u64 TERMS_STEP = 256 >> 4;  // 16 positions on

// (r, -r m) of the two positions of a thread whose fragment rows are positions.
struct RowScales {
  float rstd[2], offset[2];

  DEV RowScales at(u32 pairs, int row) {
    RowScales s;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 at = pairs + (row + 8 * r) / 2 * 16 + row % 2 * 4;
      s.rstd[r] = lds32f(at);
      s.offset[r] = lds32f(at + 8);
    }
    return s;
  }
};

// The layer norm's gradient: dz = D - shift - slope z, from the row sums of D and of D z.
struct Correction {
  float shift[2], slope[2];

  DEV Correction of(const RowScales& s, const float (&sum)[2], const float (&moment)[2], int count) {
    const float share = 1.f / count;
    Correction c;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mean = quad_sum(sum[r]) * share;
      const float slope = fmaf(s.rstd[r], quad_sum(moment[r]) * share, s.offset[r] * mean);
      c.shift[r] = fmaf(s.offset[r], slope, mean);
      c.slope[r] = s.rstd[r] * slope;
    }
    return c;
  }
};

// Accumulators of the c-th tile.
template <int N>
DEV float (&tile_of(float (&sums)[N], int c))[32] {
  return reinterpret_cast<float(&)[32]>(sums[32 * c]);
}

// Words of a bf16 A fragment, k16 step q, from the packed accumulators of one 64-wide tile.
template <int TransB, int N>
DEV void add_product(float (&sum)[N], const u32 (&a)[16], int q, u64 b, int accumulate) {
  wgmma_rs<TransB>(sum, a[4 * q], a[4 * q + 1], a[4 * q + 2], a[4 * q + 3], b, accumulate);
}

// Stores accumulators of 64 rows of a thread to rows of floats; line: its first row, first column.
template <int N>
DEV void store_sums(float* line, int row_floats, const float (&sum)[N]) {
#pragma unroll
  for (int c = 0; c < N / 4; ++c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(line + 8 * r * row_floats + 8 * c) =
          make_float2(sum[4 * c + 2 * r], sum[4 * c + 2 * r + 1]);
    }
  }
}
DEV void store_terms(float* line, int row_floats, const float (&sum)[4]) {
  *reinterpret_cast<float2*>(line) = make_float2(sum[0], sum[1]);
  *reinterpret_cast<float2*>(line + 8 * row_floats) = make_float2(sum[2], sum[3]);
}
template <int N>
DEV void clear(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = 0.f;
}
