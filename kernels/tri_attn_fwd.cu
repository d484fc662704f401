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
// Constants: HEAD_DIM (16, 32, 64), GROUP, STAGES, BIAS_F32, HAS_MASK, SAVE_RESIDUAL, WHOLE_ROWS
// (d == HEAD_DIM).
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

// Addresses in shared memory.
struct Shared {
  u32 stages, q, items, full, empty, q_full, q_empty, words;
  u32 words_bytes;  // of one slice

  DEV Shared at(u32 base, const Params& p) {
    Shared s;
    s.stages = base;
    s.q = s.stages + STAGES * STAGE;
    s.items = s.q + 2 * GROUP * Q_TILE;
    s.full = s.items + 32;
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
  int stage = 0, trip = 0;
  u32 phase = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++trip) {
    const Item it = item_at(p, index);
    const int buffer = trip & 1;
    const u32 q_bar = s.q_full + 8 * buffer;
    mbar_wait_idle(s.q_empty + 8 * buffer, (trip >> 1 & 1) ^ 1);
    sts128(s.items + 16 * buffer, make_uint4(it.b, it.h, it.o, it.q));
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
    for (int t = 0; t < p.key_tiles; ++t) {
      const u32 k = s.stages + stage * STAGE, v = k + GROUP * KV_TILE, bar = s.full + 8 * stage;
      mbar_wait_idle(s.empty + 8 * stage, phase);
      mbar_expect(bar, STAGE);
      tma_load(k, &p.k, bar, 0, t * KEYS, it.h, it.o, it.b);
      tma_load(v, &p.v, bar, 0, t * KEYS, it.h, it.o, it.b);
      bulk_load(v + GROUP * KV_TILE, bias, CONSUMERS * BIAS_TILE, bar);
      bias += static_cast<i64>(p.query_tiles) * BIAS_TILE;
      if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

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

// ---------------------------------------------------------------------------------- consumer

DEV void consume(const Params& p, const Shared& s, int group) {
  const int last = p.key_tiles - 1;
  const u32 bias_at = 2 * GROUP * KV_TILE + group * BIAS_TILE + 16 * (threadIdx.x % 128);
  const u64 q_first = Smem::desc(s.q + group * ROWS * ROW_BYTES);

  float score[2][32], x[32], bias[32], out[GROUP][NO];
  u32 prob[2][16];
  Rows rows[GROUP];
  Shift now, before;                          // of jobs j and j-1
  float inverse[2] = {0.f, 0.f};              // 1 / sum of the last sealed slice
  int buffer = 0;                             // Q, words and coordinates of the item of job j
  u32 q_phases = 0;                           // bit b: parity to wait for in buffer b

  auto load_bias_of = [&](const Ring& r) { load_bias(bias, Smem::address(r.tile) + bias_at); };
  auto mask_scores = [&](float(&v)[32], int which, int tile, int g) {
    if (HAS_MASK) {
      const u64 word = lds64(s.words + (which * GROUP + g) * s.words_bytes + 8 * tile);
      if (word != ~0ull) apply_mask(v, word);
    }
  };
  auto wait_q = [&](int which) {
    mbar_wait(s.q_full + 8 * which, q_phases >> which & 1);
    q_phases ^= 1u << which;
  };

  // Jobs 0 and 1 of the first item: products, then the scores of job 0.
  Ring previous = Ring::first(s), current = previous, following = previous;
  wait_q(0);
  mbar_wait(current.bar, current.phase);
  if (GROUP == 1) {
    following = Ring::after(current, s);
    mbar_wait(following.bar, following.phase);
  }
  Ring second = following;  // the tile of job j+2
  u64 q_tiles = q_first;    // Q of job j+2
  wgmma_fence();
  issue_scores(score[0], q_tiles, current.tile);
  issue_scores(score[1], q_tiles + (GROUP > 1) * (Q_TILE >> 4),
               GROUP > 1 ? current.tile + (KV_TILE >> 4) : following.tile);
  wgmma_commit();
  load_bias_of(current);
  wgmma_wait<0>();
  wgmma_pin(score[0]);
  wgmma_pin(score[1]);
  mask_scores(score[0], 0, 0, 0);
  float top[2] = {-INF, -INF};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    x[i] = fmaf(score[0][i], p.scale, bias[i]);
    top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], x[i]);
  }
#pragma unroll
  for (int g = 0; g < GROUP; ++g) rows[g] = Rows::none();
  now = new_shift(rows[0], top[0], top[1]);
  before = now;
#pragma unroll
  for (int i = 0; i < 16; ++i) prob[1][i] = 0;  // job -1

  bool first_item = true;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const bool last_item = index + static_cast<int>(gridDim.x) >= p.items;
    for (int trip = 0; trip <= last; trip += UNROLL) {
#pragma unroll
      for (int j = 0; j < UNROLL * GROUP; ++j) {
        const int t = trip + j / GROUP, g = j % GROUP, turn = j & 1;
        const int g_before = (g + GROUP - 1) % GROUP, g_next = (g + 1) % GROUP;
        const int g_second = (g + 2) % GROUP;
        const bool crosses = t == last && !last_item;  // the next tile is the next item's first

        // Find the tile of job j+2; past the end of all work it stays, and changes nothing.
        if (g_second == 0) {
          const int tile = t + (g + 2) / GROUP;
          second = GROUP == 1 ? following : current;
          if (tile <= last || !last_item) second = Ring::after(second, s);
          if (tile == last + 1 && !last_item) {
            wait_q(buffer ^ 1);
            q_tiles = q_first + (buffer ^ 1) * (GROUP * Q_TILE >> 4);
          }
          mbar_wait(second.bar, second.phase);
          if (GROUP > 1) following = second;
        }

        // Tensor cores: the output of job j-1 and the scores of job j+2.
        rescale(out[g_before], before.factor);
        wgmma_pin(out[g_before]);
        wgmma_pin(prob[turn ^ 1]);
        wgmma_fence();
        issue_output(out[g_before], prob[turn ^ 1],
                     (g == 0 ? previous : current).tile + (GROUP + g_before) * (KV_TILE >> 4),
                     g > 0 ? t > 0 : t == 0 ? last > 0 : t > 1);
        issue_scores(score[turn], q_tiles + g_second * (Q_TILE >> 4),
                     (g + 2 < GROUP ? current : second).tile + g_second * (KV_TILE >> 4));
        wgmma_commit();

        // Exponentials of job j beside the scores of job j+1.
        mask_scores(score[turn ^ 1], g_next == 0 && crosses ? buffer ^ 1 : buffer,
                    g_next > 0 ? t : t < last ? t + 1 : last_item ? last : 0, g_next);
        if (g_next == 0) load_bias_of(following);
        float sum[2] = {0.f, 0.f};
        const bool restart = GROUP == 1 && t == last;  // job j+1 begins the next item
        top[0] = restart ? -INF : rows[g_next].top[0];
        top[1] = restart ? -INF : rows[g_next].top[1];
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
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          rows[g].sum[r] = fmaf(rows[g].sum[r], now.factor[r], sum[r]);
        }
        const Rows complete = rows[g];
        if (restart) rows[0] = Rows::none();
        before = now;
        now = new_shift(rows[g_next], top[0], top[1]);

        wgmma_pin(prob[turn]);
        wgmma_pin(x);
        wgmma_wait<0>();
        wgmma_pin(out[g_before]);
        wgmma_pin(score[turn]);
        if (g == 0) {
          const bool started = t > 0 || !first_item;
          if (started && elect_one()) mbar_arrive(previous.bar + 8 * STAGES);
          if (t == 0 && !first_item) {
            finish(p, s.items + 16 * (buffer ^ 1), g_before, out[g_before], inverse);
            if (elect_one()) mbar_arrive(s.q_empty + 8 * (buffer ^ 1));
          }
        } else if (t == last) {
          finish(p, s.items + 16 * buffer, g_before, out[g_before], inverse);
        }
        if (t == last) {
          seal(p, s.items + 16 * buffer, g, complete, inverse);
          if (GROUP > 1) rows[g] = Rows::none();
        }
        if (g == GROUP - 1) {
          previous = current;
          current = following;
          if (GROUP == 1) following = second;
        }
      }
    }
    first_item = false;
    buffer ^= 1;
  }

  rescale(out[GROUP - 1], before.factor);
  wgmma_pin(out[GROUP - 1]);
  wgmma_fence();
  issue_output(out[GROUP - 1], prob[1], previous.tile + (2 * GROUP - 1) * (KV_TILE >> 4), last > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(out[GROUP - 1]);
  finish(p, s.items + 16 * (buffer ^ 1), GROUP - 1, out[GROUP - 1], inverse);
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
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform for the compiler
  if (role == 0) {
    reg_dealloc<24>();
    if (threadIdx.x == 0) produce(p, s);
  } else {
    reg_alloc<240>();
    consume(p, s, role - 1);
  }
}
