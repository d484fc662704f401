// Runs the kernel KERNEL of the included source KERNEL_SOURCE block by block on fibers.
#include KERNEL_SOURCE

alignas(64) static unsigned char params_storage[sizeof(Params)];

static void enter() {
  KERNEL(*reinterpret_cast<const Params*>(params_storage));
  emu::check_sources_read();
  emu::self->done = true;
  emu::progress();
  emu::leave();
}

// Which warps may run in a sweep: all (seed 0), or random ones that stand still for a random time, so
// that a wait which only luck satisfies fails.
struct Schedule {
  std::vector<int> asleep;  // sweeps
  long calm = -1;           // progress at the last wake; nobody falls asleep before more is made

  explicit Schedule(int warps) : asleep(warps, 0) {}
  bool runs(int warp) {
    if (!emu::shuffled || emu::made == calm) return true;
    if (asleep[warp] > 0) return --asleep[warp], false;
    if (emu::random() % 8 == 0) asleep[warp] = emu::random() % 64;
    return true;
  }
  void wake() {
    std::fill(asleep.begin(), asleep.end(), 0);
    calm = emu::made;
  }
};

// Returns null, or what went wrong. Unwritten shared memory holds NaN.
extern "C" const char* emulate(const void* params, int blocks, int threads, unsigned seed) {
  memcpy(params_storage, params, sizeof(Params));
  emu::error[0] = 0;
  gridDim = {unsigned(blocks), 1, 1};
  blockDim = {unsigned(threads), 1, 1};
  for (int block = 0; block < blocks; ++block) {
    blockIdx = {unsigned(block), 0, 0};
    memset(smem, 0xff, sizeof smem);
    emu::shuffled = seed != 0;
    emu::random.seed(seed + block);
    emu::reset_copies(threads);
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
    Schedule schedule(threads / 32);
    volatile int left = threads;
    while (left > 0) {
      left = 0;
      bool running = true;
      for (auto& f : emu::fibers) {
        if (f.id % 32 == 0) running = schedule.runs(f.id / 32);
        if (f.done) continue;
        ++left;
        if (!running) continue;
        emu::self = &f;
        threadIdx = {f.id, 0, 0};
        swapcontext(&emu::scheduler, &f.context);
        if (emu::error[0]) return emu::error;
      }
      emu::advance_copies();
      if (emu::idle <= 20l * threads) continue;
      if (emu::made != schedule.calm) {
        emu::land_loads();
        schedule.wake();
        emu::idle = 0;
      } else {
        snprintf(emu::error, sizeof emu::error, "block %d: deadlock, %d threads wait", block, left);
        return emu::error;
      }
    }
    emu::complete([](const emu::Store&) { return true; });
  }
  return nullptr;
}
