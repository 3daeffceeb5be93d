// SPDX-License-Identifier: Apache-2.0
// The counters that Python reads and writes in place.
#pragma once

#include <atomic>
#include <cstdint>

namespace lowtide {

struct alignas(64) Counter {
  std::atomic<std::int64_t> value{0};

  void raise_to(std::int64_t bytes) {
    std::int64_t seen = value.load(std::memory_order_relaxed);
    while (seen < bytes && !value.compare_exchange_weak(
                               seen, bytes, std::memory_order_relaxed)) {
    }
  }
};

// The order is the interface: allocator.py reads these by index.
struct Counters {
  Counter live;     // bytes asked for and not freed yet
  Counter peak;     // largest live since the last reset
  Counter op_peak;  // the same, reset at the start of each operator
  Counter op;       // the operator that runs, as Python numbers it

  void add_live(std::int64_t bytes) {
    const std::int64_t now =
        live.value.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    peak.raise_to(now);
    op_peak.raise_to(now);
  }

  void drop_live(std::size_t bytes) {
    live.value.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
};

}  // namespace lowtide
