// SPDX-License-Identifier: Apache-2.0
// One region of memory in which all large blocks lie, page by page.
//
//     |A.. bb... C   ddd ......   (free)      |  zone:  e0 e1.. e2 ....        |
//     '---------- placed as they come --------'------- placed by a plan -------'
//
// Free ranges are coalesced at once, and found by best fit. Two things follow
// from lying on pages:
//   - A free page is either *kept* (the system has given it; using it again
//     costs nothing) or *clean* (it costs a page fault and zeroing). Pages are
//     kept while what is live and kept stays within a limit: the largest live
//     bytes so far and 3 % or 6 MiB (less would break huge pages), and a budget
//     if one is given. Beyond that, free pages go back to the system.
//     So the memory that the system sees never exceeds the limit, whatever the
//     order of allocations. At the limit, huge pages that lie free elsewhere are
//     moved to where they are wanted (arena_moves.cc); only where parts of huge
//     pages are wanted does fragmentation cost faults.
//   - A plan avoids these: it knows each block's place before the block comes.
//     A place is handed out only while its bytes are free. Else, and where the
//     program diverges from the plan, a block is placed as it comes.
//
// Every operation is O(1) but for bit sets, 64 pages a step. Nothing here
// throws or calls malloc, apart from `set_plan`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "pages.h"
#include "ranges.h"

namespace lowtide {

constexpr std::size_t kPageBytes = 4096;
constexpr Page kHugePages = 512;  // pages in a huge page

inline std::int64_t bytes_of(Page pages) {
  return std::int64_t{pages} * kPageBytes;
}
inline Page up_to_huge(Page page) {
  return (page + kHugePages - 1) & ~(kHugePages - 1);
}
inline Page down_to_huge(Page page) { return page & ~(kHugePages - 1); }

// The order is the interface: runtime/arena.py reads these by index.
struct ArenaFigures {
  std::int64_t live = 0;       // bytes of pages in use
  std::int64_t kept = 0;       // bytes of free pages that were not given back
  std::int64_t footprint = 0;  // largest live + kept since the last reset
  std::int64_t asked = 0;      // of the live bytes, those asked for
  std::int64_t most_asked = 0;  // largest since the last reset
  std::int64_t fresh = 0;      // bytes taken from the system so far
  std::int64_t returned = 0;   // bytes given back so far
  std::int64_t moved = 0;      // bytes moved to where they were wanted, so far
  std::int64_t requests = 0;   // since the cycle began, as are the next five
  std::int64_t hits = 0;       // got the planned place
  std::int64_t overflows = 0;  // were larger than planned
  std::int64_t busy = 0;       // found their place taken
  std::int64_t strays = 0;     // were not in the plan
  std::int64_t signature = 0;  // hash of the operators that asked
  std::int64_t damaged = 0;    // pages that were written or taken while free
};

struct Place {
  Page pages;  // the most that fits
  Page page;   // from the start of the zone
};

class Arena {
 public:
  struct Freed {
    std::size_t bytes;     // asked for; 0: no block of ours begins there
    std::uint64_t record;  // as given by `note`
  };

  // `live` counts the bytes of all blocks, elsewhere too.
  explicit Arena(std::atomic<std::int64_t>& live) : all_live_(live) {}

  // Reserves addresses, no memory. False: there are none; nothing else works.
  bool reserve(std::size_t bytes, bool huge_pages);

  // Null: it has no room. The block starts on a page and has whole pages. Plans
  // know it by the operator that runs; negative: it is none of their business.
  void* allocate(std::size_t bytes, std::int64_t op);

  // Takes the block's bytes off the live ones, then frees it.
  Freed release(void* data);

  bool owns(const void* data) const {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return address - base_ < bytes_;
  }

  std::size_t bytes_at(const void* data);               // 0: no block begins there
  void note(const void* data, std::uint64_t record);    // remember a number
  std::int64_t blocks();                                // handed out so far

  // Limits what is live and kept together, beside the largest live bytes so far;
  // negative: to these alone.
  void keep(std::int64_t bytes);
  // Gives all kept pages back; returns their bytes.
  std::int64_t trim();

  // A plan: the requests of operator `op` have the places from `first[op]` up
  // to `first[op + 1]`, in the order in which they come.
  void set_plan(std::size_t plan, std::vector<std::uint32_t> first,
                std::vector<Place> places);
  // Begins a cycle, by a plan or (kNone) without; returns the last one's figures.
  ArenaFigures begin(std::size_t plan);
  // The pages asked for at each place, at the most.
  std::vector<Page> asked(std::size_t plan);
  // Lets plans begin at other addresses: something lies in their way for good.
  void move_zone();

  ArenaFigures figures();
  void reset_footprint();
  // Fills what is freed, and checks it when it is handed out again.
  void set_debug(bool on);

  std::mutex mutex;  // public for fork handlers

  static constexpr std::size_t kNone = ~std::size_t{0};

 private:
  struct Plan {
    std::vector<std::uint32_t> first;
    std::vector<Place> places;
    std::vector<Page> asked;
  };

  // Bytes, and how many more are not worth giving back.
  struct Bound {
    std::int64_t limit, tolerated;
  };
  // Empty huge pages from `to` on, and the bytes wanted there.
  struct Gap {
    Page to, stop;
    std::int64_t wanted;
    Page filled;
  };

  Id planned(Page pages, std::int64_t op);
  Id as_it_comes(Page pages);
  void touch(Id id, Page page, Page pages);
  Id take(Id id, Page page, Page pages);
  Id find_live(const void* data);

  std::int64_t elsewhere() const;  // bytes live outside the arena
  bool is_full(Page pages) const;  // no room for so many fresh pages
  Bound bound(std::int64_t live) const;
  void keep_within_limit(std::int64_t others);
  // Visits free ranges from a bin on, large ones first, until told to stop. What
  // is visited may be entered anew.
  template <typename Do>
  void each_free(Kind kind, Page least, Do go_on) {
    const Bins& bins = ranges_.bins(kind);
    for (Page bin = Bins::kCount; bin-- > least;) {
      if (bins.filled[bin / 64] == 0) {
        bin = bin / 64 * 64;
        continue;
      }
      for (Id id = bins.first[bin], next; id != kNil; id = next) {
        next = ranges_[id].bin_after;
        if (!go_on(id)) {
          return;
        }
      }
    }
  }
  void give_back_most(Kind kind, Page wanted, bool ragged);
  Page give_back(Id id, Page wanted, bool ragged);
  void discard(Page page, Page pages);

  bool is_empty(Page huge) const;
  Page fill_from_elsewhere(Page start, Page stop, std::int64_t bytes);
  bool find_empty(Gap& gap) const;
  void move_out(Id id, Gap& gap);
  bool move_huge(Page from, Page to);

  char* address(Page page) const {
    return reinterpret_cast<char*>(base_) + std::size_t{page} * kPageBytes;
  }
  void fill(Page page, Page pages);
  void check(Page page, Page pages);

  std::atomic<std::int64_t>& all_live_;
  std::uintptr_t base_ = 0;
  std::size_t bytes_ = 0;
  Page border_ = 0;  // where the zone of plans begins
  Page end_ = 0;
  bool huge_ = false;
  Page zone_ = 0;    // where plans begin in it
  Ranges ranges_;
  std::int64_t handed_out_ = 0;
  std::int64_t most_ = 0;    // largest bytes live anywhere
  std::int64_t limit_ = -1;  // given from outside
  bool moves_ = false;       // whether pages may be moved
  // Of each huge page: how many huge pages away the system thinks it is.
  std::int32_t* origins_ = nullptr;
  int areas_ = 0;            // into which this cuts the arena
  ArenaFigures figures_;

  std::vector<Plan> plans_;
  Plan* plan_ = nullptr;
  std::int64_t running_ = -1;  // the operator that asked last
  std::uint32_t nth_ = 0;      // its requests so far
  bool past_plan_ = true;      // the plan has nothing more to say
  bool debug_ = false;
  PageBits taken_;  // debugging: pages in use, known from nothing else
};

}  // namespace lowtide
