// Parts of the forward kernel of triangle attention: parameters, work items, shared memory, and the
// arithmetic of one score tile. tri_attn_fwd.cu explains the whole.
#pragma once

#include "tile.cuh"

struct Params {
  TensorMap q, k, v, out_rows, residual_rows;  // [B, O, H, N, D]; the last two with STAGED
  const char* bias_tiles;
  const u64* mask_words;
  u16* out;       // [B, O, N, H, D]
  u16* residual;  // as out
  float* lse;     // [B, O, H, N]
  i64 bias_batch;  // bytes from one batch entry of bias_tiles to the next (0: shared)
  int outer, heads, n, d;
  int key_tiles, bias_key_tiles, query_tiles;  // walked; rows and columns of bias tiles
  int query_blocks, groups, items;
  float scale;
};

constexpr int KEYS = 64, ROWS = 64, CONSUMERS = 2, QUERIES = CONSUMERS * ROWS;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int KV_TILE = KEYS * ROW_BYTES;
constexpr int BIAS_TILE = ROWS * KEYS * (BIAS_F32 ? 4 : 2);
constexpr int STAGE = 2 * GROUP * KV_TILE + CONSUMERS * BIAS_TILE;
constexpr int Q_TILE = QUERIES * ROW_BYTES;
constexpr int NO = HEAD_DIM / 2;                // accumulators of O a thread and slice
constexpr int UNROLL = GROUP % 2 == 0 ? 1 : 2;  // tiles a loop trip, so that buffers alternate
constexpr int ARRIVALS = (EVERY_LANE ? 32 : 1) * 4 * CONSUMERS;  // at a barrier that frees memory
constexpr int ITEM = 32;  // bytes of an item's coordinates: u32 b, h, o, q; i64 first row in lse
constexpr float NOTHING = -1e37f;  // maximum of a row without keys
static_assert(GROUP * HEAD_DIM <= 64, "O must fit beside two score tiles");
static_assert(STAGES >= (GROUP == 1 ? 4 : 3), "a step holds tile t-1 and waits for that of j+2");
static_assert(KV_TILE % 1024 == 0 && BIAS_TILE % 1024 == 0, "tiles keep the swizzle alignment");
using Smem = Tile<ROW_BYTES>;

struct Item {
  int b, h, o, q;  // o: first slice of the group, q: first query
};

DEV Item item_at(const Params& p, int index) {
  Item it;
  it.q = index % p.query_blocks * QUERIES;
  index /= p.query_blocks;
  it.h = index % p.heads;
  index /= p.heads;
  it.o = index % p.groups * GROUP;
  it.b = index / p.groups;
  return it;
}

// Addresses in shared memory.
struct Shared {
  u32 stages, q, residual, items, full, empty, q_full, q_empty, words;
  u32 words_bytes;  // of one slice

  DEV Shared at(u32 base, const Params& p) {
    Shared s;
    s.stages = base;
    s.q = s.stages + STAGES * STAGE;
    s.residual = s.q + 2 * GROUP * Q_TILE;
    s.items = s.residual + (STAGED && SAVE_RESIDUAL ? Q_TILE : 0);
    s.full = s.items + 2 * ITEM;
    s.empty = s.full + 8 * STAGES;
    s.q_full = s.empty + 8 * STAGES;
    s.q_empty = s.q_full + 16;
    s.words = s.q_empty + 16;
    s.words_bytes = p.bias_key_tiles * 8;
    return s;
  }
};

// Stages of the ring by the number n of the tile in the block's stream: descriptor of the first
// tile, and the full barrier.
DEV u64 tile_of(const Shared& s, u32 n) {
  return Smem::desc(s.stages) + static_cast<u64>(n % STAGES) * (STAGE >> 4);
}
DEV u32 bar_of(const Shared& s, u32 n) { return s.full + n % STAGES * 8; }
DEV void wait_for(const Shared& s, u32 n) { mbar_wait(bar_of(s, n), n / STAGES & 1); }

// A consumer warp is done with what the barrier guards.
DEV void release(u32 barrier) {
  if (EVERY_LANE || elect_one()) mbar_arrive(barrier);
}

// ------------------------------------------------------------------------- pieces of a consumer

// Running softmax state of one slice; index 0 and 1 are the two rows of a thread.
struct Rows {
  float top[2], sum[2];

  DEV Rows none() { return {{NOTHING, NOTHING}, {0.f, 0.f}}; }
};

// What the exponentials of a job need: -max * log2(e), and the factor of the older sums.
struct Shift {
  float minus[2], factor[2];
};

DEV void load_bias(float (&bias)[32], u32 at) {
#if BIAS_F32
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint4 w = lds128(at + c * 2048);
    bias[4 * c] = __uint_as_float(w.x);
    bias[4 * c + 1] = __uint_as_float(w.y);
    bias[4 * c + 2] = __uint_as_float(w.z);
    bias[4 * c + 3] = __uint_as_float(w.w);
  }
#else
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint4 w = lds128(at + c * 2048);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bias[8 * c + 2 * j] = bf16_lo(words[j]);
      bias[8 * c + 2 * j + 1] = bf16_hi(words[j]);
    }
  }
#endif
}

// Sets the scores of dropped keys to -inf (scale is positive).
DEV void apply_mask(float (&s)[32], u64 word) {
  const int shift = 2 * (thread_now() % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 bits = static_cast<u32>(word >> 32 * half) >> shift;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (!(bits >> (8 * (i >> 2) + (i & 1)) & 1)) s[16 * half + i] = -INF;
    }
  }
}

DEV void issue_scores(float (&s)[32], u64 q, u64 k) {
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; ++c) {
    wgmma_ss<0, 0>(s, q + c * Smem::STEP_COLS, k + c * Smem::STEP_COLS, c > 0);
  }
}

DEV void issue_output(float (&o)[NO], const u32 (&p)[16], u64 v, bool accumulate) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    wgmma_rs<1>(o, p[4 * c], p[4 * c + 1], p[4 * c + 2], p[4 * c + 3], v + c * Smem::STEP_ROWS,
                c > 0 || accumulate);
  }
}

// The maxima of the thread's rows with a score tile, over the lanes that share a row.
DEV void fold_maxima(float (&top)[2], const float (&v)[32]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 2 * r; i < 32; i += 4) top[r] = fmaxf(top[r], fmaxf(v[i], v[i + 1]));
    top[r] = quad_max(top[r]);
  }
}

// The same by integers, right for rows whose maxima are not negative; returns their signs.
DEV int fold_maxima_of_three(float (&top)[2], const float (&v)[32]) {
  int most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = __float_as_int(top[r]);
#pragma unroll
    for (int i = 2 * r; i < 32; i += 4) {
      most[r] = max(max(most[r], __float_as_int(v[i])), __float_as_int(v[i + 1]));
    }
    most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
    most[r] = max(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
    top[r] = __int_as_float(most[r]);
  }
  return most[0] | most[1];
}

// The shift of a row's exponentials when its maximum changes.
DEV Shift shift_of(const float (&before)[2], const float (&top)[2]) {
  Shift shift;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    shift.minus[r] = -top[r] * LOG2E;
    shift.factor[r] = ex2((before[r] - top[r]) * LOG2E);  // exactly 1 for equal maxima of any size
  }
  return shift;
}

DEV void rescale(float (&o)[NO], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < NO; ++i) o[i] *= factor[i >> 1 & 1];
}
