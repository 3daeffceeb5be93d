// SPDX-License-Identifier: Apache-2.0
// One iteration on a simulated timeline: what a plan costs, and what it holds.
//
// Three lanes work at once. The compute lane runs the operators in order and
// computes dropped values again before the operator that uses them. The out
// lane writes swapped values in the order in which they were saved; their bytes
// go when the write is done. The in lane reads them back in the order of their
// use, each as late as their order allows, but so early that it is back in time
// where it fits all the way. An operator waits for its reads, and for writes as
// long as memory is too full for it:
//
//     compute  |op0|op1|op2|...waits...|op3|op4|  replay  |op5|
//     out      |    write a    |write b|       .          .
//     in                                   |  read b  |   .
//
// More room never makes the same plan slower: nothing begins later for it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lowtide.h"

namespace lowtide {

// A dropped value that is needed for the replay of another, before its own use,
// is computed for that, and again for its own use (kReplay); or it stays from
// then on (kShare). A swapped one is read back by then, and stays.
enum Code : std::int8_t { kKeep = 0, kSwap = 1, kReplay = 2, kShare = 3 };

struct Saved {
  Bytes bytes;
  int start;       // the first operator during which it may be away
  int stop;        // its first use, or the number of operators
  double seconds;  // to compute it again from its parents
  bool swappable;
  bool replayable;
  Bytes replay_from = 0;  // the least level at which a replay finds room
};

struct Iteration {
  std::vector<double> seconds;  // one an operator
  std::vector<Bytes> plain;     // load of each operator when nothing is away
  std::vector<Saved> values;
  double write = 0;  // seconds a byte, out
  double read = 0;   // seconds a byte, in
  double tax = 0;    // seconds of compute lost a second of copying
  // What value i is computed from: parents[first_parent[i] .. [i + 1]).
  std::vector<int> first_parent;
  std::vector<int> parents;
  int longest_chain = 0;  // values replayed for one use; more count tenfold
};

struct Outcome {
  Bytes excess = 0;  // above the limits; no times where it is positive
  bool stuck = false;    // a replay has no room; no times either
  Bytes peak = 0;
  Bytes moved = 0;      // bytes that are away at some time
  double seconds = 0;   // of the whole step, tax included
  double waited = 0;    // of these, compute stood still
  double replayed = 0;  // of these, computing again
  double taxed = 0;     // of these, lost to copies beside

  bool valid() const { return excess == 0 && !stuck; }
};

class Simulator {
 public:
  // Throws std::invalid_argument when the iteration contradicts itself.
  explicit Simulator(Iteration iteration);

  const Iteration& iteration() const { return iteration_; }
  int operators() const { return static_cast<int>(iteration_.plain.size()); }
  int values() const { return static_cast<int>(iteration_.values.size()); }

  // What an operator may hold: the level, or what no plan can take away.
  Bytes Limit(int op, Bytes level) const {
    return level > floor_[op] ? level : floor_[op];
  }
  const std::vector<Bytes>& floor() const { return floor_; }

  // Load of each operator while all that leaves is away in its whole window.
  const std::vector<Bytes>& Load(std::span<const std::int8_t> codes);

  Outcome Run(std::span<const std::int8_t> codes, Bytes level);

  // Operators and values looked at so far: what effort is counted in.
  std::int64_t steps() const { return steps_; }
  void Spend(std::int64_t steps) { steps_ += steps; }

  // Of the latest Run: the operator before which each read begins (-1: none),
  // and the one at which each value is back.
  const std::vector<int>& begins() const { return begins_; }
  const std::vector<int>& ends() const { return away_until_; }

 private:
  struct Lanes;

  void ResolveUses(std::span<const std::int8_t> codes);
  bool Stuck(std::span<const std::int8_t> codes, Bytes level) const;
  double Replay(std::span<const std::int8_t> codes, int value, int op);
  void Queue(std::span<const std::int8_t> codes);
  void LeadTimes(std::span<const std::int8_t> codes);
  void Write(std::span<const std::int8_t> codes, int op, Lanes& lanes);
  void Retire(Lanes& lanes);
  double Read(int value, int op, Bytes level, Lanes& lanes);
  double RoomFrom(int value, int op, Bytes level, double earliest);

  Iteration iteration_;
  std::vector<Bytes> floor_;
  std::vector<double> clock_;  // when operators begin if nothing ever waits
  std::vector<int> by_start_;
  std::int64_t steps_ = 0;
  // Of the current run, one a value:
  std::vector<int> away_until_, begins_, next_due_, needed_, replayed_for_;
  std::vector<double> written_, lead_;
  std::vector<char> stays_;
  // ... and one an operator:
  std::vector<int> due_, head_, tail_;
  std::vector<Bytes> load_, pending_, held_;
  std::vector<double> ready_;
  std::vector<int> writes_, last_first_, missing_;
};

}  // namespace lowtide
