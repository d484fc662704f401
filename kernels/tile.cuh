// Tiles: matrix descriptors, swizzle, and which element each thread of a fragment holds.
#pragma once

#include "ptx.cuh"

// With EVERY_LANE all lanes arrive at barriers that free memory, not one for all. The order is the
// same, but one that compute-sanitizer's racecheck follows: it does not see that __syncwarp and
// named barriers carry it on to the lane that arrives.
#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif

constexpr float LOG2E = 1.4426950408889634f;
#define INF __int_as_float(0x7f800000)

// Shared-memory tiles are [rows][RowBytes] with RowBytes 32, 64 or 128 and the swizzle of the same
// width, as the copy engine writes a box whose inner extent is RowBytes. Tiles start at multiples
// of 8 * RowBytes (use 1024).
template <int RowBytes>
struct Tile {
  static_assert(RowBytes == 32 || RowBytes == 64 || RowBytes == 128, "swizzle widths");
  static constexpr u64 MODE = RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3;
  static constexpr u32 EIGHT_ROWS = 8 * RowBytes;  // bytes of eight rows

  // Descriptor of the tile at this address. The same one serves both readings:
  //   rows = M or N, columns = K (Trans 0): the next 16 columns lie 32 bytes on;
  //   rows = K, columns = M or N (Trans 1): the next 16 rows lie 2 * EIGHT_ROWS bytes on, and the
  //   columns span one row (RowBytes / 2 values).
  DEV u64 desc(u32 addr) {
    return static_cast<u64>((addr & 0x3ffff) >> 4) | (1ull << 16) |
           (static_cast<u64>(EIGHT_ROWS >> 4) << 32) | (MODE << 62);
  }
  // The address that a descriptor was made of.
  DEV u32 address(u64 desc) { return (static_cast<u32>(desc) & 0xffff) << 4; }
  static constexpr u64 STEP_COLS = 32 >> 4;         // add to a descriptor: 16 columns on
  static constexpr u64 STEP_ROWS = (2 * EIGHT_ROWS) >> 4;  // add to a descriptor: 16 rows on

  // Byte offset of (row, byte column) inside the tile.
  DEV u32 offset(u32 row, u32 byte) {
    const u32 raw = row * RowBytes + byte;
    return raw ^ (((raw >> 7) & (RowBytes / 16 - 1)) << 4);
  }
};

// Accumulator fragments of m64nN: value i of a thread lies in
//   row  16 * warp + lane / 4 + 8 * ((i >> 1) & 1),   column  8 * (i >> 2) + 2 * (lane % 4) + (i & 1).
DEV int frag_row(int lane, int i) { return lane / 4 + 8 * ((i >> 1) & 1); }
DEV int frag_col(int lane, int i) { return 8 * (i >> 2) + 2 * (lane % 4) + (i & 1); }

// Reductions over the four lanes that share a row of a fragment.
DEV float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
DEV float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes 4 words among the 4 lanes of a quad: lane l gets word l of lanes 0..3.
DEV void quad_transpose(u32 (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  u32 a = odd ? w[0] : w[1], b = odd ? w[2] : w[3];
  a = __shfl_xor_sync(0xffffffffu, a, 1);
  b = __shfl_xor_sync(0xffffffffu, b, 1);
  const u32 x0 = odd ? a : w[0], x1 = odd ? w[1] : a;
  const u32 x2 = odd ? b : w[2], x3 = odd ? w[3] : b;
  u32 c = high ? x0 : x2, d = high ? x1 : x3;
  c = __shfl_xor_sync(0xffffffffu, c, 2);
  d = __shfl_xor_sync(0xffffffffu, d, 2);
  w[0] = high ? c : x0;
  w[1] = high ? d : x1;
  w[2] = high ? x2 : c;
  w[3] = high ? x3 : d;
}
