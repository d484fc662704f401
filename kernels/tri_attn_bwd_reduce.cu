// Sum of the dbias partials of all slice chunks, in ascending order (sm_90a).
//
// Partials are fp32 64 x 64 tiles in fragment order; the result has the dtype and strides of dbias.
//   grid one block per tile, 256 threads
#include "tri_attn_bwd.cuh"

struct ReduceParams {
  const float* partial;  // [chunks, B, H, tiles(q), tiles(k), 4096]
  unsigned char* dbias;  // bf16 or fp32 [B, H, N, N]
  i64 stride[4];         // b, h, q, k in elements
  int tokens, tiles, heads, batch, chunks;
};

extern "C" __global__ void __launch_bounds__(256)
    tri_attn_bwd_reduce(const __grid_constant__ ReduceParams p) {
  const int block = blockIdx.x;
  const int col_tile = block % p.tiles, row_tile = block / p.tiles % p.tiles;
  const int head = block / p.tiles / p.tiles % p.heads, batch = block / p.tiles / p.tiles / p.heads;
  const i64 chunk = static_cast<i64>(p.batch) * p.heads * p.tiles * p.tiles * kTile * kTile;
  const i64 base = batch * p.stride[0] + head * p.stride[1];
  for (int item = threadIdx.x; item < 8 * 128; item += 256) {
    const float* from = p.partial + static_cast<i64>(block) * kTile * kTile + item * 4;
    float sum[4] = {};
    for (int c = 0; c < p.chunks; ++c, from += chunk) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    const int thread = item % 128, i = item / 128;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = row_tile * kTile + thread / 32 * 16 + frag_row(thread % 32, 4 * i + e);
      const int key = col_tile * kTile + frag_col(thread % 32, 4 * i + e);
      if (query >= p.tokens || key >= p.tokens) continue;
      const i64 at = base + query * p.stride[2] + key * p.stride[3];
      if constexpr (kWideBias)
        reinterpret_cast<float*>(p.dbias)[at] = sum[e];
      else
        reinterpret_cast<u16*>(p.dbias)[at] = to_bf16(sum[e]);
    }
  }
}
