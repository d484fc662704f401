// dK and dV of triangle attention, key-stationary (sm_90a).
//
// A job is (128 keys, head, kG slices). Each consumer warpgroup owns 64 of the keys for all kG
// slices and walks the query tiles; scores are computed transposed (rows = keys), so P and dS feed
// dV = P^T dO and dK = dS^T Q straight from registers. The bias tile is widened once for kG slices.
//   producer   warpgroup 2, one thread: K, V of the next job, then per query tile bias, Q, dO, fold
//   consumers  warpgroups 0, 1: 240 registers (kG * kD = 64: 64 accumulators, 64 scores, 32 bias)
//   smem       kStages x {bias[2], kG x (Q, dO, fold)}, 2 x kG x {K[2], V[2]}, barriers
// dK and dV replace K and V in shared memory and leave by TMA, which clips ragged edges.
#include "tri_attn_bwd_main.cuh"

constexpr bool kSplit = TPF_SPLIT;
constexpr bool kAhead = TPF_AHEAD;  // S of the next step under all that follows the exponentials
constexpr int kStages = TPF_STAGES;
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = kConsumers * kBiasBytes + kG * kSliceBytes;
constexpr int kResidentSlice = kConsumers * kSliceBytes;
constexpr int kResidentBytes = kG * kResidentSlice;
constexpr int kBuffers = kAhead ? 2 : 1;  // score tiles
constexpr int kOnes = kStages * kStageBytes + 2 * kResidentBytes;
constexpr int kZeros = kOnes + kFoldBytes;
constexpr int kBarriers = kZeros + kFoldBytes;
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

// K (0), V (1) or key fold (2) of a warpgroup.
DEV u32 resident_tile(u32 resident, int slice, int which, int warpgroup) {
  return resident + slice * kResidentSlice + warpgroup * kSliceBytes + which * kOperandBytes;
}

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  Ring<2> slot;
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    const u32 ready = bars.resident_full(slot.index);
    mbar_wait(bars.resident_empty(slot.index), slot.parity ^ 1);
    mbar_expect(ready, kResidentBytes);
    for (int g = 0; g < kG; ++g) {
      const int slice = j.group * kG + g, inside = min(slice, p.outer - 1);
      for (int w = 0; w < kConsumers; ++w) {
        const int tile = j.block * kConsumers + w;
        load_rows(resident_tile(resident, g, 0, w), ready, &p.k, &p.v,
                  p.key_fold + key_fold_index(p, j.batch, inside, tile) * 16,
                  {tile, j.head, slice, j.batch});
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
        const int slice = j.group * kG + g, inside = min(slice, p.outer - 1);
        load_rows(to, full, &p.q, &p.dout,
                  p.row_fold + row_fold_index(p, j.batch, inside, j.head, tile) * 16,
                  {tile, j.head, slice, j.batch});
      }
      ring.advance();
    }
  }
}

// Descriptors of Q (dO follows it) and of the query fold of slice g in a stage.
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
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  const u64 fold_dp = fold_operand(smem + kOnes, smem + kZeros);
  const u32 never = static_cast<u32>(p.tokens) >> 31;  // 0, but the compiler cannot know
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Job j = decode_job(p, job);
    const int key_tile = j.block * kConsumers + warpgroup;
    const u32 resident = smem + kStages * kStageBytes + slot.index * kResidentBytes;
    float dk[kG][kPairs], dv[kG][kPairs];
    const u64 keys = Operand::desc(resident_tile(resident, 0, 0, warpgroup));
    const u64 fold_s = fold_operand(resident_tile(resident, 0, 2, warpgroup), smem + kZeros);
    mbar_wait(bars.resident_full(slot.index), slot.parity);
    // Step i = (query tile, slice). While it computes exponentials of S(i), the tensor cores work
    // on dP(i) and the products with P and dS of step i - 1 (at first zeros). S(i + 1) follows them
    // as a group of its own (kAhead) or, as soon as P is consumed, comes under the rounding of dS.
    float s[kBuffers][32], dp[32];
    u32 probability[16] = {}, gradient[16] = {}, rest[16] = {};
    mbar_wait(bars.stage_full(ring.index), ring.parity);
    u32 stage = smem + ring.index * kStageBytes;
    u64 q = slice_descriptor(stage, 0), last_q = q;
    wgmma_fence();
    product_with_fold(s[0], keys, q, fold_s, slice_fold(stage, 0));
    wgmma_commit();
    wgmma_wait<0>();
    for (int tile = 0; tile < query_tiles; ++tile) {
      BiasTile bias;
      load_bias(bias, stage + warpgroup * kBiasBytes, thread);
      const int index = ring.index;
      const u32 full = bars.stage_full(index), parity = ring.parity;
      // After the last tile the stage itself stands in for the next: a product in vain.
      u32 next_stage = stage;
#pragma unroll
      for (int g = 0; g < kG; ++g) {
        const int before = (g + kG - 1) % kG, after = (g + 1) % kG;
        float (&now)[32] = s[kG == 1 ? 0 : g % kBuffers];
        float (&then)[32] = s[(kG == 1 ? 1 : g + 1) % kBuffers];
        const auto await_stage = [&] {
          if (after != 0) return;
          ring.advance();
          if (tile + 1 == query_tiles) return;
          mbar_wait(bars.stage_full(ring.index), ring.parity);
          next_stage = smem + ring.index * kStageBytes;
        };
        const auto next_scores = [&] {
          const u32 then_stage = after == 0 ? next_stage : stage;
          product_with_fold(then, further(keys, after * kResidentSlice),
                            slice_descriptor(then_stage, after),
                            further_operand(fold_s, after * kResidentSlice),
                            slice_fold(then_stage, after));
        };
        if constexpr (kAhead) await_stage();
        wgmma_fence();
        product_with_fold(dp, further(keys, g * kResidentSlice + kOperandBytes),
                          further(q, kOperandBytes), fold_dp, slice_fold(stage, g));
        accumulate_tokens(dv[before], probability, further(last_q, kOperandBytes), tile);
        accumulate_tokens(dk[before], gradient, last_q, tile);
        if constexpr (kSplit) accumulate_tokens(dk[before], rest, last_q, 1);
        wgmma_commit();
        exponentials(now, bias, p.scale2);
        if constexpr (kAhead) {
          wgmma_fence();
          next_scores();
          wgmma_commit();
          wgmma_wait<1>();
        } else {
          keep_order(now, full, parity);
          wgmma_wait<0>();
        }
        if (g == 0 && tile > 0) release(bars.stage_empty((index + kStages - 1) % kStages), thread);
#pragma unroll
        for (int i = 0; i < 16; ++i) probability[i] = pack_bf16(now[2 * i], now[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 32; ++i) dp[i] *= now[i];
        if constexpr (!kAhead) {
          await_stage();
          wgmma_fence();
          next_scores();
          wgmma_commit();
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if constexpr (kSplit)
            split_bf16(dp[2 * i], dp[2 * i + 1], gradient[i], rest[i]);
          else
            gradient[i] = pack_bf16(dp[2 * i], dp[2 * i + 1]);
        }
        keep_words(kSplit ? rest : gradient, never, full, parity);
        wgmma_wait<0>();
        if constexpr (kAhead && kG == 1) {
#pragma unroll
          for (int i = 0; i < 32; ++i) now[i] = then[i];
        }
        last_q = q;
        q = slice_descriptor(after == 0 ? next_stage : stage, after);
      }
      stage = next_stage;
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
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kBarriers};
  if (threadIdx.x < kTile) {
    write_ones_row(base + kOnes + threadIdx.x * 16);
    write_zero_row(base + kZeros + threadIdx.x * 16);
  }
  fence_async_shared();  // wgmma reads them through the async proxy
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(bars.stage_full(i), 1);
      mbar_init(bars.stage_empty(i), kConsumerArrivals);
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
