// Shared parts of the main kernels of the triangle attention backward: parameters, jobs, pipeline
// state and the products that they have in common.
#pragma once
#include "tri_attn_bwd.cuh"

constexpr int kG = TPF_G;                         // slices that share one bias tile
constexpr int kConsumers = 2;                     // warpgroups that compute
constexpr int kThreads = 128 * (kConsumers + 1);  // and one that loads
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

constexpr int kConsumerArrivals = (EVERY_LANE ? 128 : 4) * kConsumers;

struct Params {
  TensorMap q, k, v, dout, dq, dk, dv;  // [B, O, H, N, D], box 64 x kD
  const unsigned char* row_fold;        // [B, O, H, padded, 8] bf16
  const unsigned char* key_fold;        // [B, O, padded, 8] bf16, or [padded, 8] without a mask
  const unsigned char* bias_s;   // [B, H, tiles(q), tiles(k), 4096] fragments, rows = queries
  const unsigned char* bias_st;  // [B, H, tiles(k), tiles(q), 4096] fragments, rows = keys
  float* dbias_partial;          // partial sums of dbias, in fragment order
  float* dq_sum;                 // paper, atomic dQ: [B, O, H, N, kD]
  const int* order;              // items of the blocks of tri_attn_bwd_q_bias
  int tokens, tiles, blocks;     // N; 64-token tiles (even); 128-token blocks
  int heads, outer, batch;
  int groups, jobs;              // groups of slices, and jobs or items of this launch
  int first_group;               // of this launch (paper)
  int key_fold_stride;           // rows of a slice in key_fold; 0 without a mask
  float scale, scale2;           // scale2 = scale * log2(e), never 0
};

// One (block, head, slice group) of a persistent loop; block runs fastest.
struct Job {
  int block, head, group, batch;
};

DEV Job decode_job(const Params& p, int job) {
  Job j;
  j.block = job % p.blocks;
  job /= p.blocks;
  j.head = job % p.heads;
  job /= p.heads;
  j.group = p.first_group + job % p.groups;
  j.batch = job / p.groups;
  return j;
}

// Row of the fold arrays where tile `tile` of a slice begins.
DEV i64 row_fold_index(const Params& p, int batch, int slice, int head, int tile) {
  return (static_cast<i64>(batch * p.outer + slice) * p.heads + head) * p.tiles * kTile +
         tile * kTile;
}
DEV i64 key_fold_index(const Params& p, int batch, int slice, int tile) {
  return static_cast<i64>(batch * p.outer + slice) * p.key_fold_stride + tile * kTile;
}
DEV i64 bias_tile_index(const Params& p, int batch, int head, int row_tile, int col_tile) {
  return ((static_cast<i64>(batch) * p.heads + head) * p.tiles + row_tile) * p.tiles + col_tile;
}

// A tile of rows of one slice.
struct Rows {
  int tile, head, slice, batch;
};

// Load the rows of two operands and their fold. The copy engine clips by itself, but the fold must
// exist.
DEV void load_rows(u32 to, u32 full, const TensorMap* first, const TensorMap* second,
                   const unsigned char* fold, Rows rows) {
  tma_load(to, first, full, 0, rows.tile * kTile, rows.head, rows.slice, rows.batch);
  tma_load(to + kOperandBytes, second, full, 0, rows.tile * kTile, rows.head, rows.slice,
           rows.batch);
  bulk_load(to + 2 * kOperandBytes, fold, kFoldBytes, full);
}

// Position in a ring of stages: index and the parity of its current lap.
template <int kStages>
struct Ring {
  int index = 0;
  u32 parity = 0;
  __device__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The same kind of tile `bytes` further on; cheaper than a new descriptor.
DEV u64 further(u64 descriptor, int bytes) { return descriptor + bytes / 16; }

// Warpgroup of this thread, known to be the same for its whole warp.
DEV int warpgroup_index() { return __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0); }

// Descriptor of 64 fold rows; both halves of the k16 step read the same eight channels.
DEV u64 fold_descriptor(u32 address) {
  return (static_cast<u64>(128 / 16) << 32) | ((address & 0x3FFFF) >> 4);
}

// Descriptor of 64 fold rows as the A operand: the upper half of the k16 step reads a tile of
// zeros, which lies anywhere behind it.
DEV u64 fold_operand(u32 address, u32 zeros) {
  return fold_descriptor(address) | (static_cast<u64>((zeros - address) >> 4) << 16);
}

// The fold operand `bytes` further on: so much nearer to the zeros.
DEV u64 further_operand(u64 descriptor, int bytes) {
  const u64 steps = bytes / 16;
  return descriptor + steps - (steps << 16);
}

// acc[64 x 64] = A . B^T over the channels, plus the fold step; all operands in shared memory.
DEV void product_with_fold(float (&acc)[32], u64 a, u64 b, u64 fold_a, u64 fold_b) {
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    wgmma_ss<0, 0>(acc, a + step * Operand::STEP_COLS, b + step * Operand::STEP_COLS, step > 0);
  wgmma_ss<0, 0>(acc, fold_a, fold_b, 1);
}

// acc[64 x kD] += A[64 x 64 tokens] . B[64 tokens x kD], A from registers.
DEV void accumulate_tokens(float (&acc)[kPairs], const u32* a, u64 b, int accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_rs<1>(acc, a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3],
                b + step * Operand::STEP_ROWS, accumulate | (step > 0));
}

// Write factor * acc [64 x kD] as bf16 into a swizzled operand tile.
DEV void store_tile(u32 tile, const float (&acc)[kPairs], float factor, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) {
    const int r = row + i % 2 * 8;
    sts32(tile + Operand::offset(r, (i / 2) * 16 + thread % 4 * 4),
          pack_bf16(acc[2 * i] * factor, acc[2 * i + 1] * factor));
  }
}

// Let one lane of each warp count down a barrier once all lanes have read.
DEV void release(u32 barrier, int thread) {
  __syncwarp();
  if (EVERY_LANE || thread % 32 == 0) mbar_arrive(barrier);
}

// Write one row of the key fold for dP, the same for every key.
DEV void write_ones_row(u32 address) {
  sts128(address, make_uint4(0u, 0x3F800000u, 0x3F803F80u, 0u));
}
DEV void write_zero_row(u32 address) { sts128(address, make_uint4(0u, 0u, 0u, 0u)); }

// Split two floats into bf16 pairs with high + low equal to them within 2^-17.
DEV void split_bf16(float x, float y, u32& high, u32& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u));
}

// Keep the exponentials s before the wgmma wait that follows: wait on a barrier that has already
// completed, with a parity that seems to depend on them (their signs are 0). Otherwise the compiler
// schedules them after the wait, and nothing overlaps.
DEV void keep_order(const float (&s)[32], u32 barrier, u32 parity) {
  u32 signs = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) signs |= __float_as_uint(s[i]);
  mbar_wait(barrier, parity ^ (signs >> 31));
}

// This thread's part of a bias tile of a stage: bf16 pairs in registers, fp32 left in shared
// memory.
struct BiasTile {
  u32 words[kWideBias ? 1 : 16];
  u32 address;
};

DEV void load_bias(BiasTile& bias, u32 tile, int thread) {
  bias.address = tile + thread * 16;
  if constexpr (!kWideBias) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 w = lds128(bias.address + i * 2048);
      bias.words[4 * i] = w.x, bias.words[4 * i + 1] = w.y;
      bias.words[4 * i + 2] = w.z, bias.words[4 * i + 3] = w.w;
    }
  }
}

// s = exp2(s * scale2 + bias * log2(e)).
DEV void exponentials(float (&s)[32], const BiasTile& bias, float scale2) {
  if constexpr (kWideBias) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 w = lds128(bias.address + i * 2048);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        s[4 * i + j] = ex2(s[4 * i + j] * scale2 + __uint_as_float(words[j]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      s[2 * i] = ex2(s[2 * i] * scale2 + bf16_lo(bias.words[i]) * LOG2E);
      s[2 * i + 1] = ex2(s[2 * i + 1] * scale2 + bf16_hi(bias.words[i]) * LOG2E);
    }
  }
}

// This thread's part of a bias tile, fp32 and multiplied by log2(e).
struct WideBias {
  float values[32];
};

// Read the part of a thread from an fp32 tile; `from` is where its first 16 bytes lie.
DEV void load_wide(WideBias& bias, u32 from) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 w = lds128(from + i * 2048);
    bias.values[4 * i] = __uint_as_float(w.x), bias.values[4 * i + 1] = __uint_as_float(w.y);
    bias.values[4 * i + 2] = __uint_as_float(w.z), bias.values[4 * i + 3] = __uint_as_float(w.w);
  }
}

// s = exp2(s * scale2 + bias), the bias in registers.
DEV void wide_exponentials(float (&s)[32], const WideBias& bias, float scale2) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = ex2(s[i] * scale2 + bias.values[i]);
}

// Keep packed words before the wgmma wait that follows, as keep_order does with exponentials.
// `never` is zero.
DEV void keep_words(const u32 (&words)[16], u32 never, u32 barrier, u32 parity) {
  u32 bits = 0;
#pragma unroll
  for (int i = 1; i < 16; i += 2) bits |= words[i];
  mbar_wait(barrier, parity ^ (bits & never));
}
