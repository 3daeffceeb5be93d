// SPDX-License-Identifier: Apache-2.0
// What the arena does with free pages: it keeps them, gives them back, or fills
// them with a pattern.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "arena.h"

namespace lowtide {
namespace {

// Bytes beyond the largest live ones: so many, or a part of these.
constexpr std::int64_t kTolerated = 6 << 20;
constexpr std::int64_t kToleratedPart = 32;
constexpr unsigned char kPattern = 0xdb;

}  // namespace

// ---- what is kept -----------------------------------------------------------

std::int64_t Arena::elsewhere() const {
  const std::int64_t all = all_live_.load(std::memory_order_relaxed);
  return std::max<std::int64_t>(0, all - figures_.asked);
}

bool Arena::is_full(Page pages) const {
  return limit_ >= 0 &&
         figures_.live + figures_.kept + bytes_of(pages) > limit_ - elsewhere();
}

// What may be live and kept together when so many bytes are live.
Arena::Bound Arena::bound(std::int64_t live) const {
  const std::int64_t most = std::max(most_, live);
  const std::int64_t tolerated = std::max(kTolerated, most / kToleratedPart);
  if (limit_ >= 0 && limit_ < most + tolerated) {
    return {limit_, 0};
  }
  return {most, tolerated};
}

// Gives kept pages back beyond the limit: what plans do not use first; whole huge
// pages, then parts of them, which breaks them. A little too much is not worth it,
// but for a budget, or where a plan has a use for the memory.
void Arena::keep_within_limit(std::int64_t others) {
  const auto [limit, tolerated] = bound(others + figures_.live);
  const auto excess = [&, limit = limit] {
    return others + figures_.live + figures_.kept - limit;
  };
  if (excess() <= tolerated) {
    return;
  }
  for (const Kind kind : {kKept, kKeptInZone}) {
    for (const bool ragged : {false, true}) {
      const bool some_stay = ragged && (kind == kKeptInZone || !plan_);
      const std::int64_t much = excess() - (some_stay ? tolerated : 0);
      if (much > 0) {
        const std::int64_t bytes = std::min(much, figures_.kept);
        give_back_most(kind, static_cast<Page>((bytes + kPageBytes - 1) / kPageBytes),
                       ragged);
      }
    }
  }
}

void Arena::give_back_most(Kind kind, Page wanted, bool ragged) {
  each_free(kind, ragged ? 0 : Bins::of(kHugePages), [&](Id id) {
    wanted -= std::min(wanted, give_back(id, wanted, ragged));
    return wanted > 0;
  });
}

// Gives pages of a free range back to the system; returns how many.
Page Arena::give_back(Id id, Page wanted, bool ragged) {
  ranges_.leave(id);
  Extent& extent = ranges_[id];
  const Page end = extent.end();
  Page given = 0;
  for (Page at = extent.page, left = extent.touched; left > 0 && given < wanted;) {
    Page start = ranges_.touched.next(at, end, true);
    Page stop = ranges_.touched.next(start, end, false);
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
  ranges_.enter(id);
  return given;
}

void Arena::discard(Page page, Page pages) {
  if (huge_ && page % kHugePages != 0) {
    *address(page) = 0;  // or it comes again with the rest of its huge page
  }
  if (huge_ && (page + pages) % kHugePages != 0) {
    *address(page + pages - 1) = 0;
  }
  madvise(address(page), std::size_t{pages} * kPageBytes, MADV_DONTNEED);
  ranges_.touched.erase(page, pages);
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

// ---- debugging --------------------------------------------------------------

void Arena::set_debug(bool on) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (on && !debug_ && !taken_.reserve(end_)) {
    return;
  }
  debug_ = on;
  for (Id id = on ? ranges_.around(0) : kNil; id != kNil; id = ranges_[id].after) {
    const Extent& extent = ranges_[id];
    if (!extent.free) {
      taken_.insert(extent.page, extent.pages);
    } else if (extent.touched > 0) {
      fill(extent.page, extent.pages);
    }
  }
}

void Arena::fill(Page page, Page pages) {
  const Page end = page + pages;
  for (Page start = ranges_.touched.next(page, end, true); start < end;) {
    const Page stop = ranges_.touched.next(start, end, false);
    std::memset(address(start), kPattern, std::size_t{stop - start} * kPageBytes);
    start = ranges_.touched.next(stop, end, true);
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
    if (ranges_.touched.has(at) && std::memcmp(address(at), filled.data(), kPageBytes) != 0) {
      ++figures_.damaged;
    }
  }
}

}  // namespace lowtide
