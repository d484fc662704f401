// Parts of the forward kernel of triangle attention: parameters, shared memory, the arithmetic of
// one score tile, and how a finished slice is written. tri_attn_fwd.cu explains the whole.
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
  float scale, scale_log2;  // scale_log2 = scale * log2(e)
};

constexpr int KEYS = 64, ROWS = 64, CONSUMERS = 2, QUERIES = CONSUMERS * ROWS;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int KV_TILE = KEYS * ROW_BYTES;
constexpr int BIAS_TILE = ROWS * KEYS * (BIAS_F32 ? 4 : 2);
constexpr int STAGE = 2 * GROUP * KV_TILE + CONSUMERS * BIAS_TILE;
constexpr int Q_TILE = QUERIES * ROW_BYTES;
constexpr int NO = HEAD_DIM / 2;                // accumulators of O a thread and slice
constexpr int UNROLL = GROUP % 2 == 0 ? 1 : 2;  // tiles a loop trip, so that buffers alternate
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int ITEM = LEAN ? 32 : 16;  // bytes of an item's coordinates
constexpr int IDENTITY = 48 * 32;  // bytes of one term of 1 / scale on the tensor cores
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
  u32 stages, q, residual, identity, items, full, empty, q_full, q_empty, words;
  u32 words_bytes;  // of one slice

  DEV Shared at(u32 base, const Params& p) {
    Shared s;
    s.stages = base;
    s.q = s.stages + STAGES * STAGE;
    s.residual = s.q + 2 * GROUP * Q_TILE;
    s.identity = s.residual + (STAGED && SAVE_RESIDUAL ? Q_TILE : 0);
    s.items = s.identity + BIAS_TERMS * IDENTITY;
    s.full = s.items + 2 * ITEM;
    s.empty = s.full + 8 * STAGES;
    s.q_full = s.empty + 8 * STAGES;
    s.q_empty = s.q_full + 16;
    s.words = s.q_empty + 16;
    s.words_bytes = p.bias_key_tiles * 8;
    return s;
  }
};

// ------------------------------------------------------------------------- pieces of a consumer

// A stage of the ring: the descriptor of its first tile, its full barrier and that one's parity.
struct Ring {
  u64 tile;
  u32 bar, phase;

  DEV Ring first(const Shared& s) { return {Smem::desc(s.stages), s.full, 0}; }
  DEV Ring after(Ring r, const Shared& s) {
    r.tile += STAGE >> 4;
    r.bar += 8;
    if (r.bar == s.empty) r = {Smem::desc(s.stages), s.full, r.phase ^ 1};
    return r;
  }
};

// Running softmax state of one slice; index 0 and 1 are the two rows of a thread.
struct Rows {
  float top[2], sum[2];

  DEV Rows none() { return {{-INF, -INF}, {0.f, 0.f}}; }
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

// Folds the maxima of a score tile into the slice's rows and returns the shift of its exponentials.
DEV Shift new_shift(Rows& rows, float top0, float top1) {
  const float top[2] = {quad_max(top0), quad_max(top1)};
  Shift shift;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float safe = top[r] == -INF ? 0.f : top[r];  // no key yet: every exponential is 0
    shift.minus[r] = -safe * LOG2E;
    shift.factor[r] = ex2(fmaf(rows.top[r], LOG2E, shift.minus[r]));
    rows.top[r] = top[r];
  }
  return shift;
}

DEV void rescale(float (&o)[NO], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < NO; ++i) o[i] *= factor[i >> 1 & 1];
}

// ----------------------------------------------------------------------------------- results

// Stores a fragment as bf16 rows; line points to column 0 of the thread's first row, the second
// lies 8 rows on.
DEV void store_rows(const Params& p, u16* line, const float (&o)[NO], int rows_left, int lane) {
  const i64 eight_rows = 8 * static_cast<i64>(p.heads) * p.d;
#if WHOLE_ROWS
  // The lanes of a quad trade words, so that each holds 8 neighbouring columns: of both its rows
  // for HEAD_DIM >= 32, of one of them for 16.
  constexpr int PER_ROW = HEAD_DIM >= 32 ? 4 : 2;  // 8-column blocks of one row in a trade
#pragma unroll
  for (int part = 0; part < NO / 8; ++part) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int flat = 4 * part + j;  // (block group, row, block in the group)
      const int second = flat / PER_ROW % 2;
      const int block = flat / PER_ROW / 2 * PER_ROW + flat % PER_ROW;
      w[j] = pack_bf16(o[4 * block + 2 * second], o[4 * block + 2 * second + 1]);
    }
    quad_transpose(w, lane);
    const int flat = 4 * part + lane % 4;
    const int second = flat / PER_ROW % 2;
    const int block = flat / PER_ROW / 2 * PER_ROW + flat % PER_ROW;
    if (8 * second < rows_left) {
      *reinterpret_cast<uint4*>(line + second * eight_rows + 8 * block) =
          make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
#else
#pragma unroll
  for (int i = 0; i < NO; ++i) {
    const int second = i >> 1 & 1, column = frag_col(lane, i);
    if (8 * second < rows_left && column < p.d) {
      line[second * eight_rows + column] = to_bf16(o[i]);
    }
  }
#endif
}

// First row of a consumer's fragment inside the item.
DEV int first_row(int thread) {
  return (thread / 128 - 1) * ROWS + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// Writes the log-sums of a slice whose last exponentials are done; returns the factors 1 / sum.
DEV void seal(const Params& p, u32 item, int g, const Rows& rows, float (&inverse)[2]) {
  const uint4 it = lds128(item);  // b, h, o, q
  const int thread = thread_now(), first = it.w + first_row(thread);
  float lse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const bool some = sum > 0.f;
    inverse[r] = some ? rcp(sum) : 0.f;
    lse[r] = some ? fmaf(rows.top[r], LOG2E, lg2(sum)) : INF;
  }
  const i64 slice = static_cast<i64>(it.x) * p.outer + it.z + g;
  float* at = p.lse + (slice * p.heads + it.y) * p.n + first;
  if (thread % 4 == 0 && static_cast<int>(it.z) + g < p.outer) {
    if (first < p.n) at[0] = lse[0];
    if (first + 8 < p.n) at[8] = lse[1];
  }
}

// Normalises and writes O of a slice, and its residual.
DEV void finish(const Params& p, u32 item, int g, float (&o)[NO], const float (&inverse)[2]) {
  const uint4 it = lds128(item);
  if (static_cast<int>(it.z) + g >= p.outer) return;
  const int thread = thread_now(), lane = thread % 32, first = it.w + first_row(thread);
  rescale(o, inverse);
  const i64 slice = static_cast<i64>(it.x) * p.outer + it.z + g;
  const i64 at = ((slice * p.n + first) * p.heads + it.y) * p.d;
  store_rows(p, p.out + at, o, p.n - first, lane);
#if SAVE_RESIDUAL
#pragma unroll
  for (int i = 0; i < NO; i += 2) {
    const u32 w = pack_bf16(o[i], o[i + 1]);
    o[i] -= bf16_lo(w);
    o[i + 1] -= bf16_hi(w);
  }
  store_rows(p, p.residual + at, o, p.n - first, lane);
#endif
}
