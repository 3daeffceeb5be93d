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
// Blocks of 64 KiB and more lie in an arena of whole pages (arena.h), which lets
// the disk lane read and write them without a copy, keeps freed pages for reuse
// within a limit, and follows plans; smaller ones come from c10. Where the
// kernel lets us the arena lies on huge pages: fewer faults, and a direct
// transfer has fewer pages to pin.
//
// Once installed it stays: nothing here is ever destroyed, so that a tensor
// that dies after main() still finds it. No Python, no GIL; of torch it includes
// c10 only, which compiles in seconds.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "arena.h"
#include "block_log.h"
#include "block_table.h"
#include "counters.h"
#include "machine.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace {

using lowtide::Arena;
using lowtide::ArenaFigures;
using lowtide::BlockLog;
using lowtide::BlockRecord;
using lowtide::BlockTable;
using lowtide::Counters;
using lowtide::Owner;
using lowtide::huge_pages_wanted;
using lowtide::memory_of_machine;
using lowtide::Place;
using lowtide::Slot;
using enum lowtide::Owner;

constexpr size_t kPage = 4096;
constexpr size_t kPagedFrom = 64 * 1024;         // smaller blocks: c10's way
constexpr uint8_t kPriority = 1;                 // above c10's default of 0

Counters counters;
BlockTable table;  // of all but the arena's

// Enters a block. False: there is no memory for a larger table.
bool insert(void* data, size_t bytes, Owner owner, uint64_t record) {
  size_t lost = 0;
  const bool done = table.insert(data, bytes, owner, record, lost);
  counters.drop_live(lost);
  return done;
}

// The thread that runs operators one after the other; others come at any time,
// and what they ask for has no place in that order. Zero: nobody said so far.
std::atomic<uintptr_t> operators_thread{0};

// A number for each living thread: an address of its own.
uintptr_t this_thread() {
  static thread_local char mark;
  return reinterpret_cast<uintptr_t>(&mark);
}

// The operator that runs, -1 on other threads.
int32_t operator_now() {
  const uintptr_t thread = operators_thread.load(std::memory_order_relaxed);
  return thread != 0 && thread != this_thread()
             ? -1
             : static_cast<int32_t>(counters.op.value.load(std::memory_order_relaxed));
}

BlockLog& block_log() {
  static auto& leaked = *new BlockLog;
  return leaked;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

// Addresses are plentiful: room for holes, and for two plans as large as memory.
// Where they are limited (ulimit -v) or none may be had without memory behind
// them, the arena owns nothing and malloc serves.
Arena& arena() {
  static Arena& leaked = [] () -> Arena& {
    auto* fresh = new Arena(counters.live.value);
    fresh->reserve(4 * memory_of_machine(), huge_pages_wanted());
    return *fresh;
  }();
  return leaked;
}

// Null where c10 has to do it: small blocks, the debugging flags that fill new
// memory, what exceeds this machine, and no memory left (it words that error as
// users know it).
void* allocate_pages(size_t bytes, Owner& owner) {
  owner = kC10;
  if (bytes < kPagedFrom || bytes > memory_of_machine() ||
      FLAGS_caffe2_cpu_allocator_do_zero_fill ||
      FLAGS_caffe2_cpu_allocator_do_junk_fill) {
    return nullptr;
  }
  if (void* const data = arena().allocate(bytes, operator_now())) {
    owner = kArena;
    return data;
  }
  void* data = nullptr;
  if (posix_memalign(&data, kPage, whole_pages(bytes)) != 0) {
    return nullptr;
  }
  owner = kMalloc;
  return data;
}

// Enters a new block in the books. False: there is no memory for them.
bool enter(void* data, size_t bytes, Owner owner) {
  const uint64_t record =
      block_log().on() ? block_log().born(bytes, operator_now()) : 0;
  if (owner != kArena) {
    return insert(data, bytes, owner, record);
  }
  if (record != 0) {
    arena().note(data, record);
  }
  return true;
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
    if (!enter(data, bytes, owner)) {
      owner == kMalloc ? std::free(data) : c10::free_cpu(data);
      TORCH_CHECK(false, "lowtide: can't allocate memory for the table of blocks"
                  " while allocating ", bytes, " bytes");
    }
    counters.add_live(static_cast<int64_t>(bytes));
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

void note_death(uint64_t record) {
  if (record != 0 && block_log().on()) {
    block_log().died(record, operator_now());
  }
}

void release_to_arena(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  const Arena::Freed freed = arena().release(data);
  if (freed.bytes == 0) {
    std::fputs("lowtide: a block was freed twice, or at a wrong address\n", stderr);
    std::abort();
  }
  note_death(freed.record);
}

void release(void* data) {
  if (!data) {
    return;
  }
  if (arena().owns(data)) {
    release_to_arena(data);
    return;
  }
  // Out of the table first: once freed, the address may be handed out again.
  const Slot slot = table.remove(data);
  if (slot.address != 0) {
    counters.drop_live(slot.bytes());
    note_death(slot.record);
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  slot.owner() == kMalloc ? std::free(data) : c10::free_cpu(data);
}

// A fork must not find anything locked by a thread that the child lacks.
void lock_all() {
  block_log().mutex.lock();
  arena().mutex.lock();
  table.lock();
}

void unlock_all() {
  table.unlock();
  arena().mutex.unlock();
  block_log().mutex.unlock();
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
    arena();
    block_log();
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
  counters.add_live(bytes);
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
  if (!insert(data, bytes, kC10, 0)) {
    return 0;
  }
  (void)block.compare_exchange_deleter(former->raw_deleter(), &release);
  counters.add_live(static_cast<int64_t>(bytes));
  return static_cast<int64_t>(bytes);
}

// Counts the blocks handed out or adopted so far.
__attribute__((visibility("default"))) int64_t lowtide_blocks() {
  return arena().blocks() + table.inserted();
}

// Bytes asked for by the live block that starts here; -1: not ours.
__attribute__((visibility("default"))) int64_t lowtide_bytes(void* data) {
  if (const size_t bytes = arena().bytes_at(data)) {
    return static_cast<int64_t>(bytes);
  }
  const Slot slot = table.look_up(data);
  return slot.address ? static_cast<int64_t>(slot.bytes()) : -1;
}

// Gives kept pages back to the system and returns their bytes; from now on as
// much is kept as is live at the most from here.
__attribute__((visibility("default"))) int64_t lowtide_trim() {
  return arena().trim();
}

// Keeps what is live and kept within a limit, and (negative: only) within what
// is live at the most.
__attribute__((visibility("default"))) void lowtide_keep(int64_t bytes) {
  arena().keep(bytes);
}

// The log of blocks.

__attribute__((visibility("default"))) bool lowtide_log_start() {
  return block_log().start();
}

__attribute__((visibility("default"))) void lowtide_log_stop() {
  block_log().stop();
}

__attribute__((visibility("default"))) int64_t lowtide_log_events() {
  return block_log().events();
}

__attribute__((visibility("default"))) int64_t lowtide_log_copy(
    int64_t from, BlockRecord* to, int64_t room) {
  return block_log().copy(from, to, room);
}

// From now on the operators of all threads count.
__attribute__((visibility("default"))) void lowtide_plan_end() {
  operators_thread = 0;
  arena().begin(Arena::kNone);
}

// Plans. `first` has a number for each operator and one more, `pages` and
// `page` one for each place (see arena.h).

__attribute__((visibility("default"))) void lowtide_plan_set(
    uint64_t plan, const uint32_t* first, uint64_t rows, const uint32_t* pages,
    const uint32_t* page, uint64_t places) {
  std::vector<Place> all(places);
  for (size_t i = 0; i < places; ++i) {
    all[i] = {pages[i], page[i]};
  }
  arena().set_plan(plan, std::vector<uint32_t>(first, first + rows), std::move(all));
}

// Begins a cycle of this thread, by a plan or (2^64 - 1) without; tells of the
// last one.
__attribute__((visibility("default"))) void lowtide_plan_begin(
    uint64_t plan, ArenaFigures* past) {
  operators_thread = this_thread();
  *past = arena().begin(plan);
}

// The pages that were asked for at each place, at the most.
__attribute__((visibility("default"))) void lowtide_plan_asked(
    uint64_t plan, uint32_t* to, uint64_t room) {
  const std::vector<uint32_t> asked = arena().asked(plan);
  std::copy_n(asked.begin(), std::min<size_t>(room, asked.size()), to);
}

__attribute__((visibility("default"))) void lowtide_plan_move() {
  arena().move_zone();
}

__attribute__((visibility("default"))) void lowtide_arena(ArenaFigures* figures) {
  *figures = arena().figures();
}

__attribute__((visibility("default"))) void lowtide_arena_reset() {
  arena().reset_footprint();
}

__attribute__((visibility("default"))) void lowtide_arena_debug(bool on) {
  arena().set_debug(on);
}

}  // extern "C"
