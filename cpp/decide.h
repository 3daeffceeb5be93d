// SPDX-License-Identifier: Apache-2.0
// Does a problem fit below a given height? An exact search.
//
// Depth first over skylines: in a valley, choose which block rests on its floor
// first from one side (moves.h says why that is enough). A valley without a
// choice comes before the lowest one. What keeps the tree small:
//   - a section whose floor and open blocks exceed the height ends a branch;
//   - moves are left out that another is never worse than: a gap that an open
//     block fits into, equal blocks or blocks of equal life in another order;
//   - a failure carries the sections it depended on, and moves elsewhere are
//     not tried again in its favour (conflict-directed backjumping);
//   - failed states are remembered by hash. (Two states with one 64-bit hash
//     would cost a placement or prove too much; no run will see that.)
// Moves that lose nothing come first, then larger blocks, by a noisy and random
// measure: short runs with new noise find most placements that exist.
//
// Exponential. Heights at the lower bound are the easiest, since nothing may be
// lost where it is reached: a few hundred blocks take about a second there.
#pragma once

#include <memory>
#include <vector>

#include "effort.h"
#include "lowtide.h"
#include "sweep.h"

namespace lowtide {

enum class Verdict { kFits, kImpossible, kGaveUp };

class Decider {
 public:
  Decider(const Problem& problem, const Sections& sections);
  ~Decider();

  // Searches a placement no higher than `capacity`. What one call learns about
  // a capacity (failed states, where the trouble is) serves the next one.
  Verdict Decide(Bytes capacity, std::uint64_t seed, std::int64_t nodes,
                 Limits& limits, std::vector<Bytes>& offsets);

 private:
  class Search;
  std::unique_ptr<Search> search_;
};

}  // namespace lowtide
