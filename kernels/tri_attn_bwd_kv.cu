// dK and dV of triangle attention, key-stationary (sm_90a).
//
// A job is (128 keys, head, kG slices). Each consumer warpgroup owns 64 of the keys for all kG
// slices and walks the query tiles; scores are computed transposed (rows = keys), so P and dS feed
// dV = P^T dO and dK = dS^T Q straight from registers. The bias tile is widened once for kG slices.
//   producer   warpgroup 2, one thread: K, V of the next job, then per query tile bias, Q, dO, fold
//   consumers  warpgroups 0, 1: 240 registers (kG * kD = 64: 64 accumulators, 64 scores, 32 bias)
//   smem       kStages x {bias[2], kG x (Q, dO, fold)}, 2 x kG x {K[2], V[2]}, barriers
// dK and dV replace K and V in shared memory and leave by TMA, which clips ragged edges.
#include "tri_attn_bwd.cuh"

constexpr bool kSplit = TPF_SPLIT;
constexpr int kStages = TPF_STAGES;
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = kConsumers * kBiasBytes + kG * kSliceBytes;
constexpr int kResidentSlice = 2 * kConsumers * kOperandBytes;
constexpr int kResidentBytes = kG * kResidentSlice;
constexpr int kBarriers = kStages * kStageBytes + 2 * kResidentBytes;
constexpr int kSmemBytes = kBarriers + 16 * (kStages + 2) + 1024;
static_assert(kSmemBytes <= 232448, "shared memory of one block");

struct Barriers {
  u32 base;
  __device__ u32 stage_full(int i) const { return base + 8 * i; }
  __device__ u32 stage_empty(int i) const { return base + 8 * (kStages + i); }
  __device__ u32 resident_full(int i) const { return base + 8 * (2 * kStages + i); }
  __device__ u32 resident_empty(int i) const { return base + 8 * (2 * kStages + 2 + i); }
};

DEV u32 resident_tile(u32 resident, int slice, int which, int warpgroup) {
  return resident + slice * kResidentSlice + (which * kConsumers + warpgroup) * kOperandBytes;
}

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  Ring<2> slot;
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    mbar_wait(bars.resident_empty(slot.index), slot.parity ^ 1);
    mbar_expect(bars.resident_full(slot.index), kResidentBytes);
    for (int g = 0; g < kG; ++g) {
      const int slice = j.group * kG + g;
      for (int w = 0; w < kConsumers; ++w) {
        const int key = (j.block * kConsumers + w) * kTile;
        tma_load(resident_tile(resident, g, 0, w), &p.k, bars.resident_full(slot.index), 0, key,
                 j.head, slice, j.batch);
        tma_load(resident_tile(resident, g, 1, w), &p.v, bars.resident_full(slot.index), 0, key,
                 j.head, slice, j.batch);
      }
    }
    slot.advance();
    for (int tile = 0; tile < query_tiles; ++tile) {
      const u32 full = bars.stage_full(ring.index);
      u32 to = smem + ring.index * kStageBytes;
      mbar_wait(bars.stage_empty(ring.index), ring.parity ^ 1);
      mbar_expect(full, kStageBytes);
      for (int w = 0; w < kConsumers; ++w, to += kBiasBytes)
        bulk_load(to,
                  p.bias_st + bias_tile_index(p, j.batch, j.head, j.block * kConsumers + w, tile) *
                                  kBiasBytes,
                  kBiasBytes, full);
      for (int g = 0; g < kG; ++g, to += kSliceBytes) {
        const int slice = j.group * kG + g;
        const int inside = min(slice, p.outer - 1);  // TMA clips by itself, bulk copies do not
        tma_load(to, &p.q, full, 0, tile * kTile, j.head, slice, j.batch);
        tma_load(to + kOperandBytes, &p.dout, full, 0, tile * kTile, j.head, slice, j.batch);
        bulk_load(to + 2 * kOperandBytes,
                  p.row_fold + row_fold_index(p, j.batch, inside, j.head, tile) * 16, kFoldBytes,
                  full);
      }
      ring.advance();
    }
  }
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  Ring<2> slot;
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  const int quad = thread % 4, row = thread / 32 * 16 + thread % 32 / 4;
  const u32 ones = key_fold_dp(quad);
  const u32 fold_dp[2] = {ones, ones};
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const int key_tile = j.block * kConsumers + warpgroup;
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    float dk[kG][kPairs], dv[kG][kPairs];
    u32 fold_s[kG][2];
#pragma unroll
    for (int g = 0; g < kG; ++g) {
      const int inside = min(j.group * kG + g, p.outer - 1);
      const unsigned char* fold =
          p.key_fold + (key_fold_index(p, j.batch, inside, key_tile) + row) * 16 + 12;
      fold_s[g][0] = key_fold_s(quad, *reinterpret_cast<const u32*>(fold));
      fold_s[g][1] = key_fold_s(quad, *reinterpret_cast<const u32*>(fold + 8 * 16));
    }
    const u64 keys = Operand::desc(resident_tile(resident, 0, 0, warpgroup));
    mbar_wait(bars.resident_full(slot.index), slot.parity);
    // The step before, not yet added to dK and dV; at first zeros times any tile.
    u32 probability[16] = {}, gradient[16] = {}, rest[16] = {};
    u64 last_q = Operand::desc(smem + ring.index * kStageBytes + kConsumers * kBiasBytes);
    for (int tile = 0; tile < query_tiles; ++tile) {
      const u32 stage = smem + ring.index * kStageBytes;
      mbar_wait(bars.stage_full(ring.index), ring.parity);
      const u64 operands = Operand::desc(stage), folds = fold_descriptor(stage);
      float bias[32];
      load_bias(bias, stage + warpgroup * kBiasBytes, thread);
#pragma unroll
      for (int g = 0; g < kG; ++g) {
        const u64 q = further(operands, kConsumers * kBiasBytes + g * kSliceBytes);
        const u64 dout = further(q, kOperandBytes);
        const u64 fold =
            further(folds, kConsumers * kBiasBytes + g * kSliceBytes + 2 * kOperandBytes);
        const u64 k = further(keys, g * kResidentSlice);
        const u64 v = further(k, kConsumers * kOperandBytes);
        constexpr int kLast = kG - 1;
        const int before = g == 0 ? kLast : g - 1;
        float s[32], dp[32];
        // The products of the step before run while this step computes exponentials.
        wgmma_fence();
        product_with_fold(s, k, q, fold_s[g], fold);
        wgmma_commit();
        accumulate_tokens(dv[before], probability, further(last_q, kOperandBytes), tile);
        accumulate_tokens(dk[before], gradient, last_q, tile);
        if constexpr (kSplit) accumulate_tokens(dk[before], rest, last_q, 1);
        product_with_fold(dp, v, dout, fold_dp, fold);
        wgmma_commit();
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = ex2(s[i] * p.scale2 + bias[i]);
        keep_order(bars.stage_full(ring.index), ring.parity);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 16; ++i) probability[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
        if (g == 0 && tile > 0)
          release(bars.stage_empty((ring.index + kStages - 1) % kStages), thread);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float x = s[2 * i] * dp[2 * i], y = s[2 * i + 1] * dp[2 * i + 1];
          if constexpr (kSplit)
            split_bf16(x, y, gradient[i], rest[i]);
          else
            gradient[i] = pack_bf16(x, y);
        }
        last_q = q;
      }
      ring.advance();
    }
    wgmma_fence();
    accumulate_tokens(dv[kG - 1], probability, further(last_q, kOperandBytes), 1);
    accumulate_tokens(dk[kG - 1], gradient, last_q, 1);
    if constexpr (kSplit) accumulate_tokens(dk[kG - 1], rest, last_q, 1);
    wgmma_commit();
    wgmma_wait<0>();
    release(bars.stage_empty((ring.index + kStages - 1) % kStages), thread);
    named_sync(1 + warpgroup, 128);  // every warp is done with K and V
#pragma unroll
    for (int g = 0; g < kG; ++g) {
      store_tile(resident_tile(resident, g, 0, warpgroup), dk[g], p.scale, thread);
      store_tile(resident_tile(resident, g, 1, warpgroup), dv[g], 1.0f, thread);
    }
    fence_async_shared();  // the stores below read through the async proxy
    named_sync(1 + warpgroup, 128);
    if (thread == 0) {
      for (int g = 0; g < kG; ++g) {
        tma_store(&p.dk, resident_tile(resident, g, 0, warpgroup), 0, key_tile * kTile, j.head,
                  j.group * kG + g, j.batch);
        tma_store(&p.dv, resident_tile(resident, g, 1, warpgroup), 0, key_tile * kTile, j.head,
                  j.group * kG + g, j.batch);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbar_arrive(bars.resident_empty(slot.index));
    }
    slot.advance();
  }
  if (thread == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tri_attn_bwd_kv(const __grid_constant__ Params p) {
  extern __shared__ unsigned char raw[];
  const u32 smem = (smem_u32(raw) + 1023) & ~1023u;
  const Barriers bars{smem + kBarriers};
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
    if (threadIdx.x == kConsumers * 128) produce(p, smem, bars);
  } else {
    reg_alloc<kConsumerRegisters>();
    consume(p, smem, bars, warpgroup, threadIdx.x % 128);
  }
}
