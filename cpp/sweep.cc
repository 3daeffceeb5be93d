// SPDX-License-Identifier: Apache-2.0
#include "sweep.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lowtide {
namespace {

[[noreturn]] void Reject(std::size_t i, const Block& block,
                         const std::string& why) {
  throw std::invalid_argument(
      "block " + std::to_string(i) + " (" + std::to_string(block.bytes) +
      " bytes, alive in [" + std::to_string(block.life.born) + ", " +
      std::to_string(block.life.dead) + ")) " + why);
}

// Adds `amount` to [first, last) of a difference array over a circle of
// `count` cells; `last` may pass `count`.
template <typename T>
void AddRange(std::vector<T>& difference, int count, int first, int last,
              T amount) {
  difference[first] += amount;
  if (last <= count) {
    difference[last] -= amount;
    return;
  }
  difference[count] -= amount;
  difference[0] += amount;
  difference[last - count] -= amount;
}

template <typename T>
void Accumulate(std::vector<T>& difference) {
  for (std::size_t i = 1; i < difference.size(); ++i) {
    difference[i] += difference[i - 1];
  }
}

}  // namespace

void Validate(const Problem& problem) {
  constexpr Bytes kMost = Bytes{1} << 62;
  Bytes total = 0;
  for (std::size_t i = 0; i < problem.blocks.size(); ++i) {
    const Block& block = problem.blocks[i];
    const auto [born, dead] = block.life;
    if (block.bytes <= 0) Reject(i, block, "has no bytes");
    if (dead <= born) Reject(i, block, "dies before it lives");
    if (problem.period > 0) {
      const std::string circle =
          "a circle of " + std::to_string(problem.period);
      if (born < 0 || born >= problem.period)
        Reject(i, block, "is born outside " + circle);
      if (dead - born > problem.period)
        Reject(i, block, "outlives " + circle);
    }
    if (block.bytes > kMost - total) {
      throw std::overflow_error("the blocks together exceed 2**62 bytes");
    }
    total += block.bytes;
  }
}

Sections CutAtBirths(const Problem& problem) {
  Sections cut;
  cut.starts.reserve(problem.blocks.size());
  for (const Block& block : problem.blocks) {
    cut.starts.push_back(block.life.born);
  }
  std::sort(cut.starts.begin(), cut.starts.end());
  cut.starts.erase(std::unique(cut.starts.begin(), cut.starts.end()),
                   cut.starts.end());
  cut.count = static_cast<int>(cut.starts.size());
  const auto index = [&cut](Time time) {
    return static_cast<int>(
        std::lower_bound(cut.starts.begin(), cut.starts.end(), time) -
        cut.starts.begin());
  };
  for (const Block& block : problem.blocks) {
    const auto [born, dead] = block.life;
    const bool wraps = problem.period > 0 && dead > problem.period;
    cut.first.push_back(index(born));
    cut.last.push_back(wraps ? cut.count + index(dead - problem.period)
                             : index(dead));
  }
  return cut;
}

std::vector<Bytes> LiveBytes(const Problem& problem, const Sections& sections) {
  std::vector<Bytes> live(sections.count + 1, 0);
  for (std::size_t i = 0; i < problem.blocks.size(); ++i) {
    AddRange(live, sections.count, sections.first[i], sections.last[i],
             problem.blocks[i].bytes);
  }
  Accumulate(live);
  live.pop_back();
  return live;
}

Bytes LowerBound(std::span<const Bytes> live) {
  return live.empty() ? 0 : *std::max_element(live.begin(), live.end());
}

std::vector<int> IndependentParts(const Sections& sections, int* parts) {
  // crossing[s]: how many blocks live on both sides of the start of section s.
  std::vector<int> crossing(sections.count + 1, 0);
  for (std::size_t i = 0; i < sections.first.size(); ++i) {
    if (sections.last[i] > sections.first[i] + 1) {
      AddRange(crossing, sections.count, sections.first[i] + 1,
               sections.last[i], 1);
    }
  }
  Accumulate(crossing);
  std::vector<int> part(sections.count, 0);
  int current = 0;
  for (int s = 1; s < sections.count; ++s) {
    if (crossing[s] == 0) ++current;
    part[s] = current;
  }
  *parts = sections.count == 0 ? 0 : current + 1;
  // On a circle, what lives across its seam joins the last part to the first.
  if (sections.count > 0 && crossing[0] > 0 && current > 0) {
    for (int& p : part) p = p == current ? 0 : p;
    --*parts;
  }
  std::vector<int> of_block;
  of_block.reserve(sections.first.size());
  for (int first : sections.first) of_block.push_back(part[first]);
  return of_block;
}

}  // namespace lowtide
