// Bias fragments and key folds of the triangle attention backward (sm_90a).
//
// The bias [B, H, N, N], of any strides, is copied twice into the order in which accumulator
// fragments hold 64 x 64 tiles: rows = queries in fp32, and rows = keys in its own dtype. fp32 copies
// hold it multiplied by log2(e). Ragged edges become zeros. The blocks after the bias tiles write the key folds (channel
// 6 is -huge for a dropped key) and, behind the row folds, a tile of dropped rows.
//   grid bias tiles + key blocks, 256 threads
#include "tri_attn_bwd.cuh"

struct Params {
  const unsigned char* bias;  // bf16 or fp32
  const unsigned char* mask;  // bool [B, O, N] or null
  unsigned char *bias_s, *bias_st, *key_fold, *dropped_rows;
  i64 bias_stride[4];  // b, h, q, k in elements
  i64 mask_stride[3];  // b, o, n
  int tokens, tiles, heads, batch;
  int outer, slices;  // slices of one batch entry and of all that have a key fold
  float scale2;
};

DEV u32 bias_bits(const Params& p, i64 base, int query, int key) {
  if (query >= p.tokens || key >= p.tokens) return 0;
  const i64 at = base + query * p.bias_stride[2] + key * p.bias_stride[3];
  if constexpr (kWideBias) return reinterpret_cast<const u32*>(p.bias)[at];
  return reinterpret_cast<const u16*>(p.bias)[at];
}

// Write the four elements of accumulator registers 4i .. 4i + 3.
template <bool kWide>
DEV void store_group(unsigned char* tiles, i64 tile, int i, int thread, const u32 (&bits)[4]) {
  const i64 at = tile * kTile * kTile + fragment_index<kWide>(i, thread);
  if constexpr (kWide) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[e] = (kWideBias ? __uint_as_float(bits[e]) : bf16_lo(bits[e])) * LOG2E;
    *reinterpret_cast<float4*>(tiles + at * 4) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *reinterpret_cast<uint2*>(tiles + at * 2) =
        make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
}

DEV void arrange_bias(const Params& p, int block) {
  const int col_tile = block % p.tiles, row_tile = block / p.tiles % p.tiles;
  const int head = block / p.tiles / p.tiles % p.heads, batch = block / p.tiles / p.tiles / p.heads;
  const i64 base = batch * p.bias_stride[0] + head * p.bias_stride[1];
  for (int item = threadIdx.x; item < 8 * 128; item += 256) {
    const int thread = item % 128, i = item / 128;
    u32 s[4], st[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row_tile * kTile + thread / 32 * 16 + frag_row(thread % 32, 4 * i + e);
      const int col = col_tile * kTile + frag_col(thread % 32, 4 * i + e);
      s[e] = bias_bits(p, base, row, col);
      st[e] = bias_bits(p, base, col, row);
    }
    store_group<true>(p.bias_s, block, i, thread, s);
    store_group<kWideBias>(p.bias_st, block, i, thread, st);
  }
}

DEV void fold_keys(const Params& p, int block) {
  const int padded = p.tiles * kTile;
  const i64 item = static_cast<i64>(block) * 256 + threadIdx.x;
  if (item < kTile)
    *reinterpret_cast<uint4*>(p.dropped_rows + item * 16) =
        make_uint4(dropped(p.scale2), 0u, 0u, 0x3F80u);
  const int token = item % padded, slice = item / padded % p.outer, batch = item / padded / p.outer;
  if (item >= static_cast<i64>(p.slices) * padded) return;
  bool kept = token < p.tokens;
  if (kept && p.mask)
    kept = p.mask[batch * p.mask_stride[0] + slice * p.mask_stride[1] + token * p.mask_stride[2]];
  const uint4 fold = make_uint4(0x3F803F80u, 0x3F80u, 0u, kept ? 0u : dropped(p.scale2));
  *reinterpret_cast<uint4*>(p.key_fold + item * 16) = fold;
}

extern "C" __global__ void __launch_bounds__(256)
    tri_attn_prep_pair(const __grid_constant__ Params p) {
  const int bias_blocks = p.batch * p.heads * p.tiles * p.tiles;
  if (static_cast<int>(blockIdx.x) < bias_blocks)
    arrange_bias(p, blockIdx.x);
  else
    fold_keys(p, blockIdx.x - bias_blocks);
}
