// SPDX-License-Identifier: Apache-2.0
// The whole search for offsets: greedy placements first, then exact decisions.
#pragma once

#include "effort.h"
#include "lowtide.h"

namespace lowtide {

struct Goal {
  Bytes enough = 0;        // stop at this height; the lower bound always is
  std::uint64_t seed = 0;
};

struct Found {
  Placement placement;
  Bytes lower_bound = 0;   // no placement is lower
  bool aborted = false;    // the clock or the caller ended the search
};

// Each independent part is placed alone. Near-linear greedy placements come
// first; whatever they leave above the bound is searched: greedy restarts with
// noisy keys, and decisions "does it fit below h" that close in on the least
// height from both sides. The same problem, goal and number of nodes always
// give the same placement unless the search was aborted.
Found Place(const Problem& problem, const Goal& goal, Limits& limits);

}  // namespace lowtide
