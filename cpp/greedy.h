// SPDX-License-Identifier: Apache-2.0
// Placements made in one go, without looking back.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "effort.h"
#include "lowtide.h"
#include "sweep.h"

namespace lowtide {

enum class Fit { kFirst, kBest };

// Takes the blocks in `order`; each goes into a hole between the blocks
// already placed that live at the same time: the lowest hole it fits (first
// fit) or the smallest (best fit, the lowest of equals). O(n^2). Nothing when
// the limits end it.
std::optional<Placement> PlaceInOrder(const Problem& problem,
                                      const Sections& sections,
                                      std::span<const int> order, Fit fit,
                                      Limits& limits);

// Takes the valleys of the skyline, lowest first; each receives the block with
// the largest key among those that live inside it, or rises to its lower rim
// when there is none. About O(n log n). Nothing when the placement would
// become higher than `ceiling`, or when the limits end it.
class ValleyFiller {
 public:
  ValleyFiller(const Problem& problem, const Sections& sections);

  std::optional<Placement> Fill(std::span<const double> keys, Bytes ceiling,
                                Limits& limits);

 private:
  void Load(std::span<const double> keys);
  void Remove(int rank);
  int Largest(int from, int to, int limit) const;
  void Search(int node, int low, int high, int from, int to, int limit,
              int* best) const;
  int Inside(int run, int end) const;

  const Problem& problem_;
  const Sections& sections_;
  std::vector<int> block_;   // by rank: in order of their beginnings
  std::vector<int> starts_;  // starts_[s]: how many begin before section s
  int leaves_ = 1;
  // A tree over the ranks: the largest key and the earliest end below a node.
  std::vector<double> key_;
  std::vector<int> end_;
};

}  // namespace lowtide
