// SPDX-License-Identifier: Apache-2.0
// All addresses of the arena, cut into live blocks and free ranges, which
// are found by size or by address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pages.h"

namespace lowtide {

using Id = std::uint32_t;
constexpr Id kNil = 0;

// A range of pages, live or free, between its neighbours by address.
struct Extent {
  Page page, pages;
  Id before, after;
  Id bin_before, bin_after;
  Page touched;  // of a free one, kept pages
  bool free;
  bool packed;   // the kept pages come first: no need to count them
  std::uint64_t bytes;
  std::uint64_t record;

  Page end() const { return page + pages; }
};

// Free ranges by size: each of the smaller sizes has a bin, 32 bins each
// larger power of two.
struct Bins {
  static constexpr Page kCount = 896;
  Id first[kCount];
  Word filled[kCount / 64];

  static Page of(Page pages);
};

// Ranges of one kind are found together. The zone is what lies behind the border.
enum Kind { kClean = 0, kKept = 1, kCleanInZone = 2, kKeptInZone = 3 };

class Ranges {
 public:
  // Begins with two free ranges, before the border and behind it.
  bool reserve(Page pages, Page border);

  Extent& operator[](Id id) { return extents_[id]; }
  const Extent& operator[](Id id) const { return extents_[id]; }

  // The range around a page, and the one that starts there (kNil: there is none).
  Id around(Page page) const { return starting_[starts_.previous(page)]; }
  Id starting_at(Page page) const {
    return starts_.has(page) ? starting_[page] : kNil;
  }

  // The smallest free range that fits, of the first few of its bin.
  Id best_fit(Kind kind, Page pages) const;
  const Bins& bins(Kind kind) const { return bins_[kind]; }

  // A free range must be left before it changes, and entered again afterwards.
  void enter(Id id);
  void leave(Id id);

  // Cuts a range after so many pages; returns what lies behind.
  Id split(Id id, Page pages);
  // Makes one free range of a range and its free neighbours; it is to be entered.
  Id coalesce(Id id);

  bool exhausted() const { return made_ + 2 >= kMost; }

  PageBits touched;  // pages that the system has given

 private:
  static constexpr Id kMost = 1 << 22;

  Bins& bins_of(const Extent& extent) {
    return bins_[(extent.page >= border_) * 2 + (extent.touched > 0)];
  }
  Id make(Page page, Page pages);
  void drop(Id id);
  Id merge(Id left, Id right);
  bool is_packed(const Extent& extent) const;

  Extent* extents_ = nullptr;
  Id* starting_ = nullptr;
  PageIndex starts_;
  Bins bins_[4] = {};
  Page border_ = 0;
  Id unused_ = kNil;  // a list of extents to be used again
  Id made_ = 1;
};

}  // namespace lowtide
