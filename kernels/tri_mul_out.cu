// Triangle multiplicative update, output side (sm_90a).
//
//   update = sigmoid(W_g zn) (W_z xn), zn and xn layer norms of z and of x = a b^T (tri_mul.cuh)
//
// A warpgroup owns 64 positions: it takes x (channel-major, transposed by ldmatrix) into registers
// as matrix operand, computes its row statistics, and runs over the 64-channel units of the output:
// two products (z stays in the stage), gate, bulk store. Warpgroups work on different items. A block
// does SLICE units, those whose weights it holds; the blocks of all slices take the same items.
//   warpgroups 0 .. CONSUMERS - 1: consumers; the last: producer
//   smem  weights | STAGES x (z, x) | CONSUMERS x SLICE x output tile | vectors | barriers
// Constants: CZ, CH, SLICE, CONSUMERS, STAGES, SHARED_BYTES.
#include "tri_mul.cuh"

struct Params {
  TensorMap z;    // [B, N, N, C]
  TensorMap x;    // [B, H, N, N]
  TensorMap out;  // [B, N, N, C]
  const unsigned char* packed;
  const float4* z_stats;  // [B, N, pitch] r, -r m, r times the mask (tri_mul.cuh)
  float2* x_stats;        // r, -r m
  Grid grid;
};

constexpr int SLICES = CB / SLICE;
constexpr int STAGE = (CB + HB) * BLOCK;
constexpr int WEIGHTS = SLICE * STAGE, VECTORS = SLICE * 64 * 16;
constexpr int AT_STAGES = WEIGHTS;
constexpr int AT_OUTPUT = AT_STAGES + STAGES * STAGE;
constexpr int AT_VECTORS = AT_OUTPUT + CONSUMERS * SLICE * BLOCK;
constexpr int AT_BARRIERS = AT_VECTORS + VECTORS;
constexpr int SHARED = AT_BARRIERS + 16 * STAGES + 8;
static_assert(SHARED == SHARED_BYTES, "the host counts the same shared memory");
static_assert(STAGES > 0 && STAGES % CONSUMERS == 0, "a stage serves one consumer, lap by lap");
static_assert(CB % SLICE == 0, "whole slices");

struct Barriers {
  u32 base;
  __device__ u32 full(int i) const { return base + 8 * i; }
  __device__ u32 empty(int i) const { return base + 8 * (STAGES + i); }
  __device__ u32 weights() const { return base + 16 * STAGES; }
};

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  const int slice = blockIdx.x % SLICES;
  mbar_expect(bars.weights(), WEIGHTS + VECTORS);
  bulk_load(smem, p.packed + IN_BYTES + slice * WEIGHTS, WEIGHTS, bars.weights());
  bulk_load(smem + AT_VECTORS, p.packed + IN_BYTES + OUT_BYTES + IN_VECTORS + slice * VECTORS,
            VECTORS, bars.weights());
  Ring<STAGES, STAGE> ring(smem + AT_STAGES);
  for (int index = blockIdx.x / SLICES; index < p.grid.tiles; index += gridDim.x / SLICES) {
    const Item item = Item::at(p.grid, index);
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    mbar_expect(bars.full(ring.index), STAGE);
    load_positions(ring.stage, &p.z, bars.full(ring.index), item);
    load_channels(ring.stage + CB * BLOCK, &p.x, bars.full(ring.index), item);
    ring.advance(1);
  }
}

// The rows of a thread: inverse deviation and minus that times the mean, of z and of x.
struct Scales {
  float z[2], z_offset[2], x[2], x_offset[2];
};

// Gated projections of one unit as bf16 fragments.
DEV void gated(u32 (&out)[16], const float (&value)[32], const float (&gate)[32], u32 vectors,
               const Scales& scale) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint4 first = lds128(vectors + 128 * c), second = lds128(vectors + 128 * c + 16);
    const float s_value[2] = {__uint_as_float(first.x), __uint_as_float(second.x)};
    const float t_value[2] = {__uint_as_float(first.y), __uint_as_float(second.y)};
    const float s_gate[2] = {__uint_as_float(first.z), __uint_as_float(second.z)};
    const float t_gate[2] = {__uint_as_float(first.w), __uint_as_float(second.w)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float y[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = 4 * c + 2 * r + j;
        const float v = fmaf(value[i], scale.x[r], fmaf(scale.x_offset[r], s_value[j], t_value[j]));
        const float g = fmaf(gate[i], scale.z[r], fmaf(scale.z_offset[r], s_gate[j], t_gate[j]));
        y[j] = v * sigmoid(g);
      }
      out[2 * c + r] = pack_bf16(y[0], y[1]);
    }
  }
}

// value = x W_z^T and gate = z W_g^T for the 64 channels of a unit.
DEV void products(float (&value)[32], float (&gate)[32], const u32 (&x)[4 * H_STEPS], u64 z,
                  u64 weights) {
#pragma unroll
  for (int q = 0; q < H_STEPS; ++q)
    wgmma_rs<0>(value, x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3],
                weights + channel_step(q), q > 0);
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_ss<0, 0>(gate, z + channel_step(q), weights + (HB * BLOCK >> 4) + channel_step(q), q > 0);
}

// Takes x of an item into registers, rows = positions.
DEV void load_x(u32 (&x)[4 * H_STEPS], u32 tiles, int warp, int lane) {
#pragma unroll
  for (int q = 0; q < H_STEPS; ++q) {
    u32 words[4];
    ldmatrix_trans(words, fragment_trans(tiles, warp, lane, q));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[4 * q + j] = words[j];
  }
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int group) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int row = 16 * warp + lane / 4;
  const u32 vectors = smem + AT_VECTORS + lane % 4 * 32;
  const u32 output = smem + AT_OUTPUT + group * SLICE * BLOCK;
  const u64 weights = Smem::desc(smem);
  Ring<STAGES, STAGE> ring(smem + AT_STAGES);
  for (int i = 0; i < group; ++i) ring.advance(1);
  const int slice = blockIdx.x % SLICES, stride = gridDim.x / SLICES;
  mbar_wait(bars.weights(), 0);
  for (int index = blockIdx.x / SLICES + group * stride; index < p.grid.tiles;
       index += CONSUMERS * stride) {
    const Item item = Item::at(p.grid, index);
    const i64 first = first_position(p.grid, index);
    const int left = positions_left(p.grid, index);
    Scales scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float4 stats = make_float4(1.f, 0.f, 0.f, 0.f);
      if (row + 8 * r < left) stats = p.z_stats[first + row + 8 * r];
      scale.z[r] = stats.x;
      scale.z_offset[r] = stats.y;
    }
    u32 x[4 * H_STEPS];
    mbar_wait(bars.full(ring.index), ring.parity);
    load_x(x, ring.stage + CB * BLOCK, warp, lane);
    const Moments m = moments<H_STEPS>(x, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale.x[r] = m.rstd[r];
      scale.x_offset[r] = -m.rstd[r] * m.mean[r];
      if (slice == 0 && lane % 4 == 0 && row + 8 * r < left)
        p.x_stats[first + row + 8 * r] = make_float2(scale.x[r], scale.x_offset[r]);
    }
#pragma unroll 1
    for (int unit = 0; unit < SLICE; ++unit) {
      float value[32], gate[32];
      u32 out[16];
      const u64 at = weights + unit * (STAGE >> 4);
      wgmma_fence();
      products(value, gate, x, Smem::desc(ring.stage), at);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(value);
      wgmma_pin(gate);
      if (unit == SLICE - 1) arrive_warp(bars.empty(ring.index));
      gated(out, value, gate, vectors + unit * 64 * 16, scale);
      const u32 tile = output + unit * BLOCK;
      if (thread == 0) bulk_wait_read<SLICE - 1>();
      named_sync(1 + group, 128);  // the last store has left this tile
#pragma unroll
      for (int q = 0; q < 4; ++q)
        stmatrix(fragment(tile, warp, lane, q), out[4 * q], out[4 * q + 1], out[4 * q + 2],
                 out[4 * q + 3]);
      fence_async_shared();
      named_sync(1 + group, 128);
      if (thread == 0) {
        tma_store(&p.out, tile, 64 * (slice * SLICE + unit), item.k, item.i, item.b);
        bulk_commit();
      }
    }
    for (int i = 0; i < CONSUMERS; ++i) ring.advance(1);
  }
  if (thread == 0) bulk_wait<0>();
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    tri_mul_out(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const Barriers bars{base + AT_BARRIERS};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(bars.full(i), 1);
      mbar_init(bars.empty(i), 4);
    }
    mbar_init(bars.weights(), 1);
    mbar_init_fence();
  }
  __syncthreads();
  const int group = warpgroup_index();
  if (group == CONSUMERS) {
    reg_dealloc<24>();
    if (threadIdx.x == CONSUMERS * 128) produce(p, base, bars);
  } else {
    reg_alloc<CONSUMERS == 2 ? 240 : 160>();
    consume(p, base, bars, group);
  }
}
