// SPDX-License-Identifier: Apache-2.0
// Plans for every budget at once: of each level of memory, the fastest found.
//
// For some prices of the copying lanes, levels are walked from loose to tight:
// where the load is furthest above its limit, the value leaves that costs least
// a byte, and what has become superfluous returns. Then every level's best plan
// is changed one value at a time while that helps, and is handed to its
// neighbours. Nothing depends on the budget in the end asked for: that is why
// more memory never gets a slower plan.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline.h"

namespace lowtide {

// The pool: codes of each level's plan (levels ascend), and of those between
// one level and the next. `effort` counts operators and values looked at; the
// same effort gives the same plans on every machine.
std::vector<std::vector<std::int8_t>> FindFrontier(
    Simulator& simulator, const std::vector<Bytes>& levels,
    std::int64_t effort);

}  // namespace lowtide
