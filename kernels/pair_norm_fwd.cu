// Layer norm of rows of C channels, with narrow projections of the result (sm_90a).
//
// y = (x - mean) / sqrt(var + 1e-5) * weight + bias in bf16, statistics in fp32, and
// heads[h] = head_weight[h] . y, from y before its rounding. Persistent warps; the next rows are on
// their way while a warp works.
//   grid as many blocks as stay on the chip, 256 threads
#include "pair_norm.cuh"

struct Params {
  const unsigned char* x;  // bf16 or fp32, rows x_stride elements apart
  const float *weight, *bias, *head_weight;
  unsigned char* y;  // bf16, dense
  u16* heads;        // bf16 [B, kHeads, plane]
  i64 x_stride;
  int rows, plane;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    pair_norm_fwd(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kLanes, step = gridDim.x * (kThreads / kLanes);
  float weight[kPerLane], bias[kPerLane], head_weight[kHeadSlots][kPerLane];
  load_parameters(weight, p.weight, lane);
  load_parameters(bias, p.bias, lane);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    load_parameters(head_weight[h], p.head_weight + h * kChannels, lane);
  }
  int row = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
  RawRow<kWide> next = RawRow<kWide>::load(p.x, row * p.x_stride, lane, row < p.rows);
  // All lanes of a warp stay until its first row is beyond the end: they sum together.
  for (int first = row - threadIdx.x % 32 / kLanes; first < p.rows; first += step, row += step) {
    float x[kPerLane];
    widen(x, next);
    const int after = row + step;
    next = RawRow<kWide>::load(p.x, after * p.x_stride, lane, after < p.rows);
    standardise(x, lane);
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) x[c] = x[c] * weight[c] + bias[c];
    if (row < p.rows) store_row<false>(p.y, static_cast<i64>(row) * kChannels, lane, x);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) sum += x[c] * head_weight[h][c];
      sum = row_sum(sum);
      if (lane == h % kLanes && row < p.rows) p.heads[head_at(row, h, p.plane)] = to_bf16(sum);
    }
  }
}
