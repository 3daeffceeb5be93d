// SPDX-License-Identifier: Apache-2.0
// What may be done next in a valley of the skyline.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lowtide.h"
#include "sets.h"
#include "skyline.h"
#include "sweep.h"

namespace lowtide {

enum class Side { kLeft, kRight };

// Push every block of a placement down until it rests on something. Then in
// any valley either no block rests on the floor, or one of them is the first
// from the left: nothing rests on the floor between the valley's left rim and
// it, so that stretch is closed and rises to the lower of the rim and the
// block's top. (Or the same from the right.)
//
//      rim |  |     |top          |  |#####|top
//          |__|_____|____         |__|     |____   the closed stretch (#) is
//          |  from  block         |  from  block   lost for good
//
struct Move {
  int block;      // -1: nothing rests on this floor, all of it is closed
  int from;       // the section the block begins in; may pass the seam
  int closed_from;
  int closed_to;
  Bytes rise;     // the level the closed stretch rises to
  double closed;  // bytes x sections lost
};

// The blocks not yet placed, how much each section can still afford to lose,
// and the moves that follow from them.
class Moves {
 public:
  Moves(const Problem& problem, const Sections& sections);

  int blocks() const { return static_cast<int>(bytes_.size()); }
  int sections() const { return sections_; }
  bool wall() const { return wall_; }
  Bytes bytes(int block) const { return bytes_[block]; }
  int first(int block) const { return ahead_.first[block]; }
  int length(int block) const { return ahead_.last[block] - first(block); }
  int original(int block) const { return original_[block]; }
  int open_count() const { return open_count_; }

  // Opens every block again, for a placement no higher than `capacity`; false
  // when the live bytes alone exceed it.
  bool Reset(Bytes capacity);
  void Close(int block);
  void Open(int block);
  // Takes `amount` from what the sections [from, to) may lose.
  void Lose(int from, int to, Bytes amount);

  // Counts the moves in a valley from one side, up to `most`, and appends them
  // to `moves` unless that is null. Left out are moves that lose more than a
  // section affords, and those that another move is never worse than.
  int List(const Skyline& sky, int run, Side side, int most,
           std::vector<Move>* moves) const;
  // The same while the skyline is flat all round: any open block comes first.
  void ListFlat(const Skyline& sky, int run, std::vector<Move>* moves) const;
  // What listing cost since the last call, in search nodes, at least one.
  std::int64_t TakeWork();

 private:
  // The blocks in order of their beginnings; behind_ sees time reversed.
  struct View {
    std::vector<int> block;  // by rank
    std::vector<int> first, last;  // by rank
    std::vector<int> starts;  // starts[s]: how many begin before section s
    std::vector<int> rank;    // by block
    Bits open;                // by rank
  };
  class Scan;

  static View Order(const std::vector<int>& first, const std::vector<int>& last,
                    const std::vector<Bytes>& bytes, int sections);
  bool OrderIsForced(const Skyline& sky, int run, int block, int from) const;
  bool TwinComesFirst(int block) const;

  int sections_;
  bool wall_;
  std::vector<int> original_;  // index in the problem
  std::vector<Bytes> bytes_;
  std::vector<Bytes> live_;
  std::vector<Bytes> spare_;   // what each section may still lose
  View ahead_, behind_;
  int open_count_ = 0;
  Bytes smallest_ = 0;
  mutable std::vector<std::pair<int, Bytes>> seen_;  // scratch of List
  mutable std::int64_t looked_at_ = 0;               // blocks, by List
};

}  // namespace lowtide
