// SPDX-License-Identifier: Apache-2.0
// The vocabulary of the planner's core: what is placed, and where it lands.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lowtide {

using Bytes = std::int64_t;
using Time = std::int64_t;  // an index of an operator or of an event

// Half-open: alive at `born`, no longer alive at `dead`.
struct Interval {
  Time born;
  Time dead;
};

struct Block {
  Interval life;
  Bytes bytes;  // already rounded up to the device's alignment
};

// Which blocks must not share bytes. Time is a line when `period` is 0, else a
// circle of that length, on which a life may wrap round (and then ends at
// `dead - period`):
//
//     offset |   ____                offset |__            ____
//            |  | b  |__                    |a |   ____   | a
//            |__|____| c|                   |__|__|_b__|__|____
//            +-----------> time             +-------------------> 0 again
//
struct Problem {
  std::vector<Block> blocks;
  Time period = 0;
};

struct Placement {
  std::vector<Bytes> offsets;  // one a block, in the problem's order
  Bytes height = 0;            // the highest byte any block ends at
};

}  // namespace lowtide
