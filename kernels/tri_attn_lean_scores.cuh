// Scores of the lean forward kernel, with the bias added by the tensor cores if BIAS_TERMS > 0: as
// bias (1 / scale) I after Q K^T, where 1 / scale is one BF16 value or the sum of two. The products
// are then the scores over the scale. A = the packed bias tile in registers, B = 1 / scale I.
#pragma once

#include "tri_attn_fwd.cuh"

static_assert(!(BIAS_TERMS && BIAS_F32), "a bias tile on the tensor cores is BF16");

#if BIAS_TERMS
using Bias = u32[16];  // as A operand
#else
using Bias = float[32];
#endif

// Writes terms of 1 / scale as products' B operands [n][16]: sixteen rows of zeros, of the term
// times I, of zeros; a product of 32 columns starts at the first or second sixteen rows.
DEV void write_identity(const Params& p, const Shared& s) {
  float rest = 1.f / p.scale;
  for (int term = 0; term < BIAS_TERMS; ++term) {
    const u32 value = pack_bf16(rest, 0.f);
    rest -= bf16_lo(value);
    for (int i = threadIdx.x; i < IDENTITY / 4; i += blockDim.x) {
      const int row = i / 8, column = i % 8 * 2;
      const u32 word = row - 16 == column ? value : row - 16 == column + 1 ? value << 16 : 0;
      sts32(s.identity + term * IDENTITY + Tile<32>::offset(row, 2 * column), word);
    }
  }
  fence_async_shared();
}

DEV void load_bias(u32 (&bias)[16], u32 at) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint4 w = lds128(at + c * 2048);
    bias[4 * c] = w.x;
    bias[4 * c + 1] = w.y;
    bias[4 * c + 2] = w.z;
    bias[4 * c + 3] = w.w;
  }
}

// S = Q K^T, with the bias by products of 32 columns, as a chain of products must have one shape.
DEV void issue_scores(float (&s)[32], u64 q, u64 k, const Bias& bias, u64 identity) {
#if BIAS_TERMS
  using Half = float[16];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Half& d = *reinterpret_cast<Half*>(s + 16 * half);
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 16; ++c) {
      wgmma_ss<0, 0>(d, q + c * Smem::STEP_COLS,
                     k + half * 2 * Smem::STEP_ROWS + c * Smem::STEP_COLS, c > 0);
    }
  }
#pragma unroll
  for (int term = 0; term < BIAS_TERMS; ++term) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      Half& d = *reinterpret_cast<Half*>(s + 16 * (c / 2));
      const u64 at = identity + ((term * IDENTITY + (c % 2 ? 0 : 16 * 32)) >> 4);
      wgmma_rs<0>(d, bias[4 * c], bias[4 * c + 1], bias[4 * c + 2], bias[4 * c + 3], at, 1);
    }
  }
#else
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; ++c) {
    wgmma_ss<0, 0>(s, q + c * Smem::STEP_COLS, k + c * Smem::STEP_COLS, c > 0);
  }
#endif
}
