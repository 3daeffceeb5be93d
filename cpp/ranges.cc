// SPDX-License-Identifier: Apache-2.0
#include "ranges.h"

#include <sys/mman.h>

#include <algorithm>

namespace lowtide {
namespace {

constexpr int kLooked = 32;  // free ranges of one bin compared

}  // namespace

bool Ranges::reserve(Page pages, Page border) {
  const std::size_t room = kMost * sizeof(Extent);
  void* const extents = map_lazily(room);
  void* const starting = map_lazily(pages * sizeof(Id));
  if (!extents || !starting || !starts_.reserve(pages) || !touched.reserve(pages)) {
    if (extents) {
      munmap(extents, room);
    }
    if (starting) {
      munmap(starting, pages * sizeof(Id));
    }
    return false;
  }
  extents_ = static_cast<Extent*>(extents);
  starting_ = static_cast<Id*>(starting);
  border_ = border;
  const Id left = make(0, border);
  const Id right = make(border, pages - border);
  extents_[left].after = right;
  extents_[right].before = left;
  enter(left);
  enter(right);
  return true;
}

// ---- free ranges by size ----------------------------------------------------

Page Bins::of(Page pages) {
  if (pages < 64) {
    return pages;
  }
  const Page power = 31 - static_cast<Page>(__builtin_clz(pages));
  return 64 + (power - 6) * 32 + ((pages >> (power - 5)) & 31);
}

void Ranges::enter(Id id) {
  Extent& extent = extents_[id];
  Bins& bins = bins_of(extent);
  const Page bin = Bins::of(extent.pages);
  extent.bin_before = kNil;
  extent.bin_after = bins.first[bin];
  if (extent.bin_after != kNil) {
    extents_[extent.bin_after].bin_before = id;
  }
  bins.first[bin] = id;
  bins.filled[bin / 64] |= Word{1} << (bin % 64);
}

void Ranges::leave(Id id) {
  const Extent& extent = extents_[id];
  if (extent.bin_after != kNil) {
    extents_[extent.bin_after].bin_before = extent.bin_before;
  }
  if (extent.bin_before != kNil) {
    extents_[extent.bin_before].bin_after = extent.bin_after;
    return;
  }
  Bins& bins = bins_of(extent);
  const Page bin = Bins::of(extent.pages);
  bins.first[bin] = extent.bin_after;
  if (extent.bin_after == kNil) {
    bins.filled[bin / 64] &= ~(Word{1} << (bin % 64));
  }
}

Id Ranges::best_fit(Kind kind, Page pages) const {
  const Bins& bins = bins_[kind];
  const Page own = Bins::of(pages);
  Word rest = bins.filled[own / 64] & (~Word{0} << (own % 64));
  for (Page word = own / 64;;) {
    while (rest != 0) {
      const Page bin = word * 64 + static_cast<Page>(__builtin_ctzll(rest));
      Id best = kNil;
      int looked = 0;
      for (Id id = bins.first[bin]; id != kNil; id = extents_[id].bin_after) {
        const Page size = extents_[id].pages;
        if (size >= pages && (best == kNil || size < extents_[best].pages)) {
          best = id;
        }
        if (size == pages || ++looked == kLooked) {
          break;
        }
      }
      if (best != kNil) {
        return best;
      }
      rest &= rest - 1;
    }
    if (++word == Bins::kCount / 64) {
      return kNil;
    }
    rest = bins.filled[word];
  }
}

// ---- ranges by address ------------------------------------------------------

// Makes a free range without neighbours and outside the bins.
Id Ranges::make(Page page, Page pages) {
  Id id = unused_;
  if (id != kNil) {
    unused_ = extents_[id].after;
  } else {
    id = made_++;
  }
  extents_[id] = {page, pages, kNil, kNil, kNil, kNil, 0, true, true, 0, 0};
  starting_[page] = id;
  starts_.insert(page);
  return id;
}

void Ranges::drop(Id id) {
  starts_.erase(extents_[id].page);
  extents_[id].after = unused_;
  unused_ = id;
}

// Makes one range of two neighbours.
Id Ranges::merge(Id left, Id right) {
  Extent& whole = extents_[left];
  const Extent& part = extents_[right];
  whole.packed = whole.packed && (part.touched == 0 ||
                                  (whole.touched == whole.pages && part.packed));
  whole.pages += part.pages;
  whole.touched += part.touched;
  whole.after = part.after;
  if (part.after != kNil) {
    extents_[part.after].before = left;
  }
  drop(right);
  return left;
}

bool Ranges::is_packed(const Extent& extent) const {
  const Page stop = extent.page + extent.touched;
  return touched.next(extent.page, stop, false) == stop;
}

Id Ranges::split(Id id, Page pages) {
  const Extent whole = extents_[id];
  const Id rest = make(whole.page + pages, whole.pages - pages);
  Extent& front = extents_[id];
  Extent& behind = extents_[rest];
  if (whole.packed) {
    front.touched = std::min(pages, whole.touched);
  } else {
    // Count the smaller side: the other may be most of all addresses.
    const bool shorter = pages <= behind.pages;
    const Page counted = shorter ? touched.count(front.page, pages)
                                 : touched.count(behind.page, behind.pages);
    front.touched = shorter ? counted : whole.touched - counted;
  }
  behind.touched = whole.touched - front.touched;
  behind.before = id;
  behind.after = whole.after;
  if (whole.after != kNil) {
    extents_[whole.after].before = rest;
  }
  front.pages = pages;
  front.after = rest;
  if (!whole.packed) {
    front.packed = is_packed(front);
    behind.packed = is_packed(behind);
  }
  return rest;
}

Id Ranges::coalesce(Id id) {
  const Id after = extents_[id].after;
  if (after != kNil && extents_[after].free && extents_[after].page != border_) {
    leave(after);
    merge(id, after);
  }
  const Id before = extents_[id].before;
  if (before != kNil && extents_[before].free && extents_[id].page != border_) {
    leave(before);
    id = merge(before, id);
  }
  return id;
}

}  // namespace lowtide
