// CPU stand-in for kernels/ptx.cuh: the same functions, executed by fibers, one for each thread of
// a block. Asynchronous work runs at the moment that exposes most mistakes: bulk copies as copies.cuh
// says, a matrix product when it is waited for (its inputs must still be there, its result is not
// there earlier). A block in which nobody can proceed is reported as a deadlock.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define DEV static inline
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define TPF_TRAP(cond) \
  do {                 \
    if (cond) emu::fail("trap: " #cond); \
  } while (0)

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using std::max;
using std::min;

struct alignas(64) TensorMap {
  u64 opaque[16];  // address, element bytes, rank, swizzle bytes, then shape, strides, box (u32)
};
struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Dim3 {
  unsigned x, y, z;
};

alignas(1024) static unsigned char smem[1 << 18];
static Dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emu {

constexpr int STACK = 1 << 16;
constexpr u32 BASE = 1024;  // address of dynamic shared memory

struct Product {
  std::function<void()> run;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  unsigned id;
  bool done = false;
  std::vector<std::function<void()>> open;               // products since the last commit
  std::vector<std::vector<std::function<void()>>> groups;  // committed, not waited for
};
struct Rendezvous {
  int count = 0, generation = 0;
  u64 slots[2][128][4];
};
struct Barrier {
  u32 arrivals = 0, pending = 0, phase = 0;
  i64 bytes = 0;
};

static std::vector<Fiber> fibers;
static Fiber* self;
static ucontext_t scheduler;
static std::map<u32, Barrier> barriers;
static std::vector<Rendezvous> warps;
static std::map<int, Rendezvous> named;
static Rendezvous block_sync;
static long idle;  // yields in a row without progress
static long made;  // steps of progress
static char error[512];

[[noreturn]] static inline void leave() {
  setcontext(&scheduler);
  abort();
}
static inline void fail(const char* text) {
  if (!error[0]) snprintf(error, sizeof error, "block %u thread %u: %s", blockIdx.x, self->id, text);
  leave();
}
static inline void yield() {
  ++idle;
  swapcontext(&self->context, &scheduler);
}
static inline void progress() { idle = 0, ++made; }

// Gives every participant the values of all; returns the table of slots.
static inline u64 (*exchange(Rendezvous& r, int people, int index, const u64 (&value)[4]))[4] {
  const int mine = r.generation;
  std::copy(value, value + 4, r.slots[mine & 1][index]);
  progress();
  if (++r.count == people) {
    r.count = 0;
    ++r.generation;
  } else {
    while (r.generation == mine) yield();
  }
  return r.slots[mine & 1];
}
static inline int lane() { return self->id % 32; }
static inline Rendezvous& warp() { return warps[self->id / 32]; }
static inline void meet(Rendezvous& r, int people) {
  const int mine = r.generation;
  progress();
  if (++r.count == people) {
    r.count = 0;
    ++r.generation;
  } else {
    while (r.generation == mine) yield();
  }
}
static inline unsigned char* at(u32 address) {
  if (address < BASE || address >= BASE + sizeof smem) fail("shared address out of range");
  return smem + (address - BASE);
}
static inline void settle(Barrier& b) {
  progress();
  if (b.pending == 0 && b.bytes == 0) {
    ++b.phase;
    b.pending = b.arrivals;
  }
}
static inline float bf16(const unsigned char* p) {
  u16 h;
  memcpy(&h, p, 2);
  const u32 w = static_cast<u32>(h) << 16;
  float f;
  memcpy(&f, &w, 4);
  return f;
}
// Element of a matrix operand behind a descriptor; trans: the operand is contiguous along mn.
static inline float element(u64 desc, int mn, int k, bool trans) {
  const u32 start = (desc & 0x3fff) << 4, group = (desc >> 32 & 0x3fff) << 4;
  const int mode = desc >> 62;
  if (mode == 0) {  // no swizzle: rows of 16 bytes, the second eight columns one leading offset on
    if (trans) fail("transposed operand without swizzle");
    const u32 leading = (desc >> 16 & 0x3fff) << 4;
    return bf16(at(start + mn / 8 * group + mn % 8 * 16 + k / 8 * leading + k % 8 * 2));
  }
  const u32 row_bytes = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 0;
  const int row = trans ? k : mn, width = row_bytes / 2, column = trans ? mn % width : k;
  const u32 leading = (desc >> 16 & 0x3fff) << 4;  // to the next columns that a row has no room for
  if (trans && mn >= width && leading < 1024) fail("operand wider than its swizzle row");
  const u32 tile = start + (trans ? mn / width * leading : 0);
  const u32 raw = tile + row / 8 * group + row % 8 * row_bytes + 2 * column;
  return bf16(at(raw ^ ((raw >> 7 & (row_bytes / 16 - 1)) << 4)));
}

}  // namespace emu

// ------------------------------------------------------------------------- CUDA built-ins

static inline float __uint_as_float(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static inline float __int_as_float(int x) { return __uint_as_float(x); }
static inline u32 __float_as_uint(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
static inline int __float_as_int(float x) { return __float_as_uint(x); }
static inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
static inline float atomicAdd(float* p, float x) {
  const float old = *p;
  *p = old + x;
  return old;
}
static inline u32 atomicAdd(u32* p, u32 x) {
  const u32 old = *p;
  *p = old + x;
  return old;
}
static inline void __threadfence() {}
static inline void __syncthreads() { emu::meet(emu::block_sync, blockDim.x); }
static inline void __syncwarp() { emu::meet(emu::warp(), 32); }
static inline void __nanosleep(unsigned) {}
template <class T>
static inline T __shfl_sync(u32, T value, int source) {
  u64 v[4] = {};
  memcpy(v, &value, sizeof value);
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), v);
  T result;
  memcpy(&result, all[source & 31], sizeof result);
  return result;
}
template <class T>
static inline T __shfl_xor_sync(u32 mask, T value, int flip) {
  return __shfl_sync(mask, value, emu::lane() ^ flip);
}
static inline u32 __ballot_sync(u32, bool vote) {
  u64 v[4] = {vote};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), v);
  u32 result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<u32>(all[i][0]) << i;
  return result;
}
static inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
static inline bool __all_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }

// ---------------------------------------------------------------- the functions of ptx.cuh

DEV u32 smem_u32(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) - smem) + emu::BASE;
}

DEV void mbar_init(u32 bar, u32 arrivals) { emu::barriers[bar] = {arrivals, arrivals, 0, 0}; }
DEV void mbar_init_fence() {}
DEV void mbar_arrive(u32 bar) {
  emu::Barrier& b = emu::barriers.at(bar);
  if (b.pending == 0) emu::fail("more arrivals than a barrier expects");
  --b.pending;
  emu::settle(b);
}
DEV void mbar_expect(u32 bar, u32 bytes) {
  emu::barriers.at(bar).bytes += bytes;
  mbar_arrive(bar);
}
DEV bool mbar_try_wait(u32 bar, u32 parity) {
  if ((emu::barriers.at(bar).phase & 1) != parity) return true;
  emu::yield();
  return false;
}
DEV void mbar_wait(u32 bar, u32 parity) {
  while (!mbar_try_wait(bar, parity)) {
  }
  emu::progress();
}
DEV void mbar_wait_idle(u32 bar, u32 parity) { mbar_wait(bar, parity); }

#include "copies.cuh"

template <int Registers>
DEV void reg_alloc() {}
template <int Registers>
DEV void reg_dealloc() {}
DEV void named_sync(int id, int threads) { emu::meet(emu::named[id], threads); }
DEV void named_arrive(int id, int threads) {
  emu::Rendezvous& r = emu::named[id];
  emu::progress();
  if (++r.count < threads) return;
  r.count = 0;
  ++r.generation;
}
DEV bool elect_one() { return emu::lane() == 0; }
DEV int thread_now() { return emu::self->id; }

DEV float ex2(float x) { return exp2f(x); }
DEV float lg2(float x) { return log2f(x); }
DEV float rcp(float x) { return 1.f / x; }
DEV u16 to_bf16(float x) {
  const u32 w = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return static_cast<u16>((w + 0x7fff + (w >> 16 & 1)) >> 16);
}
DEV u32 pack_bf16(float lo, float hi) { return static_cast<u32>(to_bf16(hi)) << 16 | to_bf16(lo); }
DEV float bf16_lo(u32 x) { return __uint_as_float(x << 16); }
DEV float bf16_hi(u32 x) { return __uint_as_float(x & 0xffff0000u); }

template <class T>
static inline T shared_value(u32 addr) {
  T v;
  memcpy(&v, emu::at(addr), sizeof v);
  return v;
}
DEV uint4 lds128(u32 addr) { return shared_value<uint4>(addr); }
DEV u64 lds64(u32 addr) { return shared_value<u64>(addr); }
DEV float lds32f(u32 addr) { return shared_value<float>(addr); }
DEV void sts32(u32 addr, u32 v) { emu::put(addr, &v, sizeof v); }
DEV void ldmatrix(u32 (&v)[4], u32 addr) {
  const u64 mine[4] = {addr};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), mine);
  u32 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = static_cast<u32>(all[8 * i + emu::lane() / 4][0]);
  for (int i = 0; i < 4; ++i) v[i] = shared_value<u32>(rows[i] + emu::lane() % 4 * 4);
}
// The 8x8 tiles as they lie in memory go to all lanes; lane l takes a pair of row l / 4, or, for the
// transposed load, of column l / 4.
DEV void ldmatrix_trans(u32 (&v)[4], u32 addr) {
  const u64 mine[4] = {addr};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), mine);
  u32 rows[4][2];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j)
      rows[i][j] = static_cast<u32>(all[8 * i + emu::lane() % 4 * 2 + j][0]) + emu::lane() / 4 * 2;
  for (int i = 0; i < 4; ++i)
    v[i] = shared_value<u16>(rows[i][0]) | static_cast<u32>(shared_value<u16>(rows[i][1])) << 16;
}
DEV void stmatrix(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  const u64 mine[4] = {addr};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), mine);
  const u32 words[4] = {a, b, c, d};
  u32 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = static_cast<u32>(all[8 * i + emu::lane() / 4][0]);
  for (int i = 0; i < 4; ++i) emu::put(rows[i] + emu::lane() % 4 * 4, words + i, 4);
}
DEV void stmatrix_trans(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  const u64 mine[4] = {addr};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), mine);
  const u32 words[4] = {a, b, c, d};
  u32 rows[4][2];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j)
      rows[i][j] = static_cast<u32>(all[8 * i + emu::lane() % 4 * 2 + j][0]) + emu::lane() / 4 * 2;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      const u16 half = static_cast<u16>(words[i] >> 16 * j);
      emu::put(rows[i][j], &half, 2);
    }
}
DEV void sts128(u32 addr, uint4 v) { emu::put(addr, &v, sizeof v); }
DEV void sts16(u32 addr, u16 v) { emu::put(addr, &v, sizeof v); }
DEV void sts32f(u32 addr, float v) { emu::put(addr, &v, sizeof v); }
DEV float rsqrt_fast(float x) { return 1.f / sqrtf(x); }
DEV u32 take_ticket(u32* counter) { return atomicAdd(counter, 1u); }

DEV void wgmma_fence() {}
DEV void wgmma_commit() {
  emu::self->groups.push_back(std::move(emu::self->open));
  emu::self->open.clear();
}
template <int Pending>
DEV void wgmma_wait() {
  emu::meet(emu::warp(), 32);
  auto& groups = emu::self->groups;
  while (groups.size() > Pending) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  emu::meet(emu::warp(), 32);
}
template <class T, int N>
DEV void wgmma_pin(T (&)[N]) {}

template <int TransA, int TransB, int N>
DEV void wgmma_ss(float (&d)[N], u64 a, u64 b, int accumulate) {
  const int row0 = emu::self->id / 32 % 4 * 16 + emu::lane() / 4, column0 = emu::lane() % 4 * 2;
  float* out = d;
  emu::self->open.push_back([=] {
    for (int i = 0; i < N; ++i) {
      const int row = row0 + 8 * (i >> 1 & 1), column = 8 * (i >> 2) + column0 + (i & 1);
      float sum = accumulate ? out[i] : 0.f;
      for (int k = 0; k < 16; ++k) {
        sum += emu::element(a, row, k, TransA) * emu::element(b, column, k, TransB);
      }
      out[i] = sum;
    }
  });
}
template <int TransB, int N>
DEV void wgmma_rs(float (&d)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
  const u64 mine[4] = {a0, a1, a2, a3};
  auto* all = emu::exchange(emu::warp(), 32, emu::lane(), mine);
  const int quad = emu::lane() / 4 * 4, column0 = emu::lane() % 4 * 2;
  std::vector<float> rows(32);  // [row half][k]
  for (int t = 0; t < 4; ++t) {
    for (int r = 0; r < 4; ++r) {
      const u32 w = static_cast<u32>(all[quad + t][r]);
      const int at = (r & 1) * 16 + (r >> 1) * 8 + 2 * t;
      rows[at] = bf16_lo(w);
      rows[at + 1] = bf16_hi(w);
    }
  }
  float* out = d;
  emu::self->open.push_back([=] {
    for (int i = 0; i < N; ++i) {
      const int column = 8 * (i >> 2) + column0 + (i & 1);
      float sum = accumulate ? out[i] : 0.f;
      for (int k = 0; k < 16; ++k) {
        const float value = rows[(i >> 1 & 1) * 16 + k];
        if (value != 0.f) sum += value * emu::element(b, column, k, TransB);
      }
      out[i] = sum;
    }
  });
}
