// SPDX-License-Identifier: Apache-2.0
// The upper edge of what has been placed so far, as runs of equal height.
#pragma once

#include <cstdint>
#include <vector>

#include "lowtide.h"

namespace lowtide {

// Runs over a circle of sections; neighbouring runs always differ in level. On
// a line, one more section with an infinite level (the wall) closes the circle.
//
//     level |         ______
//           |__      |      |__          a valley is a run lower than both
//           |  |_____|      |  |         its neighbours: here the second
//           +-----------------------> section
//
// A run is named by its first section and may wrap. Every change is logged and
// can be taken back with Undo, in reverse order.
class Skyline {
 public:
  static constexpr Bytes kWall = Bytes{1} << 62;

  explicit Skyline(int sections, bool wall);

  int sections() const { return sections_; }
  Bytes level(int run) const { return cells_[run].level; }
  int length(int run) const { return cells_[run].length; }
  int end(int run) const { return run + cells_[run].length; }  // may wrap
  int previous(int run) const { return cells_[run].previous; }
  int next(int run) const { return Wrap(end(run)); }
  int any() const { return any_; }
  // The block whose top is exactly this run, or -1.
  int top_block(int run) const { return cells_[run].block; }
  // A number that no run but this, with this history below it, ever had.
  std::uint64_t stamp(int run) const { return cells_[run].stamp; }
  bool whole_circle(int run) const { return cells_[run].length == sections_; }
  bool valley(int run) const {
    return whole_circle(run) || (level(run) < level(previous(run)) &&
                                 level(run) < level(next(run)));
  }
  Bytes left_wall(int run) const {
    return whole_circle(run) ? kWall : level(previous(run));
  }
  Bytes right_wall(int run) const {
    return whole_circle(run) ? kWall : level(next(run));
  }
  // A hash of the whole edge, for recognising one seen before.
  std::uint64_t hash() const { return hash_; }
  int Wrap(int section) const {
    return section >= sections_ ? section - sections_ : section;
  }

  // Lifts [from, to) inside `run` to `level` and leaves `block` (or -1) as its
  // top. Sections count from the run's start, so `to` may pass the seam.
  // Returns the run that now holds `from`.
  int Lift(int run, int from, int to, Bytes level, int block);

  std::size_t mark() const { return log_.size(); }
  void Undo(std::size_t mark);
  void ForgetLog() { log_.clear(); }

 private:
  struct Cell {
    int length = 0;  // 0: no run begins here
    int previous = 0;
    Bytes level = 0;
    int block = -1;
    std::uint64_t stamp = 0;
  };
  struct Entry {
    int at;
    int any;
    std::uint64_t hash;
    Cell cell;
  };

  Cell& Change(int at);
  void Toggle(int run);
  void Set(int at, int length, int previous, Bytes level, int block);
  int MergeWithNext(int run);

  int sections_;
  int any_ = 0;
  std::uint64_t hash_ = 0;
  std::uint64_t stamps_ = 0;
  std::vector<Cell> cells_;
  std::vector<Entry> log_;
};

}  // namespace lowtide
