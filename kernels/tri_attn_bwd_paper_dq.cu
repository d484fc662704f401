// Sum of the dQ partials of the paper's backward over the key tiles, in ascending order (sm_90a).
//
// A thread owns eight channels of a row. Sums are fp32; the result is bf16, times scale.
//   grid ceil(rows * head_dim_padded / 8 / 256), 256 threads
#include "tri_attn_bwd.cuh"

constexpr bool kWidePartial = TPF_WIDE_PARTIAL;  // fp32, for the atomic variants
constexpr bool kVector = TPF_VECTOR;  // 16-byte stores: D a multiple of 8 and all strides of dq too

struct Params {
  const unsigned char* partial;  // bf16 or fp32 [key tiles, B, O, H, N, channels]
  unsigned char* dq;
  i64 stride[4];  // of dq: b, o, h, n in elements
  i64 rows;       // B * O * H * N
  int tokens, heads, outer, head_dim, channels, key_tiles;
  float scale;
};

DEV void add_fp32(float* sum, uint4 w) {
  sum[0] += __uint_as_float(w.x), sum[1] += __uint_as_float(w.y);
  sum[2] += __uint_as_float(w.z), sum[3] += __uint_as_float(w.w);
}

DEV void add_bf16(float* sum, uint4 w) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += bf16_lo(words[i]);
    sum[2 * i + 1] += bf16_hi(words[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    tri_attn_bwd_paper_dq(const __grid_constant__ Params p) {
  const int parts = p.channels / 8;
  const i64 item = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  i64 row = item / parts;
  const int channel = item % parts * 8;
  if (row >= p.rows) return;
  float sum[8] = {};
  constexpr int kBytes = kWidePartial ? 4 : 2;
  const unsigned char* from = p.partial + (row * p.channels + channel) * kBytes;
  for (int tile = 0; tile < p.key_tiles; ++tile, from += p.rows * p.channels * kBytes) {
    const uint4* words = reinterpret_cast<const uint4*>(from);
    if constexpr (kWidePartial) {
      add_fp32(sum, words[0]);
      add_fp32(sum + 4, words[1]);
    } else {
      add_bf16(sum, words[0]);
    }
  }
  const int token = row % p.tokens;
  row /= p.tokens;
  const int head = row % p.heads;
  row /= p.heads;
  const int slice = row % p.outer, batch = row / p.outer;
  const i64 to = batch * p.stride[0] + slice * p.stride[1] + head * p.stride[2] +
                 token * p.stride[3] + channel;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack_bf16(sum[2 * i] * p.scale, sum[2 * i + 1] * p.scale);
  if constexpr (kVector) {
    *reinterpret_cast<uint4*>(p.dq + to * 2) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (channel + i < p.head_dim)
        reinterpret_cast<u16*>(p.dq)[to + i] = words[i / 2] >> (i % 2 * 16);
  }
}
