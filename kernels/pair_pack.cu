// Writes fp32 matrices one after the other in bf16: the weights of a layer, for its products
// (sm_90a).
//   grid one thread for eight elements, 256 threads
#include "pair.cuh"

constexpr int kMost = 5;  // matrices

struct Params {
  const float* matrix[kMost];
  u32 end[kMost];      // vectors of eight elements up to the end of a matrix; non-decreasing
  unsigned char* out;  // bf16
};

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_pack(const __grid_constant__ Params p) {
  const u32 item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= p.end[kMost - 1]) return;
  const float* from = nullptr;
  u32 start = 0;
#pragma unroll
  for (int m = 0; m < kMost; ++m) {
    if (item >= start && item < p.end[m]) from = p.matrix[m] + static_cast<i64>(item - start) * 8;
    start = p.end[m];
  }
  float x[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] = from[c];
  store8(p.out, static_cast<i64>(item) * 8, x);
}
