// Gradients of pair_norm_fwd: of its rows and, as partial sums of each block, of its parameters
// (sm_90a).
//
//   g  = dy + sum_h dheads[h] head_weight[h]             gradient of the normalised row
//   dx = (g w - mean(g w) - xhat mean(g w xhat)) / deviation  (+ residual)
//   partial = sums over rows of g xhat, of g and, for each head, of dheads[h] y
// The statistics come from x again: that costs less than to load them. On request y is written
// again, in the place of dy. Each lane sums its channels over its rows in ascending order, then a
// block over its row groups; the host adds the blocks.
//   grid as many blocks as stay on the chip, 128 threads
#include "pair_norm.cuh"

struct Params {
  const unsigned char* x;         // bf16 or fp32, rows x_stride elements apart
  unsigned char* dy;              // bf16, dense; holds y afterwards if keep_y
  const unsigned char* residual;  // dtype of x, dense, or null
  unsigned char* dx;              // dtype of x, dense
  const float *weight, *bias, *head_weight;
  const u16* dheads;  // bf16 [B, kHeads, plane]
  float* partial;     // [blocks, 2 + kHeads, kChannels]
  i64 x_stride;
  int rows, plane, keep_y;
};

constexpr int kBlock = 128;
constexpr int kGroups = kBlock / kLanes;

// Writes the sum over the row groups of a block.
DEV void store_sums(float* out, const float (&sum)[kPerLane], float (*scratch)[kChannels]) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  __syncthreads();  // the sums before have been read
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) {
    if (exists(lane, c / 8)) scratch[group][channel_of(lane, c / 8) + c % 8] = sum[c];
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < kChannels; channel += kBlock) {
    float total = 0.0f;
    for (int g = 0; g < kGroups; ++g) total += scratch[g][channel];
    out[channel] = total;
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, kHeads * kVectors > 4 ? 2 : 3)
    pair_norm_bwd(const __grid_constant__ Params p) {
  __shared__ float scratch[kGroups][kChannels];
  const int lane = threadIdx.x % kLanes, step = gridDim.x * kGroups;
  float weight[kPerLane], bias[kPerLane], head_weight[kHeadSlots][kPerLane];
  load_parameters(weight, p.weight, lane);
  load_parameters(bias, p.bias, lane);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    load_parameters(head_weight[h], p.head_weight + h * kChannels, lane);
  }
  float dweight[kPerLane] = {}, dbias[kPerLane] = {}, dhead_weight[kHeadSlots][kPerLane] = {};
  int row = (blockIdx.x * kBlock + threadIdx.x) / kLanes;
  const auto load = [&](const unsigned char* rows, int at) {
    return RawRow<false>::load(rows, static_cast<i64>(at) * kChannels, lane, at < p.rows);
  };
  RawRow<kWide> next_x = RawRow<kWide>::load(p.x, row * p.x_stride, lane, row < p.rows);
  RawRow<false> next_dy = load(p.dy, row);
  for (int first = row - threadIdx.x % 32 / kLanes; first < p.rows; first += step, row += step) {
    const bool inside = row < p.rows;
    const i64 start = static_cast<i64>(row) * kChannels;
    const bool add = p.residual != nullptr;
    const RawRow<kWide> raw_residual =
        RawRow<kWide>::load(add ? p.residual : p.x, add ? start : 0, lane, add && inside);
    float x[kPerLane], g[kPerLane];
    widen(x, next_x);
    widen(g, next_dy);
    const int after = row + step;
    next_x = RawRow<kWide>::load(p.x, after * p.x_stride, lane, after < p.rows);
    next_dy = load(p.dy, after);
    const float scale = standardise(x, lane);
    float y[kPerLane];
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) y[c] = x[c] * weight[c] + bias[c];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float d = inside ? bf16_lo(p.dheads[head_at(row, h, p.plane)]) : 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        g[c] += d * head_weight[h][c];
        dhead_weight[h][c] += d * y[c];
      }
    }
    float sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) {
      dweight[c] += g[c] * x[c];
      dbias[c] += g[c];
      g[c] *= weight[c];
      sum += g[c];
      product += g[c] * x[c];
    }
    sum = row_sum(sum) * (1.0f / kChannels);
    product = row_sum(product) * (1.0f / kChannels);
    if (!inside) continue;
    if (p.keep_y) store_row<false>(p.dy, start, lane, y);
    widen(y, raw_residual);
#pragma unroll
    for (int c = 0; c < kPerLane; ++c) y[c] += scale * (g[c] - sum - x[c] * product);
    store_row<kWide>(p.dx, start, lane, y);
  }
  float* out = p.partial + static_cast<i64>(blockIdx.x) * (2 + kHeads) * kChannels;
  store_sums(out, dweight, scratch);
  store_sums(out + kChannels, dbias, scratch);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    store_sums(out + (2 + h) * kChannels, dhead_weight[h], scratch);
  }
}
