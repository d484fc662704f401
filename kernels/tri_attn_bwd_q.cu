// dQ of triangle attention, query-stationary (sm_90a).
//
// A job is (128 queries, head, kG slices). Each consumer warpgroup owns 64 of the queries for all
// kG slices and walks the key tiles: S = Q K^T and dP = dO V^T (rows = queries), then dQ += dS K
// with dS from registers. dS enters the product as the sum of two bf16 numbers, so its rounding
// does not reach dQ (one term without TPF_SPLIT).
//   producer   warpgroup 2, one thread: Q, dO, fold of the next job, then per key tile bias, K, V,
//   fold consumers  warpgroups 0, 1: 240 registers (kG * kD / 2 accumulators, 64 scores, 32 bias)
//   smem       kStages x {bias[2], kG x (K, V, fold)}, 2 x kG x {Q[2], dO[2], fold[2]}, ones,
//   barriers
#include "tri_attn_bwd_main.cuh"

constexpr bool kSplit = TPF_SPLIT;
constexpr int kStages = TPF_STAGES;
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = kConsumers * kBiasBytes + kG * kSliceBytes;
constexpr int kResidentSlice = kConsumers * kSliceBytes;
constexpr int kResidentBytes = kG * kResidentSlice;
constexpr int kOnes = kStages * kStageBytes + 2 * kResidentBytes;
constexpr int kBarriers = kOnes + kFoldBytes;
constexpr int kSmemBytes = kBarriers + 16 * (kStages + 2) + 1024;
static_assert(kStages >= (kG == 1 ? 3 : 2), "a stage is held until the step after its last");
static_assert(kSmemBytes <= 232448, "shared memory of one block");

struct Barriers {
  u32 base;
  __device__ u32 stage_full(int i) const { return base + 8 * i; }
  __device__ u32 stage_empty(int i) const { return base + 8 * (kStages + i); }
  __device__ u32 resident_full(int i) const { return base + 8 * (2 * kStages + i); }
  __device__ u32 resident_empty(int i) const { return base + 8 * (2 * kStages + 2 + i); }
};

DEV u32 resident_slice(u32 resident, int slice, int warpgroup) {
  return resident + slice * kResidentSlice + warpgroup * kSliceBytes;
}

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  Ring<2> slot;
  const int key_tiles = (p.tokens + kTile - 1) / kTile;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    const u32 ready = bars.resident_full(slot.index);
    mbar_wait(bars.resident_empty(slot.index), slot.parity ^ 1);
    mbar_expect(ready, kResidentBytes);
    for (int g = 0; g < kG; ++g) {
      const int slice = j.group * kG + g;
      const int inside = min(slice, p.outer - 1);  // TMA clips by itself, bulk copies do not
      for (int w = 0; w < kConsumers; ++w) {
        const u32 to = resident_slice(resident, g, w);
        const int tile = j.block * kConsumers + w;
        tma_load(to, &p.q, ready, 0, tile * kTile, j.head, slice, j.batch);
        tma_load(to + kOperandBytes, &p.dout, ready, 0, tile * kTile, j.head, slice, j.batch);
        bulk_load(to + 2 * kOperandBytes,
                  p.row_fold + row_fold_index(p, j.batch, inside, j.head, tile) * 16, kFoldBytes,
                  ready);
      }
    }
    slot.advance();
    for (int tile = 0; tile < key_tiles; ++tile) {
      const u32 full = bars.stage_full(ring.index);
      u32 to = smem + ring.index * kStageBytes;
      mbar_wait(bars.stage_empty(ring.index), ring.parity ^ 1);
      mbar_expect(full, kStageBytes);
      for (int w = 0; w < kConsumers; ++w, to += kBiasBytes)
        bulk_load(to,
                  p.bias_s + bias_tile_index(p, j.batch, j.head, j.block * kConsumers + w, tile) *
                                 kBiasBytes,
                  kBiasBytes, full);
      for (int g = 0; g < kG; ++g, to += kSliceBytes) {
        const int slice = j.group * kG + g;
        const int inside = min(slice, p.outer - 1);
        tma_load(to, &p.k, full, 0, tile * kTile, j.head, slice, j.batch);
        tma_load(to + kOperandBytes, &p.v, full, 0, tile * kTile, j.head, slice, j.batch);
        bulk_load(to + 2 * kOperandBytes,
                  p.key_fold + key_fold_index(p, j.batch, inside, tile) * 16, kFoldBytes, full);
      }
      ring.advance();
    }
  }
}

// Descriptors of K (V follows it) and of the key fold of slice g in a stage.
DEV u64 slice_descriptor(u32 stage, int g) {
  return further(Operand::desc(stage), kConsumers * kBiasBytes + g * kSliceBytes);
}
DEV u64 slice_fold(u32 stage, int g) {
  return further(fold_descriptor(stage),
                 kConsumers * kBiasBytes + g * kSliceBytes + 2 * kOperandBytes);
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  Ring<2> slot;
  const int key_tiles = (p.tokens + kTile - 1) / kTile;
  const int quad = thread % 4, row = thread / 32 * 16 + thread % 32 / 4;
  const u64 ones = fold_descriptor(smem + kOnes);
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const int query_tile = j.block * kConsumers + warpgroup;
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    float dq[kG][kPairs];
    u32 row_fold[kG][2];
    mbar_wait(bars.resident_full(slot.index), slot.parity);
#pragma unroll
    for (int g = 0; g < kG; ++g) {
      const u32 fold =
          resident_slice(resident, g, warpgroup) + 2 * kOperandBytes + row * 16 + quad * 4;
      row_fold[g][0] = lds32(fold);
      row_fold[g][1] = lds32(fold + 8 * 16);
    }
    const u64 queries = Operand::desc(resident_slice(resident, 0, warpgroup));
    // Step i = (key tile, slice). While it computes exponentials of S(i), the tensor cores work on
    // S(i + 1), dP(i) and the product with dS of step i - 1 (at first zeros).
    float s[2][32], dp[32];
    u32 gradient[16] = {}, rest[16] = {};
    mbar_wait(bars.stage_full(ring.index), ring.parity);
    u32 stage = smem + ring.index * kStageBytes;
    u64 k = slice_descriptor(stage, 0), last_k = k;
    wgmma_fence();
    product_with_fold(s[0], queries, k, row_fold[0], slice_fold(stage, 0));
    wgmma_commit();
    wgmma_wait<0>();
    for (int tile = 0; tile < key_tiles; ++tile) {
      BiasTile bias;
      load_bias(bias, stage + warpgroup * kBiasBytes, thread);
      const int index = ring.index;
      const u32 full = bars.stage_full(index), parity = ring.parity;
      // After the last tile the stage itself stands in for the next: a product in vain.
      u32 next_stage = stage;
#pragma unroll
      for (int g = 0; g < kG; ++g) {
        const int before = (g + kG - 1) % kG, after = (g + 1) % kG;
        float (&now)[32] = s[kG == 1 ? 0 : g % 2];
        float (&then)[32] = s[kG == 1 ? 1 : (g + 1) % 2];
        if (after == 0) {
          ring.advance();
          if (tile + 1 < key_tiles) {
            mbar_wait(bars.stage_full(ring.index), ring.parity);
            next_stage = smem + ring.index * kStageBytes;
          }
        }
        const u32 then_stage = after == 0 ? next_stage : stage;
        const u64 then_k = slice_descriptor(then_stage, after);
        const u64 dout = further(queries, g * kResidentSlice + kOperandBytes);
        wgmma_fence();
        product_with_fold(dp, dout, further(k, kOperandBytes), row_fold[g], ones);
        accumulate_tokens(dq[before], gradient, last_k, tile);
        if constexpr (kSplit) accumulate_tokens(dq[before], rest, last_k, 1);
        product_with_fold(then, further(queries, after * kResidentSlice), then_k, row_fold[after],
                          slice_fold(then_stage, after));
        wgmma_commit();
        exponentials(now, bias, p.scale2);
        keep_order(now, full, parity);
        wgmma_wait<0>();
        if (g == 0 && tile > 0) release(bars.stage_empty((index + kStages - 1) % kStages), thread);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float x = now[2 * i] * dp[2 * i], y = now[2 * i + 1] * dp[2 * i + 1];
          if constexpr (kSplit)
            split_bf16(x, y, gradient[i], rest[i]);
          else
            gradient[i] = pack_bf16(x, y);
        }
        if constexpr (kG == 1) {
#pragma unroll
          for (int i = 0; i < 32; ++i) now[i] = then[i];
        }
        last_k = k;
        k = then_k;
      }
      stage = next_stage;
    }
    wgmma_fence();
    accumulate_tokens(dq[kG - 1], gradient, last_k, 1);
    if constexpr (kSplit) accumulate_tokens(dq[kG - 1], rest, last_k, 1);
    wgmma_commit();
    wgmma_wait<0>();
    release(bars.stage_empty((ring.index + kStages - 1) % kStages), thread);
    named_sync(1 + warpgroup, 128);  // every warp is done with Q
#pragma unroll
    for (int g = 0; g < kG; ++g)
      store_tile(resident_slice(resident, g, warpgroup), dq[g], p.scale, thread);
    fence_async_shared();  // the stores below read through the async proxy
    named_sync(1 + warpgroup, 128);
    if (thread == 0) {
      for (int g = 0; g < kG; ++g)
        tma_store(&p.dq, resident_slice(resident, g, warpgroup), 0, query_tile * kTile, j.head,
                  j.group * kG + g, j.batch);
      bulk_commit();
      bulk_wait_read<0>();
      mbar_arrive(bars.resident_empty(slot.index));
    }
    slot.advance();
  }
  if (thread == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tri_attn_bwd_q(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kBarriers};
  if (threadIdx.x < kTile) write_ones_row(base + kOnes + threadIdx.x * 16);
  fence_async_shared();  // wgmma reads the ones through the async proxy
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(bars.stage_full(i), 1);
      mbar_init(bars.stage_empty(i), 4 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(bars.resident_full(i), 1);
      mbar_init(bars.resident_empty(i), kConsumers);
    }
    mbar_init_fence();
  }
  __syncthreads();
  const int warpgroup = warpgroup_index();
  if (warpgroup == kConsumers) {
    reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) produce(p, base, bars);
  } else {
    reg_alloc<kConsumerRegisters>();
    consume(p, base, bars, warpgroup, threadIdx.x % 128);
  }
}
