// SPDX-License-Identifier: Apache-2.0
#include "frontier.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>

namespace lowtide {
namespace {

using Codes = std::vector<std::int8_t>;

constexpr double kNever = std::numeric_limits<double>::infinity();
// Prices of a second of copying, in seconds of computing.
constexpr std::array kPrices{0.0, 0.1, 0.4, 1.0, 1e6};
constexpr double kSwapFirst = -1;  // the price at which all is swapped that can
constexpr double kTie = 1e-9;    // costs a byte that differ by less are equal
constexpr Bytes kAnyBytes = std::numeric_limits<Bytes>::max();
constexpr std::int64_t kRounds = 2;
constexpr double kSame = 1e-12;  // seconds: times that differ by less are equal

bool Better(const Outcome& a, const Outcome& b) {
  if (a.seconds < b.seconds - kSame) return true;
  return a.seconds <= b.seconds + kSame && a.moved < b.moved;
}

struct FoundPlan {
  Codes codes;
  Outcome outcome;  // at its level
  bool found = false;
};

// For one price, the better way out for each value, and its cost.
struct Ways {
  Codes way;
  std::vector<double> cost;
  std::vector<int> dearest;  // values by cost, dearest first
};

class Finder {
 public:
  Finder(Simulator& simulator, const std::vector<Bytes>& levels,
         std::int64_t effort)
      : simulator_(simulator),
        it_(simulator.iteration()),
        levels_(levels),
        effort_(effort),
        best_(levels.size()),
        loads_(simulator.operators()) {
    clock_.assign(1, 0.0);
    for (double s : it_.seconds) clock_.push_back(clock_.back() + s);
  }

  std::vector<Codes> Find() {
    for (const bool exact : {false, true})
      for (const double price : kPrices) Sweep(price, exact);
    if (!it_.parents.empty()) Sweep(kSwapFirst, true);
    // Tight plans fit into loose levels; loose ones are where tight ones begin.
    const auto count = static_cast<std::int64_t>(levels_.size());
    for (std::int64_t turn = 0; turn < kRounds * 2 * count; ++turn) {
      const bool down = turn / count % 2 == 0;
      const std::int64_t at = turn % count;
      const auto l = static_cast<std::size_t>(down ? count - 1 - at : at);
      if (simulator_.steps() >= effort_) break;
      const std::int64_t share =
          (effort_ - simulator_.steps()) / (kRounds * 2 * count - turn);
      const std::int64_t end = simulator_.steps() + share;
      ways_.clear();
      for (const double price : kPrices)
        ways_.push_back(Price(price, levels_[l]));
      if (at > 0) Repair(l, best_[down ? l + 1 : l - 1]);
      Improve(l, end);
    }
    std::vector<Codes> pool;
    for (std::size_t l = 0; l < levels_.size(); ++l)
      if (best_[l].found) Loosen(l, pool);
    return pool;
  }

 private:
  Ways Price(double price, Bytes level) const {
    Ways ways{Codes(it_.values.size(), kKeep),
              std::vector<double>(it_.values.size(), kNever),
              std::vector<int>(it_.values.size())};
    for (std::size_t i = 0; i < it_.values.size(); ++i) {
      const Saved& value = it_.values[i];
      const bool used = value.stop < simulator_.operators();
      const double bytes = static_cast<double>(value.bytes);
      const double copy = bytes * (it_.write + (used ? it_.read : 0));
      if (value.swappable) {
        const double window = clock_[value.stop] - clock_[value.start];
        ways.way[i] = kSwap;
        ways.cost[i] = copy * (it_.tax + std::max(price, 0.0)) +
                       std::max(0.0, copy - window);
      }
      const double replay = used ? value.seconds : 0;
      const bool room = level >= value.replay_from &&
                        (price >= 0 || !value.swappable);
      if (value.replayable && room && replay <= ways.cost[i]) {
        ways.way[i] = kReplay;
        ways.cost[i] = replay;
      }
    }
    std::iota(ways.dearest.begin(), ways.dearest.end(), 0);
    std::stable_sort(
        ways.dearest.begin(), ways.dearest.end(),
        [&](int a, int b) { return ways.cost[a] > ways.cost[b]; });
    return ways;
  }

  // Lets values leave, cheapest a byte first where the load is highest above
  // its limit, until it fits; `banned` stays. Where `exact`, only bytes that
  // are needed there count. False where it cannot fit.
  bool Cover(Codes& codes, Bytes level, const Ways& ways, int banned,
             bool exact) {
    loads_ = simulator_.Load(codes);
    for (;;) {
      simulator_.Spend(simulator_.operators() + simulator_.values());
      int peak = 0;
      Bytes excess = 0;
      for (int op = 0; op < simulator_.operators(); ++op) {
        const Bytes above = loads_[op] - simulator_.Limit(op, level);
        if (above > excess) {
          excess = above;
          peak = op;
        }
      }
      if (excess == 0) return true;
      const int pick = Cheapest(codes, ways, banned, peak,
                                exact ? excess : kAnyBytes);
      if (pick < 0) return false;
      codes[pick] = ways.way[pick];
      if (!it_.parents.empty()) {
        loads_ = simulator_.Load(codes);
        continue;
      }
      const Saved& value = it_.values[pick];
      for (int op = value.start; op < value.stop; ++op)
        loads_[op] -= value.bytes;
    }
  }

  // The value that costs least a byte of those there at `op`; of equal ones
  // that with the most bytes for the longest time.
  int Cheapest(const Codes& codes, const Ways& ways, int banned, int op,
               Bytes needed) const {
    int pick = -1;
    double least = kNever, most = 0;
    for (int i = 0; i < simulator_.values(); ++i) {
      const Saved& value = it_.values[i];
      if (codes[i] != kKeep || ways.way[i] == kKeep || i == banned) continue;
      if (value.start > op || value.stop <= op) continue;
      const auto freed = static_cast<double>(std::min(value.bytes, needed));
      const double rate = ways.cost[i] / freed;
      if (pick >= 0 && rate > least * (1 + kTie)) continue;
      const double reach = freed * (clock_[value.stop] - clock_[value.start]);
      if (pick >= 0 && rate > least * (1 - kTie) && reach <= most) continue;
      least = rate;
      most = reach;
      pick = i;
    }
    return pick;
  }

  // Brings back, dearest first, what may stay without breaking a limit.
  void Prune(Codes& codes, Bytes level, const Ways& ways, int kept_away) {
    loads_ = simulator_.Load(codes);
    const std::vector<int> until = simulator_.ends();
    simulator_.Spend(simulator_.operators());
    for (int i : ways.dearest)
      if (codes[i] != kKeep && i != kept_away)
        Return(codes, i, until[i], level);
  }

  // Lets a value stay, where `loads_` then keeps to the limits.
  bool Return(Codes& codes, int i, int until, Bytes level) {
    const Saved& value = it_.values[i];
    const auto fits = [&](int op) {
      return loads_[op] + value.bytes <= simulator_.Limit(op, level);
    };
    // What refused the last one mostly refuses the next.
    if (refused_ >= value.start && refused_ < until && !fits(refused_))
      return false;
    for (int op = value.start; op < until; ++op) {
      if (fits(op)) continue;
      simulator_.Spend(op - value.start);
      refused_ = op;
      return false;
    }
    simulator_.Spend(until - value.start);
    for (int op = value.start; op < until; ++op) loads_[op] += value.bytes;
    codes[i] = kKeep;
    return true;
  }

  bool Offer(std::size_t l, const Codes& codes) {
    bool better = Try(l, codes);
    if (it_.parents.empty()) return better;
    // The same with what replays compute for others staying from then on.
    Codes shared = codes;
    for (std::int8_t& code : shared)
      if (code == kReplay) code = kShare;
    return Try(l, shared) || better;
  }

  bool Try(std::size_t l, const Codes& codes) {
    const Outcome outcome = simulator_.Run(codes, levels_[l]);
    if (!outcome.valid()) return false;
    if (best_[l].found && !Better(outcome, best_[l].outcome)) return false;
    best_[l] = {codes, outcome, true};
    return true;
  }

  void Sweep(double price, bool exact) {
    Codes path(it_.values.size(), kKeep);
    for (std::size_t l = levels_.size(); l-- > 0;) {
      const Ways ways = Price(price, levels_[l]);
      Unstick(path, levels_[l]);
      Cover(path, levels_[l], ways, -1, exact);
      Codes codes = path;
      Prune(codes, levels_[l], ways, -1);
      Offer(l, codes);
    }
  }

  // Swaps what could not be computed again at this level.
  void Unstick(Codes& codes, Bytes level) const {
    for (int i = 0; i < simulator_.values(); ++i) {
      const Saved& value = it_.values[i];
      const bool replays = codes[i] == kReplay || codes[i] == kShare;
      if (replays && level < value.replay_from)
        codes[i] = value.swappable ? kSwap : kKeep;
    }
  }

  // Fits a neighbour's plan to this level.
  void Repair(std::size_t l, const FoundPlan& neighbour) {
    if (!neighbour.found) return;
    Offer(l, neighbour.codes);
    for (const std::size_t w : {std::size_t{0}, ways_.size() / 2}) {
      Codes codes = neighbour.codes;
      Unstick(codes, levels_[l]);
      if (!Cover(codes, levels_[l], ways_[w], -1, true)) continue;
      Prune(codes, levels_[l], ways_[w], -1);
      if (codes != best_[l].codes) Offer(l, codes);
    }
  }

  // Changes one value at a time while that helps and the effort lasts.
  void Improve(std::size_t l, std::int64_t end) {
    int since = 0;  // values looked at since the last success
    while (best_[l].found && since < simulator_.values() &&
           simulator_.steps() < end) {
      next_ = next_ + 1 < simulator_.values() ? next_ + 1 : 0;
      since = Change(l, next_) ? 0 : since + 1;
    }
  }

  // Adds a level's plan, and those that lead from it towards the next level by
  // letting one value after another stay, the dearest a byte first.
  void Loosen(std::size_t l, std::vector<Codes>& pool) {
    Codes codes = best_[l].codes;
    pool.push_back(codes);
    if (l + 1 == levels_.size()) return;
    const Ways ways = Price(kPrices[kPrices.size() / 2], levels_[l]);
    order_.clear();
    for (int i = 0; i < simulator_.values(); ++i)
      if (codes[i] != kKeep) order_.push_back(i);
    const auto rate = [&](int i) {
      return ways.cost[i] / static_cast<double>(it_.values[i].bytes);
    };
    std::stable_sort(order_.begin(), order_.end(),
                     [&](int a, int b) { return rate(a) > rate(b); });
    loads_ = simulator_.Load(codes);
    const std::vector<int> until = simulator_.ends();
    for (int i : order_)
      if (Return(codes, i, until[i], levels_[l + 1] - 1)) pool.push_back(codes);
  }

  bool Change(std::size_t l, int i) {
    const Saved& value = it_.values[i];
    const bool movable = value.swappable || value.replayable;
    if (!movable) return false;
    bool helped = false;
    const std::int8_t now = best_[l].codes[i];
    for (const std::int8_t code : {kSwap, kReplay, kShare}) {
      if (code == now || !(code == kSwap ? value.swappable : value.replayable))
        continue;
      if (code == kShare && it_.parents.empty()) continue;
      Codes codes = best_[l].codes;
      codes[i] = code;
      if (now == kKeep) {
        for (const std::size_t w : {std::size_t{0}, ways_.size() / 2}) {
          Codes without = codes;
          Prune(without, levels_[l], ways_[w], i);
          helped |= Try(l, without);
        }
      } else {
        helped |= Try(l, codes);
      }
    }
    if (now == kKeep) return helped;
    for (const Ways& ways : ways_) {
      Codes codes = best_[l].codes;
      codes[i] = kKeep;
      if (!Cover(codes, levels_[l], ways, i, true)) break;
      Prune(codes, levels_[l], ways, -1);
      helped |= Offer(l, codes);
    }
    return helped;
  }

  Simulator& simulator_;
  const Iteration& it_;
  const std::vector<Bytes>& levels_;
  std::int64_t effort_;
  int next_ = -1;
  std::vector<FoundPlan> best_;
  std::vector<Bytes> loads_;
  std::vector<double> clock_;
  std::vector<Ways> ways_;
  std::vector<int> order_;
  int refused_ = 0;  // an operator that had no room for a value
};

}  // namespace

std::vector<std::vector<std::int8_t>> FindFrontier(
    Simulator& simulator, const std::vector<Bytes>& levels,
    std::int64_t effort) {
  return Finder(simulator, levels, effort).Find();
}

}  // namespace lowtide
