// Sum of the partials of dbias, in ascending order of the slices (sm_90a).
//
// Partials are fp32 64 x 64 tiles in fragment order, four in a slot. A 128 x 128 tile has one slot
// if it is whole, else one per chunk of slices. The result has the dtype and strides of dbias.
//   grid one block per 64 x 64 tile, 256 threads
#include "tri_attn_bwd.cuh"

struct Params {
  const float* partial;  // [slots, 2, 2, 4096]
  unsigned char* dbias;  // bf16 or fp32 [B, H, N, N]
  i64 stride[4];         // b, h, q, k in elements
  int tokens, tiles, heads;
  int whole_tiles, rest_tiles, chunks;
};

extern "C" __global__ void __launch_bounds__(256, 4)
    tri_attn_bwd_reduce(const __grid_constant__ Params p) {
  const int block = blockIdx.x;
  const int col_tile = block % p.tiles, row_tile = block / p.tiles % p.tiles;
  const int head = block / p.tiles / p.tiles % p.heads, batch = block / p.tiles / p.tiles / p.heads;
  const int blocks = p.tiles / 2;
  const int tile = ((batch * p.heads + head) * blocks + row_tile / 2) * blocks + col_tile / 2;
  const int chunks = tile < p.whole_tiles ? 1 : p.chunks;
  const i64 slot = 4 * kTile * kTile, chunk = p.rest_tiles * slot;
  const i64 base = batch * p.stride[0] + head * p.stride[1];
  for (int item = threadIdx.x; item < 8 * 128; item += 256) {
    const float* from =
        p.partial + tile * slot + (row_tile % 2 * 2 + col_tile % 2) * kTile * kTile + item * 4;
    float sum[4] = {};
    for (int c = 0; c < chunks; ++c, from += chunk) {
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
