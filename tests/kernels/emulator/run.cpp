// Runs the kernel KERNEL of the included source KERNEL_SOURCE block by block on fibers.
#include KERNEL_SOURCE

alignas(64) static unsigned char params_storage[sizeof(Params)];

static void enter() {
  KERNEL(*reinterpret_cast<const Params*>(params_storage));
  emu::self->done = true;
  emu::progress();
  emu::leave();
}

// Returns null, or what went wrong. Unwritten shared memory holds NaN.
extern "C" const char* emulate(const void* params, int blocks, int threads) {
  memcpy(params_storage, params, sizeof(Params));
  emu::error[0] = 0;
  gridDim = {unsigned(blocks), 1, 1};
  blockDim = {unsigned(threads), 1, 1};
  for (int block = 0; block < blocks; ++block) {
    blockIdx = {unsigned(block), 0, 0};
    memset(smem, 0xff, sizeof smem);
    emu::barriers.clear();
    emu::named.clear();
    emu::block_sync = {};
    emu::warps.assign(threads / 32, {});
    emu::fibers.clear();
    emu::fibers.resize(threads);
    for (int i = 0; i < threads; ++i) {
      emu::Fiber& f = emu::fibers[i];
      f.id = i;
      f.stack.resize(emu::STACK);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      makecontext(&f.context, enter, 0);
    }
    emu::idle = 0;
    volatile int left = threads;
    while (left > 0) {
      left = 0;
      for (auto& f : emu::fibers) {
        if (f.done) continue;
        ++left;
        emu::self = &f;
        threadIdx = {f.id, 0, 0};
        swapcontext(&emu::scheduler, &f.context);
        if (emu::error[0]) return emu::error;
      }
      if (emu::idle > 20l * threads) {
        snprintf(emu::error, sizeof emu::error, "block %d: deadlock, %d threads wait", block, left);
        return emu::error;
      }
    }
  }
  return nullptr;
}
