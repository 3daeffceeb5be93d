// SPDX-License-Identifier: Apache-2.0
// Hands out and takes back at random from two threads while a third changes
// plans, limits and the zone. Every page of a live block carries its owner's
// stamp: whoever else wrote to it is found out when the block is freed.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "arena.h"

using lowtide::Arena;
using lowtide::kPageBytes;
using lowtide::Page;
using lowtide::Place;

namespace {

constexpr auto kPage = static_cast<std::int64_t>(kPageBytes);

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> op{0};

#define EXPECT(condition)                                             \
  if (!(condition)) {                                                 \
    std::printf("line %d: not so: %s\n", __LINE__, #condition);       \
    std::exit(1);                                                     \
  }

struct Block {
  char* data;
  std::size_t bytes;
  std::uint64_t stamp;

  std::size_t pages() const { return (bytes + kPageBytes - 1) / kPageBytes; }
  std::uint64_t& at(std::size_t page) const {
    return *reinterpret_cast<std::uint64_t*>(data + page * kPageBytes);
  }
};

Block allocate(Arena& arena, std::size_t bytes, std::uint64_t stamp) {
  Block block{static_cast<char*>(arena.allocate(bytes, op)), bytes, stamp};
  EXPECT(block.data && arena.owns(block.data));
  EXPECT(reinterpret_cast<std::uintptr_t>(block.data) % kPageBytes == 0);
  live += static_cast<std::int64_t>(bytes);
  for (std::size_t i = 0; i < block.pages(); ++i) {
    block.at(i) = stamp + i;
  }
  return block;
}

void release(Arena& arena, const Block& block) {
  for (std::size_t i = 0; i < block.pages(); ++i) {
    EXPECT(block.at(i) == block.stamp + i);
  }
  EXPECT(arena.bytes_at(block.data) == block.bytes);
  EXPECT(arena.release(block.data).bytes == block.bytes);
}

std::size_t random_bytes(std::mt19937& random) {
  const auto pages = 1 + random() % (random() % 8 == 0 ? 1500 : 40);
  return pages * kPageBytes - random() % kPageBytes;
}

void churn(Arena& arena, unsigned seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<Block> blocks;
  for (int round = 0; round < rounds; ++round) {
    if (blocks.size() < 60 && random() % 100 < 55) {
      const std::uint64_t stamp = (std::uint64_t{seed} << 56) | (round * 4096ULL);
      blocks.push_back(allocate(arena, random_bytes(random), stamp));
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      release(arena, blocks.back());
      blocks.pop_back();
    }
  }
  for (const Block& block : blocks) {
    release(arena, block);
  }
}

void meddle(Arena& arena, const std::atomic<bool>& ended) {
  std::mt19937 random(7);
  while (!ended) {
    std::vector<std::uint32_t> first{0};
    std::vector<Place> places;
    for (int row = 0; row < 20; ++row) {
      for (unsigned i = random() % 30; i > 0; --i) {
        places.push_back({static_cast<Page>(random() % 60),
                          static_cast<Page>(random() % 3000)});
      }
      first.push_back(static_cast<std::uint32_t>(places.size()));
    }
    const std::size_t plan = random() % 4;
    arena.set_plan(plan, first, places);
    for (int cycle = 0; cycle < 5; ++cycle) {
      arena.begin(random() % 5 == 0 ? Arena::kNone : random() % 4);
      for (int step = 0; step < 25; ++step) {
        op = static_cast<std::int64_t>(random() % 22) - 1;
        std::this_thread::yield();
      }
    }
    switch (random() % 8) {
      case 0: arena.move_zone(); break;
      case 1: arena.trim(); break;
      case 2: arena.keep(random() % 2 ? -1 : 20 << 20); break;
      default: break;
    }
  }
}

void many_threads(bool debug) {
  Arena arena(live);
  EXPECT(arena.reserve(std::size_t{4} << 30, true));
  arena.set_debug(debug);
  std::atomic<bool> ended{false};
  std::thread meddler(meddle, std::ref(arena), std::cref(ended));
  std::thread other(churn, std::ref(arena), 1, debug ? 1000 : 8000);
  churn(arena, 2, debug ? 1000 : 8000);
  other.join();
  ended = true;
  meddler.join();
  EXPECT(arena.figures().live == 0 && arena.figures().asked == 0 && live == 0);
  EXPECT(arena.figures().damaged == 0);
  // All that was free is one range again: a block of that size fits.
  void* const half = arena.allocate((std::size_t{2} << 30) - 1, -1);
  EXPECT(half != nullptr);
  EXPECT(arena.release(half).bytes > 0);
  live = 0;
}

// What is live and kept hardly exceeds the largest live pages.
void footprint_follows_the_peak() {
  Arena arena(live);
  EXPECT(arena.reserve(std::size_t{4} << 30, true));
  std::mt19937 random(3);
  std::vector<Block> blocks;
  std::int64_t pages = 0, peak = 0;
  for (int round = 0; round < 4000; ++round) {
    if (blocks.empty() || (blocks.size() < 80 && random() % 2)) {
      blocks.push_back(allocate(arena, random_bytes(random), round * 4096ULL));
      pages += static_cast<std::int64_t>(blocks.back().pages());
      peak = std::max(peak, pages);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      pages -= static_cast<std::int64_t>(blocks.back().pages());
      release(arena, blocks.back());
      blocks.pop_back();
    }
    const auto figures = arena.figures();
    EXPECT(figures.live == pages * kPage);
    EXPECT(figures.live + figures.kept == figures.fresh - figures.returned);
    EXPECT(figures.footprint <= peak * kPage + (6 << 20));
  }
  for (const Block& block : blocks) {
    release(arena, block);
  }
  arena.trim();
  EXPECT(arena.figures().kept == 0);
}

// Whether this kernel moves memory and leaves what lay there mapped.
bool system_moves() {
  constexpr int kDontUnmap = 4;
  const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | kDontUnmap;
  void* const both = mmap(nullptr, 2 * kPageBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* const second = static_cast<char*>(both) + kPageBytes;
  return mremap(both, kPageBytes, kPageBytes, flags, second) == second;
}

int areas_of_process() {
  std::FILE* const file = std::fopen("/proc/self/maps", "r");
  int lines = 0;
  for (int c; (c = std::fgetc(file)) != EOF;) {
    lines += c == '\n';
  }
  std::fclose(file);
  return lines;
}

// Free memory that no block fits into is moved together, not zeroed afresh.
void scattered_pages_serve() {
  constexpr std::size_t kMiB = 1 << 20;
  Arena arena(live);
  EXPECT(arena.reserve(std::size_t{4} << 30, true));
  std::vector<Block> blocks;
  for (int i = 0; i < 32; ++i) {
    blocks.push_back(allocate(arena, 4 * kMiB, i * 4096ULL));
  }
  for (int round = 0; round < 40; ++round) {
    // Every other one is freed, and one block takes the place of all of them.
    std::vector<Block> rest;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      i % 2 ? rest.push_back(blocks[i]) : release(arena, blocks[i]);
    }
    const auto before = arena.figures();
    const Block large = allocate(arena, 64 * kMiB, round * 4096ULL);
    const auto after = arena.figures();
    if (round > 0) {
      EXPECT(after.footprint == before.footprint);
    }
    EXPECT(!system_moves() || after.fresh - before.fresh <= (8 << 20));
    release(arena, large);
    blocks = std::move(rest);
    while (blocks.size() < 32) {
      const std::uint64_t stamp = (round * 32 + blocks.size()) * 4096ULL;
      blocks.push_back(allocate(arena, 4 * kMiB, stamp));
    }
  }
  EXPECT(!system_moves() || arena.figures().moved > 0);
  EXPECT(areas_of_process() < 2000);
  for (const Block& block : blocks) {
    release(arena, block);
  }
}

void damage_is_found() {
  Arena arena(live);
  EXPECT(arena.reserve(std::size_t{1} << 30, true));
  arena.set_debug(true);
  const Block block = allocate(arena, 100 * kPageBytes, 1);
  const Block other = allocate(arena, 100 * kPageBytes, 1);
  release(arena, block);
  block.data[50 * kPageBytes + 17] = 1;
  const Block again = allocate(arena, 100 * kPageBytes, 1);
  EXPECT(again.data == block.data);
  EXPECT(arena.figures().damaged == 1);
  release(arena, again);
  release(arena, other);
}

}  // namespace

int main() {
  footprint_follows_the_peak();
  scattered_pages_serve();
  damage_is_found();
  many_threads(true);
  many_threads(false);
  std::puts("no overlap");
}
