// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace lowtide {
namespace {

constexpr Page kHugePages = 512;              // pages in a huge page
constexpr std::uint32_t kMostExtents = 1 << 22;
constexpr int kLooked = 32;                   // free ranges of one bin compared
constexpr std::int64_t kSlack = 400;          // one such part of the peak
constexpr unsigned char kPattern = 0xdb;

std::int64_t bytes_of(Page pages) { return std::int64_t{pages} * kPageBytes; }

Page pages_for(std::size_t bytes) {
  return static_cast<Page>((bytes + kPageBytes - 1) / kPageBytes);
}

Page up_to_huge(Page page) { return (page + kHugePages - 1) & ~(kHugePages - 1); }
Page down_to_huge(Page page) { return page & ~(kHugePages - 1); }

}  // namespace

bool Arena::reserve(std::size_t bytes, bool huge_pages) {
  const std::size_t unit = std::size_t{4} * kHugePages * kPageBytes;
  bytes = std::min(bytes, std::size_t{1} << 43) / unit * unit;
  const std::size_t aligned = std::size_t{kHugePages} * kPageBytes;
  if (bytes == 0) {
    return false;
  }
  void* const region = map_lazily(bytes + aligned);
  void* const extents = map_lazily(kMostExtents * sizeof(Extent));
  void* const starting = map_lazily(bytes / kPageBytes * sizeof(Id));
  const std::size_t pages = bytes / kPageBytes;
  if (!region || !extents || !starting || !starts_.reserve(pages) ||
      !touched_.reserve(pages)) {
    for (auto [data, size] : {std::pair{region, bytes + aligned},
                              std::pair{extents, kMostExtents * sizeof(Extent)},
                              std::pair{starting, pages * sizeof(Id)}}) {
      if (data) {
        munmap(data, size);
      }
    }
    return false;
  }
  base_ = (reinterpret_cast<std::uintptr_t>(region) + aligned - 1) & ~(aligned - 1);
#ifdef MADV_HUGEPAGE
  madvise(reinterpret_cast<void*>(base_), bytes,
          huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  extents_ = static_cast<Extent*>(extents);
  starting_ = static_cast<Id*>(starting);
  end_ = static_cast<Page>(pages);
  border_ = zone_ = end_ / 2;
  const Id left = make_extent(0, border_);
  const Id right = make_extent(border_, end_ - border_);
  extents_[left].after = right;
  extents_[right].before = left;
  enter(left);
  enter(right);
  bytes_ = bytes;  // from here on it owns addresses
  return true;
}

// ---- free ranges by size ----------------------------------------------------

// Below 64 pages each size has a bin, above 32 to each power of two.
Page Arena::bin_of(Page pages) {
  if (pages < 64) {
    return pages;
  }
  const Page power = 31 - static_cast<Page>(__builtin_clz(pages));
  return 64 + (power - 6) * 32 + ((pages >> (power - 5)) & 31);
}

void Arena::enter(Id id) {
  Extent& extent = extents_[id];
  Bins& bins = bins_of(extent);
  const Page bin = bin_of(extent.pages);
  extent.bin_before = kNil;
  extent.bin_after = bins.first[bin];
  if (extent.bin_after != kNil) {
    extents_[extent.bin_after].bin_before = id;
  }
  bins.first[bin] = id;
  bins.filled[bin / 64] |= Word{1} << (bin % 64);
}

void Arena::leave(Id id) {
  const Extent& extent = extents_[id];
  if (extent.bin_after != kNil) {
    extents_[extent.bin_after].bin_before = extent.bin_before;
  }
  if (extent.bin_before != kNil) {
    extents_[extent.bin_before].bin_after = extent.bin_after;
    return;
  }
  Bins& bins = bins_of(extent);
  const Page bin = bin_of(extent.pages);
  bins.first[bin] = extent.bin_after;
  if (extent.bin_after == kNil) {
    bins.filled[bin / 64] &= ~(Word{1} << (bin % 64));
  }
}

// The smallest free range that fits, of the first few of its bin.
Arena::Id Arena::best_fit(const Bins& bins, Page pages) const {
  const Page own = bin_of(pages);
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
Arena::Id Arena::make_extent(Page page, Page pages) {
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

void Arena::drop_extent(Id id) {
  starts_.erase(extents_[id].page);
  extents_[id].after = unused_;
  unused_ = id;
}

// Makes one range of two neighbours.
Arena::Id Arena::merge(Id left, Id right) {
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
  drop_extent(right);
  return left;
}

// Cuts a range after so many pages; returns what lies behind.
Arena::Id Arena::split(Id id, Page pages) {
  const Extent whole = extents_[id];
  const Id rest = make_extent(whole.page + pages, whole.pages - pages);
  Extent& front = extents_[id];
  Extent& behind = extents_[rest];
  if (whole.packed) {
    front.touched = std::min(pages, whole.touched);
  } else {
    // Count the smaller side: the other may be most of all addresses.
    const bool shorter = pages <= behind.pages;
    const Page counted = shorter ? touched_.count(front.page, pages)
                                 : touched_.count(behind.page, behind.pages);
    front.touched = shorter ? counted : whole.touched - counted;
    front.packed = front.touched == front.pages || front.touched == 0;
    behind.packed = false;
  }
  behind.touched = whole.touched - front.touched;
  behind.packed |= behind.touched == behind.pages || behind.touched == 0;
  behind.before = id;
  behind.after = whole.after;
  if (whole.after != kNil) {
    extents_[whole.after].before = rest;
  }
  front.pages = pages;
  front.after = rest;
  return rest;
}

// ---- handing out ------------------------------------------------------------

// The free range around the planned place of this request; kNil: there is none.
Arena::Id Arena::planned(Page pages, std::int64_t op) {
  if (op < 0) {
    return kNil;
  }
  ++figures_.requests;
  figures_.signature = static_cast<std::int64_t>(
      (static_cast<Word>(figures_.signature) ^ static_cast<Word>(op + 1)) *
      0x9e3779b97f4a7c15ULL);
  if (op != running_) {
    running_ = op;
    nth_ = 0;
  }
  if (!plan_) {
    return kNil;
  }
  const std::size_t nth = nth_++;
  const auto row = static_cast<std::size_t>(op);
  const std::size_t rows = plan_->first.size() - 1;
  past_plan_ = row >= rows ||
               (row + 1 == rows && plan_->first[row] + nth >= plan_->places.size());
  if (past_plan_ || plan_->first[row] + nth >= plan_->first[row + 1]) {
    ++figures_.strays;
    return kNil;
  }
  const std::size_t slot = plan_->first[row] + nth;
  const Place& place = plan_->places[slot];
  if (pages > plan_->asked[slot]) {
    plan_->asked[slot] = pages;
  }
  if (place.pages == 0) {  // it was seen, but is not planned for
    ++figures_.strays;
    return kNil;
  }
  if (pages > place.pages || place.page + place.pages > end_ - zone_) {
    ++figures_.overflows;
    return kNil;
  }
  const Page page = zone_ + place.page;
  const Id id = starting_[starts_.previous(page)];
  const Extent& extent = extents_[id];
  if (!extent.free || page + pages > extent.page + extent.pages) {
    ++figures_.busy;
    return kNil;
  }
  ++figures_.hits;
  take(id, page, pages);
  return starting_[page];
}

// Prefers pages that are kept: outside the zone, and in it where no plan will
// want them. A range that is mostly clean competes with the clean ones.
Arena::Id Arena::as_it_comes(Page pages) {
  Id id = best_fit(bins_[1], pages);
  if (id == kNil || extents_[id].touched < pages) {
    const Id in_zone = past_plan_ ? best_fit(bins_[3], pages) : kNil;
    const Id clean = best_fit(bins_[0], pages);
    if (in_zone != kNil && extents_[in_zone].touched >= pages) {
      id = in_zone;
    } else if (id == kNil || (clean != kNil && extents_[id].touched < pages / 2 &&
                              extents_[clean].pages < extents_[id].pages)) {
      id = clean;
    }
  }
  for (const int bins : {3, 2}) {  // a last resort: addresses are short
    if (id == kNil) {
      id = best_fit(bins_[bins], pages);
    }
  }
  if (id != kNil) {
    take(id, extents_[id].page, pages);
  }
  return id;
}

// Makes a live block of part of a free range.
void Arena::take(Id id, Page page, Page pages) {
  leave(id);
  if (page > extents_[id].page) {
    const Id front = id;
    id = split(front, page - extents_[front].page);
    enter(front);
  }
  if (pages < extents_[id].pages) {
    enter(split(id, pages));
  }
  Extent& block = extents_[id];
  block.free = false;
  if (debug_) {
    check(page, pages);
  }
  const Page fresh = pages - block.touched;
  figures_.kept -= bytes_of(block.touched);
  figures_.live += bytes_of(pages);
  figures_.fresh += bytes_of(fresh);
  if (fresh > 0) {
    touched_.insert(page, pages);
  }
}

void* Arena::allocate(std::size_t bytes, std::int64_t op) {
  if (bytes >= bytes_) {
    return nullptr;
  }
  const Page pages = pages_for(bytes);
  const std::lock_guard<std::mutex> guard(mutex);
  if (made_ + 2 >= kMostExtents) {
    return nullptr;
  }
  Id id = planned(pages, op);
  if (id == kNil) {
    id = as_it_comes(pages);
  }
  if (id == kNil) {
    return nullptr;
  }
  const std::int64_t others = elsewhere();  // before this block is among `asked`
  Extent& block = extents_[id];
  block.bytes = bytes;
  block.record = 0;
  ++handed_out_;
  figures_.asked += static_cast<std::int64_t>(bytes);
  figures_.most_asked = std::max(figures_.most_asked, figures_.asked);
  most_ = std::max(most_, others + figures_.live);
  keep_within_limit(others);
  figures_.footprint = std::max(figures_.footprint, figures_.live + figures_.kept);
  return address(block.page);
}

// ---- taking back ------------------------------------------------------------

Arena::Id Arena::find_live(const void* data) {
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(data) - base_;
  if (offset >= bytes_ || offset % kPageBytes != 0) {
    return kNil;
  }
  const auto page = static_cast<Page>(offset / kPageBytes);
  if (!starts_.has(page) || extents_[starting_[page]].free) {
    return kNil;
  }
  return starting_[page];
}

Arena::Freed Arena::release(void* data) {
  const std::lock_guard<std::mutex> guard(mutex);
  Id id = find_live(data);
  if (id == kNil) {
    return {0, 0};
  }
  Extent& block = extents_[id];
  const Freed freed{block.bytes, block.record};
  const auto bytes = static_cast<std::int64_t>(block.bytes);
  all_live_.fetch_sub(bytes, std::memory_order_relaxed);
  figures_.asked -= bytes;
  figures_.live -= bytes_of(block.pages);
  figures_.kept += bytes_of(block.pages);
  if (debug_) {
    fill(block.page, block.pages);
  }
  block.free = true;
  block.touched = block.pages;
  block.packed = true;
  const Id after = block.after;
  if (after != kNil && extents_[after].free && extents_[after].page != border_) {
    leave(after);
    merge(id, after);
  }
  const Id before = block.before;
  if (before != kNil && extents_[before].free && block.page != border_) {
    leave(before);
    id = merge(before, id);
  }
  enter(id);
  keep_within_limit(elsewhere());
  return freed;
}

// ---- what is kept -----------------------------------------------------------

std::int64_t Arena::elsewhere() const {
  const std::int64_t all = all_live_.load(std::memory_order_relaxed);
  return std::max<std::int64_t>(0, all - figures_.asked);
}

void Arena::keep_within_limit(std::int64_t others) {
  const std::int64_t slack = most_ / kSlack;
  const std::int64_t most =
      limit_ >= 0 ? std::min(limit_, most_ + slack) : most_ + slack;
  const std::int64_t limit = most - others;
  std::int64_t excess = figures_.live + figures_.kept - limit;
  excess = std::min(excess, figures_.kept);
  if (excess <= 0) {
    return;
  }
  auto wanted = static_cast<Page>((excess + kPageBytes - 1) / kPageBytes);
  // Whole huge pages first; what plans do not use first; large ranges first.
  for (const bool ragged : {false, true}) {
    for (Bins* bins : {&bins_[1], &bins_[3]}) {
      const Page least = ragged ? 0 : bin_of(kHugePages);
      for (Page bin = Bins::kCount; bin-- > least;) {
        if (bins->filled[bin / 64] == 0) {
          bin = bin / 64 * 64;
          continue;
        }
        for (Id id = bins->first[bin], next; id != kNil; id = next) {
          next = extents_[id].bin_after;
          wanted -= std::min(wanted, give_back(id, wanted, ragged));
          if (wanted == 0) {
            return;
          }
        }
      }
    }
  }
}

// Gives pages of a free range back to the system; returns how many.
Page Arena::give_back(Id id, Page wanted, bool ragged) {
  leave(id);
  Extent& extent = extents_[id];
  const Page end = extent.page + extent.pages;
  Page given = 0;
  for (Page at = extent.page, left = extent.touched; left > 0 && given < wanted;) {
    Page start = touched_.next(at, end, true);
    Page stop = touched_.next(start, end, false);
    left -= stop - start;
    at = stop;
    if (ragged) {
      stop = std::min(stop, start + (wanted - given));
    } else {
      start = up_to_huge(start);
      stop = std::min(down_to_huge(stop), up_to_huge(start + (wanted - given)));
    }
    if (start < stop) {
      discard(start, stop - start);
      given += stop - start;
    }
  }
  extent.touched -= given;
  extent.packed = extent.touched == 0 || (extent.packed && given == 0);
  enter(id);
  return given;
}

void Arena::discard(Page page, Page pages) {
  madvise(address(page), std::size_t{pages} * kPageBytes, MADV_DONTNEED);
  touched_.erase(page, pages);
  figures_.kept -= bytes_of(pages);
  figures_.returned += bytes_of(pages);
}

void Arena::keep(std::int64_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex);
  limit_ = bytes;
  keep_within_limit(elsewhere());
}

std::int64_t Arena::trim() {
  const std::lock_guard<std::mutex> guard(mutex);
  const std::int64_t kept = figures_.kept;
  const std::int64_t limit = std::exchange(limit_, 0);
  keep_within_limit(elsewhere());
  limit_ = limit;
  most_ = figures_.live + elsewhere();
  return kept;
}

// ---- plans ------------------------------------------------------------------

void Arena::set_plan(std::size_t plan, std::vector<std::uint32_t> first,
                     std::vector<Place> places) {
  const std::lock_guard<std::mutex> guard(mutex);
  const std::size_t current = plan_ ? plan_ - plans_.data() : kNone;
  if (plan >= plans_.size()) {
    plans_.resize(plan + 1);  // moves the active one
  }
  if (plan == current) {
    past_plan_ = true;
  }
  plan_ = current == kNone || current == plan ? nullptr : &plans_[current];
  std::vector<Page> asked(places.size(), 0);
  plans_[plan] = {std::move(first), std::move(places), std::move(asked)};
}

ArenaFigures Arena::begin(std::size_t plan) {
  const std::lock_guard<std::mutex> guard(mutex);
  const ArenaFigures past = figures_;
  figures_.requests = figures_.hits = figures_.overflows = 0;
  figures_.busy = figures_.strays = figures_.signature = 0;
  plan_ = plan < plans_.size() && !plans_[plan].first.empty() ? &plans_[plan] : nullptr;
  past_plan_ = !plan_;
  running_ = -1;
  nth_ = 0;
  return past;
}

std::vector<Page> Arena::asked(std::size_t plan) {
  const std::lock_guard<std::mutex> guard(mutex);
  return plan < plans_.size() ? plans_[plan].asked : std::vector<Page>{};
}

void Arena::move_zone() {
  const std::lock_guard<std::mutex> guard(mutex);
  const Page half = border_ + (end_ - border_) / 2;
  zone_ = zone_ == border_ ? half : border_;
}

// ---- looking ----------------------------------------------------------------

std::size_t Arena::bytes_at(const void* data) {
  const std::lock_guard<std::mutex> guard(mutex);
  const Id id = find_live(data);
  return id == kNil ? 0 : extents_[id].bytes;
}

void Arena::note(const void* data, std::uint64_t record) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (const Id id = find_live(data); id != kNil) {
    extents_[id].record = record;
  }
}

std::int64_t Arena::blocks() {
  const std::lock_guard<std::mutex> guard(mutex);
  return handed_out_;
}

ArenaFigures Arena::figures() {
  const std::lock_guard<std::mutex> guard(mutex);
  return figures_;
}

void Arena::reset_footprint() {
  const std::lock_guard<std::mutex> guard(mutex);
  figures_.footprint = figures_.live + figures_.kept;
  figures_.most_asked = figures_.asked;
}

// ---- debugging --------------------------------------------------------------

void Arena::set_debug(bool on) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (on && !debug_ && !taken_.reserve(end_)) {
    return;
  }
  debug_ = on;
  for (Id id = on ? starting_[0] : kNil; id != kNil; id = extents_[id].after) {
    const Extent& extent = extents_[id];
    if (!extent.free) {
      taken_.insert(extent.page, extent.pages);
    } else if (extent.touched > 0) {
      fill(extent.page, extent.pages);
    }
  }
}

void Arena::fill(Page page, Page pages) {
  const Page end = page + pages;
  for (Page start = touched_.next(page, end, true); start < end;) {
    const Page stop = touched_.next(start, end, false);
    std::memset(address(start), kPattern, std::size_t{stop - start} * kPageBytes);
    start = touched_.next(stop, end, true);
  }
  taken_.erase(page, pages);
}

void Arena::check(Page page, Page pages) {
  figures_.damaged += taken_.count(page, pages);
  taken_.insert(page, pages);
  static const auto filled = [] {
    std::vector<unsigned char> bytes(kPageBytes, kPattern);
    return bytes;
  }();
  for (Page at = page; at < page + pages; ++at) {
    if (touched_.has(at) && std::memcmp(address(at), filled.data(), kPageBytes) != 0) {
      ++figures_.damaged;
    }
  }
}

}  // namespace lowtide
