// SPDX-License-Identifier: Apache-2.0
// Two small sets: the blocks still to be placed, and a stretch of time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace lowtide {

class Bits {
 public:
  explicit Bits(int size = 0) : words_((size + 63) / 64, 0) {}

  void Set(int i) { words_[i >> 6] |= 1ull << (i & 63); }
  void Clear(int i) { words_[i >> 6] &= ~(1ull << (i & 63)); }
  bool Has(int i) const { return words_[i >> 6] >> (i & 63) & 1; }

  // The first member in [from, to), or `to`.
  int Next(int from, int to) const {
    if (from >= to) return to;
    int word = from >> 6;
    std::uint64_t rest = words_[word] >> (from & 63) << (from & 63);
    while (rest == 0) {
      if (++word << 6 >= to) return to;
      rest = words_[word];
    }
    return std::min(64 * word + std::countr_zero(rest), to);
  }

 private:
  std::vector<std::uint64_t> words_;
};

// A set of sections out of `sections`, in at most 256 buckets: it may hold
// more than was added, never less.
class Region {
 public:
  // Adds [from, to); `to` may pass the seam of the circle.
  void Add(int from, int to, int sections) {
    if (to > sections) {
      Add(0, to - sections, sections);
      to = sections;
    }
    if (from >= to) return;
    const int low = Bucket(from, sections);
    const int high = Bucket(to - 1, sections);
    for (int word = low >> 6; word <= high >> 6; ++word) {
      const int a = std::max(low - 64 * word, 0);
      const int b = std::min(high - 64 * word, 63);
      words_[word] |= (~0ull >> (63 - b + a)) << a;
    }
  }
  void Add(const Region& other) {
    for (int i = 0; i < kWords; ++i) words_[i] |= other.words_[i];
  }
  bool Meets(const Region& other) const {
    std::uint64_t common = 0;
    for (int i = 0; i < kWords; ++i) common |= words_[i] & other.words_[i];
    return common != 0;
  }

 private:
  static constexpr int kWords = 4;
  static constexpr int kBuckets = 64 * kWords;

  static int Bucket(int section, int sections) {
    if (sections <= kBuckets) return section;
    return static_cast<int>(std::int64_t{section} * kBuckets / sections);
  }
  std::array<std::uint64_t, kWords> words_{};
};

}  // namespace lowtide
