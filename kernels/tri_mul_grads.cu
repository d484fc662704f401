// Weight gradients of the triangle multiplicative update from the partial sums (sm_90a).
//
// A block owns one channel j of [a; b] or of the update: it adds the partials of all blocks in their
// order, completes the rows j of the weight gradients (tri_mul_bwd.cuh), and leaves row j's share of
// the layer norm gradients. The block that comes last adds the shares, in the order of the rows.
//   grid 2 H + C, 288 threads
#include "tri_mul_bwd.cuh"

struct Params {
  const float *in_partial, *out_partial;  // [passes, slots, TEAM * 64, IN_ROW], [slots, .., OUT_ROW]
  const float *value[2], *gate[2];        // linear_a_p, linear_b_p; linear_a_g, linear_b_g
  const float *z, *g;
  const float *in_weight, *in_bias, *out_weight, *out_bias;  // layer norms
  float *d_value[2], *d_gate[2];
  float *d_z, *d_g;
  float *d_in_weight, *d_in_bias, *d_out_weight, *d_out_bias;
  float2 *in_shares, *out_shares;  // [2 H + C, C], [C, H]: of weight and bias
  u32* ticket;                     // blocks that are done
  int in_slots, out_slots;
};

constexpr int ROWS_OUT = 2 * CH + CZ, LONGEST = IN_ROW > OUT_ROW ? IN_ROW : OUT_ROW;

// One product's row: its sums over positions, u and v, its weights and the layer norm before it.
struct Part {
  const float* sums;
  float u, v, factor;
  const float *weights, *norm_weight, *norm_bias;
  float* gradient;

  // Writes gradient element c and returns what it gives to the layer norm's weight and bias.
  __device__ float2 element(int c) const {
    const float centred = factor * (sums[c] - u), total = factor * v;
    gradient[c] = fmaf(norm_weight[c], centred, norm_bias[c] * total);
    return make_float2(weights[c] * centred, weights[c] * total);
  }
};

// Four sums: u and v of an operand in two terms each.
DEV float u_of(const float* terms) { return terms[0] + terms[1]; }
DEV float v_of(const float* terms) { return terms[2] + terms[3]; }

DEV void add_partials(float* sums, const float* from, i64 stride, int slots, int count) {
  for (int i = threadIdx.x; i < count; i += 288) {
    float sum = 0.f;
#pragma unroll 12
    for (int slot = 0; slot < slots; ++slot) sum += from[slot * stride + i];
    sums[i] = sum;
  }
}

DEV void input_row(const Params& p, float* sums, int j) {
  constexpr int UNIT_ROWS = TEAM * 64;
  const i64 pass = static_cast<i64>(j / UNIT_ROWS) * p.in_slots * UNIT_ROWS;
  add_partials(sums, p.in_partial + (pass + j % UNIT_ROWS) * IN_ROW, UNIT_ROWS * IN_ROW, p.in_slots,
               IN_ROW);
  __syncthreads();
  const int branch = j / CH, at = j % CH * CZ;
  const float* terms = sums + 2 * CB * 64;
  const Part value = {sums, u_of(terms), v_of(terms), 1.f, p.value[branch] + at,
                      p.in_weight, p.in_bias, p.d_value[branch] + at};
  const Part gate = {sums + CB * 64, u_of(terms + 4), v_of(terms + 4), -LOG2E, p.gate[branch] + at,
                     p.in_weight, p.in_bias, p.d_gate[branch] + at};
  for (int c = threadIdx.x; c < CZ; c += 288) {
    const float2 a = value.element(c), b = gate.element(c);
    p.in_shares[j * CZ + c] = make_float2(a.x + b.x, a.y + b.y);
  }
}

DEV void output_row(const Params& p, float* sums, int j) {
  add_partials(sums, p.out_partial + j * OUT_ROW, CB * 64 * OUT_ROW, p.out_slots, OUT_ROW);
  __syncthreads();
  const float* terms = sums + (HB + CB) * 64;
  const Part value = {sums, u_of(terms), v_of(terms), 1.f, p.z + j * CH,
                      p.out_weight, p.out_bias, p.d_z + j * CH};
  const Part gate = {sums + HB * 64, u_of(terms + 4), v_of(terms + 4), -LOG2E, p.g + j * CZ,
                     p.in_weight, p.in_bias, p.d_g + j * CZ};
  for (int h = threadIdx.x; h < CH; h += 288) p.out_shares[j * CH + h] = value.element(h);
  for (int c = threadIdx.x; c < CZ; c += 288)
    p.in_shares[(2 * CH + j) * CZ + c] = gate.element(c);
}

DEV void add_shares(const float2* shares, int rows, int channels, int c, float* weight, float* bias) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 16
  for (int j = 0; j < rows; ++j) {
    const float2 share = shares[j * channels + c];
    sum.x += share.x;
    sum.y += share.y;
  }
  weight[c] = sum.x;
  bias[c] = sum.y;
}

extern "C" __global__ void __launch_bounds__(288) tri_mul_grads(const __grid_constant__ Params p) {
  __shared__ float sums[LONGEST];
  __shared__ u32 done;
  const int j = blockIdx.x;
  if (j < 2 * CH) {
    input_row(p, sums, j);
  } else {
    output_row(p, sums, j - 2 * CH);
  }
  __syncthreads();
  if (threadIdx.x == 0) done = take_ticket(p.ticket);
  __syncthreads();
  if (done != ROWS_OUT - 1) return;
  for (int c = threadIdx.x; c < CZ + CH; c += 288) {
    if (c < CZ) {
      add_shares(p.in_shares, ROWS_OUT, CZ, c, p.d_in_weight, p.d_in_bias);
    } else {
      add_shares(p.out_shares, CZ, CH, c - CZ, p.d_out_weight, p.d_out_bias);
    }
  }
}
