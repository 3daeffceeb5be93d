// SPDX-License-Identifier: Apache-2.0
// What is known about each live block outside the arena, by its address.
//
// Open addressing, linear probing, in parts with a lock each. Its memory comes
// from mmap, so that no lock of ours is ever held while malloc takes one of its own.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace lowtide {

// Who has the memory of a block. The arena keeps the books of its own blocks.
enum class Owner : std::uint64_t { kC10 = 0, kMalloc = 1, kArena = 2 };

// An empty slot has address 0.
struct Slot {
  std::uintptr_t address;
  std::uint64_t bytes_and_owner;  // bytes asked for, times four, plus the owner
  std::uint64_t record;           // in the log of blocks

  std::size_t bytes() const { return bytes_and_owner / 4; }
  Owner owner() const { return static_cast<Owner>(bytes_and_owner & 3); }
};

class BlockTable {
 public:
  // Enters a block. False: there is no memory for a larger table. `lost` are the
  // bytes of a former block here that was freed behind our back.
  bool insert(void* data, std::size_t bytes, Owner owner, std::uint64_t record,
              std::size_t& lost) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    if (shard.used + 1 > shard.capacity / 4 * 3 && !grow(shard)) {
      return false;
    }
    Slot& slot = shard.slots[find(shard, address)];
    if (slot.address != 0) {
      lost = slot.bytes();
      --shard.used;
    }
    slot = {address, bytes * 4 + static_cast<std::uint64_t>(owner), record};
    ++shard.used;
    ++shard.inserted;
    return true;
  }

  // Takes a block out. A slot with address 0: it was not ours.
  Slot remove(void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    if (!shard.slots) {
      return {0, 0, 0};
    }
    std::size_t hole = find(shard, address);
    const Slot found = shard.slots[hole];
    if (found.address == 0) {
      return found;
    }
    // Close the hole: move back each later entry of the run that may stand there.
    const std::size_t mask = shard.capacity - 1;
    for (std::size_t i = (hole + 1) & mask; shard.slots[i].address != 0;
         i = (i + 1) & mask) {
      const std::size_t wanted = home(shard, shard.slots[i].address);
      if (((i - wanted) & mask) >= ((i - hole) & mask)) {
        shard.slots[hole] = shard.slots[i];
        hole = i;
      }
    }
    shard.slots[hole] = {0, 0, 0};
    --shard.used;
    return found;
  }

  Slot look_up(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    Shard& shard = shard_of(address);
    const std::lock_guard<std::mutex> guard(shard.mutex);
    return shard.slots ? shard.slots[find(shard, address)] : Slot{0, 0, 0};
  }

  // Blocks entered so far.
  std::int64_t inserted() {
    std::int64_t blocks = 0;
    for (Shard& shard : shards_) {
      const std::lock_guard<std::mutex> guard(shard.mutex);
      blocks += shard.inserted;
    }
    return blocks;
  }

  // For fork handlers.
  void lock() {
    for (Shard& shard : shards_) {
      shard.mutex.lock();
    }
  }
  void unlock() {
    for (Shard& shard : shards_) {
      shard.mutex.unlock();
    }
  }

 private:
  static constexpr int kShards = 64;                // a power of two
  static constexpr std::size_t kFirstSlots = 256;  // per shard, a power of two

  struct alignas(64) Shard {
    std::mutex mutex;
    Slot* slots = nullptr;     // null until the first block
    std::size_t capacity = 0;  // a power of two
    std::size_t used = 0;
    std::int64_t inserted = 0;  // so far
  };

  static std::uint64_t hash(std::uintptr_t address) {
    // Addresses are multiples of 64 or of 4096: multiply, then use the high bits.
    return (static_cast<std::uint64_t>(address) >> 6) * 0x9e3779b97f4a7c15ULL;
  }

  Shard& shard_of(std::uintptr_t address) { return shards_[hash(address) >> 58]; }

  static std::size_t home(const Shard& shard, std::uintptr_t address) {
    return (hash(address) >> 20) & (shard.capacity - 1);
  }

  static std::size_t find(const Shard& shard, std::uintptr_t address) {
    std::size_t i = home(shard, address);
    while (shard.slots[i].address != 0 && shard.slots[i].address != address) {
      i = (i + 1) & (shard.capacity - 1);
    }
    return i;
  }

  static bool grow(Shard& shard) {
    Slot* const old_slots = shard.slots;
    const std::size_t old_capacity = shard.capacity;
    const std::size_t capacity = old_slots ? old_capacity * 2 : kFirstSlots;
    void* fresh = mmap(nullptr, capacity * sizeof(Slot), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
      return false;
    }
    shard.slots = static_cast<Slot*>(fresh);
    shard.capacity = capacity;
    for (std::size_t i = 0; i < old_capacity; ++i) {
      if (old_slots[i].address != 0) {
        shard.slots[find(shard, old_slots[i].address)] = old_slots[i];
      }
    }
    if (old_slots) {
      munmap(old_slots, old_capacity * sizeof(Slot));
    }
    return true;
  }

  Shard shards_[kShards];
};

}  // namespace lowtide
