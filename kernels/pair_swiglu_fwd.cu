// out = keep * silu(a) * b for rows [a | b] of a transition (sm_90a).
//   grid one thread for eight channels, 256 threads
#include "pair.cuh"

struct Params {
  const unsigned char *hidden, *keep;  // bf16 [rows, 2 * width], bool [rows]
  unsigned char* out;                  // bf16 [rows, width]
  u32 vectors;
};

constexpr u32 kVectors = TPF_VECTORS;  // width / 8

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_swiglu_fwd(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.vectors) return;
  const u32 row = item / kVectors;
  const i64 at = (static_cast<i64>(row) * kVectors + item) * 8;
  float a[8], b[8];
  load8(a, p.hidden, at);
  load8(b, p.hidden, at + kVectors * 8);
  const bool keep = p.keep[row];
#pragma unroll
  for (int c = 0; c < 8; ++c) a[c] = keep ? a[c] * sigmoid(a[c]) * b[c] : 0.0f;
  store8(p.out, static_cast<i64>(item) * 8, a);
}
