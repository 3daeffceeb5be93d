// SPDX-License-Identifier: Apache-2.0
#include "placement.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <optional>

#include "decide.h"
#include "greedy.h"
#include "sweep.h"

namespace lowtide {
namespace {

constexpr std::size_t kMostForFits = 20'000;      // they are quadratic
constexpr std::size_t kMostForDecisions = 5'000;  // beyond, chance does better
constexpr double kFirstAim = 0.5;
constexpr double kFitNoise = 0.3;
constexpr std::int64_t kRestartNodes = 500;   // of the shortest decision

// 1 1 2 1 1 2 4 1 1 2 1 1 2 4 8 ...: restarts of these lengths lose no more
// than a logarithm against the best fixed length (Luby, Sinclair, Zuckerman).
std::int64_t Luby(std::int64_t i) {
  std::int64_t power = 1;
  while (2 * power - 1 < i) power *= 2;
  return 2 * power - 1 == i ? power : Luby(i - power + 1);
}

// One part of the problem, and the best that is known of it.
class Part {
 public:
  Part(Problem problem, std::vector<int> blocks);
  Part(const Part&) = delete;  // filler_ refers to its neighbours

  Bytes height() const { return best_.height; }
  Bytes bound() const { return bound_; }
  bool done(Bytes enough) const { return height() <= std::max(bound_, enough); }
  const std::vector<int>& blocks() const { return blocks_; }
  const Placement& best() const { return best_; }

  void Greedy(Bytes enough, Limits& limits);
  // One round of search, twice as long each time. When the caller `asked` for
  // a height, most of it goes there.
  void Improve(Bytes enough, bool asked, Random& random, Limits& limits);

 private:
  void Keep(std::optional<Placement> placement);
  void FillWithNoise(std::int64_t nodes, Bytes enough, Random& random,
                     Limits& limits);
  void FitAroundPeak(std::int64_t nodes, Bytes enough, Random& random,
                     Limits& limits);
  void Decide(Bytes capacity, std::int64_t nodes, Random& random,
              Limits& limits);
  Bytes RoundUp(Bytes bytes) const {
    return (bytes + unit_ - 1) / unit_ * unit_;
  }
  std::vector<std::vector<double>> Keys() const;
  std::vector<bool> AliveAt(int section) const;
  std::vector<int> LongestFirst(const std::vector<bool>& first,
                                std::span<const double> rest) const;

  Problem problem_;
  std::vector<int> blocks_;  // their indices in the whole problem
  Sections sections_;
  Bytes unit_ = 0;           // divides every size, so every useful height
  std::vector<bool> at_peak_;  // whether a block lives where the most do
  Bytes bound_;
  Placement best_;
  ValleyFiller filler_;
  std::vector<std::vector<double>> keys_;
  std::unique_ptr<Decider> decider_;
  std::int64_t restarts_ = 0;
  std::int64_t round_ = 0;
  double aim_ = kFirstAim;   // from the bound (0) to the best height (1)
};

Part::Part(Problem problem, std::vector<int> blocks)
    : problem_(std::move(problem)),
      blocks_(std::move(blocks)),
      sections_(CutAtBirths(problem_)),
      filler_(problem_, sections_),
      keys_(Keys()) {
  const std::vector<Bytes> live = LiveBytes(problem_, sections_);
  bound_ = LowerBound(live);
  const auto peak = std::max_element(live.begin(), live.end());
  at_peak_ = AliveAt(static_cast<int>(peak - live.begin()));
  for (const Block& block : problem_.blocks) {
    unit_ = std::gcd(unit_, block.bytes);
    best_.height += block.bytes;  // one on the other, until something is known
  }
  bound_ = RoundUp(bound_);
}

std::vector<std::vector<double>> Part::Keys() const {
  std::vector<std::vector<double>> keys(4);
  for (std::size_t i = 0; i < problem_.blocks.size(); ++i) {
    const double bytes = static_cast<double>(problem_.blocks[i].bytes);
    const double length = sections_.last[i] - sections_.first[i];
    keys[0].push_back(bytes * length);
    keys[1].push_back(std::sqrt(bytes) * length);
    keys[2].push_back(length);
    keys[3].push_back(bytes);
  }
  return keys;
}

std::vector<bool> Part::AliveAt(int section) const {
  std::vector<bool> alive;
  for (std::size_t i = 0; i < problem_.blocks.size(); ++i) {
    const int first = sections_.first[i], last = sections_.last[i];
    const int again = section + sections_.count;  // it may pass the end
    alive.push_back((first <= section && section < last) ||
                    (first <= again && again < last));
  }
  return alive;
}

// The longest lives of some blocks, then the others by their keys.
std::vector<int> Part::LongestFirst(const std::vector<bool>& first,
                                    std::span<const double> rest) const {
  std::vector<int> order(first.size());
  std::iota(order.begin(), order.end(), 0);
  const std::vector<double>& length = keys_[2];
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    if (first[a] != first[b]) return bool{first[a]};
    return first[a] ? length[a] > length[b] : rest[a] > rest[b];
  });
  return order;
}

void Part::Keep(std::optional<Placement> placement) {
  if (!placement) return;
  if (best_.offsets.empty() || placement->height < best_.height) {
    best_ = *std::move(placement);
  }
}

void Part::Greedy(Bytes enough, Limits& limits) {
  // The first placement is always made, so that there is one to give.
  Limits unlimited = Limits::None();
  Keep(filler_.Fill(keys_[0], best_.height, unlimited));
  for (std::size_t k = 1; k < keys_.size() && !done(enough); ++k) {
    Keep(filler_.Fill(keys_[k], best_.height - 1, limits));
  }
  if (problem_.blocks.size() > kMostForFits) return;
  std::vector<int> order(problem_.blocks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](int a, int b) {
    const Block& x = problem_.blocks[a];
    const Block& y = problem_.blocks[b];
    return x.bytes != y.bytes ? x.bytes > y.bytes : x.life.born < y.life.born;
  });
  for (Fit fit : {Fit::kFirst, Fit::kBest}) {
    if (done(enough)) return;
    Keep(PlaceInOrder(problem_, sections_, order, fit, limits));
  }
  if (done(enough)) return;
  order = LongestFirst(at_peak_, keys_[3]);
  Keep(PlaceInOrder(problem_, sections_, order, Fit::kFirst, limits));
}

void Part::FillWithNoise(std::int64_t nodes, Bytes enough, Random& random,
                         Limits& limits) {
  std::vector<double> noisy(problem_.blocks.size());
  const std::int64_t end = limits.spent() + nodes;
  while (limits.spent() < end && !done(enough) && limits.Spend(1)) {
    const auto& keys = keys_[random.Next() % keys_.size()];
    const double width = random.Unit();
    for (std::size_t b = 0; b < noisy.size(); ++b) {
      noisy[b] = keys[b] * (1.0 - width * random.Unit());
    }
    Keep(filler_.Fill(noisy, best_.height - 1, limits));
  }
}

// Where the most bytes live nothing may be lost: they come first, without a gap
// between them. The others fill in, largest first, in ever another order.
void Part::FitAroundPeak(std::int64_t nodes, Bytes enough, Random& random,
                         Limits& limits) {
  std::vector<double> noisy(problem_.blocks.size());
  const std::int64_t end = limits.spent() + nodes;
  while (limits.spent() < end && !done(enough) && limits.Spend(1)) {
    const double width = kFitNoise * random.Unit();
    for (std::size_t b = 0; b < noisy.size(); ++b) {
      noisy[b] = keys_[3][b] * (1.0 - width * random.Unit());
    }
    Keep(PlaceInOrder(problem_, sections_, LongestFirst(at_peak_, noisy),
                      Fit::kFirst, limits));
  }
}

// Asks for `nodes` nodes, in restarts, whether the part fits below `capacity`.
void Part::Decide(Bytes capacity, std::int64_t nodes, Random& random,
                  Limits& limits) {
  if (!decider_) decider_ = std::make_unique<Decider>(problem_, sections_);
  const std::int64_t end = limits.spent() + nodes;
  while (limits.spent() < end && limits.Spend(1)) {
    Placement placement;
    const std::int64_t length = kRestartNodes * Luby(++restarts_);
    const Verdict verdict = decider_->Decide(capacity, random.Next(), length,
                                             limits, placement.offsets);
    if (verdict == Verdict::kGaveUp) continue;
    if (verdict == Verdict::kImpossible) {
      bound_ = RoundUp(capacity + 1);
      return;
    }
    for (std::size_t i = 0; i < placement.offsets.size(); ++i) {
      placement.height = std::max(
          placement.height, placement.offsets[i] + problem_.blocks[i].bytes);
    }
    Keep(std::move(placement));
    return;
  }
}

void Part::Improve(Bytes enough, bool asked, Random& random, Limits& limits) {
  const std::int64_t nodes = 4000 << std::min<std::int64_t>(round_++, 40);
  FillWithNoise(nodes / 4, enough, random, limits);
  if (problem_.blocks.size() <= kMostForFits) {
    FitAroundPeak(nodes / 8, enough, random, limits);
  }
  if (problem_.blocks.size() > kMostForDecisions) return;
  const auto lowest = [&] { return std::max(bound_, enough / unit_ * unit_); };
  // At the bound nothing may be wasted, which makes the answer quick to find if
  // there is one. Above it, heights are tried that are not known to be hard.
  const std::int64_t most = asked ? nodes : nodes / 4;
  if (!done(enough)) Decide(lowest(), most, random, limits);
  for (int i = 0; i < 4 && !done(enough); ++i) {
    const Bytes height = best_.height;
    const double gap = static_cast<double>(height - lowest());
    const Bytes aim = lowest() + static_cast<Bytes>(aim_ * gap);
    const Bytes capacity = std::min(aim / unit_ * unit_, height - unit_);
    Decide(capacity, nodes / 8, random, limits);
    aim_ = best_.height < height ? kFirstAim : (1 + aim_) / 2;
  }
}

std::deque<Part> Split(const Problem& problem) {
  int count = 0;
  const std::vector<int> part =
      IndependentParts(CutAtBirths(problem), &count);
  std::vector<Problem> problems(count, Problem{{}, problem.period});
  std::vector<std::vector<int>> blocks(count);
  for (std::size_t i = 0; i < part.size(); ++i) {
    problems[part[i]].blocks.push_back(problem.blocks[i]);
    blocks[part[i]].push_back(static_cast<int>(i));
  }
  std::deque<Part> parts;
  for (int p = 0; p < count; ++p) {
    parts.emplace_back(std::move(problems[p]), std::move(blocks[p]));
  }
  return parts;
}

}  // namespace

Found Place(const Problem& problem, const Goal& goal, Limits& limits) {
  std::deque<Part> parts = Split(problem);
  Found found;
  found.placement.offsets.resize(problem.blocks.size());
  Bytes enough = goal.enough;
  for (const Part& part : parts) enough = std::max(enough, part.bound());
  for (Part& part : parts) part.Greedy(enough, limits);
  const auto highest = [&] {
    return std::max_element(parts.begin(), parts.end(),
                            [](const Part& a, const Part& b) {
                              return a.height() < b.height();
                            });
  };
  // Only the highest part matters; another one takes over when it sinks.
  Random random(goal.seed);
  while (!parts.empty() && !highest()->done(enough) && limits.Spend(1)) {
    highest()->Improve(enough, goal.enough > 0, random, limits);
  }
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < part.blocks().size(); ++i) {
      found.placement.offsets[part.blocks()[i]] = part.best().offsets[i];
    }
    found.placement.height =
        std::max(found.placement.height, part.best().height);
    found.lower_bound = std::max(found.lower_bound, part.bound());
  }
  found.aborted = limits.aborted();
  return found;
}

}  // namespace lowtide
