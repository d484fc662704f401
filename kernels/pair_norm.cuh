// Rows of the layer norm: kLanes lanes share a row of kChannels, kVectors times eight channels each.
//
// Beside the norm the kernels compute kHeads narrow projections of its result, the biases of the
// triangle attention: a row is then read once for both, and the biases come out head-major.
#pragma once
#include "pair.cuh"

constexpr int kChannels = TPF_CHANNELS;
constexpr int kHeads = TPF_HEADS;  // 0: none
constexpr bool kWide = TPF_WIDE;   // x and dx are fp32, else bf16
static_assert(kChannels % 8 == 0 && kChannels <= 512, "a row is 1 to 64 vectors of eight channels");

DEV constexpr int lanes_for(int vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < 32) lanes *= 2;
  return lanes;
}
constexpr int kLanes = lanes_for(kChannels / 8);
constexpr int kVectors = (kChannels / 8 + kLanes - 1) / kLanes;
constexpr int kPerLane = 8 * kVectors;
constexpr int kHeadSlots = kHeads ? kHeads : 1;
constexpr float kEpsilon = 1e-5f;

// First channel of a lane's vector v; the last vectors of a row may not exist.
DEV int channel_of(int lane, int v) { return (v * kLanes + lane) * 8; }
DEV bool exists(int lane, int v) {
  return kVectors * kLanes * 8 == kChannels || channel_of(lane, v) < kChannels;
}

// A lane's part of a row as it lies in memory; zeros where there is none.
template <bool Wide>
struct RawRow {
  uint4 words[kVectors * (Wide ? 2 : 1)];

  DEV RawRow load(const unsigned char* tensor, i64 row_start, int lane, bool inside) {
    constexpr int kParts = Wide ? 2 : 1;
    RawRow raw;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4* from = reinterpret_cast<const uint4*>(
          tensor + (row_start + channel_of(lane, v)) * (Wide ? 4 : 2));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        raw.words[v * kParts + part] =
            inside && exists(lane, v) ? from[part] : make_uint4(0, 0, 0, 0);
      }
    }
    return raw;
  }
};

DEV void widen(float (&x)[kPerLane], const RawRow<false>& raw) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float eight[8];
    unpack(eight, raw.words[v]);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[8 * v + c] = eight[c];
  }
}
DEV void widen(float (&x)[kPerLane], const RawRow<true>& raw) {
#pragma unroll
  for (int v = 0; v < 2 * kVectors; ++v) {
    const u32 words[4] = {raw.words[v].x, raw.words[v].y, raw.words[v].z, raw.words[v].w};
#pragma unroll
    for (int c = 0; c < 4; ++c) x[4 * v + c] = __uint_as_float(words[c]);
  }
}

template <bool Wide>
DEV void store_row(unsigned char* tensor, i64 row_start, int lane, const float (&x)[kPerLane]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!exists(lane, v)) continue;
    float eight[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) eight[c] = x[8 * v + c];
    const i64 at = row_start + channel_of(lane, v);
    if constexpr (Wide) {
      float4* to = reinterpret_cast<float4*>(tensor + 4 * at);
      to[0] = make_float4(eight[0], eight[1], eight[2], eight[3]);
      to[1] = make_float4(eight[4], eight[5], eight[6], eight[7]);
    } else {
      store8(tensor, at, eight);
    }
  }
}

// A lane's channels of a parameter vector.
DEV void load_parameters(float (&x)[kPerLane], const float* parameters, int lane) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int c = 0; c < 8; ++c)
      x[8 * v + c] = exists(lane, v) ? parameters[channel_of(lane, v) + c] : 0.0f;
}

// Sum over the lanes that share a row, the same in all of them.
DEV float row_sum(float x) {
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Subtracts the mean and divides by the standard deviation; returns 1 / deviation.
DEV float standardise(float (&x)[kPerLane], int lane) {
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) sum += x[c];
  const float mean = row_sum(sum) * (1.0f / kChannels);
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) {
    x[c] = exists(lane, c / 8) ? x[c] - mean : 0.0f;
    squares += x[c] * x[c];
  }
  const float scale = rsqrt_fast(row_sum(squares) * (1.0f / kChannels) + kEpsilon);
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) x[c] *= scale;
  return scale;
}

// Element of head h, row `row` in a head-major tensor [B, kHeads, plane].
DEV i64 head_at(int row, int h, int plane) {
  return static_cast<i64>(row / plane * kHeads + h) * plane + row % plane;
}
