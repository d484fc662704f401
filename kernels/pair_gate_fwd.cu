// out = o * sigmoid(gate) for rows of the attention's result (sm_90a).
//
// o has its own order of rows (slices first), gate and out that of the pairs.
//   grid one thread for eight channels, 256 threads
#include "pair.cuh"

struct Params {
  const unsigned char *o, *gate;  // bf16
  unsigned char* out;             // bf16, dense
  Rows o_stride;
  i64 gate_stride;  // elements between rows
  u32 vectors, columns, plane;
};

constexpr u32 kVectors = TPF_VECTORS;  // of a row

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_gate_fwd(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.vectors) return;
  const u32 row = item / kVectors, channel = item % kVectors * 8;
  float o[8], gate[8];
  load8(o, p.o, row_at(p.o_stride, row, p.columns, p.plane) + channel);
  load8(gate, p.gate, row * p.gate_stride + channel);
#pragma unroll
  for (int c = 0; c < 8; ++c) o[c] *= sigmoid(gate[c]);
  store8(p.out, static_cast<i64>(item) * 8, o);
}
