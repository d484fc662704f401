// Triangle multiplicative update, backward of the input side (sm_90a).
//
// One pass over z for TEAM 64-channel units of [a; b]: from da, db it recomputes values and gates,
// forms the gradients d of both projections, adds their part of dz to the carry tensor (in dz's
// place; bf16) and keeps the sums for the weight gradients (tri_mul_bwd.cuh). With LAST the carry is
// complete and becomes dz by the layer norm's gradient.
//
// A team of TEAM warpgroups shares the 64 positions of an item; each owns one unit:
//   1. value, gate [channels, positions] = W' z^T            tensor cores
//   2. d of both, from da or db: to registers and to the stage
//   3. weight gradient sums += d z                            A from registers
// and the members take turns to finish an item, while the others go on to the next:
//   4. D [positions, C] = sum over all units d^T W', add the carry, layer norm gradient, store.
//   warpgroups 0, 1: consumers (two teams of one if TEAM is 1); warpgroup 2: warp 0 bulk loads,
//   warp 1 bulk stores, warps 2, 3 row statistics and mask
//   smem  weights | STAGES x (z, da or db -> d of values, d of gates, carry, terms, pairs, masks) |
//   vectors | barriers
// Constants: CZ, CH, STAGES, LAST, SUMS (whether weights are trained), SHARED_BYTES.
#include "tri_mul_bwd.cuh"

struct Params {
  TensorMap z;      // [B, N, N, C]
  TensorMap d;      // [2, B, H, N, N] da, db
  TensorMap carry;  // [B, N, N, C]
  const unsigned char* packed;
  const float4* stats;  // [B, N, pitch] of z
  float* partial;       // [slots, TEAM * 64, IN_ROW]
  Grid grid;
  int unit;  // first unit of the pass
};

constexpr int TEAMS = CONSUMERS / TEAM;
constexpr int WEIGHTS = TEAM * 2 * CB * BLOCK;
constexpr int Z = 0, D_VALUE = CB * BLOCK, D_GATE = D_VALUE + TEAM * BLOCK;
constexpr int CARRY = D_GATE + TEAM * BLOCK, AT_TERMS = CARRY + CB * BLOCK;
constexpr int AT_PAIRS = AT_TERMS + 2 * TERMS, AT_MASKS = AT_PAIRS + PAIRS;
constexpr int STAGE = AT_PAIRS + 1024;
constexpr int AT_STAGES = WEIGHTS;
constexpr int AT_VECTORS = AT_STAGES + STAGES * STAGE;
constexpr int AT_BARRIERS = AT_VECTORS + TEAM * 64 * 16;
constexpr int SHARED = AT_BARRIERS + 48 * STAGES + 8;
static_assert(SHARED == SHARED_BYTES, "the host counts the same shared memory");
static_assert(STAGES > 0 && STAGES % TEAMS == 0, "a stage serves one team, lap by lap");
static_assert(STAGE % 1024 == 0, "stages keep the swizzle alignment");
using Stages = Ring<STAGES, STAGE>;

using Barriers = BarriersOf<STAGES>;

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  mbar_expect(bars.weights(), WEIGHTS + TEAM * 64 * 16);
  bulk_load(smem, p.packed + static_cast<i64>(p.unit) * (2 * CB * BLOCK), WEIGHTS, bars.weights());
  bulk_load(smem + AT_VECTORS, p.packed + IN_BYTES + OUT_BYTES + p.unit * 64 * 16, TEAM * 64 * 16,
            bars.weights());
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    const Item item = Item::at(p.grid, index);
    const u32 full = bars.full(ring.index);
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    mbar_expect(full, (CB + TEAM) * BLOCK);
    load_positions(ring.stage + Z, &p.z, full, item);
    for (int c = 0; c < TEAM * 64; c += BOX) {
      const int channel = p.unit * 64 + c;
      tma_load(ring.stage + D_VALUE + c * 128, &p.d, full, item.k, item.i, channel % CH, item.b,
               channel / CH);
    }
    const u32 late = bars.late(ring.index);
    mbar_wait_idle(bars.free(ring.index), ring.parity ^ 1);
    mbar_expect(late, CB * BLOCK);
    load_positions(ring.stage + CARRY, &p.carry, late, item);
    ring.advance(1);
  }
}

DEV void store_results(const Params& p, u32 smem, Barriers bars) {
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    mbar_wait_idle(bars.done(ring.index), ring.parity);
    const Item item = Item::at(p.grid, index);
    for (int c = 0; c < CB; ++c)
      tma_store(&p.carry, ring.stage + CARRY + c * BLOCK, 64 * c, item.k, item.i, item.b);
    bulk_commit();
    bulk_wait_read<0>();
    mbar_arrive(bars.free(ring.index));
    ring.advance(1);
  }
  bulk_wait<0>();
}

DEV void prepare_positions(const Params& p, u32 smem, Barriers bars, int pos) {
  for (int i = 0; i < STAGES; ++i) clear_terms(smem + AT_STAGES + i * STAGE + AT_TERMS, pos);
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    float4 stats = make_float4(1.f, 0.f, 0.f, 0.f);
    if (pos < positions_left(p.grid, index)) stats = p.stats[first_position(p.grid, index) + pos];
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    write_position(ring.stage + AT_TERMS, ring.stage + AT_PAIRS, pos, stats.x, stats.y);
    sts32f(ring.stage + AT_MASKS + 4 * pos, stats.z);
    fence_async_shared();
    arrive_warp(bars.full(ring.index));
    ring.advance(1);
  }
}

struct Sums {
  float value[CB * 32], gate[CB * 32];
  float terms[4];
};

// A thread's place, read when needed: registers are scarce.
struct Worker {
  int group, unit, warp, lane;

  DEV Worker now() {
    const int thread = thread_now();
    return {thread / 128, thread / 128 % TEAM, thread % 128 / 32, thread % 32};
  }
};

// d of value and gate, as fragments [channels, positions], from the gradient of the gated value.
DEV void gradients(u32 (&d_value)[16], u32 (&d_gate)[16], const float (&value)[32],
                   const float (&gate)[32], u32 stage, u32 vectors) {
  const Worker w = Worker::now();
  const u32 tile = stage + D_VALUE + w.unit * BLOCK;
  const u32 rows = vectors + (w.unit * 64 + 16 * w.warp + w.lane / 4) * 16;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    u32 d[4];
    ldmatrix(d, fragment(tile, w.warp, w.lane, q));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = 8 * q + 4 * half + w.lane % 4;
      const uint4 scales = lds128(stage + AT_PAIRS + 16 * pair);
      const u64 masks = lds64(stage + AT_MASKS + 8 * pair);
      const float rstd[2] = {__uint_as_float(scales.x), __uint_as_float(scales.y)};
      const float offset[2] = {__uint_as_float(scales.z), __uint_as_float(scales.w)};
      const float kept[2] = {__uint_as_float(static_cast<u32>(masks)),
                             __uint_as_float(static_cast<u32>(masks >> 32))};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 row = lds128(rows + 128 * e);  // again and again, for want of registers
        const float s_value = __uint_as_float(row.x), t_value = __uint_as_float(row.y);
        const float s_gate = __uint_as_float(row.z), t_gate = __uint_as_float(row.w);
        const u32 word = d[2 * half + e];
        const float dy[2] = {bf16_lo(word) * kept[0], bf16_hi(word) * kept[1]};
        float dv[2], dg[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = 8 * q + 4 * half + 2 * e + j;
          const float v = fmaf(value[i], rstd[j], fmaf(offset[j], s_value, t_value));
          const float g = sigmoid(fmaf(gate[i], rstd[j], fmaf(offset[j], s_gate, t_gate)));
          dv[j] = dy[j] * g;
          dg[j] = dv[j] * v * fmaf(g, LN2, -LN2);  // the gate's weights carry -log2(e)
        }
        d_value[4 * q + 2 * half + e] = pack_bf16(dv[0], dv[1]);
        d_gate[4 * q + 2 * half + e] = pack_bf16(dg[0], dg[1]);
      }
    }
    stmatrix(fragment(tile, w.warp, w.lane, q), d_value[4 * q], d_value[4 * q + 1],
             d_value[4 * q + 2], d_value[4 * q + 3]);
    stmatrix(fragment(tile, w.warp, w.lane, q) + TEAM * BLOCK, d_gate[4 * q], d_gate[4 * q + 1],
             d_gate[4 * q + 2], d_gate[4 * q + 3]);
  }
}

DEV void issue_sums(Sums& sums, const u32 (&d_value)[16], const u32 (&d_gate)[16], u32 stage,
                    int more) {
  const u64 z = Smem::desc(stage + Z), terms = terms_descriptor(stage + AT_TERMS);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int accumulate = more | (q > 0);
#pragma unroll
    for (int c = 0; c < CB; ++c) {
      const u64 tile = z + c * (BLOCK >> 4) + q * Smem::STEP_ROWS;
      add_product<1>(tile_of(sums.value, c), d_value, q, tile, accumulate);
      add_product<1>(tile_of(sums.gate, c), d_gate, q, tile, accumulate);
    }
    const u64 columns = terms + q * TERMS_STEP;
    add_product<0>(sums.terms, d_value, q, columns, accumulate);
    add_product<0>(sums.terms, d_gate, q, columns + (TERMS >> 4), 1);
  }
}

// D of the c-th 64 channels of z from the d of all units.
DEV void issue_carry(float (&acc)[32], u64 stage, u64 weights, int c) {
#pragma unroll
  for (int u = 0; u < TEAM; ++u) {
#pragma unroll
    for (int gate = 0; gate < 2; ++gate) {
      const u64 d = stage + ((D_VALUE + (gate * TEAM + u) * BLOCK) >> 4);
      const u64 w = weights + ((2 * u + gate) * CB + c) * (BLOCK >> 4);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        wgmma_ss<1, 1>(acc, d + q * Smem::STEP_ROWS, w + q * Smem::STEP_ROWS, u + gate + q > 0);
    }
  }
}

// Turns D into dz.
DEV void norm_gradient(float (&acc)[CB * 32], u32 stage, const Worker& w) {
  float sum[2] = {0.f, 0.f}, moment[2] = {0.f, 0.f};
#pragma unroll
  for (int q = 0; q < 4 * CB; ++q) {
    u32 z[4];
    __syncwarp();
    ldmatrix(z, fragment(stage, w.warp, w.lane, q % 4) + Z + q / 4 * BLOCK);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* x = acc + 8 * q + 2 * j;
      sum[j & 1] += x[0] + x[1];
      moment[j & 1] = fmaf(x[0], bf16_lo(z[j]), fmaf(x[1], bf16_hi(z[j]), moment[j & 1]));
    }
  }
  const RowScales scales = RowScales::at(stage + AT_PAIRS, 16 * w.warp + w.lane / 4);
  const Correction c = Correction::of(scales, sum, moment, CZ);
#pragma unroll
  for (int q = 0; q < 4 * CB; ++q) {
    u32 z[4];
    __syncwarp();
    ldmatrix(z, fragment(stage, w.warp, w.lane, q % 4) + Z + q / 4 * BLOCK);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* x = acc + 8 * q + 2 * j;
      x[0] = fmaf(-c.slope[j & 1], bf16_lo(z[j]), x[0] - c.shift[j & 1]);
      x[1] = fmaf(-c.slope[j & 1], bf16_hi(z[j]), x[1] - c.shift[j & 1]);
    }
  }
}

// Adds the carry to D; with LAST turns it into dz. Leaves the result in the carry's place.
DEV void complete(float (&acc)[CB * 32], u32 stage, Barriers bars, int n) {
  const Worker w = Worker::now();
  mbar_wait(bars.late(n % STAGES), n / STAGES & 1);
#pragma unroll
  for (int q = 0; q < 4 * CB; ++q) {
    u32 carry[4];
    __syncwarp();
    ldmatrix(carry, fragment(stage, w.warp, w.lane, q % 4) + CARRY + q / 4 * BLOCK);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      acc[8 * q + 2 * j] += bf16_lo(carry[j]);
      acc[8 * q + 2 * j + 1] += bf16_hi(carry[j]);
    }
  }
  if (LAST) norm_gradient(acc, stage, w);
  arrive_warp(bars.empty(n % STAGES));
#pragma unroll
  for (int q = 0; q < 4 * CB; ++q) {
    const float* x = acc + 8 * q;
    stmatrix(fragment(stage, w.warp, w.lane, q % 4) + CARRY + q / 4 * BLOCK, pack_bf16(x[0], x[1]),
             pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
}

DEV void accumulate(u32 smem, Barriers bars, Sums& sums, int n) {
  u32 d_value[16], d_gate[16];
  float value[32], gate[32];
  const int slot = n % STAGES;
  const u32 stage = smem + AT_STAGES + slot * STAGE;
  const u64 weights = Smem::desc(smem) + Worker::now().unit * (2 * CB * BLOCK >> 4);
  mbar_wait(bars.full(slot), n / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_ss<0, 0>(value, weights + channel_step(q), Smem::desc(stage + Z) + channel_step(q), q > 0);
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_ss<0, 0>(gate, weights + (CB * BLOCK >> 4) + channel_step(q),
                   Smem::desc(stage + Z) + channel_step(q), q > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(value);
  wgmma_pin(gate);
  gradients(d_value, d_gate, value, gate, stage, smem + AT_VECTORS);
  fence_async_shared();
  arrive_warp(bars.ready(slot));
  if (!SUMS) return;
  wgmma_fence();
  issue_sums(sums, d_value, d_gate, stage, n >= TEAMS);
  wgmma_commit();
  wgmma_wait<0>();
}

DEV void finish(u32 smem, Barriers bars, int n) {
  const int slot = n % STAGES;
  const u32 stage = smem + AT_STAGES + slot * STAGE;
  float acc[CB * 32];
  mbar_wait(bars.ready(slot), n / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < CB; ++c)
    issue_carry(tile_of(acc, c), Smem::desc(stage), Smem::desc(smem), c);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(acc);
  complete(acc, stage, bars, n);
  fence_async_shared();
  arrive_warp(bars.done(slot));
}

// Leaves the sums of a team over its items, if it found one.
DEV void store_partial(const Params& p, Sums& sums, int team, bool found) {
  const Worker w = Worker::now();
  if (!found) {
    clear(sums.value);
    clear(sums.gate);
    clear(sums.terms);
  }
  const i64 row = ((static_cast<i64>(blockIdx.x) * TEAMS + team) * TEAM + w.unit) * 64 +
                  16 * w.warp + w.lane / 4;
  float* line = p.partial + row * IN_ROW + 2 * (w.lane % 4);
  store_sums(line, IN_ROW, sums.value);
  store_sums(line + CB * 64, IN_ROW, sums.gate);
  store_terms(line + 2 * CB * 64, IN_ROW, sums.terms);
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int group) {
  const int team = group / TEAM;
  Sums sums;
  mbar_wait(bars.weights(), 0);
  int n = team;  // items of this block, dealt to the teams in turn
  for (; blockIdx.x + n * gridDim.x < p.grid.tiles; n += TEAMS) {
    accumulate(smem, bars, sums, n);
    if (TEAM == 1 || (n + group) % TEAM == 0) {
      finish(smem, bars, n);
    } else {
      arrive_warp(bars.empty(n % STAGES));
    }
  }
  if (SUMS) store_partial(p, sums, team, n > team);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    tri_mul_bwd_in(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const Barriers bars{base + AT_BARRIERS};
  if (threadIdx.x == 0) bars.init(TEAM);
  __syncthreads();
  const int group = warpgroup_index();
  if (group == CONSUMERS) {
    reg_dealloc<PRODUCER_REGISTERS>();
    const int thread = threadIdx.x % 128;
    if (thread == 0) produce(p, base, bars);
    if (thread == 32) store_results(p, base, bars);
    if (thread >= 64) prepare_positions(p, base, bars, thread - 64);
  } else {
    reg_alloc<CONSUMER_REGISTERS>();
    consume(p, base, bars, group);
  }
}
