// Query folds of the triangle attention backward: softmax statistics as channels (sm_90a).
//
// Per row: delta = rowsum(dO * (O + R)) in fp32, where R is the saved rounding residual of O
// (absent: zero), and the eight fold channels that tri_attn_bwd.cuh describes. kD / 8 lanes share a
// row; heads run fastest, as they lie in memory. Rows beyond N and rows without keys get l = -huge:
// P = 0.
//   grid B * O * slice_blocks, 256 threads
#include "tri_attn_bwd.cuh"

constexpr bool kVector = TPF_VECTOR;  // 16-byte loads: D = kD, all strides multiples of 8
constexpr int kLanes = kD / 8;

struct Params {
  const unsigned char *dout, *out,
      *residual;     // bf16; residual may be null and has the strides of out
  const float* lse;  // [B, O, H, N], base 2
  unsigned char* row_fold;
  i64 dout_stride[4], out_stride[4];  // b, o, h, n in elements
  int tokens, padded, heads, outer, head_dim;
  int slice_blocks;  // blocks of one slice
  float scale2;
};

// Eight channels of a row from `channel` on, as floats; zeros beyond the head width.
DEV void load_channels(float (&x)[8], const unsigned char* row, int channel, int head_dim) {
  if constexpr (kVector) {
    const uint4 w = *reinterpret_cast<const uint4*>(row + channel * 2);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
  } else {
    const u16* values = reinterpret_cast<const u16*>(row);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = channel + i < head_dim ? bf16_lo(values[channel + i]) : 0.0f;
  }
}

// The three bf16 terms of x, largest first; their sum is x within 2^-24.
DEV void split3(float x, u32 (&terms)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    terms[i] = to_bf16(x);
    x -= bf16_lo(terms[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    tri_attn_prep_rows(const __grid_constant__ Params p) {
  const int flat = blockIdx.x / p.slice_blocks, batch = flat / p.outer, slice = flat % p.outer;
  const int item = blockIdx.x % p.slice_blocks * 256 + threadIdx.x;
  const int part = item % kLanes, head = item / kLanes % p.heads, token = item / kLanes / p.heads;
  float delta = 0.0f;
  if (token < p.tokens) {
    const i64 at = batch * p.out_stride[0] + slice * p.out_stride[1] + head * p.out_stride[2] +
                   token * p.out_stride[3];
    const i64 from = batch * p.dout_stride[0] + slice * p.dout_stride[1] + head * p.dout_stride[2] +
                     token * p.dout_stride[3];
    float grad[8], out[8], residual[8] = {};
    load_channels(grad, p.dout + from * 2, part * 8, p.head_dim);
    load_channels(out, p.out + at * 2, part * 8, p.head_dim);
    if (p.residual) load_channels(residual, p.residual + at * 2, part * 8, p.head_dim);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta += grad[i] * (out[i] + residual[i]);
  }
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) delta += __shfl_xor_sync(0xFFFFFFFFu, delta, lane);
  if (part != 0 || token >= p.padded) return;
  const i64 row = static_cast<i64>(flat) * p.heads + head;
  const float lse = token < p.tokens ? p.lse[row * p.tokens + token] : INF;
  u32 l[3] = {dropped(p.scale2), 0, 0}, d[3] = {0, 0, 0};
  if (lse < INF) {
    split3(-lse / p.scale2, l);
    split3(-delta, d);
  }
  const uint4 fold = make_uint4(l[0] | l[1] << 16, l[2] | d[0] << 16, d[1] | d[2] << 16, 0x3F80u);
  *reinterpret_cast<uint4*>(p.row_fold + (row * p.padded + token) * 16) = fold;
}
