// The consumer of the forward kernel of triangle attention with fewer instructions a score. The
// schedule is that of tri_attn_fwd.cu; what differs:
//   trips over tiles inside an item are compiled without the code of an item's first and last tile;
//   rows without keys have a finite maximum, so that no value is special;
//   maxima are of three values and by integers, as the bits of floats that are not negative are
//   ordered like integers; if a maximum of the warp is negative, all are found anew by floats;
//   BIAS_TERMS 1, 2: the tensor cores add the bias (tri_attn_lean_scores.cuh); the products are the
//   scores over the scale, and x holds the finished arguments of the exponentials;
//   EARLY: the products of a step are issued with its first exponentials, not among all of them;
//   STAGED: a warp writes its rows of O into its slice's Q tile, which is read no more, those of
//   the residual beside it, and the copy engine stores them.
#pragma once

#include "tri_attn_lean_scores.cuh"

constexpr float NOTHING = -1e37f;  // maximum of a row without keys

// Stages of the ring by the number n of the tile in the block's stream.
DEV u64 tile_of(const Shared& s, u32 n) {  // descriptor of the first tile
  return Smem::desc(s.stages) + static_cast<u64>(n % STAGES) * (STAGE >> 4);
}
DEV u32 bar_of(const Shared& s, u32 n) { return s.full + n % STAGES * 8; }
DEV void wait_for(const Shared& s, u32 n) { mbar_wait(bar_of(s, n), n / STAGES & 1); }

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

// The shift of a row's exponentials when its maximum changes; unit = log2(e) in units of scores.
DEV Shift shift_of(const float (&before)[2], const float (&top)[2], float unit) {
  Shift shift;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    shift.minus[r] = -top[r] * unit;
    shift.factor[r] = ex2((before[r] - top[r]) * unit);  // exactly 1 for equal maxima of any size
  }
  return shift;
}

// seal() with the first row's place in lse as the producer has it.
DEV void seal_rows(const Params& p, u32 item, int g, const Rows& rows, float (&inverse)[2]) {
  const uint4 it = lds128(item);  // b, h, o, q
  const i64 row = static_cast<i64>(lds64(item + 16));
  const int thread = thread_now(), mine = first_row(thread);
  const int left = p.n - static_cast<int>(it.w) - mine;
  float* at = p.lse + row + g * p.heads * p.n + mine;
  const bool writes = thread % 4 == 0 && static_cast<int>(it.z) + g < p.outer;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(rows.sum[r]);
    const bool some = sum > 0.f;
    inverse[r] = some ? rcp(sum) : 0.f;
    const float lse = some ? fmaf(rows.top[r], BIAS_TERMS ? p.scale_log2 : LOG2E, lg2(sum)) : INF;
    if (writes && 8 * r < left) at[8 * r] = lse;
  }
}

#if STAGED
// Writes a fragment as BF16 into the warp's 16 rows of a tile.
DEV void stage_rows(u32 tile, int warp, int lane, const u32 (&words)[NO / 2]) {
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; ++c) {
    const u32 at = tile + Smem::offset(16 * warp + lane % 16, 32 * c + lane / 16 * 16);
    stmatrix(at, words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]);
  }
}
#endif

// Normalises O of a slice and writes it and its residual.
DEV void complete_slice(const Params& p, const Shared& s, int group, int buffer, int g,
                        float (&o)[NO], const float (&inverse)[2]) {
#if STAGED
  const int thread = thread_now(), warp = thread / 32 % 4, lane = thread % 32;
  rescale(o, inverse);
  u32 words[NO / 2];
#pragma unroll
  for (int i = 0; i < NO / 2; ++i) words[i] = pack_bf16(o[2 * i], o[2 * i + 1]);
  const u32 tile = s.q + (buffer * GROUP + g) * Q_TILE + group * ROWS * ROW_BYTES;
  stage_rows(tile, warp, lane, words);
  const u32 beside = s.residual + group * ROWS * ROW_BYTES;
#if SAVE_RESIDUAL
#pragma unroll
  for (int i = 0; i < NO / 2; ++i) {
    words[i] = pack_bf16(o[2 * i] - bf16_lo(words[i]), o[2 * i + 1] - bf16_hi(words[i]));
  }
  if (lane == 0) bulk_wait_read<0>();
  __syncwarp();
  stage_rows(beside, warp, lane, words);
#endif
  fence_async_shared();
  __syncwarp();
  if (lane == 0) {
    const uint4 it = lds128(s.items + ITEM * buffer);  // b, h, o, q
    const int row = it.w + group * ROWS + 16 * warp, slice = it.z + g;
    tma_store(&p.out_rows, tile + 16 * warp * ROW_BYTES, 0, row, it.y, slice, it.x);
    if (SAVE_RESIDUAL) {
      tma_store(&p.residual_rows, beside + 16 * warp * ROW_BYTES, 0, row, it.y, slice, it.x);
    }
    bulk_commit();
  }
#else
  finish(p, s.items + ITEM * buffer, g, o, inverse);
#endif
}

// Lets the producer overwrite a Q buffer.
DEV void release_q(const Shared& s, int buffer) {
#if STAGED
  if (thread_now() % 32 == 0) {
    bulk_wait_read<0>();
#else
  if (elect_one()) {
#endif
    mbar_arrive(s.q_empty + 8 * buffer);
  }
}

DEV void consume(const Params& p, const Shared& s, int group) {
  const int last = p.key_tiles - 1;
  const u32 bias_at = 2 * GROUP * KV_TILE + group * BIAS_TILE + 16 * (threadIdx.x % 128);
  const u64 q_first = Smem::desc(s.q + group * ROWS * ROW_BYTES);
  const u64 identity = Tile<32>::desc(s.identity);
  const float unit = BIAS_TERMS ? p.scale_log2 : LOG2E;
  const Rows none = {{NOTHING, NOTHING}, {0.f, 0.f}};

  float score[2][32], x[32], out[GROUP][NO];
  Bias bias;
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
      if (j == 0 || (BIAS_TERMS && GROUP == 1)) load_bias_of(following);
      wgmma_fence();
      issue_scores(score[j], q_tiles + (GROUP > 1) * j * (Q_TILE >> 4),
                   tile_of(s, following) + (GROUP > 1) * j * (KV_TILE >> 4), bias, identity);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(score[j]);
    }
    u32 second = following;  // the tile of job j+2
    mask_scores(score[0], buffer, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) rows[g] = none;
#if BIAS_TERMS
    fold_maxima(rows[0].top, score[0]);
    now = shift_of(none.top, rows[0].top, unit);
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = fmaf(score[0][i], unit, now.minus[i >> 1 & 1]);
#else
#pragma unroll
    for (int i = 0; i < 32; ++i) x[i] = fmaf(score[0][i], p.scale, bias[i]);
    fold_maxima(rows[0].top, x);
    now = shift_of(none.top, rows[0].top, unit);
#endif
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
          if (BIAS_TERMS) load_bias_of(second);
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
                     tile_of(s, g + 2 < GROUP ? current : second) + g_second * (KV_TILE >> 4), bias,
                     identity);
        wgmma_commit();
        if (EARLY && p.n < 0) __nanosleep(1);  // never; keeps what follows behind the products

        // Exponentials of job j beside the maxima of job j+1 and what its exponentials need.
        mask_scores(score[turn ^ 1], g_next == 0 && crosses ? buffer ^ 1 : buffer,
                    g_next > 0 ? t : !edge || t < last ? t + 1 : last_item ? last : 0, g_next);
        Rows complete = rows[g];
        if (GROUP == 1 && is_last) rows[0] = none;  // job j+1 begins the next item
        Rows& next = rows[g_next];
        const float old[2] = {next.top[0], next.top[1]};
        before = now;
        float sum[2] = {0.f, 0.f};
#if BIAS_TERMS
        const float(&fresh)[32] = score[turn ^ 1];
        int signs = fold_maxima_of_three(next.top, fresh);
        now = shift_of(old, next.top, unit);
#else
        const float(&fresh)[32] = x;
        if (g_next == 0) load_bias_of(following);
#endif
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int r = i & 1;
#if BIAS_TERMS
          const float p0 = ex2(x[2 * i]), p1 = ex2(x[2 * i + 1]);
          x[2 * i] = fmaf(fresh[2 * i], unit, now.minus[r]);
          x[2 * i + 1] = fmaf(fresh[2 * i + 1], unit, now.minus[r]);
#else
          const float p0 = ex2(fmaf(x[2 * i], LOG2E, before.minus[r]));
          const float p1 = ex2(fmaf(x[2 * i + 1], LOG2E, before.minus[r]));
          x[2 * i] = fmaf(score[turn ^ 1][2 * i], p.scale, bias[2 * i]);
          x[2 * i + 1] = fmaf(score[turn ^ 1][2 * i + 1], p.scale, bias[2 * i + 1]);
#endif
          sum[r] = i < 2 ? fmaf(complete.sum[r], before.factor[r], p0 + p1) : sum[r] + (p0 + p1);
          prob[turn][i] = pack_bf16(p0, p1);
        }
#if !BIAS_TERMS
        int signs = fold_maxima_of_three(next.top, fresh);
        now = shift_of(old, next.top, unit);
#endif
        complete.sum[0] = sum[0];
        complete.sum[1] = sum[1];
        if (GROUP > 1 || !is_last) rows[g].sum[0] = sum[0], rows[g].sum[1] = sum[1];
        // The sums, never negative, hold the exponentials before this branch and so before the wait.
        signs |= __float_as_int(sum[0]) | __float_as_int(sum[1]);
        if (__any_sync(0xffffffffu, signs < 0)) {
          next.top[0] = old[0];
          next.top[1] = old[1];
          fold_maxima(next.top, fresh);
          now = shift_of(old, next.top, unit);
#if BIAS_TERMS
#pragma unroll
          for (int i = 0; i < 32; ++i) x[i] = fmaf(fresh[i], unit, now.minus[i >> 1 & 1]);
#endif
        }

        wgmma_pin(prob[turn]);
        wgmma_pin(x);
        wgmma_wait<0>();
        wgmma_pin(out[g_before]);
        wgmma_pin(score[turn]);
        if (g == 0) {
          const bool started = !edge || t > 0 || !first_item;
          if (started && elect_one()) mbar_arrive(bar_of(s, previous) + 8 * STAGES);
          if (edge && t == 0 && !first_item) {
            complete_slice(p, s, group, buffer ^ 1, g_before, out[g_before], inverse);
          }
        } else if (is_last) {
          complete_slice(p, s, group, buffer, g_before, out[g_before], inverse);
        }
        if (g == GROUP - 1 && edge && t == 0 && !first_item) release_q(s, buffer ^ 1);
        if (is_last) {
          seal_rows(p, s.items + ITEM * buffer, g, complete, inverse);
          if (GROUP > 1) rows[g] = none;
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
    complete_slice(p, s, group, buffer ^ 1, GROUP - 1, out[GROUP - 1], inverse);
    if (elect_one()) mbar_arrive(bar_of(s, previous) + 8 * STAGES);
    release_q(s, buffer ^ 1);
    current = previous + 1;
  }
}
