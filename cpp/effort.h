// SPDX-License-Identifier: Apache-2.0
// What bounds a search. Nodes decide, so that the same seed and budget give
// the same placement everywhere; the clock and the flag only abort.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace lowtide {

class Limits {
 public:
  using Clock = std::chrono::steady_clock;

  Limits(std::int64_t nodes, Clock::time_point deadline,
         const std::atomic<bool>* cancelled)
      : nodes_(nodes), deadline_(deadline), cancelled_(cancelled) {}

  static Limits None() {
    return Limits(std::numeric_limits<std::int64_t>::max(),
                  Clock::time_point::max(), nullptr);
  }

  // Counts work in search nodes; false once none is left or on an abort.
  bool Spend(std::int64_t nodes) {
    spent_ += nodes;
    since_look_ += nodes;
    if (since_look_ >= kLookEvery) {
      since_look_ = 0;
      aborted_ = aborted_ || (cancelled_ && cancelled_->load()) ||
                 Clock::now() >= deadline_;
    }
    return !aborted_ && spent_ < nodes_;
  }

  std::int64_t spent() const { return spent_; }
  std::int64_t left() const { return nodes_ - spent_; }
  bool aborted() const { return aborted_; }

 private:
  static constexpr std::int64_t kLookEvery = 4096;  // the clock costs ~30 ns
  std::int64_t nodes_;
  Clock::time_point deadline_;
  const std::atomic<bool>* cancelled_;
  std::int64_t spent_ = 0;
  std::int64_t since_look_ = 0;
  bool aborted_ = false;
};

// A generator whose numbers are the same on every platform (SplitMix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t Next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace lowtide
