// dbias of triangle attention: sum over the slices of dS, in registers (sm_90a).
//
// A job is (128 x 128 scores, head, range of slices). Each consumer warpgroup owns 64 queries x 128
// keys, two 64 x 64 halves, and adds P * dP over its slices in ascending order, in fp32 and without
// rounding dS. A job leaves one partial; tri_attn_bwd_reduce adds the few of a tile.
//   producer   warpgroup 2, one thread: per slice Q, dO, query fold, K, V, key fold
//   consumers  warpgroups 0, 1: 240 registers (64 sums, 128 scores)
//   smem       kStages x {(Q, dO, fold)[2], (K, V, fold)[2]}, fp32 bias of the job, ones, barriers
#include "tri_attn_bwd_main.cuh"

constexpr int kStages = TPF_STAGES;
constexpr int kHalves = 2;
#ifndef TPF_FRAGMENTS
#define TPF_FRAGMENTS (kD < 64)
#endif
constexpr bool kInRegisters = TPF_FRAGMENTS;
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = (kConsumers + kHalves) * kSliceBytes;
constexpr int kBias = kStages * kStageBytes;
constexpr int kBiasTile = kTile * kTile * 4;
constexpr int kOnes = kBias + kConsumers * kHalves * kBiasTile;
constexpr int kBarriers = kOnes + kFoldBytes;
constexpr int kSmemBytes = kBarriers + 16 * kStages + 1024;
static_assert(kSmemBytes <= 232448, "shared memory of one block");

struct Barriers {
  u32 base;
  __device__ u32 full(int i) const { return base + 8 * i; }
  __device__ u32 empty(int i) const { return base + 8 * (kStages + i); }
};

// A 128 x 128 tile of one head and the slices that a job adds. The first jobs take whole tiles, one
// wave after the other; the tiles that would not fill a last wave are cut into chunks of slices.
struct Tiles {
  int query_block, key_block, head, batch, begin, end;
};

DEV Tiles decode_tiles(const Params& p, int job) {
  Tiles t;
  const bool whole = job < p.whole_tiles;
  const int rest = job - p.whole_tiles;
  int tile = whole ? job : p.whole_tiles + rest % p.groups;
  t.begin = whole ? 0 : rest / p.groups * p.group;
  t.end = whole ? p.outer : min(t.begin + p.group, p.outer);
  t.key_block = tile % p.blocks;
  tile /= p.blocks;
  t.query_block = tile % p.blocks;
  tile /= p.blocks;
  t.head = tile % p.heads;
  t.batch = tile / p.heads;
  return t;
}

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Tiles t = decode_tiles(p, job);
    for (int slice = t.begin; slice < t.end; ++slice) {
      const u32 full = bars.full(ring.index);
      u32 to = smem + ring.index * kStageBytes;
      mbar_wait(bars.empty(ring.index), ring.parity ^ 1);
      mbar_expect(full, kStageBytes);
      for (int w = 0; w < kConsumers; ++w, to += kSliceBytes) {
        const int tile = t.query_block * kConsumers + w;
        tma_load(to, &p.q, full, 0, tile * kTile, t.head, slice, t.batch);
        tma_load(to + kOperandBytes, &p.dout, full, 0, tile * kTile, t.head, slice, t.batch);
        bulk_load(to + 2 * kOperandBytes,
                  p.row_fold + row_fold_index(p, t.batch, slice, t.head, tile) * 16, kFoldBytes,
                  full);
      }
      for (int half = 0; half < kHalves; ++half, to += kSliceBytes) {
        const int tile = t.key_block * kHalves + half;
        tma_load(to, &p.k, full, 0, tile * kTile, t.head, slice, t.batch);
        tma_load(to + kOperandBytes, &p.v, full, 0, tile * kTile, t.head, slice, t.batch);
        bulk_load(to + 2 * kOperandBytes, p.key_fold + key_fold_index(p, t.batch, slice, tile) * 16,
                  kFoldBytes, full);
      }
      ring.advance();
    }
  }
}

// Read four consecutive values of a bias fragment from global memory, times log2(e).
DEV uint4 read_bias(const Params& p, i64 tile, int index) {
  float x[4];
  if constexpr (kWideBias) {
    const float4 w =
        *reinterpret_cast<const float4*>(p.bias_s + (tile * kTile * kTile + index) * 4);
    x[0] = w.x, x[1] = w.y, x[2] = w.z, x[3] = w.w;
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(p.bias_s + (tile * kTile * kTile + index) * 2);
    x[0] = __uint_as_float(w.x << 16), x[1] = __uint_as_float(w.x & 0xFFFF0000u);
    x[2] = __uint_as_float(w.y << 16), x[3] = __uint_as_float(w.y & 0xFFFF0000u);
  }
  return make_uint4(__float_as_uint(x[0] * LOG2E), __float_as_uint(x[1] * LOG2E),
                    __float_as_uint(x[2] * LOG2E), __float_as_uint(x[3] * LOG2E));
}

// The A operands of a warpgroup: Q and dO fragments (kept in shared memory at kD = 64) and the
// fold.
struct Queries {
  u32 q[kInRegisters ? kD / 4 : 1], dout[kInRegisters ? kD / 4 : 1], fold[2];
};

// Four registers per k16 step of the A operand: rows of this warp, 16 channels.
DEV void load_fragments(u32* fragment, u32 tile, int thread) {
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16, byte = lane / 16 * 16;
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    u32 v[4];
    ldmatrix(v, tile + Operand::offset(row, byte + step * 32));
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[4 * step + i] = v[i];
  }
}

DEV void load_queries(Queries& a, u32 mine, int thread) {
  if constexpr (kInRegisters) {
    load_fragments(a.q, mine, thread);
    load_fragments(a.dout, mine + kOperandBytes, thread);
  }
  const u32 fold =
      mine + 2 * kOperandBytes + (thread / 32 * 16 + thread % 32 / 4) * 16 + thread % 4 * 4;
  a.fold[0] = lds32(fold);
  a.fold[1] = lds32(fold + 8 * 16);
}

DEV void product(float (&acc)[32], const u32* fragment, u64 a, u64 b, const u32 (&fold_a)[2],
                 u64 fold_b) {
  if constexpr (kInRegisters) {
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
      wgmma_rs<0>(acc, fragment[4 * step], fragment[4 * step + 1], fragment[4 * step + 2],
                  fragment[4 * step + 3], b + step * Operand::STEP_COLS, step > 0);
    wgmma_rs<0>(acc, fold_a[0], fold_a[1], 0, 0, fold_b, 1);
  } else {
    product_with_fold(acc, a, b, fold_a, fold_b);
  }
}

// S and dP of 64 queries x one half of the keys.
DEV void half_scores(float (&s)[32], float (&dp)[32], u32 stage, int warpgroup, int half,
                     const Queries& a, u64 ones) {
  const u64 operands = Operand::desc(stage), folds = fold_descriptor(stage);
  const u64 q = further(operands, warpgroup * kSliceBytes),
            k = further(operands, (kConsumers + half) * kSliceBytes);
  const u64 fold = further(folds, (kConsumers + half) * kSliceBytes + 2 * kOperandBytes);
  product(s, a.q, q, k, a.fold, fold);
  product(dp, a.dout, further(q, kOperandBytes), further(k, kOperandBytes), a.fold, ones);
}

// sum += P * dP
DEV void accumulate_half(float (&sum)[32], float (&s)[32], const float (&dp)[32], u32 bias,
                         float scale2) {
  probabilities(s, bias, scale2);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] += s[i] * dp[i];
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  const u64 ones = fold_descriptor(smem + kOnes);
  const u32 my_bias = smem + kBias + warpgroup * kHalves * kBiasTile + thread * 16;
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Tiles t = decode_tiles(p, job);
    const int query_tile = t.query_block * kConsumers + warpgroup;
    float sum[kHalves][32];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const i64 tile =
          bias_tile_index(p, t.batch, t.head, query_tile, t.key_block * kHalves + half);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // Each thread keeps its own fragment, so no barrier is needed.
        sts128(my_bias + half * kBiasTile + i * 2048,
               read_bias(p, tile, fragment_index(i, thread)));
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[half][4 * i + e] = 0.0f;
      }
    }
    float s[kHalves][32], dp[kHalves][32];
    Queries a;
    mbar_wait(bars.full(ring.index), ring.parity);
    load_queries(a, smem + ring.index * kStageBytes + warpgroup * kSliceBytes, thread);
    wgmma_fence();
    half_scores(s[0], dp[0], smem + ring.index * kStageBytes, warpgroup, 0, a, ones);
    wgmma_commit();
    wgmma_wait<0>();
    // Each half is computed while the products of the next half run; the last step repeats a
    // product in vain because a product under a condition would serialise all of them.
    for (int slice = t.begin; slice < t.end; ++slice) {
      const u32 current = smem + ring.index * kStageBytes;
      const int this_stage = ring.index;
      wgmma_fence();
      half_scores(s[1], dp[1], current, warpgroup, 1, a, ones);
      wgmma_commit();
      accumulate_half(sum[0], s[0], dp[0], my_bias, p.scale2);
      wgmma_wait<0>();
      u32 next = current;
      ring.advance();
      if (slice + 1 < t.end) {
        release(bars.empty(this_stage), thread);
        next = smem + ring.index * kStageBytes;
        mbar_wait(bars.full(ring.index), ring.parity);
      }
      load_queries(a, next + warpgroup * kSliceBytes, thread);
      wgmma_fence();
      half_scores(s[0], dp[0], next, warpgroup, 0, a, ones);
      wgmma_commit();
      accumulate_half(sum[1], s[1], dp[1], my_bias + kBiasTile, p.scale2);
      wgmma_wait<0>();
    }
    release(bars.empty((ring.index + kStages - 1) % kStages), thread);
    // Slot `job` of the partials holds the four 64 x 64 tiles of the job.
    float* partial = p.dbias_partial +
                     (static_cast<i64>(job) * kConsumers + warpgroup) * kHalves * kTile * kTile;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float4* to = reinterpret_cast<float4*>(partial + half * kTile * kTile) + thread;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        to[i * 128] = make_float4(sum[half][4 * i], sum[half][4 * i + 1], sum[half][4 * i + 2],
                                  sum[half][4 * i + 3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tri_attn_bwd_bias(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kBarriers};
  if (threadIdx.x < kTile) write_ones_row(base + kOnes + threadIdx.x * 16);
  fence_async_shared();  // wgmma reads the ones through the async proxy
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(bars.full(i), 1);
      mbar_init(bars.empty(i), 4 * kConsumers);
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
