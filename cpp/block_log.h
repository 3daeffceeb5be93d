// SPDX-License-Identifier: Apache-2.0
// Records every block while it is on: its size, and when it came and went.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "pages.h"

namespace lowtide {

// The layout is the interface: trace.BLOCKS.
struct BlockRecord {
  std::int64_t bytes;  // asked for
  std::int64_t start;  // number of the event, counted from the log's start
  std::int64_t stop;   // -1: not freed yet
  std::int32_t start_op;
  std::int32_t stop_op;  // -1: not freed yet
};

class BlockLog {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Begins anew. False: there are no addresses for it.
  bool start() {
    const std::lock_guard<std::mutex> guard(mutex);
    if (!records_) {
      records_ = static_cast<BlockRecord*>(map_lazily(kMost * sizeof(BlockRecord)));
    }
    forget();
    on_ = records_ != nullptr;
    return on_;
  }

  // Ends the recording and gives its memory back.
  void stop() {
    const std::lock_guard<std::mutex> guard(mutex);
    on_ = false;
    forget();
  }

  // A block came; returns what it is known by, 0 where it is not recorded.
  std::uint64_t born(std::size_t bytes, std::int32_t op) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (!on_ || count_ == kMost) {
      return 0;
    }
    records_[count_++] = {static_cast<std::int64_t>(bytes), events_++, -1, op, -1};
    return generation_ << 32 | count_;
  }

  void died(std::uint64_t record, std::int32_t op) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (on_ && record >> 32 == generation_) {
      BlockRecord& block = records_[(record & 0xffffffff) - 1];
      block.stop = events_++;
      block.stop_op = op;
    }
  }

  std::int64_t events() {
    const std::lock_guard<std::mutex> guard(mutex);
    return events_;
  }

  // Copies records from the one numbered `from`; returns how many there are beyond.
  std::int64_t copy(std::int64_t from, BlockRecord* to, std::int64_t room) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto count = static_cast<std::int64_t>(count_);
    for (std::int64_t i = 0; i < room && from + i < count; ++i) {
      to[i] = records_[from + i];
    }
    return count > from ? count - from : 0;
  }

  std::mutex mutex;  // public for fork handlers

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 26;

  void forget() {
    if (records_ && count_ > 0) {
      madvise(records_, count_ * sizeof(BlockRecord), MADV_DONTNEED);
    }
    count_ = 0;
    events_ = 0;
    ++generation_;
  }

  std::atomic<bool> on_{false};
  BlockRecord* records_ = nullptr;
  std::size_t count_ = 0;
  std::int64_t events_ = 0;
  std::uint64_t generation_ = 0;  // so that a block of a former log is not mistaken
};

}  // namespace lowtide
