// SPDX-License-Identifier: Apache-2.0
// Times a pair of allocation and release in the arena, without a plan and by
// one, while other blocks lie around, and what torch's own allocator calls (where
// glibc is kept from mapping blocks, which takes microseconds). Prints nanoseconds:
// dynamic, planned, glibc; and the part of the requests that got planned places.
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "arena.h"

using lowtide::Arena;
using lowtide::kPageBytes;
using lowtide::Page;
using lowtide::Place;

namespace {

constexpr int kCycles = 300;
constexpr int kRepeats = 80;  // the best counts
constexpr int kBlocks = 400;

std::atomic<std::int64_t> live{0};

struct Event {
  int block;
  bool born;
};

// One iteration of training: blocks are born, and die in the opposite order, with
// workspace in between.
std::vector<Event> iteration() {
  std::vector<Event> events;
  for (int i = 0; i < kBlocks / 2; ++i) {
    events.push_back({2 * i, true});
    events.push_back({2 * i + 1, true});
    events.push_back({2 * i + 1, false});
  }
  for (int i = kBlocks / 2; i-- > 0;) {
    events.push_back({2 * i, false});
  }
  return events;
}

// Time of this thread alone: others on the machine do not count.
double cpu_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1e9 + static_cast<double>(now.tv_nsec);
}

// Allocates and frees in the arena, or (null) in glibc.
double nanoseconds(Arena* arena, const std::vector<std::size_t>& bytes,
                   std::size_t plan) {
  const std::vector<Event> events = iteration();
  std::vector<void*> data(kBlocks);
  const double start = cpu_nanoseconds();
  for (int cycle = 0; cycle < kCycles; ++cycle) {
    if (arena) {
      arena->begin(plan);
    }
    for (const Event& event : events) {
      if (!arena) {
        if (!event.born) {
          std::free(data[event.block]);
        } else if (posix_memalign(&data[event.block], 64, bytes[event.block]) != 0) {
          std::abort();
        }
      } else if (event.born) {
        data[event.block] = arena->allocate(bytes[event.block], 0);
        live.fetch_add(static_cast<std::int64_t>(bytes[event.block]),
                       std::memory_order_relaxed);
      } else {
        arena->release(data[event.block]);
      }
    }
  }
  return (cpu_nanoseconds() - start) / kCycles / kBlocks;
}

double best(Arena* arena, const std::vector<std::size_t>& bytes, std::size_t plan) {
  double least = nanoseconds(arena, bytes, plan);
  for (int i = 0; i < kRepeats; ++i) {
    least = std::min(least, nanoseconds(arena, bytes, plan));
  }
  return least;
}

}  // namespace

int main() {
  Arena arena(live);
  if (!arena.reserve(std::size_t{64} << 30, true)) {
    return 1;
  }
  std::mt19937 random(1);
  std::vector<std::size_t> bytes;
  std::vector<Place> places;
  Page top = 0, height = 0;
  for (int i = 0; i < kBlocks; ++i) {
    const Page pages = 16 + random() % 2000;
    bytes.push_back(pages * kPageBytes - random() % kPageBytes);
    places.push_back({pages, top});
    height = std::max(height, top + pages);
    if (i % 2 == 0) {
      top += pages;
    }
  }
  arena.set_plan(0, {0, kBlocks}, places);
  const double dynamic = best(&arena, bytes, Arena::kNone);
  const double planned = best(&arena, bytes, 0);
  const auto figures = arena.figures();
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT32_MAX);
  const double glibc = best(nullptr, bytes, 0);
  std::printf("%.1f %.1f %.1f %.4f\n", dynamic, planned, glibc,
              static_cast<double>(figures.hits) / figures.requests);
}
