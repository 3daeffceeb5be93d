// SPDX-License-Identifier: Apache-2.0
#include "greedy.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>

#include "skyline.h"

namespace lowtide {
namespace {

constexpr double kNone = -1.0;  // keys are positive
constexpr int kLooksPerNode = 1024;  // at a block, in PlaceInOrder
constexpr int kNever = std::numeric_limits<int>::max();

struct Placed {
  Bytes offset, end;
  int first, length;
};

bool Overlap(const Placed& a, int first, int length, int circle) {
  int ahead = first - a.first;
  if (ahead < 0) ahead += circle;
  if (ahead < a.length) return true;
  return ahead != 0 && circle - ahead < length;
}

Bytes FindHole(const std::vector<Placed>& placed, int first, int length,
               int circle, Bytes bytes, Fit fit) {
  Bytes top = 0;
  Bytes best = -1, smallest = Skyline::kWall;
  for (const Placed& other : placed) {
    if (!Overlap(other, first, length, circle)) continue;
    const Bytes hole = other.offset - top;
    if (hole >= bytes && hole < smallest) {
      best = top;
      smallest = hole;
      if (fit == Fit::kFirst) return best;
    }
    top = std::max(top, other.end);
  }
  return best >= 0 ? best : top;
}

}  // namespace

std::optional<Placement> PlaceInOrder(const Problem& problem,
                                      const Sections& sections,
                                      std::span<const int> order, Fit fit,
                                      Limits& limits) {
  Placement placement;
  placement.offsets.assign(problem.blocks.size(), 0);
  std::vector<Placed> placed;  // by offset
  placed.reserve(order.size());
  // On a line nothing wraps, so any circle that is long enough will do.
  const int circle =
      problem.period > 0 ? sections.count : 2 * sections.count + 1;
  for (int i : order) {
    const int first = sections.first[i];
    const int length = sections.last[i] - first;
    const Bytes bytes = problem.blocks[i].bytes;
    const Bytes offset = FindHole(placed, first, length, circle, bytes, fit);
    const auto at = std::upper_bound(
        placed.begin(), placed.end(), offset,
        [](Bytes o, const Placed& p) { return o < p.offset; });
    placed.insert(at, {offset, offset + bytes, first, length});
    placement.offsets[i] = offset;
    placement.height = std::max(placement.height, offset + bytes);
    const auto looks = static_cast<std::int64_t>(placed.size());
    if (!limits.Spend(1 + looks / kLooksPerNode)) return std::nullopt;
  }
  return placement;
}

ValleyFiller::ValleyFiller(const Problem& problem, const Sections& sections)
    : problem_(problem), sections_(sections) {
  const int n = static_cast<int>(problem.blocks.size());
  block_.resize(n);
  std::iota(block_.begin(), block_.end(), 0);
  std::stable_sort(block_.begin(), block_.end(), [&](int a, int b) {
    return sections.first[a] < sections.first[b];
  });
  starts_.assign(sections.count + 1, 0);
  for (int first : sections.first) ++starts_[first + 1];
  std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  while (leaves_ < n) leaves_ *= 2;
}

void ValleyFiller::Load(std::span<const double> keys) {
  key_.assign(2 * leaves_, kNone);
  end_.assign(2 * leaves_, kNever);
  for (std::size_t rank = 0; rank < block_.size(); ++rank) {
    key_[leaves_ + rank] = keys[block_[rank]];
    end_[leaves_ + rank] = sections_.last[block_[rank]];
  }
  for (int node = leaves_ - 1; node > 0; --node) {
    key_[node] = std::max(key_[2 * node], key_[2 * node + 1]);
    end_[node] = std::min(end_[2 * node], end_[2 * node + 1]);
  }
}

void ValleyFiller::Remove(int rank) {
  int node = leaves_ + rank;
  key_[node] = kNone;
  end_[node] = kNever;
  for (node /= 2; node > 0; node /= 2) {
    key_[node] = std::max(key_[2 * node], key_[2 * node + 1]);
    end_[node] = std::min(end_[2 * node], end_[2 * node + 1]);
  }
}

void ValleyFiller::Search(int node, int low, int high, int from, int to,
                          int limit, int* best) const {
  if (high <= from || to <= low || end_[node] > limit) return;
  if (*best >= 0 && key_[node] <= key_[leaves_ + *best]) return;
  if (high - low == 1) {
    *best = low;
    return;
  }
  const int middle = (low + high) / 2;
  const int child = key_[2 * node] >= key_[2 * node + 1] ? 0 : 1;
  for (int side : {child, 1 - child}) {
    if (side == 0) {
      Search(2 * node, low, middle, from, to, limit, best);
    } else {
      Search(2 * node + 1, middle, high, from, to, limit, best);
    }
  }
}

// The rank with the largest key that begins in the sections [from, to) and
// ends by `limit`, or -1.
int ValleyFiller::Largest(int from, int to, int limit) const {
  int best = -1;
  if (from < to) {
    Search(1, 0, leaves_, starts_[from], starts_[to], limit, &best);
  }
  return best;
}

int ValleyFiller::Inside(int run, int end) const {
  const int count = sections_.count;
  if (end - run == count && problem_.period > 0) {
    return Largest(0, count, kNever - 1);  // flat all round: any block
  }
  const int before = Largest(run, std::min(end, count), end);
  const int after = Largest(0, std::max(end - count, 0), end - count);
  if (before < 0 || after < 0) return std::max(before, after);
  return key_[leaves_ + before] >= key_[leaves_ + after] ? before : after;
}

std::optional<Placement> ValleyFiller::Fill(std::span<const double> keys,
                                            Bytes ceiling, Limits& limits) {
  Load(keys);
  Placement placement;
  placement.offsets.assign(problem_.blocks.size(), 0);
  if (block_.empty()) return placement;
  Skyline sky(sections_.count, problem_.period == 0);
  using Entry = std::tuple<Bytes, int, std::uint64_t>;  // level, run, stamp
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lowest;
  const auto push = [&](int run) {
    if (sky.valley(run)) lowest.push({sky.level(run), run, sky.stamp(run)});
  };
  push(sky.any());
  std::size_t left = block_.size();
  while (left > 0) {
    const auto [level, run, stamp] = lowest.top();
    lowest.pop();
    if (sky.length(run) == 0 || sky.stamp(run) != stamp) continue;
    if (!limits.Spend(1)) return std::nullopt;
    const int end = sky.end(run);
    const int rank = Inside(run, end);
    int lifted;
    if (rank < 0) {
      const Bytes rim = std::min(sky.left_wall(run), sky.right_wall(run));
      lifted = sky.Lift(run, run, end, rim, -1);
    } else {
      const int i = block_[rank];
      const Bytes top = level + problem_.blocks[i].bytes;
      if (top > ceiling) return std::nullopt;
      const int first = sections_.first[i];
      const int from = first < run ? first + sections_.count : first;
      const int length = sections_.last[i] - first;
      lifted = sky.Lift(run, from, from + length, top, i);
      Remove(rank);
      placement.offsets[i] = level;
      placement.height = std::max(placement.height, top);
      --left;
    }
    sky.ForgetLog();
    push(lifted);
    push(sky.previous(lifted));
    push(sky.next(lifted));
  }
  return placement;
}

}  // namespace lowtide
