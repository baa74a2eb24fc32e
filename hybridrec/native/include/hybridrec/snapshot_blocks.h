// Blocks of memory for rows that snapshots keep while they are overwritten.
//
// Memory is new when it is first written, which costs more than the row that is copied there, and the thread that trains
// would pay for it. So the thread that reads a snapshot makes some blocks ready, huge pages that it has touched already,
// as soon as a row is kept; blocks that a snapshot leaves behind are ready as well. What is ready goes when the last
// snapshot does.
#pragma once

#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "hybridrec/memory.h"

namespace hybridrec {

class SnapshotBlocks {
 public:
  using Block = PageArray<float>;
  static constexpr size_t kBlockBytes = kHugePageBytes;
  static constexpr size_t kBlockFloats = kBlockBytes / sizeof(float);
  static constexpr size_t kMostReady = 8;

  explicit SnapshotBlocks(Budget& budget) : budget_(budget) {}
  SnapshotBlocks(const SnapshotBlocks&) = delete;  // its memory is accounted once
  SnapshotBlocks& operator=(const SnapshotBlocks&) = delete;
  ~SnapshotBlocks() { release_ready(); }

  void add_user() {
    std::lock_guard lock(mutex_);
    ++num_users_;
  }
  void remove_user() {
    std::lock_guard lock(mutex_);
    if (--num_users_ != 0) return;
    release_ready();
    is_wanted_ = false;
  }

  // To be called without any lock that training needs. Makes nothing ready that the budget has no room for.
  void make_ready() {
    while (is_short()) {
      Block block;
      if (!budget_.try_take(kBlockBytes)) return;
      try {
        block.reserve(kBlockFloats);
      } catch (const std::bad_alloc&) {  // who needs it will tell
        budget_.give_back(kBlockBytes);
        return;
      }
      for (size_t i = 0; i < kBlockFloats; i += kPageBytes / sizeof(float)) block[i] = 0.0f;
      give_back(std::move(block));
    }
  }

  // `floats`: kBlockFloats, or the size of a snapshot that needs less or has longer rows. Never refused by the budget:
  // the step that writes the row back cannot be taken back here. Throws std::bad_alloc.
  Block take(size_t floats) {
    if (floats == kBlockFloats) {
      std::lock_guard lock(mutex_);
      is_wanted_ = true;
      if (!ready_.empty()) {
        Block block = std::move(ready_.back());
        ready_.pop_back();
        return block;
      }
    }
    Block block;
    block.reserve(floats);
    budget_.take(block.bytes());
    return block;
  }

  void give_back(Block block) {
    std::lock_guard lock(mutex_);
    if (block.bytes() == kBlockBytes && num_users_ != 0 && ready_.size() < kMostReady) {
      ready_.push_back(std::move(block));
    } else {
      budget_.give_back(block.bytes());
    }
  }

  size_t num_ready() {
    std::lock_guard lock(mutex_);
    return ready_.size();
  }

 private:
  bool is_short() {
    std::lock_guard lock(mutex_);
    return is_wanted_ && ready_.size() < kMostReady;
  }
  void release_ready() {
    for (const Block& block : ready_) budget_.give_back(block.bytes());
    ready_.clear();
  }

  Budget& budget_;
  std::mutex mutex_;
  std::vector<Block> ready_;
  size_t num_users_ = 0;
  bool is_wanted_ = false;  // one was taken
};

}  // namespace hybridrec
