// Triangle multiplicative update, input side: a and b, channel-major (sm_90a).
//
//   a = mask sigmoid(W_ag zn) (W_ap zn), b likewise, zn = layer norm of z (tri_mul.cuh: on raw z)
//
// A warpgroup owns 64 positions: it takes z into registers as matrix operand (and computes the row
// statistics from it), gives the stage back, and then runs over the 64-channel units of [a; b]: two
// products, gate, transposition by stmatrix, bulk store of [channels][positions]. Warpgroups work
// on different items, so products of one run beside the gates of another. A block does SLICE units,
// those whose weights it holds; the blocks of all slices take the same items at the same time.
//   warpgroups 0 .. CONSUMERS - 1: consumers; the last: warp 0 producer, warps 1 .. store the units
//   of one consumer each
//   smem  weights | STAGES x z | CONSUMERS x 2 x output tile | vectors | barriers
// Constants: CZ, CH, SLICE, CONSUMERS, STAGES, SHARED_BYTES.
#include "tri_mul.cuh"

struct Params {
  TensorMap z;   // [B, N, N, C]
  TensorMap ab;  // [2, B, H, N, N]
  const unsigned char* packed;
  float4* stats;  // [B, N, pitch] of z: r, -r m, r times the mask (tri_mul.cuh)
  Mask mask;
  Grid grid;
};

constexpr int SLICES = (UNITS + SLICE - 1) / SLICE;
constexpr int STAGE = CB * BLOCK;
constexpr int WEIGHTS = SLICE * 2 * CB * BLOCK, VECTORS = SLICE * 64 * 16;
constexpr int AT_STAGES = WEIGHTS;
constexpr int AT_OUTPUT = AT_STAGES + STAGES * STAGE;
constexpr int AT_VECTORS = AT_OUTPUT + CONSUMERS * 2 * BLOCK;
constexpr int AT_BARRIERS = AT_VECTORS + VECTORS;
constexpr int SHARED = AT_BARRIERS + 16 * STAGES + 8 + 32 * CONSUMERS;
static_assert(SHARED == SHARED_BYTES, "the host counts the same shared memory");
static_assert(STAGES > 0 && STAGES % CONSUMERS == 0, "a stage serves one consumer, lap by lap");
static_assert(SLICES * SLICE <= PASSES * TEAM || SLICES == 1, "the packed weights have all units");

struct Barriers {
  u32 base;
  __device__ u32 full(int i) const { return base + 8 * i; }
  __device__ u32 empty(int i) const { return base + 8 * (STAGES + i); }
  __device__ u32 weights() const { return base + 16 * STAGES; }
  // Of output tile 0 or 1 of a consumer: it holds a unit; the unit has left.
  __device__ u32 filled(int group, int tile) const { return weights() + 8 + 32 * group + 8 * tile; }
  __device__ u32 freed(int group, int tile) const { return filled(group, tile) + 16; }
};

DEV void produce(const Params& p, u32 smem, Barriers bars) {
  const int slice = blockIdx.x % SLICES;
  mbar_expect(bars.weights(), WEIGHTS + VECTORS);
  bulk_load(smem, p.packed + slice * WEIGHTS, WEIGHTS, bars.weights());
  bulk_load(smem + AT_VECTORS, p.packed + IN_BYTES + OUT_BYTES + slice * VECTORS, VECTORS,
            bars.weights());
  Ring<STAGES, STAGE> ring(smem + AT_STAGES);
  for (int index = blockIdx.x / SLICES; index < p.grid.tiles; index += gridDim.x / SLICES) {
    mbar_wait_idle(bars.empty(ring.index), ring.parity ^ 1);
    mbar_expect(bars.full(ring.index), STAGE);
    load_positions(ring.stage, &p.z, bars.full(ring.index), Item::at(p.grid, index));
    ring.advance(1);
  }
}

// value = z W_p^T and gate = z W_g^T for the 64 channels of a unit.
DEV void products(float (&value)[32], float (&gate)[32], const u32 (&z)[4 * Z_STEPS],
                  u64 weights) {
  wgmma_fence();
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_rs<0>(value, z[4 * q], z[4 * q + 1], z[4 * q + 2], z[4 * q + 3],
                weights + channel_step(q), q > 0);
#pragma unroll
  for (int q = 0; q < Z_STEPS; ++q)
    wgmma_rs<0>(gate, z[4 * q], z[4 * q + 1], z[4 * q + 2], z[4 * q + 3],
                weights + (CB * BLOCK >> 4) + channel_step(q), q > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(value);
  wgmma_pin(gate);
}

// Gated and masked values of one unit as bf16 fragments.
DEV void gated(u32 (&out)[16], const float (&value)[32], const float (&gate)[32], u32 vectors,
               const float (&rstd)[2], const float (&offset)[2], const float (&weight)[2]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint4 first = lds128(vectors + 128 * c), second = lds128(vectors + 128 * c + 16);
    const float s_value[2] = {__uint_as_float(first.x), __uint_as_float(second.x)};
    const float t_value[2] = {__uint_as_float(first.y), __uint_as_float(second.y)};
    const float s_gate[2] = {__uint_as_float(first.z), __uint_as_float(second.z)};
    const float t_gate[2] = {__uint_as_float(first.w), __uint_as_float(second.w)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = 4 * c + 2 * r + j;
        const float v = fmaf(value[i], rstd[r], fmaf(offset[r], s_value[j], t_value[j]));
        const float g = fmaf(gate[i], rstd[r], fmaf(offset[r], s_gate[j], t_gate[j]));
        x[j] = v * weight[r] * sigmoid(g);
      }
      out[2 * c + r] = pack_bf16(x[0], x[1]);
    }
  }
}

// Sends a unit [64 channels][64 positions]; what lies outside a and b is dropped.
DEV void send_unit(const Params& p, u32 tile, int unit, const Item& item) {
#pragma unroll 1
  for (int c = 0; c < 64; c += BOX) {
    const int channel = unit * 64 + c;
    tma_store(&p.ab, tile + c * 128, item.k, item.i, channel % CH, item.b, channel / CH);
  }
  bulk_commit();
}

// Stores the units of a consumer as they come.
DEV void store_units(const Params& p, u32 smem, Barriers bars, int group) {
  const int slice = blockIdx.x % SLICES, stride = gridDim.x / SLICES;
  const u32 output = smem + AT_OUTPUT + group * 2 * BLOCK;
  u32 count = 0;
  for (int index = blockIdx.x / SLICES + group * stride; index < p.grid.tiles;
       index += CONSUMERS * stride) {
    const Item item = Item::at(p.grid, index);
    for (int unit = 0; unit < SLICE; ++unit, ++count) {
      const u32 tile = count & 1;
      mbar_wait_idle(bars.filled(group, tile), count >> 1 & 1);
      send_unit(p, output + tile * BLOCK, slice * SLICE + unit, item);
      bulk_wait_read<0>();
      mbar_arrive(bars.freed(group, tile));
    }
  }
  bulk_wait<0>();
}

DEV void consume(const Params& p, u32 smem, Barriers bars, int group) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int row = 16 * warp + lane / 4;
  const u32 vectors = smem + AT_VECTORS + lane % 4 * 32;
  const u64 weights = Smem::desc(smem);
  const u32 output = smem + AT_OUTPUT + group * 2 * BLOCK;
  u32 count = 0;  // units done
  Ring<STAGES, STAGE> ring(smem + AT_STAGES);
  for (int i = 0; i < group; ++i) ring.advance(1);
  const int slice = blockIdx.x % SLICES, stride = gridDim.x / SLICES;
  mbar_wait(bars.weights(), 0);
  for (int index = blockIdx.x / SLICES + group * stride; index < p.grid.tiles;
       index += CONSUMERS * stride) {
    const Item item = Item::at(p.grid, index);
    float weight[2], offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) weight[r] = mask_at(p.mask, p.grid, item, row + 8 * r);
    u32 z[4 * Z_STEPS];
    mbar_wait(bars.full(ring.index), ring.parity);
#pragma unroll
    for (int q = 0; q < Z_STEPS; ++q) {
      u32 words[4];
      ldmatrix(words, fragment(ring.stage + q / 4 * BLOCK, warp, lane, q % 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) z[4 * q + j] = words[j];
    }
    arrive_warp(bars.empty(ring.index));
    for (int i = 0; i < CONSUMERS; ++i) ring.advance(1);
    const Moments m = moments<Z_STEPS>(z, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      offset[r] = -m.rstd[r] * m.mean[r];
      if (slice == 0 && lane % 4 == 0 && row + 8 * r < positions_left(p.grid, index))
        p.stats[first_position(p.grid, index) + row + 8 * r] =
            make_float4(m.rstd[r], offset[r], m.rstd[r] * weight[r], 0.f);
    }
#pragma unroll 1
    for (int unit = 0; unit < SLICE; ++unit, ++count) {
      float value[32], gate[32];
      u32 out[16];
      products(value, gate, z, weights + unit * (2 * CB * BLOCK >> 4));
      gated(out, value, gate, vectors + unit * 64 * 16, m.rstd, offset, weight);
      const u32 tile = count & 1;
      mbar_wait(bars.freed(group, tile), (count >> 1 & 1) ^ 1);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        stmatrix_trans(fragment_trans(output + tile * BLOCK, warp, lane, q), out[4 * q],
                       out[4 * q + 1], out[4 * q + 2], out[4 * q + 3]);
      fence_async_shared();
      arrive_warp(bars.filled(group, tile));
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    tri_mul_in(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = smem_u32(smem);
  const Barriers bars{base + AT_BARRIERS};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbar_init(bars.full(i), 1);
      mbar_init(bars.empty(i), 4);
    }
    for (int i = 0; i < CONSUMERS; ++i) {
      for (int tile = 0; tile < 2; ++tile) {
        mbar_init(bars.filled(i, tile), 4);
        mbar_init(bars.freed(i, tile), 1);
      }
    }
    mbar_init(bars.weights(), 1);
    mbar_init_fence();
  }
  __syncthreads();
  const int group = warpgroup_index();
  if (group == CONSUMERS) {
    reg_dealloc<24>();
    const int warp = threadIdx.x / 32 % 4;
    if (threadIdx.x == CONSUMERS * 128) produce(p, base, bars);
    if (threadIdx.x % 32 == 0 && warp > 0 && warp <= CONSUMERS)
      store_units(p, base, bars, warp - 1);
  } else {
    reg_alloc<CONSUMERS == 2 ? 240 : 160>();
    consume(p, base, bars, group);
  }
}
