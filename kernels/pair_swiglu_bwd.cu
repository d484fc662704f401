// Gradients of pair_swiglu_fwd, in place (sm_90a).
//
// hidden [a | b] becomes its gradient; the gradient of the result becomes the result, for the
// gradient of the output projection.
//   grid one thread for eight channels, 256 threads
#include "pair.cuh"

struct Params {
  unsigned char* hidden;      // bf16 [rows, 2 * width]
  const unsigned char* keep;  // bool [rows]
  unsigned char* out;         // bf16 [rows, width]
  u32 vectors;
};

constexpr u32 kVectors = TPF_VECTORS;  // width / 8

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_swiglu_bwd(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.vectors) return;
  const u32 row = item / kVectors;
  const i64 at = (static_cast<i64>(row) * kVectors + item) * 8;
  float a[8], b[8], grad[8], out[8];
  load8(a, p.hidden, at);
  load8(b, p.hidden, at + kVectors * 8);
  load8(grad, p.out, static_cast<i64>(item) * 8);
  const bool keep = p.keep[row];
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float open = sigmoid(a[c]), silu = a[c] * open;
    if (!keep) grad[c] = 0.0f;
    out[c] = keep ? silu * b[c] : 0.0f;
    a[c] = grad[c] * b[c] * (open + silu * (1.0f - open));
    b[c] = grad[c] * silu;
  }
  store8(p.hidden, at, a);
  store8(p.hidden, at + kVectors * 8, b);
  store8(p.out, static_cast<i64>(item) * 8, out);
}
