// How the forward kernel of triangle attention writes a slice. STAGED: a warp writes its rows of O
// into its slice's Q tile, which is read no more, those of the residual beside it, and the copy
// engine stores them. Else the threads store them.
#pragma once

#include "tri_attn_fwd.cuh"

// First row of a consumer's fragment inside the item.
DEV int first_row(int thread) {
  return (thread / 128 - 1) * ROWS + thread % 128 / 32 * 16 + thread % 32 / 4;
}

// Writes the log-sums of a slice whose last exponentials are done; returns the factors 1 / sum.
DEV void seal(const Params& p, u32 item, int g, const Rows& rows, float (&inverse)[2]) {
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
    const float lse = some ? fmaf(rows.top[r], LOG2E, lg2(sum)) : INF;
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

// Normalises O of a slice and writes it and its residual.
DEV void finish(const Params& p, const Shared& s, int group, int buffer, int g, float (&o)[NO],
                const float (&inverse)[2]) {
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
}
#else
// Stores a fragment as bf16 rows; line points to column 0 of the thread's first row, the second
// lies 8 rows on.
DEV void store_rows(const Params& p, u16* line, const float (&o)[NO], int rows_left, int lane) {
  const i64 eight_rows = 8 * static_cast<i64>(p.heads) * p.d;
#if WHOLE_ROWS
  static_assert(HEAD_DIM == 64, "narrower rows are staged");
  // The lanes of a quad trade words, so that each holds 8 neighbouring columns of both its rows.
#pragma unroll
  for (int part = 0; part < NO / 8; ++part) {
    const int second = part % 2, blocks = part / 2 * 4;  // of 8 columns
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * (blocks + j) + 2 * second;
      w[j] = pack_bf16(o[i], o[i + 1]);
    }
    quad_transpose(w, lane);
    if (8 * second < rows_left) {
      *reinterpret_cast<uint4*>(line + second * eight_rows + 8 * (blocks + lane % 4)) =
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

// Normalises O of a slice and writes it and its residual.
DEV void finish(const Params& p, const Shared& s, int group, int buffer, int g, float (&o)[NO],
                const float (&inverse)[2]) {
  const uint4 it = lds128(s.items + ITEM * buffer);  // b, h, o, q
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
#endif

// Lets the producer overwrite a Q buffer.
DEV void release_q(const Shared& s, int buffer) {
  const u32 barrier = s.q_empty + 8 * buffer;
#if STAGED
  if (EVERY_LANE || thread_now() % 32 == 0) {
    bulk_wait_read<0>();
    mbar_arrive(barrier);
  }
#else
  release(barrier);
#endif
}
