// Triangle multiplicative update, backward of the output side (sm_90a).
//
// From the gradient of the update it recomputes gate and projection, forms their gradients d, and
// gives dx (channel-major), the carry (the output gate's part of dz by tri_mul_bwd.cuh, bf16, in
// dz's place) and the sums for the gradients of linear_z and linear_g.
//
// A team of CB warpgroups shares the 64 positions of an item; each owns 64 channels of the update:
//   1. value, gate [channels, positions] = W_z' x, W_g' z^T   tensor cores
//   2. d of both, from the update's gradient (transposed by ldmatrix): to registers and to the stage
//   3. weight gradient sums += d x, d z                       A from registers
// and the members take turns to finish an item, while the others go on to the next:
//   4. D [positions, H] = sum over all channels d W_z', layer norm gradient -> dx (transposed)
//   5. carry [positions, C] = sum over all channels d W_g'
//   warpgroups 0, 1: consumers (two teams of one if C <= 64); warpgroup 2: warp 0 bulk loads,
//   warp 1 bulk stores, warps 2, 3 row statistics
//   smem  weights | STAGES x (x, z, dout -> d of projections -> dx, d of gates -> carry, terms and
//   pairs of x and z) | vectors | barriers
// Constants: CZ, CH, STAGES, SUMS (whether weights are trained), SHARED_BYTES.
#include "tri_mul_bwd.cuh"

struct Params {
  TensorMap z;      // [B, N, N, C]
  TensorMap x;      // [B, H, N, N]
  TensorMap dout;   // [B, N, N, C]
  TensorMap dx;     // [B, H, N, N]
  TensorMap carry;  // [B, N, N, C]
  const unsigned char* packed;
  const float4* z_stats;  // [B, N, pitch]
  const float2* x_stats;
  float* partial;  // [slots, CB * 64, OUT_ROW]
  u32* ticket;     // set to 0 for tri_mul_grads
  Grid grid;
};

constexpr int MEMBERS = CB, TEAMS = CONSUMERS / MEMBERS;
constexpr int D_BLOCKS = CB > HB ? CB : HB;
constexpr int X = 0, Z = HB * BLOCK, D_VALUE = Z + CB * BLOCK, D_GATE = D_VALUE + D_BLOCKS * BLOCK;
constexpr int X_TERMS = D_GATE + CB * BLOCK, Z_TERMS = X_TERMS + 2 * TERMS;
constexpr int X_PAIRS = Z_TERMS + 2 * TERMS, Z_PAIRS = X_PAIRS + PAIRS;
constexpr int STAGE = Z_PAIRS + PAIRS;
constexpr int AT_STAGES = OUT_BYTES;
constexpr int AT_VECTORS = AT_STAGES + STAGES * STAGE;
constexpr int AT_BARRIERS = AT_VECTORS + OUT_VECTORS;
constexpr int SHARED = AT_BARRIERS + 48 * STAGES + 8;
static_assert(SHARED == SHARED_BYTES, "the host counts the same shared memory");
static_assert(STAGES > 0 && STAGES % TEAMS == 0, "a stage serves one team, lap by lap");
static_assert(STAGE % 1024 == 0, "stages keep the swizzle alignment");
using Stages = Ring<STAGES, STAGE>;

using Barriers = BarriersOf<STAGES>;

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  mbar_expect(bars.weights(), OUT_BYTES + OUT_VECTORS);
  bulk_load(smem, p.packed + IN_BYTES, OUT_BYTES, bars.weights());
  bulk_load(smem + AT_VECTORS, p.packed + IN_BYTES + OUT_BYTES + IN_VECTORS, OUT_VECTORS,
            bars.weights());
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    const Item item = Item::at(p.grid, index);
    const u32 full = bars.full(ring.index);
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    mbar_expect(full, (HB + CB) * BLOCK);
    load_channels(ring.stage + X, &p.x, full, item);
    load_positions(ring.stage + Z, &p.z, full, item);
    const u32 late = bars.late(ring.index);
    mbar_wait_idle(bars.free(ring.index), ring.parity ^ 1);
    mbar_expect(late, CB * BLOCK);
    load_positions(ring.stage + D_VALUE, &p.dout, late, item);
    ring.advance(1);
  }
}

DEV void store_results(const Params& p, u32 smem, Barriers bars) {
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    const Item item = Item::at(p.grid, index);
    mbar_wait_idle(bars.done(ring.index), ring.parity);
    for (int h = 0; h < HB; ++h)
      tma_store(&p.dx, ring.stage + D_VALUE + h * BLOCK, item.k, item.i, 64 * h, item.b);
    for (int c = 0; c < CB; ++c)
      tma_store(&p.carry, ring.stage + D_GATE + c * BLOCK, 64 * c, item.k, item.i, item.b);
    bulk_commit();
    bulk_wait_read<0>();
    mbar_arrive(bars.free(ring.index));
    ring.advance(1);
  }
  bulk_wait<0>();
}

DEV void prepare_positions(const Params& p, u32 smem, Barriers bars, int pos) {
  for (int i = 0; i < STAGES; ++i) {
    clear_terms(smem + AT_STAGES + i * STAGE + X_TERMS, pos);
    clear_terms(smem + AT_STAGES + i * STAGE + Z_TERMS, pos);
  }
  Stages ring(smem + AT_STAGES);
  for (int index = blockIdx.x; index < p.grid.tiles; index += gridDim.x) {
    float2 x = make_float2(1.f, 0.f), z = x;
    if (pos < positions_left(p.grid, index)) {
      const i64 at = first_position(p.grid, index) + pos;
      x = p.x_stats[at];
      z = *reinterpret_cast<const float2*>(p.z_stats + at);
    }
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    write_position(ring.stage + X_TERMS, ring.stage + X_PAIRS, pos, x.x, x.y);
    write_position(ring.stage + Z_TERMS, ring.stage + Z_PAIRS, pos, z.x, z.y);
    fence_async_shared();
    arrive_warp(bars.full(ring.index));
    ring.advance(1);
  }
}

struct Sums {
  float value[HB * 32], gate[CB * 32];
  float terms[4];
};

// A thread's place, read when needed: registers are scarce.
struct Worker {
  int group, unit, warp, lane;

  DEV Worker now() {
    const int thread = thread_now();
    return {thread / 128, thread / 128 % MEMBERS, thread % 128 / 32, thread % 32};
  }
};

// d of projection and gate, as fragments [channels, positions], from the gradient of the update.
DEV void gradients(u32 (&d_value)[16], u32 (&d_gate)[16], const float (&value)[32],
                   const float (&gate)[32], u32 stage, u32 vectors) {
  const Worker w = Worker::now();
  const u32 tile = stage + D_VALUE + w.unit * BLOCK;
  const u32 rows = vectors + (w.unit * 64 + 16 * w.warp + w.lane / 4) * 16;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    u32 d[4];
    ldmatrix_trans(d, fragment_trans(tile, w.warp, w.lane, q));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = 8 * q + 4 * half + w.lane % 4;
      const uint4 of_x = lds128(stage + X_PAIRS + 16 * pair);
      const uint4 of_z = lds128(stage + Z_PAIRS + 16 * pair);
      const float x_rstd[2] = {__uint_as_float(of_x.x), __uint_as_float(of_x.y)};
      const float x_offset[2] = {__uint_as_float(of_x.z), __uint_as_float(of_x.w)};
      const float z_rstd[2] = {__uint_as_float(of_z.x), __uint_as_float(of_z.y)};
      const float z_offset[2] = {__uint_as_float(of_z.z), __uint_as_float(of_z.w)};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 row = lds128(rows + 128 * e);  // again and again, for want of registers
        const float s_value = __uint_as_float(row.x), t_value = __uint_as_float(row.y);
        const float s_gate = __uint_as_float(row.z), t_gate = __uint_as_float(row.w);
        const u32 word = d[2 * half + e];
        const float dout[2] = {bf16_lo(word), bf16_hi(word)};
        float dv[2], dg[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = 8 * q + 4 * half + 2 * e + j;
          const float v = fmaf(value[i], x_rstd[j], fmaf(x_offset[j], s_value, t_value));
          const float g = sigmoid(fmaf(gate[i], z_rstd[j], fmaf(z_offset[j], s_gate, t_gate)));
          const float dy = dout[j] * g;
          dv[j] = dy * x_rstd[j];
          dg[j] = dy * v * z_rstd[j] * fmaf(g, LN2, -LN2);  // the gate's weights carry -log2(e)
        }
        d_value[4 * q + 2 * half + e] = pack_bf16(dv[0], dv[1]);
        d_gate[4 * q + 2 * half + e] = pack_bf16(dg[0], dg[1]);
      }
    }
    stmatrix_trans(fragment_trans(tile, w.warp, w.lane, q), d_value[4 * q], d_value[4 * q + 1],
                   d_value[4 * q + 2], d_value[4 * q + 3]);
    stmatrix_trans(fragment_trans(tile, w.warp, w.lane, q) + D_GATE - D_VALUE, d_gate[4 * q],
                   d_gate[4 * q + 1], d_gate[4 * q + 2], d_gate[4 * q + 3]);
  }
}

DEV void issue_sums(Sums& sums, const u32 (&d_value)[16], const u32 (&d_gate)[16], u32 stage,
                    int more) {
  const u64 x = Smem::desc(stage + X), z = Smem::desc(stage + Z);
  const u64 x_terms = terms_descriptor(stage + X_TERMS), z_terms = terms_descriptor(stage + Z_TERMS);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int accumulate = more | (q > 0);
#pragma unroll
    for (int h = 0; h < HB; ++h)
      add_product<0>(tile_of(sums.value, h), d_value, q,
                     x + h * (BLOCK >> 4) + q * Smem::STEP_COLS, accumulate);
#pragma unroll
    for (int c = 0; c < CB; ++c)
      add_product<1>(tile_of(sums.gate, c), d_gate, q,
                     z + c * (BLOCK >> 4) + q * Smem::STEP_ROWS, accumulate);
    add_product<0>(sums.terms, d_value, q, x_terms + q * TERMS_STEP, accumulate);
    add_product<0>(sums.terms, d_gate, q, z_terms + (TERMS >> 4) + q * TERMS_STEP, 1);
  }
}

// D of 64 input channels from the d of all channels; weights: their tile for the first 64.
DEV void issue_back(float (&acc)[32], u64 d, u64 weights) {
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q) {
    const u64 w = weights + q / 4 * ((HB + CB) * BLOCK >> 4) + q % 4 * Smem::STEP_ROWS;
    wgmma_ss<0, 1>(acc, d + channel_step(q), w, q > 0);
  }
}

// Turns D into dx.
DEV void norm_gradient(float (&acc)[HB * 32], u32 stage) {
  const Worker w = Worker::now();
  float sum[2] = {0.f, 0.f}, moment[2] = {0.f, 0.f};
#pragma unroll
  for (int q = 0; q < 4 * HB; ++q) {
    u32 x[4];
    __syncwarp();
    ldmatrix_trans(x, fragment_trans(stage + X, w.warp, w.lane, q));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* d = acc + 8 * q + 2 * j;
      sum[j & 1] += d[0] + d[1];
      moment[j & 1] = fmaf(d[0], bf16_lo(x[j]), fmaf(d[1], bf16_hi(x[j]), moment[j & 1]));
    }
  }
  const RowScales scales = RowScales::at(stage + X_PAIRS, 16 * w.warp + w.lane / 4);
  const Correction c = Correction::of(scales, sum, moment, CH);
#pragma unroll
  for (int q = 0; q < 4 * HB; ++q) {
    u32 x[4];
    __syncwarp();
    ldmatrix_trans(x, fragment_trans(stage + X, w.warp, w.lane, q));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* d = acc + 8 * q + 2 * j;
      d[0] = fmaf(-c.slope[j & 1], bf16_lo(x[j]), d[0] - c.shift[j & 1]);
      d[1] = fmaf(-c.slope[j & 1], bf16_hi(x[j]), d[1] - c.shift[j & 1]);
    }
  }
}

DEV void finish(u32 smem, Barriers bars, int n) {
  const int slot = n % STAGES;
  const u32 stage = smem + AT_STAGES + slot * STAGE;
  const u64 weights = Smem::desc(smem);
  mbar_wait(bars.ready(slot), n / STAGES & 1);
  {
    float acc[HB * 32];
    wgmma_fence();
#pragma unroll
    for (int h = 0; h < HB; ++h)
      issue_back(tile_of(acc, h), Smem::desc(stage + D_VALUE), weights + h * (BLOCK >> 4));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
    norm_gradient(acc, stage);
    const Worker w = Worker::now();
    named_sync(1 + w.group, 128);  // all four warps are done with d of the projections
    arrive_warp(bars.empty(slot));
#pragma unroll
    for (int q = 0; q < 4 * HB; ++q) {
      const float* x = acc + 8 * q;
      stmatrix_trans(fragment_trans(stage + D_VALUE, w.warp, w.lane, q), pack_bf16(x[0], x[1]),
                     pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
  }
  float acc[CB * 32];
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < CB; ++c)
    issue_back(tile_of(acc, c), Smem::desc(stage + D_GATE), weights + (HB + c) * (BLOCK >> 4));
  wgmma_commit();
  const Worker w = Worker::now();
  wgmma_wait<0>();
  wgmma_pin(acc);
  named_sync(1 + w.group, 128);  // all four warps are done with d of the gates
#pragma unroll
  for (int q = 0; q < 4 * CB; ++q) {
    const float* x = acc + 8 * q;
    stmatrix(fragment(stage, w.warp, w.lane, q % 4) + D_GATE + q / 4 * BLOCK,
             pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
             pack_bf16(x[6], x[7]));
  }
  fence_async_shared();
  arrive_warp(bars.done(slot));
}

DEV void accumulate(u32 smem, Barriers bars, Sums& sums, int n) {
  u32 d_value[16], d_gate[16];
  float value[32], gate[32];
  const int slot = n % STAGES;
  const u32 stage = smem + AT_STAGES + slot * STAGE;
  const u64 weights = Smem::desc(smem) + Worker::now().unit * ((HB + CB) * BLOCK >> 4);
  mbar_wait(bars.full(slot), n / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int q = 0; q < H_STEPS; ++q)
    wgmma_ss<0, 1>(value, weights + channel_step(q), Smem::desc(stage + X) + q * Smem::STEP_ROWS,
                   q > 0);
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_ss<0, 0>(gate, weights + (HB * BLOCK >> 4) + channel_step(q),
                   Smem::desc(stage + Z) + channel_step(q), q > 0);
  wgmma_commit();
  mbar_wait(bars.late(slot), n / STAGES & 1);
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

// Leaves the sums of a team over its items, if it found one.
DEV void store_partial(const Params& p, Sums& sums, int team, bool found) {
  const Worker w = Worker::now();
  if (!found) {
    clear(sums.value);
    clear(sums.gate);
    clear(sums.terms);
  }
  const i64 row = ((static_cast<i64>(blockIdx.x) * TEAMS + team) * MEMBERS + w.unit) * 64 +
                  16 * w.warp + w.lane / 4;
  float* line = p.partial + row * OUT_ROW + 2 * (w.lane % 4);
  store_sums(line, OUT_ROW, sums.value);
  store_sums(line + HB * 64, OUT_ROW, sums.gate);
  store_terms(line + (HB + CB) * 64, OUT_ROW, sums.terms);
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int group) {
  const int team = group / MEMBERS;
  Sums sums;
  mbar_wait(bars.weights(), 0);
  int n = team;  // items of this block, dealt to the teams in turn
  for (; blockIdx.x + n * gridDim.x < p.grid.tiles; n += TEAMS) {
    accumulate(smem, bars, sums, n);
    if (MEMBERS == 1 || (n + group) % MEMBERS == 0) {
      finish(smem, bars, n);
    } else {
      arrive_warp(bars.empty(n % STAGES));
    }
  }
  if (SUMS) store_partial(p, sums, team, n > team);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    tri_mul_bwd_out(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const Barriers bars{base + AT_BARRIERS};
  if (threadIdx.x == 0) {
    bars.init(MEMBERS);
    if (blockIdx.x == 0) *p.ticket = 0;
  }
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
