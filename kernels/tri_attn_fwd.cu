// Triangle attention, forward: O = softmax(scale QK^T + bias) V for every outer slice and head.
//
// Work item: 128 queries x GROUP outer slices x one head; a persistent block walks its items, and
// within an item the key tiles of 64. Warp roles: warpgroup 0 is the producer (one thread issues
// the bulk copies), warpgroups 1 and 2 own 64 queries each and all GROUP slices of them, so a bias
// tile is widened to FP32 registers once and serves GROUP score tiles.
//
// A job is one (key tile, slice). The jobs of an item, or with STREAM those of all items of a block,
// form one stream; step j runs, with everything of step j-1 complete:
//   tensor cores   O[j-1] += P[j-1] V[j-1]   and   S[j+2] = Q K^T      (in flight during the step)
//   MUFU pipe      P[j] = exp2((X[j] - max) log2(e))                   } independent of each other
//   FMA, ALU pipes X[j+1] = scale S[j+1] + bias, its row maxima        }
// so the exponentials never wait for a maximum or a product. The running maximum is exact (the
// largest P of a row is 1). Only one group of products is in flight and it is drained at the end of
// the step: ptxas serialises products whose accumulators live across a loop edge.
// A slice is sealed (log-sum, 1 / sum) after its last exponentials and finished (O written) one
// step later, when its last product is complete. With STREAM the next item starts while the last
// one ends; as it reaches two jobs ahead, a block with one or two key tiles must then have at most
// two items (two Q buffers; blocks_for in tri_attn.py).
//
// Shared memory: STAGES x [K: GROUP tiles | V: GROUP tiles | bias: 2 tiles], 2 x Q, then 2 x item
// coordinates, barriers, 2 x mask words.
// Registers of a consumer (GROUP x HEAD_DIM = 64): S 2x32, X 32, P 2x16, bias 32, O 32, rows 16.
// Constants: HEAD_DIM (16, 32, 64), GROUP, STAGES, BIAS_F32, HAS_MASK, SAVE_RESIDUAL, WHOLE_ROWS
// (d == HEAD_DIM), STREAM.
#include "tri_attn_fwd.cuh"
#if LEAN
#include "tri_attn_lean.cuh"
#endif

// ---------------------------------------------------------------------------------- producer

DEV void produce(const Params& p, const Shared& s) {
  int stage = 0, trip = 0;
  u32 phase = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++trip) {
    const Item it = item_at(p, index);
    const int buffer = trip & 1;
    const u32 q_bar = s.q_full + 8 * buffer;
    mbar_wait_idle(s.q_empty + 8 * buffer, (trip >> 1 & 1) ^ 1);
    sts128(s.items + ITEM * buffer, make_uint4(it.b, it.h, it.o, it.q));
#if LEAN
    const i64 row = ((static_cast<i64>(it.b) * p.outer + it.o) * p.heads + it.h) * p.n + it.q;
    sts128(s.items + ITEM * buffer + 16, make_uint4(row, row >> 32, 0, 0));
#endif
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

#if !LEAN
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

  auto load_bias_of = [&](const Ring& r) {
    load_bias(bias, Smem::address(r.tile) + bias_at);
    wgmma_pin(bias);  // else it is carried around the loop in other registers, by moves
  };
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

  // A stream of jobs: all items of the block (STREAM), or one.
  Ring current = Ring::first(s);
  for (int start = blockIdx.x; start < p.items; start += STREAM ? p.items : gridDim.x) {
    const int end = STREAM ? p.items : start + 1;
    // Jobs 0 and 1: products, then the scores of job 0.
    Ring previous = current, following = current;
    wait_q(buffer);
    mbar_wait(current.bar, current.phase);
    if (GROUP == 1) {
      following = Ring::after(current, s);
      mbar_wait(following.bar, following.phase);
    }
    Ring second = following;  // the tile of job j+2
    u64 q_tiles = q_first + buffer * (GROUP * Q_TILE >> 4);  // Q of job j+2
    wgmma_fence();
    issue_scores(score[0], q_tiles, current.tile);
    issue_scores(score[1], q_tiles + (GROUP > 1) * (Q_TILE >> 4),
                 GROUP > 1 ? current.tile + (KV_TILE >> 4) : following.tile);
    wgmma_commit();
    load_bias_of(current);
    wgmma_wait<0>();
    wgmma_pin(score[0]);
    wgmma_pin(score[1]);
    mask_scores(score[0], buffer, 0, 0);
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
    for (int index = start; index < end; index += gridDim.x) {
      const bool last_item = index + static_cast<int>(gridDim.x) >= end;
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
    if (elect_one()) {
      mbar_arrive(previous.bar + 8 * STAGES);
      mbar_arrive(s.q_empty + 8 * (buffer ^ 1));
    }
    current = Ring::after(previous, s);
  }
}
#endif

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
#if BIAS_TERMS
  write_identity(p, s);
#endif
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
