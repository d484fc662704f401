// Triangle attention, forward: O = softmax(scale QK^T + bias) V for every outer slice and head.
//
// Work item: 128 queries x GROUP outer slices x one head; a persistent block walks its items, and
// within an item the key tiles of 64. Warp roles: warpgroup 0 is the producer (one thread issues
// the bulk copies), warpgroups 1 and 2 own 64 queries each and all GROUP slices of them, so a bias
// tile is widened to FP32 registers once and serves GROUP score tiles.
//
// A job is one (key tile, slice). The jobs of an item, or with STREAM those of all items of a
// block, form one stream; step j runs, with everything of step j-1 complete:
//   tensor cores   O[j-1] += P[j-1] V[j-1]   and   S[j+2] = Q K^T      (in flight during the step)
//   MUFU pipe      P[j] = exp2((X[j] - max) log2(e))                   } independent of each other
//   FMA, ALU pipes X[j+1] = scale S[j+1] + bias, its row maxima        }
// so the exponentials never wait for a maximum or a product. Only one group of products is in
// flight and it is drained at the end of the step: ptxas serialises products whose accumulators
// live across a loop edge.
// The running maximum is exact (the largest P of a row is 1), and finite for a row without keys, so
// that no value is special. It is found by integers, three values at a time, as the bits of floats
// that are not negative are ordered like integers; if a maximum of the warp is negative, all are
// found anew by floats.
// A slice is sealed (log-sum, 1 / sum) after its last exponentials and finished (O written) one
// step later, when its last product is complete. Trips over tiles inside an item are compiled
// without the code of an item's first and last tile. With STREAM the next item starts while the
// last one ends; as it reaches two jobs ahead, a block with one or two key tiles must then have at
// most two items (two Q buffers; blocks_for in tri_attn.py).
//
// Shared memory: STAGES x [K: GROUP tiles | V: GROUP tiles | bias: 2 tiles], 2 x Q, residual of O
// (STAGED), 2 x item coordinates, barriers, 2 x mask words.
// Registers of a consumer (GROUP x HEAD_DIM = 64): S 2x32, X 32, P 2x16, bias 32, O 32, rows 16.
// Constants: HEAD_DIM (16, 32, 64), GROUP, STAGES, BIAS_F32, HAS_MASK, SAVE_RESIDUAL, WHOLE_ROWS
// (d == HEAD_DIM), STAGED (the copy engine writes O; tri_attn_fwd_store.cuh), STREAM.
#include "tri_attn_fwd_store.cuh"

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
    const i64 row = ((static_cast<i64>(it.b) * p.outer + it.o) * p.heads + it.h) * p.n + it.q;
    sts128(s.items + ITEM * buffer + 16, make_uint4(row, row >> 32, 0, 0));
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

// ---------------------------------------------------------------------------------- consumer

DEV void consume(const Params& p, const Shared& s, int group) {
  const int last = p.key_tiles - 1;
  const u32 bias_at = 2 * GROUP * KV_TILE + group * BIAS_TILE + 16 * (threadIdx.x % 128);
  const u64 q_first = Smem::desc(s.q + group * ROWS * ROW_BYTES);

  float score[2][32], x[32], bias[32], out[GROUP][NO];
  u32 prob[2][16];
  Rows rows[GROUP];
  Shift now, before;              // of jobs j and j-1
  float inverse[2] = {0.f, 0.f};  // 1 / sum of the last sealed slice
  int buffer = 0;                 // Q, words and coordinates of the item of job j
  u32 q_phases = 0;               // bit b: parity to wait for in buffer b

  auto load_bias_of = [&](u32 n) {
    load_bias(bias, s.stages + n % STAGES * STAGE + bias_at);
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
  u32 current = 0;  // number of the tile of job j
  for (int start = blockIdx.x; start < p.items; start += STREAM ? p.items : gridDim.x) {
    const int end = STREAM ? p.items : start + 1;
    // Jobs 0 and 1: products, then what the exponentials of job 0 need.
    u32 previous = current, following = current;
    wait_q(buffer);
    u64 q_tiles = q_first + buffer * (GROUP * Q_TILE >> 4);  // Q of job j+2
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (GROUP == 1 && j == 1) following = current + 1;
      wait_for(s, following);
      if (j == 0) load_bias_of(following);
      wgmma_fence();
      issue_scores(score[j], q_tiles + (GROUP > 1) * j * (Q_TILE >> 4),
                   tile_of(s, following) + (GROUP > 1) * j * (KV_TILE >> 4));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(score[j]);
    }
    u32 second = following;  // the tile of job j+2
    mask_scores(score[0], buffer, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) rows[g] = Rows::none();
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = fmaf(score[0][i], p.scale, bias[i]);
    fold_maxima(rows[0].top, x);
    now = shift_of(Rows::none().top, rows[0].top);
    before = now;
#pragma unroll
    for (int i = 0; i < 16; ++i) prob[1][i] = 0;  // job -1

    bool first_item = true, last_item = false;
    // edge: the trip may hold an item's first or last tile.
    auto walk = [&](int trip, bool edge) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < UNROLL * GROUP; ++j) {
        const int t = trip + j / GROUP, g = j % GROUP, turn = j & 1;
        const int g_before = (g + GROUP - 1) % GROUP, g_next = (g + 1) % GROUP;
        const int g_second = (g + 2) % GROUP;
        const bool is_last = edge && t == last;
        const bool crosses = is_last && !last_item;  // the next tile is the next item's first

        // Find the tile of job j+2; past the end of all work it stays, and changes nothing.
        if (g_second == 0) {
          const int tile = t + (g + 2) / GROUP;
          second = GROUP == 1 ? following : current;
          if (!edge || tile <= last || !last_item) ++second;
          if (edge && tile == last + 1 && !last_item) {
            wait_q(buffer ^ 1);
            q_tiles = q_first + (buffer ^ 1) * (GROUP * Q_TILE >> 4);
          }
          wait_for(s, second);
          if (GROUP > 1) following = second;
        }

        // Tensor cores: the output of job j-1 and the scores of job j+2.
        rescale(out[g_before], before.factor);
        wgmma_pin(out[g_before]);
        wgmma_pin(prob[turn ^ 1]);
        wgmma_fence();
        const bool more = edge ? (g > 0 ? t > 0 : t == 0 ? last > 0 : t > 1) : g > 0 || t > 1;
        const u64 values = tile_of(s, g == 0 ? previous : current) + GROUP * (KV_TILE >> 4);
        issue_output(out[g_before], prob[turn ^ 1], values + g_before * (KV_TILE >> 4), more);
        issue_scores(score[turn], q_tiles + g_second * (Q_TILE >> 4),
                     tile_of(s, g + 2 < GROUP ? current : second) + g_second * (KV_TILE >> 4));
        wgmma_commit();

        // Exponentials of job j beside the maxima of job j+1 and what its exponentials need.
        mask_scores(score[turn ^ 1], g_next == 0 && crosses ? buffer ^ 1 : buffer,
                    g_next > 0 ? t : !edge || t < last ? t + 1 : last_item ? last : 0, g_next);
        Rows complete = rows[g];
        if (GROUP == 1 && is_last) rows[0] = Rows::none();  // job j+1 begins the next item
        Rows& next = rows[g_next];
        const float old[2] = {next.top[0], next.top[1]};
        before = now;
        float sum[2] = {0.f, 0.f};
        if (g_next == 0) load_bias_of(following);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int r = i & 1;
          const float p0 = ex2(fmaf(x[2 * i], LOG2E, before.minus[r]));
          const float p1 = ex2(fmaf(x[2 * i + 1], LOG2E, before.minus[r]));
          x[2 * i] = fmaf(score[turn ^ 1][2 * i], p.scale, bias[2 * i]);
          x[2 * i + 1] = fmaf(score[turn ^ 1][2 * i + 1], p.scale, bias[2 * i + 1]);
          sum[r] = i < 2 ? fmaf(complete.sum[r], before.factor[r], p0 + p1) : sum[r] + (p0 + p1);
          prob[turn][i] = pack_bf16(p0, p1);
        }
        int signs = fold_maxima_of_three(next.top, x);
        now = shift_of(old, next.top);
        complete.sum[0] = sum[0];
        complete.sum[1] = sum[1];
        if (GROUP > 1 || !is_last) rows[g].sum[0] = sum[0], rows[g].sum[1] = sum[1];
        // The sums, never negative, hold the exponentials before this branch and so the wait.
        signs |= __float_as_int(sum[0]) | __float_as_int(sum[1]);
        if (__any_sync(0xffffffffu, signs < 0)) {
          next.top[0] = old[0];
          next.top[1] = old[1];
          fold_maxima(next.top, x);
          now = shift_of(old, next.top);
        }

        wgmma_pin(prob[turn]);
        wgmma_pin(x);
        wgmma_wait<0>();
        wgmma_pin(out[g_before]);
        wgmma_pin(score[turn]);
        if (g == 0) {
          const bool started = !edge || t > 0 || !first_item;
          if (started) release(bar_of(s, previous) + 8 * STAGES);
          if (edge && t == 0 && !first_item) {
            finish(p, s, group, buffer ^ 1, g_before, out[g_before], inverse);
          }
        } else if (is_last) {
          finish(p, s, group, buffer, g_before, out[g_before], inverse);
        }
        if (g == GROUP - 1 && edge && t == 0 && !first_item) release_q(s, buffer ^ 1);
        if (is_last) {
          seal(p, s.items + ITEM * buffer, g, complete, inverse);
          if (GROUP > 1) rows[g] = Rows::none();
        }
        if (g == GROUP - 1) {
          previous = current;
          current = following;
          if (GROUP == 1) following = second;
        }
      }
    };
    for (int index = start; index < end; index += gridDim.x) {
      last_item = index + static_cast<int>(gridDim.x) >= end;
      for (int trip = 0; trip <= last;) {
        walk(trip, true);
        for (trip += UNROLL; trip + UNROLL <= last; trip += UNROLL) walk(trip, false);
      }
      first_item = false;
      buffer ^= 1;
    }

    rescale(out[GROUP - 1], before.factor);
    wgmma_pin(out[GROUP - 1]);
    wgmma_fence();
    issue_output(out[GROUP - 1], prob[1], tile_of(s, previous) + (2 * GROUP - 1) * (KV_TILE >> 4),
                 last > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(out[GROUP - 1]);
    finish(p, s, group, buffer ^ 1, GROUP - 1, out[GROUP - 1], inverse);
    release(bar_of(s, previous) + 8 * STAGES);
    release_q(s, buffer ^ 1);
    current = previous + 1;
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
      mbar_init(s.empty + 8 * i, ARRIVALS);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(s.q_full + 8 * i, 1);
      mbar_init(s.q_empty + 8 * i, ARRIVALS);
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
