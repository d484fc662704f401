// The backward of the TurboPairFormer paper: key-tile-parallel, one recomputation (sm_90a).
//
// A job is (64 keys, head, group of kG slices) and visits all query tiles. Each warpgroup owns half
// of the group: scores transposed (rows = keys), dK and dV in fp32 registers, dS through shared
// memory for one bf16 dQ partial per key tile. The dS of the slices are added in a fixed fp32 tree,
// (0 + 1) + (2 + 3), into one bf16 dbias partial per group. kG is 4, but 2 at kD = 64 for want of
// registers.
//   producer   warpgroup 2, one thread: K, V of the job, then per query tile bias, Q, dO, fold
//   consumers  warpgroups 0, 1: kG / 2 slices each
//   smem       kStages x {bias, kG x {Q, dO, fold}}, kG x {K, V}, 2 x {dS, dQ, fp32 sum}, barriers
#include "tri_attn_bwd_main.cuh"

// For ablation only, and not deterministic: add dQ to fp32 sums by atomics, element by element (1)
// or by bulk reductions of a tile (2), and dbias element by element.
constexpr int kAtomicDq = TPF_ATOMIC_DQ;
constexpr bool kAtomicDbias = TPF_ATOMIC_DBIAS;
constexpr int kStages = TPF_STAGES;
constexpr int kGroup = kG, kMine = kGroup / kConsumers;
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = kBiasBytes + kGroup * kSliceBytes;
constexpr int kResidentBytes = 2 * kGroup * kOperandBytes;
using Scores = Tile<128>;
constexpr int kScoreBytes = kTile * 128;
constexpr int kSumBytes = kTile * kTile * 4;
constexpr int kDqBytes = kAtomicDq == 2 ? 2 * kOperandBytes : kOperandBytes;
constexpr int kScratchBytes = kScoreBytes + kDqBytes + kSumBytes;
constexpr int kScratch = kStages * kStageBytes + kResidentBytes;
constexpr int kBarriers = kScratch + kConsumers * kScratchBytes;
constexpr int kSmemBytes = kBarriers + 16 * (kStages + 1) + 1024;
static_assert(kSmemBytes <= 232448, "shared memory of one block");

struct Barriers {
  u32 base;
  __device__ u32 stage_full(int i) const { return base + 8 * i; }
  __device__ u32 stage_empty(int i) const { return base + 8 * (kStages + i); }
  __device__ u32 resident_full() const { return base + 16 * kStages; }
  __device__ u32 resident_empty() const { return base + 16 * kStages + 8; }
};

// Fragments of the key folds as the A operand: pair (2t, 2t + 1) of the eight channels, with
// t = lane % 4.
DEV u32 key_fold_s(int t, u32 mask_word) {
  return t == 0 ? 0x3F803F80u : t == 1 ? 0x00003F80u : t == 2 ? 0u : mask_word;
}
DEV u32 key_fold_dp(int t) { return t == 1 ? 0x3F800000u : t == 2 ? 0x3F803F80u : 0u; }

// acc[64 x 64] = A . B^T over the channels in shared memory, plus the fold step with fragments.
DEV void product_with_fold(float (&acc)[32], u64 a, u64 b, const u32* fold_a, u64 fold_b) {
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    wgmma_ss<0, 0>(acc, a + step * Operand::STEP_COLS, b + step * Operand::STEP_COLS, step > 0);
  wgmma_rs<0>(acc, fold_a[0], fold_a[1], 0, 0, fold_b, 1);
}

// p.blocks counts 64-key tiles here.
DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  u32 parity = 1;
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x, parity ^= 1) {
    const Job j = decode_job(p, job);
    const u32 ready = bars.resident_full();
    mbar_wait(bars.resident_empty(), parity);
    mbar_expect(ready, kResidentBytes);
    u32 to = smem + kStages * kStageBytes;
    for (int g = 0; g < kGroup; ++g, to += 2 * kOperandBytes) {
      const int slice = j.group * kGroup + g;
      tma_load(to, &p.k, ready, 0, j.block * kTile, j.head, slice, j.batch);
      tma_load(to + kOperandBytes, &p.v, ready, 0, j.block * kTile, j.head, slice, j.batch);
    }
    for (int tile = 0; tile < query_tiles; ++tile) {
      const u32 full = bars.stage_full(ring.index);
      u32 at = smem + ring.index * kStageBytes;
      mbar_wait(bars.stage_empty(ring.index), ring.parity ^ 1);
      mbar_expect(full, kStageBytes);
      bulk_load(at, p.bias_st + bias_tile_index(p, j.batch, j.head, j.block, tile) * kBiasBytes,
                kBiasBytes, full);
      at += kBiasBytes;
      for (int g = 0; g < kGroup; ++g, at += kSliceBytes) {
        const int slice = j.group * kGroup + g, inside = min(slice, p.outer - 1);
        load_rows(at, full, &p.q, &p.dout,
                  p.row_fold + row_fold_index(p, j.batch, inside, j.head, tile) * 16,
                  {tile, j.head, slice, j.batch});
      }
      ring.advance();
    }
  }
}

// dS = P * dP in place of s, and the packed P and dS.
DEV void score_gradient(float (&s)[32], const float (&dp)[32], u32 (&gradient)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] *= dp[i];
#pragma unroll
  for (int i = 0; i < 16; ++i) gradient[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Write packed dS [64 keys x 64 queries] into a swizzled tile of 128-byte rows.
DEV void store_scores(u32 tile, const u32 (&packed)[16], int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    sts32(tile + Scores::offset(row + i % 2 * 8, i / 2 * 16 + thread % 4 * 4), packed[i]);
}

// Add x to this thread's part of an fp32 tile (first: replace it).
DEV void add_to_sum(u32 sum, const float (&x)[32], bool first, int thread) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 at = sum + (i * 128 + thread) * 16;
    uint4 old = make_uint4(0, 0, 0, 0);
    if (!first) old = lds128(at);
    sts128(at, make_uint4(__float_as_uint(__uint_as_float(old.x) + x[4 * i]),
                          __float_as_uint(__uint_as_float(old.y) + x[4 * i + 1]),
                          __float_as_uint(__uint_as_float(old.z) + x[4 * i + 2]),
                          __float_as_uint(__uint_as_float(old.w) + x[4 * i + 3])));
  }
}

// Add the sums of both warpgroups and write them as bf16, 16 bytes a thread and step.
DEV void write_dbias(unsigned char* partial, u32 first, u32 second, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 at = ((2 * i + half) * 128 + thread) * 16;
      const uint4 x = lds128(first + at), y = lds128(second + at);
      words[2 * half] = pack_bf16(__uint_as_float(x.x) + __uint_as_float(y.x),
                                  __uint_as_float(x.y) + __uint_as_float(y.y));
      words[2 * half + 1] = pack_bf16(__uint_as_float(x.z) + __uint_as_float(y.z),
                                      __uint_as_float(x.w) + __uint_as_float(y.w));
    }
    reinterpret_cast<uint4*>(partial)[i * 128 + thread] =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Add the sums of both warpgroups to the fp32 sums in global memory, in the order of write_dbias.
DEV void add_dbias(float* to, u32 first, u32 second, int thread) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 at = (i * 128 + thread) * 16;
    const uint4 x = lds128(first + at), y = lds128(second + at);
    float* place = to + ((i / 2) * 128 + thread) * 8 + i % 2 * 4;
    atomicAdd(place, __uint_as_float(x.x) + __uint_as_float(y.x));
    atomicAdd(place + 1, __uint_as_float(x.y) + __uint_as_float(y.y));
    atomicAdd(place + 2, __uint_as_float(x.z) + __uint_as_float(y.z));
    atomicAdd(place + 3, __uint_as_float(x.w) + __uint_as_float(y.w));
  }
}

// Hand over the dQ of one (query tile, slice): a bf16 partial, or atomically.
DEV void write_dq(const Params& p, const Job& j, const float (&dq)[kPairs], u32 buffer, int tile,
                  int slice, int warpgroup, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float* sum =
      p.dq_sum + (((static_cast<i64>(j.batch) * p.outer + slice) * p.heads + j.head) * p.tokens +
                  tile * kTile) *
                     kD;
  if constexpr (kAtomicDq == 1) {
    named_sync(1 + warpgroup, 128);  // no warp replaces dS before all have read it
    if (slice >= p.outer) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int r = row + i / 2 % 2 * 8;
      if (tile * kTile + r < p.tokens) atomicAdd(sum + r * kD + frag_col(thread % 32, i), dq[i]);
    }
    return;
  }
  if constexpr (kAtomicDq == 2) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      sts32(buffer + ((row + i / 2 % 2 * 8) * kD + frag_col(thread % 32, i)) * 4,
            __float_as_uint(dq[i]));
  } else {
    store_tile(buffer, dq, 1.0f, thread);
  }
  fence_async_shared();  // the copies read through the async proxy
  named_sync(1 + warpgroup, 128);
  if (thread != 0) return;
  if constexpr (kAtomicDq == 2) {
    if (slice < p.outer)
      bulk_reduce_add_f32(sum, buffer, min(kTile, p.tokens - tile * kTile) * kD * 4);
  } else {
    tma_store(&p.dq, buffer, 0, tile * kTile, j.head, slice, j.block * p.batch + j.batch);
  }
  bulk_commit();
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  u32 parity = 0;
  const int query_tiles = (p.tokens + kTile - 1) / kTile;
  const int quad = thread % 4, row = thread / 32 * 16 + thread % 32 / 4;
  const u32 ones = key_fold_dp(quad);
  const u32 fold_dp[2] = {ones, ones};
  const u32 scratch = smem + kScratch + warpgroup * kScratchBytes;
  const u32 dq_tile = scratch + kScoreBytes, sum = dq_tile + kDqBytes;
  const u32 resident = smem + kStages * kStageBytes + warpgroup * kMine * 2 * kOperandBytes;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x, parity ^= 1) {
    const Job j = decode_job(p, job);
    const int first_slice = j.group * kGroup + warpgroup * kMine;
    float dk[kMine][kPairs], dv[kMine][kPairs];
    u32 fold_s[kMine][2];
#pragma unroll
    for (int g = 0; g < kMine; ++g) {
      const int inside = min(first_slice + g, p.outer - 1);
      const unsigned char* fold =
          p.key_fold + (key_fold_index(p, j.batch, inside, j.block) + row) * 16 + 12;
      fold_s[g][0] = key_fold_s(quad, *reinterpret_cast<const u32*>(fold));
      fold_s[g][1] = key_fold_s(quad, *reinterpret_cast<const u32*>(fold + 8 * 16));
    }
    mbar_wait(bars.resident_full(), parity);
    for (int tile = 0; tile < query_tiles; ++tile) {
      const u32 stage = smem + ring.index * kStageBytes;
      mbar_wait(bars.stage_full(ring.index), ring.parity);
#pragma unroll
      for (int g = 0; g < kMine; ++g) {
        const u32 base = stage + kBiasBytes + (warpgroup * kMine + g) * kSliceBytes;
        const u64 q = Operand::desc(base), dout = Operand::desc(base + kOperandBytes);
        const u64 fold = fold_descriptor(base + 2 * kOperandBytes);
        const u64 k = Operand::desc(resident + 2 * g * kOperandBytes),
                  v = further(k, kOperandBytes);
        float s[32], dp[32], dq[kPairs];
        u32 probability[16], gradient[16];
        wgmma_fence();
        product_with_fold(s, k, q, fold_s[g], fold);
        wgmma_commit();
        product_with_fold(dp, v, dout, fold_dp, fold);
        wgmma_commit();
        wgmma_wait<1>();
        BiasTile bias;
        load_bias(bias, stage, thread);
        exponentials(s, bias, p.scale2);
#pragma unroll
        for (int i = 0; i < 16; ++i) probability[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
        wgmma_fence();
        accumulate_tokens(dv[g], probability, dout, tile);
        wgmma_commit();
        wgmma_wait<1>();
        score_gradient(s, dp, gradient);
        if (first_slice + g >= p.outer) {
#pragma unroll
          for (int i = 0; i < 32; ++i) s[i] = 0.0f;  // a slice that does not exist
        }
        wgmma_fence();
        accumulate_tokens(dk[g], gradient, q, tile);
        wgmma_commit();
        if (thread == 0) bulk_wait_read<0>();  // the store of the last dQ tile
        store_scores(scratch, gradient, thread);
        add_to_sum(sum, s, g == 0, thread);
        fence_async_shared();  // wgmma reads dS through the async proxy
        named_sync(1 + warpgroup, 128);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma_ss<1, 1>(dq, Scores::desc(scratch) + step * Scores::STEP_ROWS,
                         k + step * Operand::STEP_ROWS, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        write_dq(p, j, dq, dq_tile, tile, first_slice + g, warpgroup, thread);
      }
      release(bars.stage_empty(ring.index), thread);
      ring.advance();
      named_sync(3, 128 * kConsumers);  // both sums are complete
      if (warpgroup == tile % kConsumers) {
        const u32 sums = smem + kScratch + kScoreBytes + kDqBytes;
        const i64 group = kAtomicDbias ? 0 : j.group - p.first_group;
        const i64 index = (group * p.batch + j.batch) * p.heads + j.head;
        const i64 at = ((index * p.tiles + j.block) * p.tiles + tile) * kTile * kTile;
        if constexpr (kAtomicDbias)
          add_dbias(p.dbias_partial + at, sums, sums + kScratchBytes, thread);
        else
          write_dbias(reinterpret_cast<unsigned char*>(p.dbias_partial) + at * 2, sums,
                      sums + kScratchBytes, thread);
      }
      named_sync(3, 128 * kConsumers);  // both sums may be replaced
    }
#pragma unroll
    for (int g = 0; g < kMine; ++g) {
      store_tile(resident + 2 * g * kOperandBytes, dk[g], p.scale, thread);
      store_tile(resident + (2 * g + 1) * kOperandBytes, dv[g], 1.0f, thread);
    }
    fence_async_shared();  // the stores below read through the async proxy
    named_sync(1 + warpgroup, 128);
    if (thread == 0) {
      for (int g = 0; g < kMine; ++g) {
        tma_store(&p.dk, resident + 2 * g * kOperandBytes, 0, j.block * kTile, j.head,
                  first_slice + g, j.batch);
        tma_store(&p.dv, resident + (2 * g + 1) * kOperandBytes, 0, j.block * kTile, j.head,
                  first_slice + g, j.batch);
      }
      bulk_commit();
      bulk_wait_read<0>();
      mbar_arrive(bars.resident_empty());
    }
  }
  if (thread == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tri_attn_bwd_paper(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kBarriers};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(bars.stage_full(i), 1);
      mbar_init(bars.stage_empty(i), kConsumerArrivals);
    }
    mbar_init(bars.resident_full(), 1);
    mbar_init(bars.resident_empty(), kConsumers);
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
