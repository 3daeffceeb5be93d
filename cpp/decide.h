// SPDX-License-Identifier: Apache-2.0
// Does a problem fit below a given height? An exact search.
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
