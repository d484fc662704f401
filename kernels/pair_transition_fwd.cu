// out = x + keep * (silu(rows W_a^T) * rows W_b^T) W_out^T for normed rows (sm_90a).
//
// The hidden layer stays on the chip: a warpgroup has 64 rows x 128 hidden values in accumulators,
// turns them into 64 rows x 64 products, and these are the A operand of the second product, from
// registers. The second product of a slice runs together with the first of the next one; while one
// warpgroup computes activations the other has the tensor cores.
//   warpgroups 0, 1: consumers; warp 8: weights; warp 9: rows
//   smem  kStages x weights | 2 x kBuffers x rows | barriers
#include "pair_transition.cuh"

struct Params {
  TensorMap rows, w_in, w_out;
  const unsigned char *x, *keep;  // bf16 [M, C], bool [M]
  unsigned char* out;             // bf16 [M, C]
  int count, slices, tiles;       // M, E / 64, blocks of 128 rows
};

// 64 x 64 products as A fragments: words 4 q .. 4 q + 3 are the units 16 q .. 16 q + 15.
DEV void activate(u32 (&product)[16], const float (&hidden)[64]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float value[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float a = hidden[2 * i + e];
      value[e] = a * sigmoid(a) * hidden[32 + 2 * i + e];
    }
    product[i] = pack_bf16(value[0], value[1]);
  }
}

DEV void output_product(float (&out)[kC / 2], const u32 (&product)[16], u64 weights,
                        int accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_rs<0>(out, product[4 * step], product[4 * step + 1], product[4 * step + 2],
                product[4 * step + 3], weights + step * Operand::STEP_COLS,
                accumulate | (step > 0));
}

DEV void store_rows(const Params& p, const float (&update)[kC / 2], int first_row) {
  const int lane = threadIdx.x % 32, row0 = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    if (row >= p.count) continue;
    const bool keep = p.keep[row];
    const i64 at = (static_cast<i64>(row) * kC + lane % 4 * 2) * 2;
#pragma unroll
    for (int i = 0; i < kC / 8; ++i) {
      const u32 x = *reinterpret_cast<const u32*>(p.x + at + 16 * i);
      const float lo = keep ? update[4 * i + 2 * half] : 0.0f;
      const float hi = keep ? update[4 * i + 2 * half + 1] : 0.0f;
      *reinterpret_cast<u32*>(p.out + at + 16 * i) = pack_bf16(bf16_lo(x) + lo, bf16_hi(x) + hi);
    }
  }
}

DEV void consume(const Params& p, u32 base, Barriers bars, int group) {
  const u64 weights = Operand::desc(base);
  Ring<kStages> ring;
  Ring<kBuffers> buffer;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    float hidden[64], out[kC / 2];
    u32 product[16];
    const u64 rows = Operand::desc(rows_at(base, group, buffer.index, 0));
    mbar_wait(bars.rows_full(group, buffer.index), buffer.parity);
    mbar_wait(bars.full(ring.index), ring.parity);
    wgmma_pin(hidden);
    wgmma_fence();
    hidden_products(hidden, rows, weights + ring.index * (kStage >> 4));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(hidden);
    activate(product, hidden);
    for (int slice = 1; slice < p.slices; ++slice) {
      const int before = ring.index;
      ring.advance();
      mbar_wait(bars.full(ring.index), ring.parity);
      wgmma_pin(hidden);
      wgmma_pin(out);
      wgmma_pin(product);
      wgmma_fence();
      hidden_products(hidden, rows, weights + ring.index * (kStage >> 4));
      output_product(out, product, weights + ((before * kStage + kIn) >> 4), slice > 1);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(hidden);
      wgmma_pin(out);
      wgmma_pin(product);
      release(bars.empty(before));
      activate(product, hidden);
    }
    release(bars.rows_empty(group, buffer.index));
    buffer.advance();
    wgmma_pin(out);
    wgmma_pin(product);
    wgmma_fence();
    output_product(out, product, weights + ((ring.index * kStage + kIn) >> 4), p.slices > 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(out);
    release(bars.empty(ring.index));
    ring.advance();
    store_rows(p, out, tile * kBlockRows + 64 * group);
  }
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    pair_transition_fwd(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kAtBarriers};
  if (threadIdx.x == 0) init_barriers(bars);
  __syncthreads();  // the barriers are ready
  const int group = warpgroup_index();
  if (group < kWarpgroups) {
    reg_alloc<240>();
    consume(p, base, bars, group);
    return;
  }
  reg_dealloc<24>();
  if (threadIdx.x == 128 * kWarpgroups) {
    load_weights(base, bars, &p.w_in, &p.w_out, p.slices, p.tiles);
  } else if (threadIdx.x == 128 * kWarpgroups + 32) {
    const TensorMap* const sources[] = {&p.rows};
    load_rows(base, bars, sources, p.tiles);
  }
}
