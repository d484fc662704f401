// Triangle attention, forward: O = softmax(scale QK^T + bias) V for every outer slice and head.
//
// Work item: 128 queries x GROUP outer slices x one head; a persistent block walks its items, and
// within an item the key tiles of 64. Warp roles: warpgroup 0 is the producer (one thread issues
// the bulk copies), warpgroups 1 and 2 own 64 queries each and all GROUP slices of them, so a bias
// tile is widened to FP32 registers once and serves GROUP score tiles.
//
// A job is one (key tile, slice). Step j runs, with everything of step j-1 complete:
//   tensor cores   O[j-1] += P[j-1] V[j-1]   and   S[j+2] = Q K^T      (in flight during the step)
//   MUFU pipe      P[j] = exp2(X[j] - max)                             } interleaved, independent
//   FMA, ALU pipes X[j+1] = scale S[j+1] + bias, its row maxima        }
// so the exponentials never wait for a maximum or a product. The running maximum is exact (the
// largest P of a row is 1). Only one group of products is in flight and it is drained at the end of
// the step: ptxas serialises products whose accumulators live across a loop edge.
//
// Shared memory: STAGES x [K: GROUP tiles | V: GROUP tiles | bias: 2 tiles], 2 x Q, 2 x mask words.
// Registers of a consumer (GROUP x HEAD_DIM = 64): S 2x32, X 32, P 2x16, bias 32, O 32, rows 24.
// Constants: HEAD_DIM (16, 32, 64), GROUP, STAGES, BIAS_F32, HAS_MASK, SAVE_RESIDUAL.
#include "tile.cuh"

struct Params {
  TensorMap q, k, v;  // [B, O, H, N, D]
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
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
static_assert(GROUP * HEAD_DIM <= 64, "O must fit beside two score tiles");
static_assert(STAGES >= (GROUP == 1 ? 4 : 3), "a step holds tile t-1 and may wait for the one of job j+2");
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

// Position in the ring of stages.
struct Ring {
  int stage;
  u32 phase;
  DEV void next(Ring& r) {
    if (++r.stage == STAGES) {
      r.stage = 0;
      r.phase ^= 1;
    }
  }
};

struct Shared {
  u32 stages, q, words, full, empty, q_full, q_empty;
  u32 words_bytes;  // of one slice

  DEV Shared at(u32 base, const Params& p) {
    Shared s;
    s.stages = base;
    s.q = s.stages + STAGES * STAGE;
    s.full = s.q + 2 * GROUP * Q_TILE;
    s.empty = s.full + 8 * STAGES;
    s.q_full = s.empty + 8 * STAGES;
    s.q_empty = s.q_full + 16;
    s.words = s.q_empty + 16;
    s.words_bytes = p.bias_key_tiles * 8;
    return s;
  }
};

// ---------------------------------------------------------------------------------- producer

DEV void produce(const Params& p, const Shared& s) {
  Ring ring{0, 0};
  int trip = 0;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++trip) {
    const Item it = item_at(p, index);
    const int buffer = trip & 1;
    const u32 q_bar = s.q_full + 8 * buffer;
    mbar_wait_idle(s.q_empty + 8 * buffer, (trip >> 1 & 1) ^ 1);
    mbar_expect(q_bar, GROUP * Q_TILE + (HAS_MASK ? GROUP * s.words_bytes : 0));
    tma_load(s.q + buffer * GROUP * Q_TILE, &p.q, q_bar, 0, it.q, it.h, it.o, it.b);
    if (HAS_MASK) {
      for (int g = 0; g < GROUP; ++g) {
        const i64 slice = static_cast<i64>(it.b) * p.outer + min(it.o + g, p.outer - 1);
        bulk_load(s.words + (buffer * GROUP + g) * s.words_bytes,
                  p.mask_words + slice * p.bias_key_tiles, s.words_bytes, q_bar);
      }
    }
    const char* bias = p.bias_tiles + it.b * p.bias_batch +
                       (static_cast<i64>(it.h) * p.bias_key_tiles * p.query_tiles +
                        it.q / ROWS) * BIAS_TILE;
    for (int t = 0; t < p.key_tiles; ++t, Ring::next(ring)) {
      const u32 k = s.stages + ring.stage * STAGE, v = k + GROUP * KV_TILE;
      const u32 bar = s.full + 8 * ring.stage;
      mbar_wait_idle(s.empty + 8 * ring.stage, ring.phase ^ 1);
      mbar_expect(bar, STAGE);
      tma_load(k, &p.k, bar, 0, t * KEYS, it.h, it.o, it.b);
      tma_load(v, &p.v, bar, 0, t * KEYS, it.h, it.o, it.b);
      bulk_load(v + GROUP * KV_TILE, bias + static_cast<i64>(t) * p.query_tiles * BIAS_TILE,
                CONSUMERS * BIAS_TILE, bar);
    }
  }
}

// ---------------------------------------------------------------------------------- consumer

// Running softmax state of one slice; index 0 and 1 are the two rows of a thread.
struct Rows {
  float top[2], sum[2];
};

// What the exponentials of a job need: -max * log2(e), and the factor of the older sums.
struct Shift {
  float minus[2], factor[2];
};

DEV void load_bias(float (&bias)[32], u32 tile) {
  const u32 at = tile + 16 * (threadIdx.x % 128);
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
DEV void apply_mask(float (&s)[32], u64 word, int lane) {
  word >>= 2 * (lane % 4);
  const u32 half[2] = {static_cast<u32>(word), static_cast<u32>(word >> 32)};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int bit = 8 * (i >> 2) + (i & 1);
    if (!(half[bit / 32] >> (bit % 32) & 1)) s[i] = -INF;
  }
}

DEV void issue_scores(float (&s)[32], u32 q_tile, u32 k_tile) {
  const u64 q = Smem::desc(q_tile), k = Smem::desc(k_tile);
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; ++c) {
    wgmma_ss<0, 0>(s, q + c * Smem::STEP_COLS, k + c * Smem::STEP_COLS, c > 0);
  }
}

DEV void issue_output(float (&o)[NO], const u32 (&p)[16], u32 v_tile, bool accumulate) {
  const u64 v = Smem::desc(v_tile);
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

DEV void rescale(float (&o)[NO], const Shift& shift) {
#pragma unroll
  for (int i = 0; i < NO; ++i) o[i] *= shift.factor[i >> 1 & 1];
}

// Writes 8 columns of one row from 16 bytes; columns past d do not exist.
DEV void store_row(u16* at, uint4 w, int column, int d) {
  if (column + 8 <= d && d % 8 == 0) {
    *reinterpret_cast<uint4*>(at + column) = w;
    return;
  }
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (column + j < d) at[column + j] = static_cast<u16>(words[j / 2] >> (16 * (j & 1)));
  }
}

// Stores a fragment as bf16 rows; the lanes of a quad first trade words so that each holds 8
// neighbouring columns. base points to (row 0 of the warpgroup's tile, column 0).
DEV void store_tile(u16* base, i64 row_stride, const float (&o)[NO], int row, int rows_left, int d,
                    int lane) {
  constexpr int PER_ROW = HEAD_DIM >= 32 ? 4 : 2;  // 8-column blocks of one row in a transpose
#pragma unroll
  for (int part = 0; part < NO / 8; ++part) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int flat = 4 * part + j;  // (block group, row half, block in the group)
      const int half = flat / PER_ROW % 2;
      const int block = flat / PER_ROW / 2 * PER_ROW + flat % PER_ROW;
      w[j] = pack_bf16(o[4 * block + 2 * half], o[4 * block + 2 * half + 1]);
    }
    quad_transpose(w, lane);
    const int flat = 4 * part + lane % 4;
    const int r = row + 8 * (flat / PER_ROW % 2);
    const int block = flat / PER_ROW / 2 * PER_ROW + flat % PER_ROW;
    if (r < rows_left) {
      store_row(base + r * row_stride, make_uint4(w[0], w[1], w[2], w[3]), 8 * block, d);
    }
  }
}

// Normalises and writes O, its residual and the log-sums of one slice.
DEV void finish(const Params& p, const Item& it, int o_index, int q0, float (&o)[NO],
                const Rows& rows, int lane, int warp) {
  const int row = 16 * warp + lane / 4;
  const int rows_left = p.n - q0;
  const i64 slice = static_cast<i64>(it.b) * p.outer + o_index;
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    inverse[r] = sum > 0.f ? 1.f / sum : 0.f;
    if (lane % 4 == 0 && row + 8 * r < rows_left) {
      p.lse[(slice * p.heads + it.h) * p.n + q0 + row + 8 * r] =
          sum > 0.f ? fmaf(rows.top[r], LOG2E, lg2(sum)) : INF;
    }
  }
#pragma unroll
  for (int i = 0; i < NO; ++i) {
    const float factor = inverse[i >> 1 & 1];
    o[i] = factor > 0.f ? o[i] * factor : 0.f;
  }
  const i64 stride = static_cast<i64>(p.heads) * p.d;
  const i64 first = (slice * p.n + q0) * stride + it.h * p.d;
  store_tile(p.out + first, stride, o, row, rows_left, p.d, lane);
#if SAVE_RESIDUAL
#pragma unroll
  for (int i = 0; i < NO; ++i) o[i] -= bf16_lo(to_bf16(o[i]));
  store_tile(p.residual + first, stride, o, row, rows_left, p.d, lane);
#endif
}

DEV void consume(const Params& p, const Shared& s, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Ring ring{0, 0};  // of tile t
  int trip = 0;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++trip) {
    const Item it = item_at(p, index);
    const int buffer = trip & 1;
    const u32 q_tiles = s.q + buffer * GROUP * Q_TILE + group * ROWS * ROW_BYTES;
    const u32 words = s.words + buffer * GROUP * s.words_bytes;
    const int last = p.key_tiles - 1;

    float score[2][32], x[32], bias[32], out[GROUP][NO];
    u32 prob[2][16];
    Rows rows[GROUP];
    Shift now, before;  // of jobs j and j-1
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows[g].top[r] = -INF;
        rows[g].sum[r] = 0.f;
      }
    }

    // Tiles t-1, t, t+1 and t+2 in the ring; past the end they stay on the last tile, whose extra
    // products and maxima change nothing.
    Ring previous = ring, current = ring, second = ring;
    auto advance = [&](Ring& r, int tile) {
      if (tile <= last) Ring::next(r);
    };
    auto k_tile = [&](const Ring& r, int g) { return s.stages + r.stage * STAGE + g * KV_TILE; };
    auto v_tile = [&](const Ring& r, int g) { return k_tile(r, GROUP + g); };
    auto bias_tile = [&](const Ring& r) { return v_tile(r, GROUP) + group * BIAS_TILE; };
    auto wait_full = [&](const Ring& r) { mbar_wait(s.full + 8 * r.stage, r.phase); };
    auto mask_scores = [&](float(&v)[32], int tile, int g) {
      if (HAS_MASK) {
        const u64 word = lds64(words + g * s.words_bytes + 8 * min(tile, last));
        if (word != ~0ull) apply_mask(v, word, lane);
      }
    };

    // Jobs 0 and 1: products, then the scores of job 0.
    mbar_wait(s.q_full + 8 * buffer, trip >> 1 & 1);
    wait_full(current);
    if (GROUP == 1) {
      advance(second, 1);
      wait_full(second);
    }
    wgmma_fence();
    issue_scores(score[0], q_tiles, k_tile(current, 0));
    issue_scores(score[1], q_tiles + (GROUP > 1) * Q_TILE, k_tile(second, GROUP > 1));
    wgmma_commit();
    load_bias(bias, bias_tile(current));
    wgmma_wait<0>();
    wgmma_pin(score[0]);
    wgmma_pin(score[1]);
    mask_scores(score[0], 0, 0);
    float top[2] = {-INF, -INF};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      x[i] = fmaf(score[0][i], p.scale, bias[i]);
      top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], x[i]);
    }
    now = new_shift(rows[0], top[0], top[1]);
    before = now;
#pragma unroll
    for (int i = 0; i < 16; ++i) prob[1][i] = 0;  // job -1

    for (int trip_tile = 0; trip_tile <= last; trip_tile += UNROLL) {
#pragma unroll
      for (int j = 0; j < UNROLL * GROUP; ++j) {
        const int t = trip_tile + j / GROUP, g = j % GROUP, turn = j & 1;
        const int g_before = (g + GROUP - 1) % GROUP, g_next = (g + 1) % GROUP;
        const int g_second = (g + 2) % GROUP;

        // Tensor cores: the output of job j-1 and the scores of job j+2.
        if (g_second == 0) {
          advance(second, t + (g + 2) / GROUP);
          wait_full(second);
        }
        rescale(out[g_before], before);
        wgmma_pin(out[g_before]);
        wgmma_pin(prob[turn ^ 1]);
        wgmma_fence();
        issue_output(out[g_before], prob[turn ^ 1], v_tile(g == 0 ? previous : current, g_before),
                     g == 0 ? t > 1 : t > 0);
        issue_scores(score[turn], q_tiles + g_second * Q_TILE, k_tile(second, g_second));
        wgmma_commit();

        // Exponentials of job j beside the scores of job j+1.
        Ring following = current;
        advance(following, t + 1);
        if (g_next == 0) load_bias(bias, bias_tile(following));
        mask_scores(score[turn ^ 1], t + (g + 1) / GROUP, g_next);
        float sum[2] = {0.f, 0.f};
        top[0] = rows[g_next].top[0];
        top[1] = rows[g_next].top[1];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int r = i & 1;
          const float p0 = ex2(fmaf(x[2 * i], LOG2E, now.minus[r]));
          const float p1 = ex2(fmaf(x[2 * i + 1], LOG2E, now.minus[r]));
          x[2 * i] = fmaf(score[turn ^ 1][2 * i], p.scale, bias[2 * i]);
          x[2 * i + 1] = fmaf(score[turn ^ 1][2 * i + 1], p.scale, bias[2 * i + 1]);
          top[r] = fmaxf(top[r], fmaxf(x[2 * i], x[2 * i + 1]));
          sum[r] += p0 + p1;
          prob[turn][i] = pack_bf16(p0, p1);
        }
        rows[g].sum[0] = fmaf(rows[g].sum[0], now.factor[0], sum[0]);
        rows[g].sum[1] = fmaf(rows[g].sum[1], now.factor[1], sum[1]);
        before = now;
        now = new_shift(rows[g_next], top[0], top[1]);

        wgmma_pin(prob[turn]);
        wgmma_pin(x);
        wgmma_wait<0>();
        wgmma_pin(out[g_before]);
        wgmma_pin(score[turn]);
        if (g == 0 && t > 0 && lane == 0) mbar_arrive(s.empty + 8 * previous.stage);
        if (g == GROUP - 1) {
          previous = current;
          current = following;
        }
      }
    }

    rescale(out[GROUP - 1], before);
    wgmma_pin(out[GROUP - 1]);
    wgmma_fence();
    issue_output(out[GROUP - 1], prob[1], v_tile(previous, GROUP - 1), p.key_tiles > 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(out[GROUP - 1]);
    if (lane == 0) {
      mbar_arrive(s.empty + 8 * previous.stage);
      mbar_arrive(s.q_empty + 8 * buffer);
    }
    ring = previous;
    Ring::next(ring);

    const int q0 = it.q + group * ROWS;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      if (it.o + g < p.outer) finish(p, it, it.o + g, q0, out[g], rows[g], lane, warp);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    tri_attn_fwd(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Shared s = Shared::at(smem_u32(smem), p);
  TPF_TRAP(s.stages % 1024 != 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(s.full + 8 * i, 1);
      mbar_init(s.empty + 8 * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(s.q_full + 8 * i, 1);
      mbar_init(s.q_empty + 8 * i, CONSUMER_WARPS);
    }
    mbar_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    reg_dealloc<24>();
    if (threadIdx.x == 0) produce(p, s);
  } else {
    reg_alloc<240>();
    consume(p, s, threadIdx.x / 128 - 1);
  }
}
