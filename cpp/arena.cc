// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace lowtide {
namespace {

Page pages_for(std::size_t bytes) {
  return static_cast<Page>((bytes + kPageBytes - 1) / kPageBytes);
}

}  // namespace

bool Arena::reserve(std::size_t bytes, bool huge_pages) {
  const std::size_t unit = std::size_t{4} * kHugePages * kPageBytes;
  bytes = std::min(bytes, std::size_t{1} << 43) / unit * unit;
  const std::size_t aligned = std::size_t{kHugePages} * kPageBytes;
  if (bytes == 0) {
    return false;
  }
  const auto pages = static_cast<Page>(bytes / kPageBytes);
  void* const region = map_lazily(bytes + aligned);
  if (!region || !ranges_.reserve(pages, pages / 2)) {
    if (region) {
      munmap(region, bytes + aligned);
    }
    return false;
  }
  base_ = (reinterpret_cast<std::uintptr_t>(region) + aligned - 1) & ~(aligned - 1);
#ifdef MADV_HUGEPAGE
  madvise(reinterpret_cast<void*>(base_), bytes,
          huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  huge_ = huge_pages;
  origins_ = static_cast<std::int32_t*>(
      map_lazily((pages / kHugePages + 1) * sizeof(std::int32_t)));
  moves_ = huge_pages && origins_ != nullptr;
  end_ = pages;
  border_ = zone_ = pages / 2;
  bytes_ = bytes;  // from here on it owns addresses
  return true;
}

// ---- handing out ------------------------------------------------------------

// The free range around the planned place of this request; kNil: there is none.
Id Arena::planned(Page pages, std::int64_t op) {
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
  const Id id = ranges_.around(page);
  if (!ranges_[id].free || page + pages > ranges_[id].end()) {
    ++figures_.busy;
    return kNil;
  }
  ++figures_.hits;
  return take(id, page, pages);
}

// Prefers pages that are kept: outside the zone, and in it where no plan will
// want them, or where others would have to be given back for fresh ones. A range
// that is mostly clean competes with the clean ones.
Id Arena::as_it_comes(Page pages) {
  Id id = ranges_.best_fit(kKept, pages);
  if (id == kNil || ranges_[id].touched < pages) {
    const bool lends = past_plan_ || is_full(pages);
    const Id in_zone = lends ? ranges_.best_fit(kKeptInZone, pages) : kNil;
    const Id clean = ranges_.best_fit(kClean, pages);
    if (in_zone != kNil && ranges_[in_zone].touched >= pages) {
      id = in_zone;
    } else if (id == kNil || (clean != kNil && ranges_[id].touched < pages / 2 &&
                              ranges_[clean].pages < ranges_[id].pages)) {
      id = clean;
    }
  }
  for (const Kind kind : {kKeptInZone, kCleanInZone}) {  // addresses are short
    if (id == kNil) {
      id = ranges_.best_fit(kind, pages);
    }
  }
  return id == kNil ? kNil : take(id, ranges_[id].page, pages);
}

// Has pages of a free range given by the system. It gives a whole huge page where
// none of its pages was given before: what the block does not use of it is kept.
// At the limit, huge pages that lie free elsewhere are moved here instead.
void Arena::touch(Id id, Page page, Page pages) {
  Extent& range = ranges_[id];
  if (range.touched == range.pages ||
      (range.packed && page + pages <= range.page + range.touched)) {
    return;
  }
  Page start = page, stop = page + pages;
  const auto is_whole = [&](Page huge) {
    return huge_ && huge >= range.page && huge + kHugePages <= range.end() &&
           is_empty(huge);
  };
  if (is_whole(down_to_huge(start))) {
    start = down_to_huge(start);
  }
  if (is_whole(down_to_huge(stop - 1))) {
    stop = down_to_huge(stop - 1) + kHugePages;
  }
  range.packed = range.packed && start <= range.page + range.touched;
  Page fresh = stop - start - ranges_.touched.count(start, stop - start);
  range.touched += fresh;
  const std::int64_t used = elsewhere() + figures_.live;
  const std::int64_t room = bound(used + bytes_of(pages)).limit - used - figures_.kept;
  if (moves_ && bytes_of(fresh) > room) {
    fresh -= fill_from_elsewhere(start, stop, bytes_of(fresh) - room);
  }
  ranges_.touched.insert(start, stop - start);
  figures_.kept += bytes_of(fresh);
  figures_.fresh += bytes_of(fresh);
  if (debug_) {
    fill(start, page - start);
    fill(page + pages, stop - page - pages);
  }
}

// Makes a live block of part of a free range.
Id Arena::take(Id id, Page page, Page pages) {
  if (debug_) {
    check(page, pages);
  }
  ranges_.leave(id);
  touch(id, page, pages);
  if (page > ranges_[id].page) {
    const Id front = id;
    id = ranges_.split(front, page - ranges_[front].page);
    ranges_.enter(front);
  }
  if (pages < ranges_[id].pages) {
    ranges_.enter(ranges_.split(id, pages));
  }
  ranges_[id].free = false;
  figures_.kept -= bytes_of(pages);
  figures_.live += bytes_of(pages);
  return id;
}

void* Arena::allocate(std::size_t bytes, std::int64_t op) {
  if (bytes >= bytes_) {
    return nullptr;
  }
  const Page pages = pages_for(bytes);
  const std::lock_guard<std::mutex> guard(mutex);
  if (ranges_.exhausted()) {
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
  Extent& block = ranges_[id];
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

Id Arena::find_live(const void* data) {
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(data) - base_;
  if (offset >= bytes_ || offset % kPageBytes != 0) {
    return kNil;
  }
  const auto page = static_cast<Page>(offset / kPageBytes);
  const Id id = ranges_.starting_at(page);
  return id == kNil || ranges_[id].free ? kNil : id;
}

Arena::Freed Arena::release(void* data) {
  const std::lock_guard<std::mutex> guard(mutex);
  const Id id = find_live(data);
  if (id == kNil) {
    return {0, 0};
  }
  Extent& block = ranges_[id];
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
  ranges_.enter(ranges_.coalesce(id));
  keep_within_limit(elsewhere());
  return freed;
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
  return id == kNil ? 0 : ranges_[id].bytes;
}

void Arena::note(const void* data, std::uint64_t record) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (const Id id = find_live(data); id != kNil) {
    ranges_[id].record = record;
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

}  // namespace lowtide
