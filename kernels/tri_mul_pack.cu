// Packs the weights of a triangle multiplicative update for its kernels (sm_90a).
//
// Every matrix times its layer norm's weight, as bf16 in swizzled 64 x 64 tiles, padded with zeros;
// beside it, for every row, the sums s and t of tri_mul.cuh. One warp a row.
//   grid 32 rows a block, 256 threads
#include "tri_mul.cuh"

struct Params {
  const float* value[2];  // linear_a_p, linear_b_p [H, C]
  const float* gate[2];   // linear_a_g, linear_b_g [H, C]
  const float* z;         // linear_z [C, H]
  const float* g;         // linear_g [C, C]
  const float *in_weight, *in_bias, *out_weight, *out_bias;  // layer norms
  unsigned char* packed;
};

// One row of a matrix: its values (null: padding), where it goes, and its factor.
struct Row {
  const float* from;
  u32 tiles, vector;  // byte offsets: tile of the first 64 columns, (s, t)
  int row;            // in the tile
  bool hidden, gate;  // columns are hidden channels; it is a gate
};

DEV Row row_at(const Params& p, int index) {
  constexpr int IN_ROWS = PASSES * TEAM * 64;
  Row r;
  r.gate = index & 1;
  index >>= 1;
  r.row = index % 64;
  if (index < IN_ROWS) {
    const int branch = index / CH;
    r.from = branch > 1 ? nullptr : (r.gate ? p.gate : p.value)[branch] + index % CH * CZ;
    r.tiles = (index / 64 * 2 + r.gate) * CB * BLOCK;
    r.vector = IN_BYTES + OUT_BYTES + index * 16 + r.gate * 8;
    r.hidden = false;
  } else {
    index -= IN_ROWS;
    r.from = index >= CZ ? nullptr : r.gate ? p.g + index * CZ : p.z + index * CH;
    r.tiles = IN_BYTES + (index / 64 * (HB + CB) + r.gate * HB) * BLOCK;
    r.vector = IN_BYTES + OUT_BYTES + IN_VECTORS + index * 16 + r.gate * 8;
    r.hidden = !r.gate;
  }
  return r;
}

extern "C" __global__ void __launch_bounds__(256) tri_mul_pack(const __grid_constant__ Params p) {
  constexpr int ALL_ROWS = 2 * (PASSES * TEAM + CB) * 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int index = blockIdx.x * 32 + warp; index < min(ALL_ROWS, (int(blockIdx.x) + 1) * 32);
       index += 8) {
    const Row r = row_at(p, index);
    const float* weight = r.hidden ? p.out_weight : p.in_weight;
    const float* bias = r.hidden ? p.out_bias : p.in_bias;
    const float factor = r.gate ? -LOG2E : 1.f;
    const int count = r.hidden ? CH : CZ;
    float s = 0.f, t = 0.f;
    for (int first = 2 * lane; first < (r.hidden ? HB : CB) * 64; first += 64) {
      float w[2] = {0.f, 0.f};
      if (r.from && first < count) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float scaled = factor * r.from[first + j];
          w[j] = scaled * weight[first + j];
          t = fmaf(scaled, bias[first + j], t);
        }
      }
      const u32 word = pack_bf16(w[0], w[1]);
      s += bf16_lo(word) + bf16_hi(word);
      const u32 at = r.tiles + first / 64 * BLOCK + Smem::offset(r.row, first % 64 * 2);
      *reinterpret_cast<u32*>(p.packed + at) = word;
    }
#pragma unroll
    for (int flip = 16; flip > 0; flip >>= 1) {
      s += __shfl_xor_sync(0xffffffffu, s, flip);
      t += __shfl_xor_sync(0xffffffffu, t, flip);
    }
    if (lane == 0) *reinterpret_cast<float2*>(p.packed + r.vector) = make_float2(s, t);
  }
}
