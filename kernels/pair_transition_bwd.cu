// Gradients of pair_transition_fwd, all but those of the weights (sm_90a).
//
//   hidden = rows W_in^T, grad = keep dout W_out           computed again, slice by slice
//   da = grad b silu'(a), db = grad silu(a), product = keep silu(a) b
//   drows = [da | db] W_in
// [da | db] and product go to memory, where the weight gradients, two plain products, take them.
// Each slice: the products of a, b and grad; the activations; drows of the slice, from registers,
// while its tiles go through shared memory to the copy engine. While one warpgroup computes
// activations the other has the tensor cores.
//   warpgroups 0, 1: consumers; warp 8: weights; warp 9: rows and dout
//   smem  kStages x weights | 2 x kBuffers x (rows, dout) | 2 x (da, db, product) | barriers
#include "pair_transition.cuh"

struct Params {
  TensorMap rows, dout, w_in, w_out;
  TensorMap dhidden, product;   // written: bf16 [M, 2 E], [M, E], boxes of 64 x 64
  const unsigned char* keep;    // bool [M]
  unsigned char* drows;         // bf16 [M, C]
  int count, slices, tiles;     // M, E / 64, blocks of 128 rows
};

struct Fragments {  // 64 x 64 values each, as A operand
  u32 da[16], db[16], product[16];
};

// Values 4 q + 2, 4 q + 3 of a fragment belong to the second row of a thread.
DEV void activate(Fragments& f, const float (&hidden)[64], const float (&grad)[32],
                  const bool (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float da[2], db[2], product[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float a = hidden[2 * i + e], b = hidden[32 + 2 * i + e];
      const float open = sigmoid(a), silu = a * open;
      const float g = keep[i % 2] ? grad[2 * i + e] : 0.0f;
      product[e] = keep[i % 2] ? silu * b : 0.0f;
      da[e] = g * b * (open + silu * (1.0f - open));
      db[e] = g * silu;
    }
    f.da[i] = pack_bf16(da[0], da[1]);
    f.db[i] = pack_bf16(db[0], db[1]);
    f.product[i] = pack_bf16(product[0], product[1]);
  }
}

// grad[64 rows x 64 units] = dout . W_out of the slice.
DEV void grad_products(float (&grad)[32], u64 dout, u64 w_out) {
#pragma unroll
  for (int step = 0; step < kC / 16; ++step)
    wgmma_ss<0, 1>(grad, dout + step / 4 * (kTile >> 4) + step % 4 * Operand::STEP_COLS,
                   w_out + step * Operand::STEP_ROWS, step > 0);
}

DEV void drows_products(float (&drows)[kBlocks][32], const Fragments& f, u64 w_in,
                        int accumulate) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const u64 a = w_in + block * (2 * kTile >> 4), b = a + (kTile >> 4);
#pragma unroll
    for (int s = 0; s < 4; ++s)
      wgmma_rs<1>(drows[block], f.da[4 * s], f.da[4 * s + 1], f.da[4 * s + 2], f.da[4 * s + 3],
                  a + s * Operand::STEP_ROWS, accumulate | (s > 0));
#pragma unroll
    for (int s = 0; s < 4; ++s)
      wgmma_rs<1>(drows[block], f.db[4 * s], f.db[4 * s + 1], f.db[4 * s + 2], f.db[4 * s + 3],
                  b + s * Operand::STEP_ROWS, 1);
  }
}

// Writes fragments into a tile of 64 x 64.
DEV void stage(u32 tile, const u32 (&words)[16]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int q = 0; q < 4; ++q)
    stmatrix(tile + Operand::offset(row, 32 * q + lane / 16 * 16), words[4 * q], words[4 * q + 1],
             words[4 * q + 2], words[4 * q + 3]);
}

DEV void store_rows(const Params& p, const float (&drows)[kBlocks][32], int first_row) {
  const int lane = threadIdx.x % 32, row0 = first_row + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + 8 * half;
    if (row >= p.count) continue;
    unsigned char* to = p.drows + (static_cast<i64>(row) * kC + lane % 4 * 2) * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<u32*>(to + 128 * block + 16 * i) =
            pack_bf16(drows[block][4 * i + 2 * half], drows[block][4 * i + 2 * half + 1]);
  }
}

DEV void consume(const Params& p, u32 base, Barriers bars, int group) {
  const u32 staging = base + kAtStaging + 3 * group * kTile;
  const u64 weights = Operand::desc(base);
  const bool leader = threadIdx.x % 128 == 0;
  Ring<kStages> ring;
  Ring<kBuffers> buffer;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int first_row = tile * kBlockRows + 64 * group;
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const bool keep[2] = {row < p.count && p.keep[row], row + 8 < p.count && p.keep[row + 8]};
    const u64 rows = Operand::desc(rows_at(base, group, buffer.index, 0));
    const u64 dout = Operand::desc(rows_at(base, group, buffer.index, 1));
    float drows[kBlocks][32];
    mbar_wait(bars.rows_full(group, buffer.index), buffer.parity);
    for (int slice = 0; slice < p.slices; ++slice, ring.advance()) {
      const u64 w_in = weights + ring.index * (kStage >> 4), w_out = w_in + (kIn >> 4);
      float hidden[64], grad[32];
      Fragments f;
      mbar_wait(bars.full(ring.index), ring.parity);
      wgmma_pin(hidden);
      wgmma_pin(grad);
      wgmma_fence();
      hidden_products(hidden, rows, w_in);
      grad_products(grad, dout, w_out);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(hidden);
      wgmma_pin(grad);
      activate(f, hidden, grad, keep);
      wgmma_pin(f.da);
      wgmma_pin(f.db);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) wgmma_pin(drows[block]);
      wgmma_fence();
      drows_products(drows, f, w_in, slice > 0);
      wgmma_commit();
      if (leader) bulk_wait_read<0>();  // the tiles of the slice before have left
      named_sync(1 + group, 128);
      stage(staging, f.da);
      stage(staging + kTile, f.db);
      stage(staging + 2 * kTile, f.product);
      fence_async_shared();
      named_sync(1 + group, 128);  // all parts of the tiles are there
      if (leader) {
        tma_store(&p.dhidden, staging, 64 * slice, first_row);
        tma_store(&p.dhidden, staging + kTile, 64 * (p.slices + slice), first_row);
        tma_store(&p.product, staging + 2 * kTile, 64 * slice, first_row);
        bulk_commit();
      }
      wgmma_wait<0>();
      wgmma_pin(f.da);
      wgmma_pin(f.db);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) wgmma_pin(drows[block]);
      release(bars.empty(ring.index));
    }
    release(bars.rows_empty(group, buffer.index));
    buffer.advance();
    store_rows(p, drows, first_row);
  }
  if (leader) bulk_wait<0>();  // shared memory stays until it has been read
}

extern "C" __global__ void __launch_bounds__(kBlockThreads, 1)
    pair_transition_bwd(const __grid_constant__ Params p) {
  extern __shared__ unsigned char smem[];
  const u32 base = (smem_u32(smem) + 1023) & ~1023u;
  const Barriers bars{base + kAtBarriers};
  if (threadIdx.x == 0) init_barriers(bars);
  __syncthreads();  // the barriers are ready
  const int group = warpgroup_index();
  if (group < kWarpgroups) {
    reg_alloc<240>();
    consume(p, base, bars, group);
    return;
  }
  reg_dealloc<24>();
  if (threadIdx.x == 128 * kWarpgroups) {
    load_weights(base, bars, &p.w_in, &p.w_out, p.slices, p.tiles);
  } else if (threadIdx.x == 128 * kWarpgroups + 32) {
    const TensorMap* const sources[] = {&p.rows, &p.dout};
    load_rows(base, bars, sources, p.tiles);
  }
}
