// Gradients of pair_gate_fwd (sm_90a).
//
// Reads the gradient of its result and leaves that result, o * sigmoid(gate), in the same place,
// for the gradient of the output projection.
//   grid one thread for eight channels, 256 threads
#include "pair.cuh"

struct Params {
  unsigned char* gated;           // bf16, dense: gradient on entry, o * sigmoid(gate) on exit
  const unsigned char *o, *gate;  // bf16
  unsigned char *d_o, *dgate;     // bf16; d_o has the strides of o
  Rows o_stride;
  i64 gate_stride, dgate_stride;  // elements between rows
  u32 vectors, columns, plane;
};

constexpr u32 kVectors = TPF_VECTORS;  // of a row

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_gate_bwd(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.vectors) return;
  const u32 row = item / kVectors, channel = item % kVectors * 8;
  const i64 at = static_cast<i64>(item) * 8;
  const i64 o_at = row_at(p.o_stride, row, p.columns, p.plane) + channel;
  float grad[8], o[8], gate[8], dgate[8];
  load8(grad, p.gated, at);
  load8(o, p.o, o_at);
  load8(gate, p.gate, row * p.gate_stride + channel);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float open = sigmoid(gate[c]);
    grad[c] *= open;
    dgate[c] = grad[c] * o[c] * (1.0f - open);
    o[c] *= open;
  }
  store8(p.gated, at, o);
  store8(p.d_o, o_at, grad);
  store8(p.dgate, row * p.dgate_stride + channel, dgate);
}
