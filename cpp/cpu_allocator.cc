// SPDX-License-Identifier: Apache-2.0
//
// Counts the bytes behind torch's CPU tensors, exactly and always: parameters,
// gradients, optimizer state, activations, and the workspace inside operators.
//
// An allocator is put in front of c10's own. Every live block stands in a hash
// table from its address to the bytes that were asked for, so that
//   - a freed block gives back exactly what it took,
//   - an address that is not ours is known to be foreign. This matters: oneDNN
//     frees through the deleter of the *current* allocator whatever the former
//     one had handed out, and storages keep the deleter that they were born
//     with.
// Blocks of 64 KiB and more start on a page and span whole pages, which lets
// the disk lane read and write them without a copy; smaller ones come from c10.
//
// Blocks of 1 MiB and more are mapped, and freed ones are kept for the next
// request of their size: training asks for the same sizes in every iteration,
// and a fresh page costs a fault. What is live and what is kept together never
// exceed the largest live bytes so far, so that the memory the system sees
// follows what is counted, which freed blocks in malloc's heap do not. Where the
// kernel lets us, blocks of 2 MiB and more lie on huge pages: fewer faults, and
// a direct transfer has fewer pages to pin.
//
// Once installed it stays: nothing here is ever destroyed, so that a tensor
// that dies after main() still finds it. No Python, no GIL; it includes c10
// only, which compiles in seconds.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kPagedFrom = 64 * 1024;         // smaller blocks: c10's way
constexpr size_t kHuge = 2 * 1024 * 1024;        // a huge page
constexpr size_t kMappedFrom = 1024 * 1024;      // mapped by us, kept when freed
constexpr size_t kMostKept = 1024;               // blocks kept at most
constexpr int kShards = 64;                      // a power of two
constexpr size_t kFirstSlots = 256;              // per shard, a power of two
constexpr uint8_t kPriority = 1;                 // above c10's default of 0

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

// The order is the interface: allocator.py reads these by index.
struct Counters {
  Counter live;     // bytes asked for and not freed yet
  Counter peak;     // largest live since the last reset
  Counter op_peak;  // the same, reset at the start of each operator
};

Counters counters;

void raise_to(std::atomic<int64_t>& peak, int64_t bytes) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < bytes && !peak.compare_exchange_weak(
                             seen, bytes, std::memory_order_relaxed)) {
  }
}

void add_live(int64_t bytes) {
  const int64_t live =
      counters.live.value.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  raise_to(counters.peak.value, live);
  raise_to(counters.op_peak.value, live);
}

// Who has the memory of a block.
enum Owner : uint64_t { kC10 = 0, kMalloc = 1, kMapped = 2 };

// What is known about one live block. An empty slot has address 0.
struct Slot {
  uintptr_t address;
  uint64_t bytes_and_owner;  // bytes asked for, times four, plus the owner

  size_t bytes() const { return bytes_and_owner / 4; }
  Owner owner() const { return static_cast<Owner>(bytes_and_owner & 3); }
};

// One part of the table: open addressing, linear probing. Its memory comes from
// mmap, so that no lock of ours is ever held while malloc takes one of its own.
struct alignas(64) Shard {
  std::mutex mutex;
  Slot* slots;      // null until the first block
  size_t capacity;  // a power of two
  size_t used;
  int64_t inserted;  // so far
};

Shard shards[kShards];

uint64_t hash(uintptr_t address) {
  // Addresses are multiples of 64 or of 4096: multiply, then use the high bits.
  return (static_cast<uint64_t>(address) >> 6) * 0x9e3779b97f4a7c15ULL;
}

Shard& shard_of(uintptr_t address) {
  return shards[hash(address) >> 58];
}

size_t home(const Shard& shard, uintptr_t address) {
  return (hash(address) >> 20) & (shard.capacity - 1);
}

size_t find(const Shard& shard, uintptr_t address) {
  size_t i = home(shard, address);
  while (shard.slots[i].address != 0 && shard.slots[i].address != address) {
    i = (i + 1) & (shard.capacity - 1);
  }
  return i;
}

bool grow(Shard& shard) {
  Slot* const old_slots = shard.slots;
  const size_t old_capacity = shard.capacity;
  const size_t capacity = old_slots ? old_capacity * 2 : kFirstSlots;
  void* fresh = mmap(nullptr, capacity * sizeof(Slot), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) {
    return false;
  }
  shard.slots = static_cast<Slot*>(fresh);
  shard.capacity = capacity;
  for (size_t i = 0; i < old_capacity; ++i) {
    if (old_slots[i].address != 0) {
      shard.slots[find(shard, old_slots[i].address)] = old_slots[i];
    }
  }
  if (old_slots) {
    munmap(old_slots, old_capacity * sizeof(Slot));
  }
  return true;
}

// Enters a block. False: there is no memory for a larger table.
bool insert(void* data, size_t bytes, Owner owner) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Shard& shard = shard_of(address);
  std::lock_guard<std::mutex> guard(shard.mutex);
  if (shard.used + 1 > shard.capacity / 4 * 3 && !grow(shard)) {
    return false;
  }
  Slot& slot = shard.slots[find(shard, address)];
  if (slot.address != 0) {
    // The former block here was freed behind our back: it is gone by now.
    counters.live.value.fetch_sub(
        static_cast<int64_t>(slot.bytes()), std::memory_order_relaxed);
    --shard.used;
  }
  slot = {address, bytes * 4 + owner};
  ++shard.used;
  ++shard.inserted;
  return true;
}

// Takes a block out. A slot with address 0: it was not ours.
Slot remove(void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Shard& shard = shard_of(address);
  std::lock_guard<std::mutex> guard(shard.mutex);
  if (!shard.slots) {
    return {0, 0};
  }
  size_t hole = find(shard, address);
  const Slot found = shard.slots[hole];
  if (found.address == 0) {
    return found;
  }
  // Close the hole: move back each later entry of the run that may stand there.
  const size_t mask = shard.capacity - 1;
  for (size_t i = (hole + 1) & mask; shard.slots[i].address != 0;
       i = (i + 1) & mask) {
    const size_t wanted = home(shard, shard.slots[i].address);
    if (((i - wanted) & mask) >= ((i - hole) & mask)) {
      shard.slots[hole] = shard.slots[i];
      hole = i;
    }
  }
  shard.slots[hole] = {0, 0};
  --shard.used;
  return found;
}

Slot look_up(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Shard& shard = shard_of(address);
  std::lock_guard<std::mutex> guard(shard.mutex);
  return shard.slots ? shard.slots[find(shard, address)] : Slot{0, 0};
}

// The variable by which c10 asks for huge pages; here, 0 turns them off.
bool huge_pages_wanted() {
  static const bool wanted = [] {
    const char* text = std::getenv("THP_MEM_ALLOC_ENABLE");
    return !text || *text != '0';
  }();
  return wanted;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

// Freed blocks that wait for the next request of their size.
struct Kept {
  void* data;
  size_t bytes;  // whole pages
};

struct Store {
  std::mutex mutex;
  Kept blocks[kMostKept];  // oldest first
  size_t count = 0;
  int64_t bytes = 0;
  int64_t most = 0;  // largest live bytes since the last trim

  // Gives the oldest blocks back to the system until `limit` bytes are left.
  void shrink(int64_t limit) {
    size_t gone = 0;
    while (gone < count && bytes > limit) {
      bytes -= static_cast<int64_t>(blocks[gone].bytes);
      munmap(blocks[gone].data, blocks[gone].bytes);
      ++gone;
    }
    for (size_t i = gone; gone > 0 && i < count; ++i) {
      blocks[i - gone] = blocks[i];
    }
    count -= gone;
  }

  // The latest kept block of exactly this size; null: there is none.
  void* take(size_t wanted) {
    for (size_t i = count; i-- > 0;) {
      if (blocks[i].bytes == wanted) {
        void* const data = blocks[i].data;
        for (size_t j = i + 1; j < count; ++j) {
          blocks[j - 1] = blocks[j];
        }
        --count;
        bytes -= static_cast<int64_t>(wanted);
        return data;
      }
    }
    return nullptr;
  }
};

Store store;

// Maps whole pages, on huge ones where they fit; null: there is no memory.
void* map_pages(size_t bytes) {
  const bool huge = bytes >= kHuge && huge_pages_wanted();
  const size_t room = huge ? bytes + kHuge - kPage : bytes;
  void* const data = mmap(nullptr, room, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return nullptr;
  }
  if (!huge) {
    return data;
  }
  // The kernel aligns some sizes only: cut off what lies before and behind.
  char* const start = static_cast<char*>(data);
  const size_t before = (kHuge - reinterpret_cast<uintptr_t>(data)) & (kHuge - 1);
  if (before > 0) {
    munmap(start, before);
  }
  if (const size_t behind = room - before - bytes) {
    munmap(start + before + bytes, behind);
  }
#ifdef MADV_HUGEPAGE
  madvise(start + before, bytes, MADV_HUGEPAGE);
#endif
  return start + before;
}

// Maps a block, or takes one that was kept; null: there is no memory.
void* map_block(size_t bytes) {
  const size_t wanted = whole_pages(bytes);
  std::lock_guard<std::mutex> guard(store.mutex);
  const int64_t live = counters.live.value.load(std::memory_order_relaxed) +
                       static_cast<int64_t>(wanted);
  if (live > store.most) {
    store.most = live;
  }
  if (void* const kept = store.take(wanted)) {
    return kept;
  }
  store.shrink(store.most - live);
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (void* const fresh = map_pages(wanted)) {
      return fresh;
    }
    store.shrink(0);
  }
  return nullptr;
}

void unmap_block(void* data, size_t bytes) {
  const size_t whole = whole_pages(bytes);
  std::lock_guard<std::mutex> guard(store.mutex);
  const int64_t live = counters.live.value.load(std::memory_order_relaxed);
  const auto size = static_cast<int64_t>(whole);
  if (live + store.bytes + size > store.most || store.count == kMostKept) {
    store.shrink(store.most - live - size);
    if (live + store.bytes + size > store.most || store.count == kMostKept) {
      munmap(data, whole);
      return;
    }
  }
  store.blocks[store.count++] = {data, whole};
  store.bytes += size;
}

void give_back(void* data, size_t bytes, Owner owner) {
  if (owner == kMapped) {
    unmap_block(data, bytes);
  } else if (owner == kMalloc) {
    std::free(data);
  } else {
    c10::free_cpu(data);
  }
}

// Null where c10 has to do it: small blocks, the debugging flags that fill new
// memory, and no memory left (it words that error as users know it).
void* allocate_pages(size_t bytes, Owner& owner) {
  void* data = nullptr;
  owner = kC10;
  if (bytes < kPagedFrom || bytes > PTRDIFF_MAX - kPage ||
      FLAGS_caffe2_cpu_allocator_do_zero_fill ||
      FLAGS_caffe2_cpu_allocator_do_junk_fill) {
    return nullptr;
  }
  if (bytes >= kMappedFrom) {
    data = map_block(bytes);
    owner = kMapped;
  } else if (posix_memalign(&data, kPage, whole_pages(bytes)) == 0) {
    owner = kMalloc;
  } else {
    data = nullptr;
  }
  if (!data) {
    owner = kC10;
    return nullptr;
  }
  return data;
}

void release(void* data);

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    Owner owner = kC10;
    void* data = allocate_pages(bytes, owner);
    if (!data) {
      try {
        data = c10::alloc_cpu(bytes);
      } catch (const c10::Error&) {
        c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
        throw;
      }
    }
    if (!insert(data, bytes, owner)) {
      give_back(data, bytes, owner);
      TORCH_CHECK(false, "lowtide: can't allocate memory for the table of blocks"
                  " while allocating ", bytes, " bytes");
    }
    add_live(static_cast<int64_t>(bytes));
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

void release(void* data) {
  if (!data) {
    return;
  }
  // Out of the table first: once freed, the address may be handed out again.
  const Slot slot = remove(data);
  if (slot.address != 0) {
    counters.live.value.fetch_sub(
        static_cast<int64_t>(slot.bytes()), std::memory_order_relaxed);
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  give_back(data, slot.bytes(), slot.owner());
}

// A fork must not find a shard locked by a thread that the child lacks.
void lock_all() {
  store.mutex.lock();
  for (Shard& shard : shards) {
    shard.mutex.lock();
  }
}

void unlock_all() {
  for (Shard& shard : shards) {
    shard.mutex.unlock();
  }
  store.mutex.unlock();
}

// glibc maps a large block anew, page fault by page fault, unless it is smaller
// than one that was mapped and freed before. Blocks that start on a page never
// become so by themselves: what is given back lacks what was cut off in front.
// One block of the largest size that counts sets the mark; it is never touched.
void raise_map_threshold() {
  constexpr size_t kLargest = 32 * 1024 * 1024;  // DEFAULT_MMAP_THRESHOLD_MAX
  void* volatile block = std::malloc(kLargest - kPagedFrom);
  std::free(block);
}

CountingAllocator* allocator() {
  static auto* const leaked = new CountingAllocator;  // outlives main()
  return leaked;
}

}  // namespace

extern "C" {

// Puts the allocator in place (once) and returns the counters.
__attribute__((visibility("default"))) void* lowtide_install() {
  static std::once_flag once;
  std::call_once(once, [] {
    raise_map_threshold();
    pthread_atfork(&lock_all, &unlock_all, &unlock_all);
    c10::SetAllocator(c10::DeviceType::CPU, allocator(), kPriority);
  });
  return &counters;
}

// True while torch's CPU allocator is ours.
__attribute__((visibility("default"))) bool lowtide_is_current() {
  return c10::GetAllocator(c10::DeviceType::CPU) == allocator();
}

// Counts bytes that live elsewhere (negative: no longer).
__attribute__((visibility("default"))) void lowtide_adjust(int64_t bytes) {
  add_live(bytes);
}

// Takes over a storage from the time before us and returns its bytes; 0 where
// its memory does not come from c10's CPU allocator, or is ours already. From
// then on its death, and what resize_ does to it, are counted like any other's.
__attribute__((visibility("default"))) int64_t lowtide_adopt(void* storage) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  c10::Allocator* const former = c10::GetDefaultCPUAllocator();
  if (impl->allocator() == former) {
    impl->set_allocator(allocator());  // an empty one may be resized later
  }
  c10::DataPtr& block = impl->_mutable_data_ptr_no_checks();
  void* const data = block.get();
  if (!data || data != block.get_context() ||
      block.get_deleter() != former->raw_deleter()) {
    return 0;
  }
  const size_t bytes = impl->nbytes();
  if (!insert(data, bytes, kC10)) {
    return 0;
  }
  (void)block.compare_exchange_deleter(former->raw_deleter(), &release);
  add_live(static_cast<int64_t>(bytes));
  return static_cast<int64_t>(bytes);
}

// Counts the blocks handed out or adopted so far.
__attribute__((visibility("default"))) int64_t lowtide_blocks() {
  int64_t blocks = 0;
  for (Shard& shard : shards) {
    std::lock_guard<std::mutex> guard(shard.mutex);
    blocks += shard.inserted;
  }
  return blocks;
}

// Bytes asked for by the live block that starts here; -1: not ours.
__attribute__((visibility("default"))) int64_t lowtide_bytes(void* data) {
  const Slot slot = look_up(data);
  return slot.address ? static_cast<int64_t>(slot.bytes()) : -1;
}

// Gives kept blocks back to the system and returns their bytes; from now on as
// much is kept as is live at the most from here.
__attribute__((visibility("default"))) int64_t lowtide_trim() {
  std::lock_guard<std::mutex> guard(store.mutex);
  const int64_t bytes = store.bytes;
  store.shrink(0);
  store.most = counters.live.value.load(std::memory_order_relaxed);
  return bytes;
}

}  // extern "C"
