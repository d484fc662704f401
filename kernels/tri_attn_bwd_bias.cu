// dbias of triangle attention: sum over the slices of dS, in registers (sm_90a).
//
// A job is (128 x 128 scores, head, range of slices). Each consumer warpgroup owns 64 queries x 128
// keys, two 64 x 64 halves, and adds P * dP over its slices in ascending order, in fp32 and without
// rounding dS. A job leaves one partial; tri_attn_bwd_reduce adds the few of a tile.
//   producer   warpgroup 2, one thread: per slice Q, dO, query fold, K, V, key fold
//   consumers  warpgroups 0, 1: 240 registers (64 sums, 96 scores, 32 bias as bf16 pairs)
//   smem       kStages x {(Q, dO, fold)[2], (K, V, fold)[2]}, an fp32 bias of the job, ones,
//   barriers
#include "tri_attn_bwd_main.cuh"

constexpr int kStages = TPF_STAGES;
constexpr int kHalves = 2;
constexpr bool kInRegisters = kD < 64;  // fragments of Q and dO
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kStageBytes = (kConsumers + kHalves) * kSliceBytes;
constexpr int kBias = kStages * kStageBytes;
constexpr int kOnes = kBias + (kWideBias ? kConsumers * kHalves * kBiasBytes : 0);
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

// This thread's bias of one half, from global memory (fp32: through its own part of `tile`).
DEV void fetch_bias(BiasTile& bias, const unsigned char* from, u32 tile, int thread) {
  bias.address = tile + thread * 16;
#pragma unroll
  for (int i = 0; i < kBiasBytes / 2048; ++i) {
    const uint4 w = reinterpret_cast<const uint4*>(from)[i * 128 + thread];
    if constexpr (kWideBias) {
      sts128(bias.address + i * 2048, w);
    } else {
      bias.words[4 * i] = w.x, bias.words[4 * i + 1] = w.y;
      bias.words[4 * i + 2] = w.z, bias.words[4 * i + 3] = w.w;
    }
  }
}

// The A operands of a warpgroup for one of the products: fragments and fold (fragments stay in
// shared memory at kD = 64).
struct Rows {
  u32 fragment[kInRegisters ? kD / 4 : 1], fold[2];
};

// Read the rows of a (Q, dO, fold) group; `which` 0 takes Q, 1 takes dO.
DEV void load_rows(Rows& rows, u32 mine, int which, int thread) {
  const int lane = thread % 32, first = thread / 32 * 16;
  if constexpr (kInRegisters) {
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      u32 v[4];
      ldmatrix(v, mine + which * kOperandBytes +
                      Operand::offset(first + lane % 16, lane / 16 * 16 + step * 32));
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.fragment[4 * step + i] = v[i];
    }
  }
  const u32 fold = mine + 2 * kOperandBytes + (first + lane / 4) * 16 + lane % 4 * 4;
  rows.fold[0] = lds32(fold);
  rows.fold[1] = lds32(fold + 8 * 16);
}

// acc[64 queries x 64 keys] = rows . b^T; `a` describes the rows in shared memory.
DEV void product(float (&acc)[32], const Rows& rows, u64 a, u64 b, u64 fold) {
  if constexpr (kInRegisters) {
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const u32* f = rows.fragment + 4 * step;
      wgmma_rs<0>(acc, f[0], f[1], f[2], f[3], b + step * Operand::STEP_COLS, step > 0);
    }
    wgmma_rs<0>(acc, rows.fold[0], rows.fold[1], 0, 0, fold, 1);
  } else {
    product_with_fold(acc, a, b, rows.fold, fold);
  }
}

// Descriptors of a stage: Q of a warpgroup (dO follows it), K of a half (V follows it), its fold.
DEV u64 query_operand(u32 stage, int warpgroup) {
  return further(Operand::desc(stage), warpgroup * kSliceBytes);
}
DEV u64 key_operand(u32 stage, int half) {
  return further(Operand::desc(stage), (kConsumers + half) * kSliceBytes);
}
DEV u64 key_fold(u32 stage, int half) {
  return further(fold_descriptor(stage), (kConsumers + half) * kSliceBytes + 2 * kOperandBytes);
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  const u64 ones = fold_descriptor(smem + kOnes);
  for (int job = blockIdx.x; job < p.jobs; job += gridDim.x) {
    const Tiles t = decode_tiles(p, job);
    BiasTile bias[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const i64 tile = bias_tile_index(p, t.batch, t.head, t.query_block * kConsumers + warpgroup,
                                       t.key_block * kHalves + half);
      fetch_bias(bias[half], p.bias_s + tile * kBiasBytes,
                 smem + kBias + (warpgroup * kHalves + half) * kBiasBytes, thread);
    }
    float sum[kHalves][32], s[kHalves][32], dp[32];
    Rows q, dout;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[half][i] = 0.0f;
    }
    u32 stage = smem + ring.index * kStageBytes;
    mbar_wait(bars.full(ring.index), ring.parity);
    load_rows(q, stage + warpgroup * kSliceBytes, 0, thread);
    wgmma_fence();
    product(s[0], q, query_operand(stage, warpgroup), key_operand(stage, 0), key_fold(stage, 0));
    wgmma_commit();
    wgmma_wait<0>();
    // While a half computes its exponentials, the tensor cores work on its dP and on S of the next
    // half. After the last slice its own stage stands in for the next: a product in vain, because
    // a product under a condition would serialise all of them.
    for (int slice = t.begin; slice < t.end; ++slice) {
      const u32 full = bars.full(ring.index), empty = bars.empty(ring.index), parity = ring.parity;
      u32 next_stage = stage;
      load_rows(dout, stage + warpgroup * kSliceBytes, 1, thread);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (half == kHalves - 1) {
          ring.advance();
          if (slice + 1 < t.end) {
            mbar_wait(bars.full(ring.index), ring.parity);
            next_stage = smem + ring.index * kStageBytes;
          }
          load_rows(q, next_stage + warpgroup * kSliceBytes, 0, thread);
        }
        const u32 then = half == kHalves - 1 ? next_stage : stage;
        const int after = (half + 1) % kHalves;
        wgmma_fence();
        product(dp, dout, further(query_operand(stage, warpgroup), kOperandBytes),
                further(key_operand(stage, half), kOperandBytes), ones);
        product(s[after], q, query_operand(then, warpgroup), key_operand(then, after),
                key_fold(then, after));
        wgmma_commit();
        exponentials(s[half], bias[half], p.scale2);
        keep_order(s[half], full, parity);
        wgmma_wait<0>();
        if (half == kHalves - 1) release(empty, thread);
#pragma unroll
        for (int i = 0; i < 32; ++i) sum[half][i] += s[half][i] * dp[i];
      }
      stage = next_stage;
    }
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
