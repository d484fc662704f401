// Sum of the bf16 dbias partials of the paper's backward, in ascending order of the groups
// (sm_90a).
//
// The partials of a launch are 64 x 64 tiles in fragment order with rows = keys. Between launches,
// which reuse the partials, the sums rest in an fp32 buffer of the same order.
//   grid one block per tile, 256 threads
#include "tri_attn_bwd.cuh"

struct Params {
  const unsigned char* partial;  // bf16 [groups, B, H, tiles(k), tiles(q), 4096]
  float* sums;                   // fp32 [B, H, tiles(k), tiles(q), 4096]
  unsigned char* dbias;          // bf16 or fp32 [B, H, N, N]
  i64 stride[4];                 // of dbias: b, h, q, k in elements
  int tokens, tiles, heads, batch, groups;
  int first, last;  // first and last launch of a call
};

extern "C" __global__ void __launch_bounds__(256)
    tri_attn_bwd_paper_dbias(const __grid_constant__ Params p) {
  const int block = blockIdx.x;
  const int query_tile = block % p.tiles, key_tile = block / p.tiles % p.tiles;
  const int head = block / p.tiles / p.tiles % p.heads, batch = block / p.tiles / p.tiles / p.heads;
  const i64 group = static_cast<i64>(p.batch) * p.heads * p.tiles * p.tiles * kTile * kTile;
  const i64 base = batch * p.stride[0] + head * p.stride[1];
  // Two accumulator groups of a thread are 16 bytes of bf16.
  for (int item = threadIdx.x; item < 4 * 128; item += 256) {
    const i64 at = static_cast<i64>(block) * kTile * kTile + item * 8;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = p.first ? 0.0f : p.sums[at + i];
    for (int g = 0; g < p.groups; ++g) {
      const uint4 w = *reinterpret_cast<const uint4*>(p.partial + (g * group + at) * 2);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * i] += bf16_lo(words[i]);
        sum[2 * i + 1] += bf16_hi(words[i]);
      }
    }
    const int thread = item % 128, i0 = item / 128 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = key_tile * kTile + thread / 32 * 16 + frag_row(thread % 32, i0 + i);
      const int query = query_tile * kTile + frag_col(thread % 32, i0 + i);
      if (!p.last)
        p.sums[at + i] = sum[i];
      else if (query < p.tokens && key < p.tokens)
        store_dbias(p.dbias, base + query * p.stride[2] + key * p.stride[3], sum[i]);
    }
  }
}
