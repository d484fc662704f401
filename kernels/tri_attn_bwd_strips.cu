// Sum of the copies of the strips of dbias, in ascending order of the blocks that left them
// (sm_90a).
//
// Block x of tri_attn_bwd_q_bias wrote strip s, the fp32 64 x 64 tiles of one query tile in
// fragment order, to slot x + s, for all strips that its items touch. The result has the dtype and
// strides of dbias.
//   grid one block per 64 x 64 tile, 256 threads
#include "tri_attn_bwd.cuh"

struct Params {
  const float* partial;  // [slots, key tiles, 4096]
  unsigned char* dbias;  // bf16 or fp32 [B, H, N, N]
  i64 stride[4];         // b, h, q, k in elements
  int tokens, tiles, heads;
  int groups, jobs, blocks;  // items of a strip and in all, and blocks of tri_attn_bwd_q_bias
};

// The block that had an item: block x begins with item x * jobs / blocks.
DEV int block_of(const Params& p, int item) {
  return static_cast<int>(((static_cast<i64>(item) + 1) * p.blocks - 1) / p.jobs);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    tri_attn_bwd_strips(const __grid_constant__ Params p) {
  const int key_tile = blockIdx.x % p.tiles, strip = blockIdx.x / p.tiles;
  const int query_tile = strip % p.tiles, head = strip / p.tiles % p.heads;
  const int batch = strip / p.tiles / p.heads;
  const int first = block_of(p, strip * p.groups), last = block_of(p, (strip + 1) * p.groups - 1);
  const i64 slot = static_cast<i64>(p.tiles) * kTile * kTile;
  const float* tile = p.partial + (first + strip) * slot + key_tile * kTile * kTile;
  const i64 base = batch * p.stride[0] + head * p.stride[1];
  for (int item = threadIdx.x; item < 8 * 128; item += 256) {
    const float* from = tile + item * 4;
    float sum[4] = {};
    for (int block = first; block <= last; ++block, from += slot) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
    const int thread = item % 128, i = item / 128;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = query_tile * kTile + thread / 32 * 16 + frag_row(thread % 32, 4 * i + e);
      const int key = key_tile * kTile + frag_col(thread % 32, 4 * i + e);
      if (query >= p.tokens || key >= p.tokens) continue;
      store_dbias(p.dbias, base + query * p.stride[2] + key * p.stride[3], sum[e]);
    }
  }
}
