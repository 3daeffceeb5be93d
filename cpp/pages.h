// SPDX-License-Identifier: Apache-2.0
// Sets of page numbers, as bits. They only hold numbers: none of the pages is
// touched. Their memory is mapped and costs nothing until a bit in it is set.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace lowtide {

using Page = std::uint32_t;
using Word = std::uint64_t;

constexpr Page kNoPage = ~Page{0};

inline void* map_lazily(std::size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

// Knows the largest member at or below a page, in O(log64 n): each bit of a
// level says whether a word of the level below has any.
class PageIndex {
 public:
  bool reserve(std::size_t pages) {
    std::size_t words = 0;
    for (std::size_t bits = pages, level = 0; level < kLevels; ++level) {
      bits = (bits + 63) / 64;
      starts_[level] = words;
      words += bits;
    }
    words_ = static_cast<Word*>(map_lazily(words * sizeof(Word)));
    return words_ != nullptr;
  }

  bool has(Page page) const { return at(0, page / 64) >> (page % 64) & 1; }

  void insert(Page page) {
    for (int level = 0; level < kLevels; ++level) {
      Word& word = at(level, page / 64);
      const bool was_empty = word == 0;
      word |= Word{1} << (page % 64);
      if (!was_empty) {
        return;
      }
      page /= 64;
    }
  }

  void erase(Page page) {
    for (int level = 0; level < kLevels; ++level) {
      Word& word = at(level, page / 64);
      word &= ~(Word{1} << (page % 64));
      if (word != 0) {
        return;
      }
      page /= 64;
    }
  }

  // The largest member <= page; kNoPage: there is none.
  Page previous(Page page) const {
    for (int level = 0; level < kLevels; ++level) {
      // At the first level the page itself counts, above it what lies below.
      const Word upto = level == 0 ? ~Word{0} >> (63 - page % 64)
                                   : (Word{1} << (page % 64)) - 1;
      if (const Word found = at(level, page / 64) & upto) {
        page = page / 64 * 64 + highest(found);
        while (level-- > 0) {
          page = page * 64 + highest(at(level, page));
        }
        return page;
      }
      page /= 64;
    }
    return kNoPage;
  }

 private:
  static constexpr int kLevels = 6;  // 64^6 exceeds every 32-bit number

  static Page highest(Word word) { return 63 - __builtin_clzll(word); }
  Word& at(int level, Page word) { return words_[starts_[level] + word]; }
  Word at(int level, Page word) const { return words_[starts_[level] + word]; }

  Word* words_ = nullptr;
  std::size_t starts_[kLevels] = {};
};

// Knows how many members a range has, 64 pages at a time.
class PageBits {
 public:
  bool reserve(std::size_t pages) {
    words_ = static_cast<Word*>(map_lazily((pages + 63) / 64 * sizeof(Word)));
    return words_ != nullptr;
  }

  bool has(Page page) const { return words_[page / 64] >> (page % 64) & 1; }

  // The first page in [page, end) that is a member (or, not one); else `end`.
  Page next(Page page, Page end, bool member) const {
    while (page < end) {
      const Word word = member ? words_[page / 64] : ~words_[page / 64];
      if (const Word rest = word >> (page % 64)) {
        page += static_cast<Page>(__builtin_ctzll(rest));
        return page < end ? page : end;
      }
      page = page / 64 * 64 + 64;
    }
    return end;
  }

  Page count(Page page, Page pages) const {
    Page found = 0;
    each_word(page, pages, [&](Page word, Word mask) {
      const Word bits = words_[word] & mask;
      // Most words are all or nothing, and counting is a call on older machines.
      found += bits == ~Word{0} ? 64
               : bits == 0      ? 0
                                : static_cast<Page>(__builtin_popcountll(bits));
    });
    return found;
  }

  void insert(Page page, Page pages) {
    each_word(page, pages, [&](Page word, Word mask) { words_[word] |= mask; });
  }

  void erase(Page page, Page pages) {
    each_word(page, pages, [&](Page word, Word mask) { words_[word] &= ~mask; });
  }

 private:
  template <typename Do>
  static void each_word(Page page, Page pages, Do act) {
    const Page end = page + pages;
    while (page < end) {
      if (page % 64 == 0 && end - page >= 64) {
        act(page / 64, ~Word{0});
        page += 64;
        continue;
      }
      const Page next = page / 64 * 64 + 64 < end ? page / 64 * 64 + 64 : end;
      const Page length = next - page;
      const Word mask = ((Word{1} << length) - 1) << (page % 64);
      act(page / 64, mask);
      page = next;
    }
  }

  Word* words_ = nullptr;
};

}  // namespace lowtide
