// A block of 64 threads sends tiles to global memory, as a test of the emulator: FAULT leaves out one
// of what the copies need (1 the fence, 2 the wait before the source is written again, 3 the wait
// before a second addition to the same place, 4 the wait before the end).
#include "ptx.cuh"

struct Params {
  float* sums;  // [2, 64]: a store and an addition; three additions
};

extern "C" __global__ void copies_check(const __grid_constant__ Params p) {
  const u32 at = smem_u32(smem) + threadIdx.x * 4;
  const float values[5] = {1.f, 2.f, 1e8f, 1.f, -1e8f};
  for (int i = 0; i < 5; ++i) {
    if (i > 0 && threadIdx.x == 0) {
      if (FAULT == 3)
        bulk_wait_read<0>();
      else if (FAULT != 2)
        bulk_wait<0>();
    }
    named_sync(1, 64);
    sts32f(at, values[i]);
    if (FAULT != 1) fence_async_shared();
    named_sync(1, 64);
    if (threadIdx.x == 0) {
      float* to = p.sums + (i < 2 ? 0 : 64);
      if (i == 0)
        bulk_store(to, smem_u32(smem), 256);
      else
        bulk_reduce_add_f32(to, smem_u32(smem), 256);
      bulk_commit();
    }
  }
  if (FAULT != 4 && threadIdx.x == 0) bulk_wait<0>();
}
