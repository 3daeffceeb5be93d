// SPDX-License-Identifier: Apache-2.0
// What can be read off a problem by walking through its time once: live bytes,
// the lower bound that follows from them, and the parts that do not interact.
#pragma once

#include <vector>

#include "lowtide.h"

namespace lowtide {

// Time cut at the births: two lives that overlap also overlap at the later
// one's birth, so nothing is lost between two births. Block i covers the
// sections [first[i], last[i]); on a circle last[i] may pass `count`, and then
// section s + count is section s.
struct Sections {
  int count = 0;
  std::vector<Time> starts;  // when each section begins, ascending
  std::vector<int> first;
  std::vector<int> last;
};

// Throws std::invalid_argument when a life is empty, longer than the period or
// begins outside it, or when a size is not positive; std::overflow_error when
// the sizes together do not fit 62 bits.
void Validate(const Problem& problem);

Sections CutAtBirths(const Problem& problem);

// Live bytes in each section.
std::vector<Bytes> LiveBytes(const Problem& problem, const Sections& sections);

// No placement can be lower than the peak of the live bytes.
Bytes LowerBound(std::span<const Bytes> live);

// The part each block belongs to, numbered from 0 in order of time. No block
// of one part lives while a block of another does, so each part can be placed
// alone. `parts` receives how many there are.
std::vector<int> IndependentParts(const Sections& sections, int* parts);

}  // namespace lowtide
