// SPDX-License-Identifier: Apache-2.0
#include "moves.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace lowtide {
namespace {

constexpr std::int64_t kLooksPerNode = 128;
constexpr std::int64_t kLooksPerMove = 8;  // moves get sorted

}  // namespace

Moves::View Moves::Order(const std::vector<int>& first,
                         const std::vector<int>& last,
                         const std::vector<Bytes>& bytes, int sections) {
  const int n = static_cast<int>(first.size());
  View view;
  view.block.resize(n);
  std::iota(view.block.begin(), view.block.end(), 0);
  std::stable_sort(view.block.begin(), view.block.end(), [&](int a, int b) {
    return std::tie(first[a], last[a], bytes[a]) <
           std::tie(first[b], last[b], bytes[b]);
  });
  view.rank.resize(n);
  view.starts.assign(sections + 1, 0);
  for (int rank = 0; rank < n; ++rank) {
    const int block = view.block[rank];
    view.rank[block] = rank;
    view.first.push_back(first[block]);
    view.last.push_back(last[block]);
    ++view.starts[first[block] + 1];
  }
  std::partial_sum(view.starts.begin(), view.starts.end(),
                   view.starts.begin());
  view.open = Bits(n);
  return view;
}

Moves::Moves(const Problem& problem, const Sections& sections)
    : sections_(sections.count),
      wall_(problem.period == 0),
      live_(LiveBytes(problem, sections)) {
  const int n = static_cast<int>(problem.blocks.size());
  for (const Block& block : problem.blocks) bytes_.push_back(block.bytes);
  smallest_ = n == 0 ? 0 : *std::min_element(bytes_.begin(), bytes_.end());
  ahead_ = Order(sections.first, sections.last, bytes_, sections_);
  original_ = ahead_.block;
  // From here on a block is its rank in ahead_.
  for (int i = 0; i < n; ++i) {
    bytes_[i] = problem.blocks[original_[i]].bytes;
    ahead_.block[i] = ahead_.rank[i] = i;
  }
  std::vector<int> first(n), last(n);
  for (int i = 0; i < n; ++i) {
    first[i] = (2 * sections_ - ahead_.last[i]) % sections_;
    last[i] = first[i] + length(i);
  }
  behind_ = Order(first, last, bytes_, sections_);
}

bool Moves::Reset(Bytes capacity) {
  for (int i = 0; i < blocks(); ++i) {
    ahead_.open.Set(i);
    behind_.open.Set(i);
  }
  open_count_ = blocks();
  spare_.resize(sections_);
  Bytes least = capacity;
  for (int s = 0; s < sections_; ++s) {
    spare_[s] = capacity - live_[s];
    least = std::min(least, spare_[s]);
  }
  return least >= 0;
}

void Moves::Close(int block) {
  ahead_.open.Clear(block);
  behind_.open.Clear(behind_.rank[block]);
  --open_count_;
}

void Moves::Open(int block) {
  ahead_.open.Set(block);
  behind_.open.Set(behind_.rank[block]);
  ++open_count_;
}

void Moves::Lose(int from, int to, Bytes amount) {
  for (int s = from; s < to; ++s) spare_[s % sections_] -= amount;
}

bool Moves::TwinComesFirst(int block) const {
  const int twin = block - 1;
  return twin >= 0 && ahead_.open.Has(twin) && first(twin) == first(block) &&
         length(twin) == length(block) && bytes_[twin] == bytes_[block];
}

// Of two blocks with the same life, one right on the other, the smaller goes
// below: the other order gives no other placement.
bool Moves::OrderIsForced(const Skyline& sky, int run, int block,
                          int from) const {
  const int below = sky.top_block(run);
  if (below < 0 || from != run || length(block) != sky.length(run) ||
      length(below) != sky.length(run)) {
    return false;
  }
  return std::make_pair(bytes_[block], block) <
         std::make_pair(bytes_[below], below);
}

// One pass over the blocks inside a valley, from one side. Time runs from that
// side here: reversed for the right one.
class Moves::Scan {
 public:
  Scan(const Moves& moves, const Skyline& sky, int run, Side side)
      : moves_(moves),
        view_(side == Side::kLeft ? moves.ahead_ : moves.behind_),
        mirrored_(side == Side::kRight),
        run_(run),
        sky_(sky),
        floor_(sky.level(run)),
        seen_(moves.seen_) {
    const int n = moves.sections_;
    from_ = mirrored_ ? (2 * n - sky.end(run)) % n : run;
    to_ = from_ + sky.length(run);
    reached_ = from_;
    wall_ = mirrored_ ? sky.right_wall(run) : sky.left_wall(run);
    rim_ = std::min(sky.left_wall(run), sky.right_wall(run));
    least_ = std::min(rim_ - floor_, moves.smallest_);
    seen_.clear();
  }

  int Count(int most, std::vector<Move>* moves) {
    const int n = moves_.sections_;
    for (int shift = 0; shift < to_; shift += n) {
      const int limit = view_.starts[std::min(to_ - shift, n)];
      int rank = view_.starts[std::max(from_ - shift, 0)];
      for (rank = view_.open.Next(rank, limit); rank < limit;
           rank = view_.open.Next(rank + 1, limit)) {
        ++moves_.looked_at_;
        // Whatever comes later closes a section that affords nothing.
        if (Spare(view_.first[rank] + shift) < least_) return count_;
        if (view_.last[rank] + shift > to_) continue;
        Consider(rank, shift, moves);
        if (count_ >= most) return count_;
      }
    }
    ConsiderNothing(moves);
    return count_;
  }

 private:
  void Consider(int rank, int shift, std::vector<Move>* moves) {
    const int block = view_.block[rank];
    const Bytes bytes = moves_.bytes_[block];
    const int from = view_.first[rank] + shift;
    smallest_ = std::min(smallest_, bytes);
    if (moves_.TwinComesFirst(block)) return;
    const Bytes lost = from > from_ ? std::min(wall_ - floor_, bytes) : 0;
    const bool filled = lost > 0 && FitsBefore(from, lost);
    seen_.push_back({view_.last[rank] + shift, bytes});
    if (filled || lost > Spare(from)) return;
    const int real_from = Real(from, view_.last[rank] + shift);
    if (moves_.OrderIsForced(sky_, run_, block, real_from)) return;
    ++count_;
    if (moves) Append(block, real_from, from, lost, moves);
  }

  // Does a block seen before fit into the stretch before `from`, and lower
  // than `lost`? It would do no harm there.
  bool FitsBefore(int from, Bytes lost) const {
    return std::any_of(seen_.begin(), seen_.end(), [&](const auto& other) {
      return other.first <= from && other.second <= lost;
    });
  }

  // The least that a section from the rim up to `from` may still lose.
  Bytes Spare(int from) {
    const int n = moves_.sections_;
    for (; reached_ < from; ++reached_) {
      const int s = reached_ % n;
      spare_ = std::min(spare_, moves_.spare_[mirrored_ ? n - 1 - s : s]);
    }
    return spare_;
  }

  void ConsiderNothing(std::vector<Move>* moves) {
    const Bytes lost = rim_ - floor_;
    if (rim_ >= Skyline::kWall || smallest_ <= lost || lost > Spare(to_)) {
      return;
    }
    ++count_;
    if (moves) {
      const int end = run_ + to_ - from_;
      moves->push_back({-1, run_, run_, end, rim_, 1e300});
    }
  }

  int Real(int from, int to) const {
    return mirrored_ ? run_ + to_ - to : from;
  }

  void Append(int block, int real_from, int from, Bytes lost,
              std::vector<Move>* moves) const {
    moves_.looked_at_ += kLooksPerMove;
    const double closed = static_cast<double>(lost) * (from - from_);
    const int end = run_ + to_ - from_;
    const int closed_from = mirrored_ ? end - (from - from_) : run_;
    const int closed_to = mirrored_ ? end : from;
    moves->push_back(
        {block, real_from, closed_from, closed_to, floor_ + lost, closed});
  }

  const Moves& moves_;
  const View& view_;
  bool mirrored_;
  int run_;
  const Skyline& sky_;
  Bytes floor_, wall_ = 0, rim_ = 0;
  int from_ = 0, to_ = 0, reached_ = 0;
  int count_ = 0;
  Bytes spare_ = Skyline::kWall;
  Bytes smallest_ = Skyline::kWall;
  Bytes least_ = 0;  // what closing any stretch loses
  std::vector<std::pair<int, Bytes>>& seen_;  // (end, bytes)
};

std::int64_t Moves::TakeWork() {
  const std::int64_t nodes = 1 + looked_at_ / kLooksPerNode;
  looked_at_ = 0;
  return nodes;
}

int Moves::List(const Skyline& sky, int run, Side side, int most,
                std::vector<Move>* moves) const {
  return Scan(*this, sky, run, side).Count(most, moves);
}

void Moves::ListFlat(const Skyline& sky, int run,
                     std::vector<Move>* moves) const {
  const int n = blocks();
  for (int i = ahead_.open.Next(0, n); i < n; i = ahead_.open.Next(i + 1, n)) {
    if (TwinComesFirst(i)) continue;
    looked_at_ += kLooksPerMove;
    const int from = first(i) < run ? first(i) + sections_ : first(i);
    moves->push_back({i, from, run, run, sky.level(run), 0.0});
  }
}

}  // namespace lowtide
