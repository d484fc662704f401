// out = x + update * scale: dropout shared along a pair axis, and the residual (sm_90a).
//
// Without x it is the gradient of the update; without scale a plain sum.
//   grid one thread for eight channels, 256 threads
#include "pair.cuh"

struct Params {
  const unsigned char *x, *update, *scale;  // bf16; x and scale may be null; update dense, as x
  unsigned char* out;                       // bf16, dense
  Rows scale_stride;                        // 0 along the shared axis
  u32 vectors, columns, plane;              // vectors of eight channels; J; I * J
};

constexpr u32 kVectors = TPF_VECTORS;  // of a row

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_residual(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.vectors) return;
  const u32 row = item / kVectors, channel = item % kVectors * 8;
  const i64 at = static_cast<i64>(item) * 8;
  float update[8], scale[8] = {1, 1, 1, 1, 1, 1, 1, 1}, x[8] = {};
  load8(update, p.update, at);
  if (p.scale) load8(scale, p.scale, row_at(p.scale_stride, row, p.columns, p.plane) + channel);
  if (p.x) load8(x, p.x, at);
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] += update[c] * scale[c];
  store8(p.out, at, x);
}
