// SPDX-License-Identifier: Apache-2.0
#include "skyline.h"

#include "effort.h"

namespace lowtide {

Skyline::Skyline(int sections, bool wall)
    : sections_(sections + (wall ? 1 : 0)), cells_(sections_) {
  cells_[0] = {sections, 0, 0, -1, ++stamps_};
  if (wall) {
    cells_[0].previous = sections;
    cells_[sections] = {1, 0, kWall, -1, ++stamps_};
    Toggle(sections);
  }
  Toggle(0);
}

void Skyline::Toggle(int run) {
  const auto level = static_cast<std::uint64_t>(cells_[run].level);
  hash_ ^= Random(level * 0x9e3779b97f4a7c15u + run).Next();
}

Skyline::Cell& Skyline::Change(int at) {
  log_.push_back({at, any_, hash_, cells_[at]});
  return cells_[at];
}

void Skyline::Set(int at, int length, int previous, Bytes level, int block) {
  Change(at) = {length, previous, level, block, ++stamps_};
  Toggle(at);
}

int Skyline::MergeWithNext(int run) {
  const int after = next(run);
  if (after == run || level(after) != level(run)) return run;
  Toggle(after);
  const int gained = Change(after).length;
  cells_[after].length = 0;
  Cell& kept = Change(run);
  kept.length += gained;
  kept.block = -1;
  kept.stamp = ++stamps_;
  if (next(run) != run) Change(next(run)).previous = run;
  else cells_[run].previous = run;
  any_ = run;
  return run;
}

int Skyline::Lift(int run, int from, int to, Bytes level, int block) {
  const Cell old = cells_[run];
  const int end = run + old.length;
  const int before = whole_circle(run) ? -1 : old.previous;
  const int after = whole_circle(run) ? -1 : next(run);
  Toggle(run);
  Change(run).length = 0;

  // Up to three pieces take the run's place.
  int last = -1;
  int first = -1;
  const auto append = [&](int a, int b, Bytes height, int top) {
    if (a == b) return;
    const int at = Wrap(a);
    Set(at, b - a, last >= 0 ? last : before, height, top);
    if (first < 0) first = at;
    last = at;
  };
  if (before < 0) {
    // The whole circle: what is left of it runs from `to` round to `from`.
    const int turn = from - Wrap(from);
    from -= turn;
    to -= turn;
    append(from, to, level, block);
    append(to, from + sections_, old.level, -1);
  } else {
    append(run, from, old.level, -1);
    append(from, to, level, block);
    append(to, end, old.level, -1);
  }
  Change(first).previous = before < 0 ? last : before;
  if (after >= 0) Change(after).previous = last;
  any_ = first;

  const int lifted = Wrap(from);
  MergeWithNext(lifted);
  const int left = previous(lifted);
  if (left != lifted && this->level(left) == level) return MergeWithNext(left);
  return lifted;
}

void Skyline::Undo(std::size_t mark) {
  while (log_.size() > mark) {
    const Entry& entry = log_.back();
    cells_[entry.at] = entry.cell;
    any_ = entry.any;
    hash_ = entry.hash;
    log_.pop_back();
  }
}

}  // namespace lowtide
