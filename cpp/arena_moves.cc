// SPDX-License-Identifier: Apache-2.0
// Free memory that lies where it is of no use is moved to where it is wanted: the
// pages keep what they hold (nobody's), and only their addresses change.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "arena.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4  // since Linux 5.7; headers may be older
#endif

namespace lowtide {
namespace {

constexpr std::size_t kHugeBytes = std::size_t{kHugePages} * kPageBytes;
constexpr int kMostAreas = 1 << 14;  // a quarter of what Linux allows by default

}  // namespace

bool Arena::is_empty(Page huge) const {
  return ranges_.touched.count(huge, kHugePages) == 0;
}

// Fills the first empty huge pages between two pages with so many bytes that lie
// free elsewhere, as far as there are any. The range around must be in no bin.
// Returns the pages that are filled.
Page Arena::fill_from_elsewhere(Page start, Page stop, std::int64_t bytes) {
  Gap gap{up_to_huge(start), stop, bytes, 0};
  for (const Kind kind : {kKept, kKeptInZone}) {
    if (find_empty(gap)) {
      each_free(kind, Bins::of(kHugePages), [&](Id id) {
        move_out(id, gap);
        return find_empty(gap);
      });
    }
  }
  return gap.filled;
}

bool Arena::find_empty(Gap& gap) const {
  while (gap.to + kHugePages <= gap.stop && !is_empty(gap.to)) {
    gap.to += kHugePages;
  }
  return gap.wanted > 0 && gap.to + kHugePages <= gap.stop;
}

// Moves whole huge pages out of a free range.
void Arena::move_out(Id id, Gap& gap) {
  const Page before = gap.filled;
  ranges_.leave(id);
  Extent& donor = ranges_[id];
  for (Page at = donor.page, left = donor.touched; left > 0 && find_empty(gap);) {
    const Page first = ranges_.touched.next(at, donor.end(), true);
    at = ranges_.touched.next(first, donor.end(), false);
    left -= at - first;
    for (Page from = up_to_huge(first); from + kHugePages <= at && find_empty(gap);
         from += kHugePages) {
      if (!move_huge(from, gap.to)) {
        gap.wanted = 0;
        break;
      }
      gap.filled += kHugePages;
      gap.wanted -= bytes_of(kHugePages);
    }
  }
  donor.touched -= gap.filled - before;
  donor.packed = donor.touched == 0 || (donor.packed && gap.filled == before);
  ranges_.enter(id);
}

// Changes the page tables: some 10 microseconds, where a fault and 2 MiB of zeroes
// take hundreds. The system sees an area wherever neighbours come from different
// places, and has a limit to their number; there moving ends, and faults serve.
bool Arena::move_huge(Page from, Page to) {
  std::int32_t& place = origins_[to / kHugePages];
  const std::int32_t origin =
      origins_[from / kHugePages] + static_cast<std::int32_t>(from / kHugePages) -
      static_cast<std::int32_t>(to / kHugePages);
  const std::int32_t left = to == 0 ? 0 : (&place)[-1], right = (&place)[1];
  const int more = (left != origin) + (right != origin) - (left != place) - (right != place);
  if (more > 0 && areas_ >= kMostAreas) {
    return false;
  }
  if (mremap(address(from), kHugeBytes, kHugeBytes,
             MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, address(to)) == MAP_FAILED) {
    moves_ = false;  // the kernel is too old, or has no memory left for areas
    // What was mapped at `to` may be gone.
    if (mmap(address(to), kHugeBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
      std::fputs("lowtide: the system can't map pages of the arena any more\n", stderr);
      std::abort();
    }
    madvise(address(to), kHugeBytes, MADV_HUGEPAGE);
    return false;
  }
  areas_ += more;
  place = origin;
  ranges_.touched.erase(from, kHugePages);
  ranges_.touched.insert(to, kHugePages);
  figures_.moved += kHugeBytes;
  return true;
}

}  // namespace lowtide
