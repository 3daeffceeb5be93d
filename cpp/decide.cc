// SPDX-License-Identifier: Apache-2.0
#include "decide.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "moves.h"
#include "sets.h"
#include "skyline.h"

namespace lowtide {

class Decider::Search {
 public:
  Search(const Problem& problem, const Sections& sections)
      : moves_(problem, sections),
        sky_(moves_.sections(), moves_.wall()),
        counts_(moves_.sections()),
        failed_(kFailures) {
    Random random(0);
    for (int i = 0; i < moves_.blocks(); ++i) key_.push_back(random.Next());
    offset_.resize(moves_.blocks());
    liking_.resize(moves_.blocks());
  }

  Verdict Run(Bytes capacity, std::uint64_t seed, std::int64_t nodes,
              Limits& limits, std::vector<Bytes>& offsets);

 private:
  static constexpr std::size_t kFailures = 1 << 16;
  static constexpr int kFew = 2;  // a valley with fewer moves is forced

  struct Frame {
    int run;
    std::size_t first_move, move;  // move: the next to try
    std::size_t sky_mark;
    std::uint64_t placed_hash;
    Region changed;  // by the move now made
    Region blame;    // what the failures so far depended on
  };
  struct Failure {
    std::uint64_t hash = 0;
    Region blame;
  };
  // How many moves a valley has, up to kFew; holds while nothing changed.
  struct Count {
    std::uint64_t stamp = 0;
    Bytes left = 0, right = 0;
    std::array<int, 2> moves{};
  };

  void Begin(Bytes capacity, std::uint64_t seed);
  bool Forced(int run, Side* side);
  int Choose(Side* side);
  void Descend();
  void Make(Frame& frame);
  void TakeBack(Frame& frame);
  bool Backtrack(Region& reason);
  Failure& Remembered() { return failed_[StateHash() % kFailures]; }
  std::uint64_t StateHash() const {
    return sky_.hash() ^ placed_hash_ ^ static_cast<std::uint64_t>(capacity_);
  }

  Moves moves_;
  Skyline sky_;
  Bytes capacity_ = 0;
  std::vector<std::uint64_t> key_;  // of each block, for placed_hash_
  std::uint64_t placed_hash_ = 0;
  std::vector<Bytes> offset_;
  std::vector<double> liking_;
  std::vector<Count> counts_;
  std::vector<Frame> frames_;
  std::vector<Move> options_;
  std::vector<Failure> failed_;
};

void Decider::Search::Begin(Bytes capacity, std::uint64_t seed) {
  capacity_ = capacity;
  sky_ = Skyline(moves_.sections(), moves_.wall());
  placed_hash_ = 0;
  frames_.clear();
  options_.clear();
  std::fill(counts_.begin(), counts_.end(), Count{});
  Random random(seed);
  const double power = random.Unit();
  for (int i = 0; i < moves_.blocks(); ++i) {
    liking_[i] = std::pow(static_cast<double>(moves_.bytes(i)), power) *
                 moves_.length(i) * random.Unit();
  }
}

bool Decider::Search::Forced(int run, Side* side) {
  const Bytes left = sky_.left_wall(run);
  const Bytes right = sky_.right_wall(run);
  Count& count = counts_[run];
  if (count.stamp != sky_.stamp(run) || count.left != left ||
      count.right != right) {
    count = {sky_.stamp(run), left, right,
             {moves_.List(sky_, run, Side::kLeft, kFew, nullptr),
              moves_.List(sky_, run, Side::kRight, kFew, nullptr)}};
  }
  *side = count.moves[1] < count.moves[0] ? Side::kRight : Side::kLeft;
  return std::min(count.moves[0], count.moves[1]) < kFew;
}

// The lowest valley without a choice, else the lowest, from the side with the
// fewer moves; at once a valley that cannot go on at all.
int Decider::Search::Choose(Side* side) {
  const int start = sky_.any();
  int forced = -1, lowest = start;
  int run = start;
  do {
    if (sky_.level(run) < sky_.level(lowest)) lowest = run;
    Side from;
    if (sky_.valley(run) && Forced(run, &from)) {
      if (forced < 0 || sky_.level(run) < sky_.level(forced)) {
        forced = run;
        *side = from;
      }
      const auto& moves = counts_[run].moves;
      if (std::min(moves[0], moves[1]) == 0) {
        *side = from;
        return run;
      }
    }
    run = sky_.next(run);
  } while (run != start);
  if (forced >= 0) return forced;
  const int left = moves_.List(sky_, lowest, Side::kLeft, 1 << 30, nullptr);
  const int right = moves_.List(sky_, lowest, Side::kRight, left, nullptr);
  *side = right < left ? Side::kRight : Side::kLeft;
  return lowest;
}

void Decider::Search::Descend() {
  Frame frame{};
  frame.first_move = frame.move = options_.size();
  frame.sky_mark = sky_.mark();
  frame.placed_hash = placed_hash_;
  const int n = moves_.sections();
  if (sky_.whole_circle(sky_.any())) {
    frame.run = sky_.any();
    moves_.ListFlat(sky_, frame.run, &options_);
    frame.blame.Add(0, n, n);
  } else {
    Side side = Side::kLeft;
    frame.run = Choose(&side);
    moves_.List(sky_, frame.run, side, 1 << 30, &options_);
    // The moves depend on the valley and on its rims; the wall never changes.
    const int end = sky_.end(frame.run);
    frame.blame.Add(frame.run, end, n);
    if (!moves_.wall() || frame.run > 0) {
      const int left = (frame.run + n - 1) % n;
      frame.blame.Add(left, left + 1, n);
    }
    if (!moves_.wall() || end < n) frame.blame.Add(end % n, end % n + 1, n);
  }
  std::sort(options_.begin() + frame.first_move, options_.end(),
            [this](const Move& a, const Move& b) {
              if (a.closed != b.closed) return a.closed < b.closed;
              return liking_[a.block] > liking_[b.block];
            });
  frames_.push_back(frame);
}

void Decider::Search::Make(Frame& frame) {
  const Move& move = options_[frame.move++];
  const Bytes floor = sky_.level(frame.run);
  const int n = moves_.sections();
  frame.changed = Region();
  if (move.block >= 0) {
    const int to = move.from + moves_.length(move.block);
    offset_[move.block] = floor;
    placed_hash_ ^= key_[move.block];
    moves_.Close(move.block);
    sky_.Lift(frame.run, move.from, to, floor + moves_.bytes(move.block),
              move.block);
    frame.changed.Add(move.from, to, n);
  }
  if (move.closed_from < move.closed_to) {
    moves_.Lose(move.closed_from, move.closed_to, move.rise - floor);
    const int run = move.closed_from % n;
    sky_.Lift(run, run, run + move.closed_to - move.closed_from, move.rise, -1);
    frame.changed.Add(move.closed_from, move.closed_to, n);
  }
}

void Decider::Search::TakeBack(Frame& frame) {
  const Move& move = options_[frame.move - 1];
  sky_.Undo(frame.sky_mark);
  placed_hash_ = frame.placed_hash;
  if (move.block >= 0) moves_.Open(move.block);
  const Bytes floor = sky_.level(frame.run);
  moves_.Lose(move.closed_from, move.closed_to, floor - move.rise);
}

// Goes back to the last move that `reason` depends on; false when none is
// left, so that nothing could have gone otherwise.
bool Decider::Search::Backtrack(Region& reason) {
  while (!frames_.empty()) {
    Frame& frame = frames_.back();
    TakeBack(frame);
    if (reason.Meets(frame.changed)) {
      frame.blame.Add(reason);
      if (frame.move < options_.size()) return true;
      reason = frame.blame;
      Remembered() = {StateHash(), reason};
    }
    options_.resize(frame.first_move);
    frames_.pop_back();
  }
  return false;
}

Verdict Decider::Search::Run(Bytes capacity, std::uint64_t seed,
                             std::int64_t nodes, Limits& limits,
                             std::vector<Bytes>& offsets) {
  Begin(capacity, seed);
  if (!moves_.Reset(capacity)) return Verdict::kImpossible;
  for (std::int64_t spent = 0; moves_.open_count() > 0; ++spent) {
    if (spent >= nodes || !limits.Spend(moves_.TakeWork())) {
      return Verdict::kGaveUp;
    }
    const Failure& known = Remembered();
    Region reason = known.blame;
    bool fails = known.hash == StateHash();
    if (!fails) {
      Descend();
      const Frame& frame = frames_.back();
      if (frame.move == options_.size()) {
        fails = true;
        reason = frame.blame;
        frames_.pop_back();
      }
    }
    if (fails && !Backtrack(reason)) return Verdict::kImpossible;
    Make(frames_.back());
  }
  offsets.resize(moves_.blocks());
  for (int i = 0; i < moves_.blocks(); ++i) {
    offsets[moves_.original(i)] = offset_[i];
  }
  return Verdict::kFits;
}

Decider::Decider(const Problem& problem, const Sections& sections)
    : search_(std::make_unique<Search>(problem, sections)) {}
Decider::~Decider() = default;

Verdict Decider::Decide(Bytes capacity, std::uint64_t seed, std::int64_t nodes,
                        Limits& limits, std::vector<Bytes>& offsets) {
  return search_->Run(capacity, seed, nodes, limits, offsets);
}

}  // namespace lowtide
