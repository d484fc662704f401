// dQ and dbias of triangle attention, query-stationary (sm_90a).
//
// An item is (64 queries, head, group of 2 kG slices); a strip is all items of the same queries,
// and a block has a list of items of few strips. Consumer warpgroup w owns kG of the slices and
// walks the key tiles: S = Q K^T and dP = dO V^T (rows = queries), dQ += dS K with dS from
// registers, and the sum of dS over its slices. Warpgroup 0 hands its sums over through shared
// memory and goes on; warpgroup 1 adds its own and sends them to the block's own copy of the strip
// of dbias [key tiles][64 x 64] in fp32, in L2: one writer, in the order of its items.
// tri_attn_bwd_strips adds the few copies of a strip. dbias never sees dS rounded; with TPF_SPLIT
// neither does dQ, as dS then enters its product as two bf16 numbers.
//   producer   warpgroup 2, one thread: per key tile bias, per step K, V, fold of two slices,
//              Q, dO, fold of a slice of the next item as soon as the last one is done with it
//   consumers  warpgroups 0, 1: 240 registers (kG * kD / 2 + 32 sums, 64 scores, 32 bias)
//   smem       kStages x 2 x {K, V, fold}, kG x 2 x {Q, dO, fold}, 2 x kStaged dQ, bias,
//              exchange of the sums, ones, zeros, barriers
#include "tri_attn_bwd_main.cuh"

constexpr bool kSplit = TPF_SPLIT;
constexpr bool kAhead = TPF_AHEAD;        // S of the next step under the exponentials of this one
constexpr int kBuffers = kAhead ? 2 : 1;    // score tiles
constexpr int kStages = TPF_STAGES;
constexpr int kWaitStep = kG > 2 ? kG - 2 : kG - 1;  // at which the last sums have surely left
constexpr int kStaged = kD == 64 ? 1 : 2;  // tiles of dQ that a warpgroup stores at a time
constexpr int kSliceBytes = 2 * kOperandBytes + kFoldBytes;
constexpr int kPairBytes = kConsumers * kSliceBytes;
constexpr int kSumBytes = kTile * kTile * 4;
constexpr int kResident = kStages * kPairBytes;
constexpr int kStaging = kResident + kG * kPairBytes;
constexpr int kBias = kStaging + kConsumers * kStaged * kOperandBytes;
constexpr int kExchange = kBias + kBiasBytes;
constexpr int kOnes = kExchange + kSumBytes;
constexpr int kZeros = kOnes + kFoldBytes;
constexpr int kBarriers = kZeros + kFoldBytes;
constexpr int kSmemBytes = kBarriers + 16 * (kStages + kG) + 24 + 1024;
static_assert(kWideBias, "the bias comes in fp32");
static_assert(!kAhead || kG % 2 == 0, "score tiles alternate");
static_assert(kG >= 2 && kStages >= 3, "a stage is held for two steps after its first");
static_assert(kSmemBytes <= 232448, "shared memory of one block");

struct Barriers {
  u32 base;
  __device__ u32 full(int stage) const { return base + 8 * stage; }
  __device__ u32 empty(int stage) const { return base + 8 * (kStages + stage); }
  __device__ u32 resident_full(int g) const { return base + 8 * (2 * kStages + g); }
  __device__ u32 resident_empty(int g) const { return base + 8 * (2 * kStages + kG + g); }
  // The sums that were in the exchange have left: it is free again.
  __device__ u32 sent() const { return base + 16 * (kStages + kG); }
  __device__ u32 bias_full() const { return base + 16 * (kStages + kG) + 8; }
  __device__ u32 bias_empty() const { return base + 16 * (kStages + kG) + 16; }
};

struct Item {
  int strip, tile, head, batch, group;
  bool fresh;  // the block's first of its strip
};

DEV Item decode_item(const Params& p, int code, int tiles) {
  Item item;
  item.fresh = code % 2;
  item.strip = code / 2 / p.groups;
  item.group = code / 2 % p.groups;
  item.tile = item.strip % tiles;
  item.head = item.strip / tiles % p.heads;
  item.batch = item.strip / tiles / p.heads;
  return item;
}

// First item of a block; its items end where those of the next block begin.
DEV int first_item(const Params& p, int block) {
  return static_cast<int>(static_cast<i64>(block) * p.jobs / gridDim.x);
}

// Slice g of warpgroup w.
DEV int slice_of(const Item& item, int w, int g) {
  return (item.group * kConsumers + w) * kG + g;
}

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  Ring<kStages> ring;
  u32 resident_parity = 1, bias_parity = 1;
  const int tiles = (p.tokens + kTile - 1) / kTile;
  const i64 dropped_rows = row_fold_index(p, p.batch, 0, 0, 0);  // after all others
  const int end = first_item(p, blockIdx.x + 1);
  for (int index = first_item(p, blockIdx.x); index < end; ++index) {
    const Item item = decode_item(p, p.order[index], tiles);
    for (int tile = 0; tile < tiles; ++tile) {
      mbar_wait(bars.bias_empty(), bias_parity);
      mbar_expect(bars.bias_full(), kBiasBytes);
      bulk_load(smem + kBias,
                p.bias_s +
                    bias_tile_index(p, item.batch, item.head, item.tile, tile) * kBiasBytes,
                kBiasBytes, bars.bias_full());
      bias_parity ^= 1;
      for (int g = 0; g < kG; ++g) {
        if (tile == 0) {
          const u32 full = bars.resident_full(g);
          mbar_wait(bars.resident_empty(g), resident_parity);
          mbar_expect(full, kPairBytes);
          for (int w = 0; w < kConsumers; ++w) {
            const int slice = slice_of(item, w, g);
            // Slices beyond the last have dropped rows: no probability, no gradient.
            const i64 row = slice < p.outer
                                ? row_fold_index(p, item.batch, slice, item.head, item.tile)
                                : dropped_rows;
            load_rows(smem + kResident + g * kPairBytes + w * kSliceBytes, full, &p.q, &p.dout,
                      p.row_fold + row * 16, {item.tile, item.head, slice, item.batch});
          }
        }
        const u32 full = bars.full(ring.index);
        mbar_wait(bars.empty(ring.index), ring.parity ^ 1);
        mbar_expect(full, kPairBytes);
        for (int w = 0; w < kConsumers; ++w) {
          const int slice = slice_of(item, w, g);
          const int inside = min(slice, p.outer - 1);  // TMA clips by itself, bulk copies do not
          load_rows(smem + ring.index * kPairBytes + w * kSliceBytes, full, &p.k, &p.v,
                    p.key_fold + key_fold_index(p, item.batch, inside, tile) * 16,
                    {tile, item.head, slice, item.batch});
        }
        ring.advance();
      }
    }
    resident_parity ^= 1;
  }
}

// Tile `at` of all copies of the strips.
DEV float* sums_of(const Params& p, int at) {
  return p.dbias_partial + static_cast<i64>(at) * kTile * kTile;
}

// Add sums to a tile of the strip, or write them if they are the first there.
DEV void send(float* to, u32 from, int bytes, bool fresh) {
  if (fresh)
    bulk_store(to, from, bytes);
  else
    bulk_reduce_add_f32(to, from, bytes);
  bulk_commit();
}

// Warpgroup 0 hands its sums of a tile over and goes on, as soon as the exchange is free.
DEV void hand_over(const float (&sum)[32], u32 exchange, Barriers bars, u32 parity, int thread) {
  mbar_wait(bars.sent(), parity);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sts128(exchange + thread * 16 + i * 2048,
           make_uint4(__float_as_uint(sum[4 * i]), __float_as_uint(sum[4 * i + 1]),
                      __float_as_uint(sum[4 * i + 2]), __float_as_uint(sum[4 * i + 3])));
  named_arrive(3, 128 * kConsumers);
}

// Warpgroup 1 adds its own and sends the result off to a tile of the strip.
DEV void take_over(const float (&sum)[32], u32 exchange, int thread, float* tile, bool fresh) {
  named_sync(3, 128 * kConsumers);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 at = exchange + thread * 16 + i * 2048;
    const uint4 y = lds128(at);
    sts128(at, make_uint4(__float_as_uint(sum[4 * i] + __uint_as_float(y.x)),
                          __float_as_uint(sum[4 * i + 1] + __uint_as_float(y.y)),
                          __float_as_uint(sum[4 * i + 2] + __uint_as_float(y.z)),
                          __float_as_uint(sum[4 * i + 3] + __uint_as_float(y.w))));
  }
  fence_async_shared();  // the copy below reads through the async proxy
  named_sync(2, 128);
  if (thread == 0) send(tile, exchange, kSumBytes, fresh);
}

// Write dQ of an item through the staging tiles of this warpgroup.
DEV void store_queries(const Params& p, const Item& item, const float (&dq)[kG][kPairs],
                       u32 staging, int warpgroup, int thread) {
#pragma unroll
  for (int first = 0; first < kG; first += kStaged) {
    if (thread == 0) bulk_wait_read<0>();
    named_sync(1 + warpgroup, 128);
#pragma unroll
    for (int i = 0; i < kStaged; ++i)
      if (first + i < kG)
        store_tile(staging + i * kOperandBytes, dq[first + i < kG ? first + i : 0], p.scale,
                   thread);
    fence_async_shared();  // the stores below read through the async proxy
    named_sync(1 + warpgroup, 128);
    if (thread == 0) {
      for (int i = 0; i < kStaged && first + i < kG; ++i)
        tma_store(&p.dq, staging + i * kOperandBytes, 0, item.tile * kTile, item.head,
                  slice_of(item, warpgroup, first + i), item.batch);
      bulk_commit();
    }
  }
}

// Step i = (key tile, slice g). Under the exponentials of S(i) the tensor cores work on dP(i), the
// product with dS of step i - 1 and, if kAhead, S(i + 1). Else this comes as soon as P is consumed,
// under the rounding and summing of dS.
DEV void consume(const Params& p, u32 smem, Barriers bars, int warpgroup, int thread) {
  Ring<kStages> ring;
  u32 item_parity = 0, tile_parity = 0;
  const int tiles = (p.tokens + kTile - 1) / kTile;
  const int end = first_item(p, blockIdx.x + 1);
  const u32 resident = smem + kResident + warpgroup * kSliceBytes;
  const u32 staging = smem + kStaging + warpgroup * kStaged * kOperandBytes;
  const u64 queries = Operand::desc(resident);
  const u64 rows = fold_operand(resident + 2 * kOperandBytes, smem + kZeros);
  const u64 stages = Operand::desc(smem + warpgroup * kSliceBytes);
  const u64 folds = fold_descriptor(smem + warpgroup * kSliceBytes + 2 * kOperandBytes);
  const u64 ones = fold_descriptor(smem + kOnes);
  const u32 never = static_cast<u32>(p.tokens) >> 31;  // 0, but the compiler cannot know
  float s[kBuffers][32], dp[32], sum[32];
  int index = first_item(p, blockIdx.x);
  mbar_wait(bars.resident_full(0), 0);
  mbar_wait(bars.full(0), 0);
  wgmma_fence();
  product_with_fold(s[0], queries, stages, rows, folds);
  wgmma_commit();
  wgmma_wait<0>();
  for (; index < end; ++index) {
    // Where the sums of the first tile go, and whether they are the first there.
    const int code = p.order[index];
    const int first_sum = (blockIdx.x + code / 2 / p.groups) * tiles;
    const bool fresh = code % 2;
    float dq[kG][kPairs];
    u32 gradient[16] = {}, rest[16] = {};
    u64 k = further(stages, ring.index * kPairBytes), last_k = k;
    int last = ring.index;
    for (int tile = 0; tile < tiles; ++tile) {
      const bool last_tile = tile + 1 == tiles;
      WideBias bias;
      mbar_wait(bars.bias_full(), tile_parity);
      load_wide(bias, smem + kBias + thread * 16);
      release(bars.bias_empty(), thread);
#pragma unroll
      for (int g = 0; g < kG; ++g) {
        const int before = (g + kG - 1) % kG, after = (g + 1) % kG;
        const u32 full = bars.full(ring.index), parity = ring.parity;
        const int stage = ring.index;
        const u64 keys = k;
        float (&now)[32] = s[g % kBuffers];
        // The step after the last of an item is the first of the next item; after the last of all,
        // the product works in vain on whatever lies there.
        const auto await_next = [&] {
          ring.advance();
          k = further(stages, ring.index * kPairBytes);
          const bool ends = g == kG - 1 && last_tile;
          if (ends && index + 1 == end) return;
          if (g == kG - 1 ? last_tile : tile == 0)
            mbar_wait(bars.resident_full(after), ends ? item_parity ^ 1 : item_parity);
          mbar_wait(bars.full(ring.index), ring.parity);
        };
        const auto next_scores = [&] {
          product_with_fold(s[(g + 1) % kBuffers], further(queries, after * kPairBytes), k,
                            further_operand(rows, after * kPairBytes),
                            further(folds, ring.index * kPairBytes));
        };
        if constexpr (kAhead) await_next();
        wgmma_fence();
        product_with_fold(dp, further(queries, g * kPairBytes + kOperandBytes),
                          further(keys, kOperandBytes), further_operand(rows, g * kPairBytes),
                          ones);
        accumulate_tokens(dq[before], gradient, last_k, tile);
        if constexpr (kSplit) accumulate_tokens(dq[before], rest, last_k, 1);
        if constexpr (kAhead) next_scores();
        wgmma_commit();
        wide_exponentials(now, bias, p.scale2);
        keep_order(now, full, parity);
        wgmma_wait<0>();
        if (g > 0 || tile > 0) release(bars.empty(last), thread);
        if (last_tile) release(bars.resident_empty(g), thread);
        last = stage;
        last_k = keys;
#pragma unroll
        for (int i = 0; i < 32; ++i) dp[i] *= now[i];
        if constexpr (!kAhead) {
          await_next();
          wgmma_fence();
          next_scores();
          wgmma_commit();
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) sum[i] = g == 0 ? dp[i] : sum[i] + dp[i];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          if constexpr (kSplit)
            split_bf16(dp[2 * i], dp[2 * i + 1], gradient[i], rest[i]);
          else
            gradient[i] = pack_bf16(dp[2 * i], dp[2 * i + 1]);
        }
        if (g == kWaitStep && warpgroup == 1) {
          if (thread == 0) bulk_wait<0>();  // complete: the sums of the next item come after these
          if (EVERY_LANE) named_sync(1 + warpgroup, 128);
          if (EVERY_LANE || thread == 0) mbar_arrive(bars.sent());
        }
        if constexpr (!kAhead) {
          keep_words(kSplit ? rest : gradient, never, full, parity);
          wgmma_wait<0>();
        }
      }
      if (warpgroup == 0)
        hand_over(sum, smem + kExchange, bars, tile_parity, thread);
      else
        take_over(sum, smem + kExchange, thread, sums_of(p, first_sum + tile), fresh);
      tile_parity ^= 1;
    }
    wgmma_fence();
    accumulate_tokens(dq[kG - 1], gradient, last_k, 1);
    if constexpr (kSplit) accumulate_tokens(dq[kG - 1], rest, last_k, 1);
    wgmma_commit();
    wgmma_wait<0>();
    release(bars.empty(last), thread);
    store_queries(p, decode_item(p, p.order[index], tiles), dq, staging, warpgroup, thread);
    item_parity ^= 1;
  }
  if (thread == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    tri_attn_bwd_q_bias(const __grid_constant__ Params p) {
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
      mbar_init(bars.full(i), 1);
      mbar_init(bars.empty(i), kConsumerArrivals);
    }
    for (int g = 0; g < kG; ++g) {
      mbar_init(bars.resident_full(g), 1);
      mbar_init(bars.resident_empty(g), kConsumerArrivals);
    }
    mbar_init(bars.bias_full(), 1);
    mbar_init(bars.bias_empty(), kConsumerArrivals);
    mbar_init(bars.sent(), EVERY_LANE ? 128 : 1);
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
