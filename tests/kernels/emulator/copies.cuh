// Bulk copies of the emulator. A load runs when it is issued (seed 0: it may overwrite what is still
// read) or at a random later time. A store or reduction reads its source and changes its target as
// late as its thread's waits allow (seed 0), or at random times before; two of them are in no order
// unless a wait lies between. Sources must have been fenced by the threads that wrote them.
#pragma once
#include <random>

namespace emu {

static std::mt19937 random;  // seeded for each block
static bool shuffled;        // by a seed above 0

// Bulk loads that have not arrived.
static std::vector<std::function<void()>> loads;

// A store or reduction on its way.
struct Store {
  unsigned thread;
  long group;  // of its thread
  u32 source;
  std::vector<unsigned char> bytes;
  bool read;
  std::function<void(const std::vector<unsigned char>&)> write;
};
static std::vector<Store> stores;

struct BulkState {
  long committed = 0;  // groups
  u32 fences = 0;      // of the async proxy
};
static std::vector<BulkState> bulk;  // of the threads

// Who wrote each word of shared memory last by an ordinary store, and after how many fences.
struct Writer {
  bool ordinary = false;
  unsigned thread;
  u32 fences;
};
static std::vector<Writer> writers(sizeof smem / 4);

static inline void reset_copies(unsigned threads) {
  loads.clear();
  stores.clear();
  bulk.assign(threads, {});
  std::fill(writers.begin(), writers.end(), Writer{});
}
// An ordinary store to shared memory.
static inline void put(u32 address, const void* from, u32 size) {
  memcpy(at(address), from, size);
  writers[(address - BASE) / 4] = {true, self->id, bulk[self->id].fences};
  if (size > 4)
    for (u32 i = 1; i < size / 4; ++i) writers[(address - BASE) / 4 + i] = writers[(address - BASE) / 4];
}
static inline void arrive(u32 dst, u32 size, const void* from) {
  if (from)
    memcpy(at(dst), from, size);
  else
    memset(at(dst), 0, size);
  writers[(dst - BASE) / 4].ordinary = false;
}

static inline void read_source(Store& store) {
  if (!store.read) memcpy(store.bytes.data(), at(store.source), store.bytes.size());
  store.read = true;
}
static inline void issue(u32 source, u32 size,
                         std::function<void(const std::vector<unsigned char>&)> write) {
  at(source + size - 1);
  for (u32 word = (source - BASE) / 4; word < (source - BASE + size) / 4; ++word) {
    const Writer& w = writers[word];
    if (w.ordinary && bulk[w.thread].fences == w.fences)
      fail("a bulk copy reads what was written without a fence of the async proxy");
  }
  stores.push_back({self->id, bulk[self->id].committed, source, std::vector<unsigned char>(size),
                    false, std::move(write)});
}
// Completes stores that are due, in no useful order: by seed 0 the last ones first.
template <class Due>
static inline void complete(Due due) {
  std::vector<Store> now;
  for (auto& store : stores)
    if (due(store)) now.push_back(std::move(store));
  std::erase_if(stores, due);
  if (shuffled)
    std::shuffle(now.begin(), now.end(), random);
  else
    std::reverse(now.begin(), now.end());
  for (auto& store : now) read_source(store);
  for (auto& store : now) store.write(store.bytes);
}
// Lets some copies go on, at random.
static inline void advance_copies() {
  if (!shuffled) return;
  for (size_t i = 0; i < loads.size();) {
    if (random() % 8) {
      ++i;
      continue;
    }
    const auto load = std::move(loads[i]);
    loads.erase(loads.begin() + i);
    load();
  }
  for (size_t i = 0; i < stores.size();) {
    const u32 choice = random() % 16;
    if (choice == 0) read_source(stores[i]);
    if (choice != 1 || !stores[i].read) {
      ++i;
      continue;
    }
    const Store store = std::move(stores[i]);
    stores.erase(stores.begin() + i);
    store.write(store.bytes);
  }
}
// Lets all loads arrive.
static inline void land_loads() {
  const auto all = std::move(loads);
  loads.clear();
  for (auto& load : all) load();
}
static inline void load_later(std::function<void()> load) {
  if (shuffled)
    loads.push_back(std::move(load));
  else
    load();
}
// What a thread must not leave behind.
static inline void check_sources_read() {
  for (const auto& store : stores)
    if (store.thread == self->id && !store.read)
      fail("a thread ends before a bulk copy has read shared memory");
}

// Calls visit(element's address or null beyond the tensor, its offset in the box) for a box of a
// tensor map whose first element lies at `at`; returns the bytes of the box.
template <int RANK, class Visit>
static inline u32 walk_box(const TensorMap& map, const i64 (&at)[RANK], Visit visit) {
  const u32 size = map.opaque[1];
  if (map.opaque[2] != RANK) fail("rank of a tensor map");
  const u64 *shape = map.opaque + 4, *stride = map.opaque + 9;
  u32 box[5] = {1, 1, 1, 1, 1};
  memcpy(box, map.opaque + 13, 4 * RANK);
  u32 offset = 0;
  u32 i[5] = {};
  for (i[4] = 0; i[4] < box[4]; ++i[4])
    for (i[3] = 0; i[3] < box[3]; ++i[3])
      for (i[2] = 0; i[2] < box[2]; ++i[2])
        for (i[1] = 0; i[1] < box[1]; ++i[1])
          for (i[0] = 0; i[0] < box[0]; ++i[0], offset += size) {
            bool inside = true;
            unsigned char* element = reinterpret_cast<unsigned char*>(map.opaque[0]);
            for (int d = 0; d < RANK; ++d) {
              const i64 c = at[d] + i[d];
              inside &= c >= 0 && c < i64(shape[d]);
              element += c * (d == 0 ? i64(size) : i64(stride[d - 1]));
            }
            visit(inside ? element : nullptr, offset);
          }
  return offset;
}
static inline u32 swizzled(u32 address, const TensorMap& map) {
  const u32 bytes = map.opaque[3];
  return bytes ? address ^ ((address >> 7 & (bytes / 16 - 1)) << 4) : address;
}
static inline void count_down(u32 bar, u32 bytes) {
  Barrier& b = barriers.at(bar);
  b.bytes -= bytes;
  settle(b);
}

}  // namespace emu

template <class... Coordinate>
DEV void tma_load(u32 dst, const TensorMap* map, u32 bar, Coordinate... coordinate) {
  emu::load_later([=, copy = *map] {
    const i64 at[] = {coordinate...};
    const u32 bytes = emu::walk_box(copy, at, [&](const unsigned char* element, u32 offset) {
      emu::arrive(emu::swizzled(dst + offset, copy), copy.opaque[1], element);
    });
    emu::count_down(bar, bytes);
  });
}
// Writes a box; parts outside the tensor are dropped.
template <class... Coordinate>
DEV void tma_store(const TensorMap* map, u32 src, Coordinate... coordinate) {
  u32 bytes = map->opaque[1], box[5];
  memcpy(box, map->opaque + 13, sizeof box);
  for (u32 d = 0; d < sizeof...(Coordinate); ++d) bytes *= box[d];
  emu::issue(src, bytes, [=, copy = *map](const std::vector<unsigned char>& from) {
    const i64 at[] = {coordinate...};
    emu::walk_box(copy, at, [&](unsigned char* element, u32 offset) {
      if (element) memcpy(element, &from[emu::swizzled(src + offset, copy) - src], copy.opaque[1]);
    });
  });
}
DEV void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  if (bytes % 16 || dst % 16 || reinterpret_cast<u64>(src) % 16) emu::fail("bulk_load alignment");
  emu::load_later([=] {
    for (u32 i = 0; i < bytes; i += 4) emu::arrive(dst + i, 4, static_cast<const char*>(src) + i);
    emu::count_down(bar, bytes);
  });
}
DEV void bulk_store(void* dst, u32 src, u32 bytes) {
  emu::issue(src, bytes, [=](const std::vector<unsigned char>& from) {
    memcpy(dst, from.data(), from.size());
  });
}
DEV void bulk_reduce_add_f32(void* dst, u32 src, u32 bytes) {
  emu::issue(src, bytes, [=](const std::vector<unsigned char>& from) {
    const float* x = reinterpret_cast<const float*>(from.data());
    for (size_t i = 0; i < from.size() / 4; ++i) static_cast<float*>(dst)[i] += x[i];
  });
}
DEV void bulk_commit() { ++emu::bulk[emu::self->id].committed; }
template <int Pending>
DEV void bulk_wait_read() {
  const long end = emu::bulk[emu::self->id].committed - Pending;
  for (auto& store : emu::stores)
    if (store.thread == emu::self->id && store.group < end) emu::read_source(store);
}
template <int Pending>
DEV void bulk_wait() {
  const unsigned thread = emu::self->id;
  const long end = emu::bulk[thread].committed - Pending;
  emu::complete([=](const emu::Store& s) { return s.thread == thread && s.group < end; });
}
DEV void fence_async_shared() { ++emu::bulk[emu::self->id].fences; }
