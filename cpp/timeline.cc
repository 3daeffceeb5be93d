// SPDX-License-Identifier: Apache-2.0
#include "timeline.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace lowtide {
namespace {

void Validate(const Iteration& it) {
  const int n = static_cast<int>(it.plain.size());
  const std::size_t m = it.values.size();
  if (it.seconds.size() != it.plain.size())
    throw std::invalid_argument("seconds and loads differ in length");
  for (const Saved& value : it.values) {
    if (value.start < 0 || value.stop > n || value.bytes < 0)
      throw std::invalid_argument("a value lies outside of its iteration");
  }
  if (it.first_parent.size() != m + 1 || it.first_parent.front() != 0 ||
      it.first_parent.back() != static_cast<int>(it.parents.size()) ||
      !std::is_sorted(it.first_parent.begin(), it.first_parent.end()))
    throw std::invalid_argument("the parents are not one row a value");
  for (std::size_t i = 0; i < m; ++i) {
    for (int e = it.first_parent[i]; e < it.first_parent[i + 1]; ++e) {
      const int p = it.parents[e];
      if (p < 0 || p >= static_cast<int>(i))
        throw std::invalid_argument(
            "a value comes before what it is made from");
    }
  }
}

}  // namespace

// The clock, and the state of the two copying lanes.
struct Simulator::Lanes {
  double now = 0;
  double out_free = 0;
  double in_free = 0;
  std::size_t head = 0;  // the first write that is not done
  Bytes pending = 0;     // bytes that are planned away, but not written yet
  std::size_t cursor = 0;
};

Simulator::Simulator(Iteration iteration) : iteration_(std::move(iteration)) {
  Validate(iteration_);
  const std::size_t n = iteration_.plain.size();
  const std::size_t m = iteration_.values.size();
  floor_ = iteration_.plain;
  for (const Saved& value : iteration_.values) {
    if (!value.swappable && !value.replayable) continue;
    for (int op = value.start; op < value.stop; ++op) floor_[op] -= value.bytes;
  }
  clock_.assign(1, 0.0);
  for (double seconds : iteration_.seconds)
    clock_.push_back(clock_.back() + seconds);
  by_start_.resize(m);
  std::iota(by_start_.begin(), by_start_.end(), 0);
  std::stable_sort(by_start_.begin(), by_start_.end(), [this](int a, int b) {
    return iteration_.values[a].start < iteration_.values[b].start;
  });
  for (auto* one_a_value :
       {&away_until_, &begins_, &next_due_, &needed_, &replayed_for_})
    one_a_value->resize(m);
  written_.resize(m);
  lead_.resize(m);
  stays_.resize(m);
  for (auto* one_an_op : {&due_, &head_, &tail_}) one_an_op->resize(n + 1);
  for (auto* one_an_op : {&load_, &pending_, &held_}) one_an_op->resize(n + 1);
  ready_.resize(n + 1);
}

// A value is needed at its own first use, or earlier where something that is
// computed again is made from it.
void Simulator::ResolveUses(std::span<const std::int8_t> codes) {
  const Iteration& it = iteration_;
  for (int i = 0; i < values(); ++i)
    away_until_[i] = needed_[i] = it.values[i].stop;
  if (it.parents.empty()) return;
  for (int i = values() - 1; i >= 0; --i) {
    if (codes[i] == kSwap || codes[i] == kShare)
      away_until_[i] = std::max(it.values[i].start, needed_[i]);
    if (codes[i] != kReplay && codes[i] != kShare) continue;
    for (int e = it.first_parent[i]; e < it.first_parent[i + 1]; ++e)
      needed_[it.parents[e]] = std::min(needed_[it.parents[e]], needed_[i]);
  }
}

bool Simulator::Stuck(std::span<const std::int8_t> codes, Bytes level) const {
  for (int i = 0; i < values(); ++i) {
    if ((codes[i] == kReplay || codes[i] == kShare) &&
        level < iteration_.values[i].replay_from)
      return true;
  }
  return false;
}

// Seconds to compute a value before `op`, with all that it is made from and is
// missing then; what was computed for this operator already is not missing.
double Simulator::Replay(std::span<const std::int8_t> codes, int value,
                         int op) {
  constexpr double kTooLong = 10;
  const Iteration& it = iteration_;
  double seconds = 0;
  int count = 0;
  missing_.assign(1, value);
  replayed_for_[value] = op;
  while (!missing_.empty()) {
    const int i = missing_.back();
    missing_.pop_back();
    seconds += it.values[i].seconds;
    ++count;
    for (int e = it.first_parent[i]; e < it.first_parent[i + 1]; ++e) {
      const int p = it.parents[e];
      if (codes[p] != kReplay || away_until_[p] <= op || replayed_for_[p] == op)
        continue;
      if (it.values[p].start > op) continue;
      replayed_for_[p] = op;
      missing_.push_back(p);
    }
  }
  steps_ += count;
  return count > it.longest_chain ? kTooLong * seconds : seconds;
}

const std::vector<Bytes>& Simulator::Load(std::span<const std::int8_t> codes) {
  steps_ += operators() + values();
  ResolveUses(codes);
  std::fill(load_.begin(), load_.end(), 0);
  for (int i = 0; i < values(); ++i) {
    if (codes[i] == kKeep) continue;
    load_[iteration_.values[i].start] -= iteration_.values[i].bytes;
    load_[away_until_[i]] += iteration_.values[i].bytes;
  }
  Bytes away = 0;
  for (int op = 0; op < operators(); ++op) {
    away += load_[op];
    load_[op] = iteration_.plain[op] + away;
  }
  return load_;
}

// Lists what is due at each operator, in the order of the values.
void Simulator::Queue(std::span<const std::int8_t> codes) {
  std::fill(due_.begin(), due_.end(), -1);
  for (int i = values() - 1; i >= 0; --i) {
    begins_[i] = -1;
    stays_[i] = 0;
    if (codes[i] == kKeep) continue;
    next_due_[i] = due_[away_until_[i]];
    due_[away_until_[i]] = i;
  }
  writes_.clear();
}

// How long before its use each read has to begin, so that all reads can follow
// one another and none is late.
void Simulator::LeadTimes(std::span<const std::int8_t> codes) {
  double latest = clock_.back();
  for (int op = operators() - 1; op >= 0; --op) {
    last_first_.clear();
    for (int i = due_[op]; i >= 0; i = next_due_[i])
      if (codes[i] == kSwap) last_first_.push_back(i);
    for (auto i = last_first_.rbegin(); i != last_first_.rend(); ++i) {
      latest = std::min(latest, clock_[op]) -
               static_cast<double>(iteration_.values[*i].bytes) *
                   iteration_.read;
      lead_[*i] = clock_[op] - latest;
    }
  }
}

void Simulator::Write(std::span<const std::int8_t> codes, int op,
                      Lanes& lanes) {
  for (; lanes.cursor < by_start_.size(); ++lanes.cursor) {
    const int i = by_start_[lanes.cursor];
    const Saved& value = iteration_.values[i];
    if (value.start > op) return;
    if (codes[i] != kSwap || away_until_[i] <= value.start) continue;
    written_[i] = std::max(lanes.out_free, lanes.now) +
                  static_cast<double>(value.bytes) * iteration_.write;
    lanes.out_free = written_[i];
    lanes.pending += value.bytes;
    writes_.push_back(i);
  }
}

void Simulator::Retire(Lanes& lanes) {
  for (; lanes.head < writes_.size(); ++lanes.head) {
    const int i = writes_[lanes.head];
    if (written_[i] > lanes.now) return;
    if (!stays_[i]) lanes.pending -= iteration_.values[i].bytes;
  }
}

// The earliest time from which a value fits beside all that runs before `op`.
double Simulator::RoomFrom(int value, int op, Bytes level,
                           double earliest) {
  const Saved& mine = iteration_.values[value];
  for (int at = op - 1; at >= mine.start && ready_[at + 1] > earliest; --at) {
    ++steps_;
    const Bytes slack = Limit(at, level) - load_[at] - mine.bytes;
    if (slack < 0) return ready_[at + 1];
    Bytes pending = pending_[at];
    double room = earliest;
    for (int w = head_[at]; w < tail_[at] && pending > slack; ++w) {
      const int other = writes_[w];
      if (away_until_[other] <= at) continue;
      pending -= iteration_.values[other].bytes;
      room = written_[other];
    }
    if (room >= ready_[at + 1]) return ready_[at + 1];
    earliest = std::max(earliest, room);
  }
  return earliest;
}

double Simulator::Read(int value, int op, Bytes level, Lanes& lanes) {
  const Saved& mine = iteration_.values[value];
  const double begin = RoomFrom(
      value, op, level,
      std::max({lanes.in_free, written_[value], ready_[op] - lead_[value]}));
  int at = op;
  while (at > mine.start && ready_[at] > begin) load_[--at] += mine.bytes;
  begins_[value] = at;
  lanes.in_free = begin + static_cast<double>(mine.bytes) * iteration_.read;
  return lanes.in_free;
}

Outcome Simulator::Run(std::span<const std::int8_t> codes, Bytes level) {
  Outcome outcome;
  Load(codes);
  for (int op = 0; op < operators(); ++op)
    outcome.excess = std::max(outcome.excess, load_[op] - Limit(op, level));
  outcome.stuck = Stuck(codes, level);
  if (!outcome.valid()) return outcome;
  steps_ += operators() + values();
  Queue(codes);
  LeadTimes(codes);
  std::fill(replayed_for_.begin(), replayed_for_.end(), -1);
  const Iteration& it = iteration_;
  Lanes lanes;
  double copied = 0, computed = 0;
  for (int op = 0; op < operators(); ++op) {
    ready_[op] = lanes.now;
    Write(codes, op, lanes);
    Retire(lanes);
    for (int i = due_[op]; i >= 0; i = next_due_[i]) {
      // Not written yet when it is used: it never left.
      if (codes[i] != kSwap || away_until_[i] <= it.values[i].start) continue;
      if (written_[i] <= lanes.now) continue;
      stays_[i] = 1;
      lanes.pending -= it.values[i].bytes;
    }
    head_[op] = static_cast<int>(lanes.head);
    tail_[op] = static_cast<int>(writes_.size());
    pending_[op] = lanes.pending;
    for (int i = due_[op]; i >= 0; i = next_due_[i]) {
      if (codes[i] != kSwap || stays_[i]) continue;
      if (away_until_[i] <= it.values[i].start) continue;
      lanes.now = std::max(lanes.now, Read(i, op, level, lanes));
      copied += static_cast<double>(it.values[i].bytes) * it.read;
    }
    for (int i = due_[op]; i >= 0; i = next_due_[i]) {
      if (codes[i] != kReplay && codes[i] != kShare) continue;
      const double seconds = Replay(codes, i, op);
      lanes.now += seconds;
      outcome.replayed += seconds;
    }
    Retire(lanes);
    while (load_[op] + lanes.pending > Limit(op, level) &&
           lanes.head < writes_.size()) {
      lanes.now = std::max(lanes.now, written_[writes_[lanes.head]]);
      Retire(lanes);
    }
    held_[op] = lanes.pending;
    lanes.now += it.seconds[op];
    computed += it.seconds[op];
    ready_[op + 1] = lanes.now;
  }
  for (int i = 0; i < values(); ++i) {
    if (codes[i] == kKeep) continue;
    outcome.moved += it.values[i].bytes;
    if (codes[i] == kSwap)
      copied += static_cast<double>(it.values[i].bytes) * it.write;
  }
  for (int op = 0; op < operators(); ++op) {
    // A read that begins in mid-operator does so when writes have made room.
    const Bytes held = std::min(load_[op] + held_[op], Limit(op, level));
    outcome.peak = std::max(outcome.peak, held);
  }
  outcome.waited = lanes.now - computed - outcome.replayed;
  outcome.taxed = it.tax * copied;
  outcome.seconds = lanes.now + outcome.taxed;
  return outcome;
}

}  // namespace lowtide
