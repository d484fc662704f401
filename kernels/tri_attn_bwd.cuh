// Data formats of the triangle attention backward: tiles, folds and bias fragments.
//
// A tile is 64 rows (tokens of one slice and head) of kD bf16, one swizzle atom wide, so the same
// descriptor serves it as a K-major operand (contraction over channels) and as an MN-major one
// (contraction over tokens).
//
// Fold: beside its kD channels every row carries eight more. They add, inside the matrix product,
// what the softmax needs per row and per key, so the score loop has no masks and no subtractions:
//   query row  (l0, l1, l2, d0, d1, d2, 1, 0)  l = -lse / scale2, d = -delta, three bf16 terms each
//   key, S     (1,  1,  1,  0,  0,  0,  m, 0)  m = 0, or -huge for a dropped key
//   key, dP    (0,  0,  0,  1,  1,  1,  0, 0)
// The k16 step that multiplies them reads its upper eight channels as zeros.
#pragma once
#include "tile.cuh"

constexpr int kD = TPF_D;                  // padded head width
constexpr bool kWideBias = TPF_WIDE_BIAS;  // bias fragments in fp32, times log2(e) (else bf16)
constexpr int kTile = 64;
constexpr int kRowBytes = 2 * kD;
using Operand = Tile<kRowBytes>;
constexpr int kOperandBytes = kTile * kRowBytes;
constexpr int kFoldBytes = kTile * 16;
constexpr int kBiasBytes = kTile * kTile * (kWideBias ? 4 : 2);
constexpr int kPairs = kD / 2;  // accumulator registers of 64 x kD
static_assert(kD == 16 || kD == 32 || kD == 64, "head width is padded to 16, 32 or 64");

// First of the four consecutive elements, in fragment order, that hold accumulator registers
// 4i .. 4i + 3 of a thread: a thread reads 16 bytes at a time (two such groups of bf16, one of
// fp32).
template <bool kWide = kWideBias>
DEV int fragment_index(int i, int thread) {
  return kWide ? (i * 128 + thread) * 4 : ((i / 2) * 128 + thread) * 8 + i % 2 * 4;
}

// bf16 bits of the fold value that makes every score of a row or key vanish: exp2(-huge) = 0.
DEV u32 dropped(float scale2) { return scale2 > 0 ? 0xF149u : 0x7149u; }

// Write element `at` of the gradient of the bias.
DEV void store_dbias(unsigned char* dbias, i64 at, float x) {
  if constexpr (kWideBias)
    reinterpret_cast<float*>(dbias)[at] = x;
  else
    reinterpret_cast<u16*>(dbias)[at] = to_bf16(x);
}
