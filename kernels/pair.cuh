// What the memory-bound kernels of the pair block share: eight channels at a time, rows by strides.
//
// A row is one pair (b, i, j), or one token; its channels have unit stride. A thread moves eight
// channels, 16 bytes of bf16, and computes in fp32.
#pragma once
#include "tile.cuh"

constexpr int kThreads = 256;  // of a block of the elementwise kernels

DEV void unpack(float (&x)[8], const uint4& w) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
}
DEV uint4 pack(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}
// Eight bf16 channels of a tensor from element `at` on, a multiple of 8.
DEV void load8(float (&x)[8], const unsigned char* tensor, i64 at) {
  unpack(x, *reinterpret_cast<const uint4*>(tensor + 2 * at));
}
DEV void store8(unsigned char* tensor, i64 at, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(tensor + 2 * at) = pack(x);
}

DEV float sigmoid(float x) { return rcp(1.0f + ex2(-LOG2E * x)); }

// Places of the rows of a tensor [B, I, J, channels], in elements.
struct Rows {
  i64 b, i, j;  // strides
};
DEV i64 row_at(const Rows& stride, u32 row, u32 columns, u32 plane) {  // columns J, plane I * J
  const u32 pair = row % plane;
  return row / plane * stride.b + pair / columns * stride.i + pair % columns * stride.j;
}
