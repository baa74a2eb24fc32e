// Numbering the distinct keys of a batch without touching the id map: for reads, which must leave no trace.
//
// Open addressing, linear probing, at most half full; slots are cleared by raising the epoch. One random line a key in
// a table of the batch's size. Memory grows to the largest batch that was read and is then reused.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridrec/memory.h"

namespace hybridrec {

class UniqueKeys {
 public:
  // Forgets all keys and makes room for n.
  void start(size_t n) {
    size_t capacity = 64;
    while (capacity < 2 * n) capacity *= 2;
    slots_.reserve(capacity);
    if (++epoch_ == 0) {  // wrapped: old marks could be taken for new ones
      for (size_t i = 0; i < slots_.capacity(); ++i) slots_[i].epoch = 0;
      epoch_ = 1;
    }
    mask_ = capacity - 1;
    shift_ = 64 - static_cast<unsigned>(__builtin_ctzll(capacity));
    keys_.clear();
  }
  void prefetch_key(int64_t key) { prefetch_for_write(&slots_[home(key)]); }
  // The number of `key` in order of first occurrence.
  uint32_t number(int64_t key) {
    for (size_t i = home(key);; i = (i + 1) & mask_) {
      Slot& slot = slots_[i];
      if (slot.epoch != epoch_) {
        slot = {key, static_cast<uint32_t>(keys_.size()), epoch_};
        keys_.push_back(key);
        return slot.number;
      }
      if (slot.key == key) return slot.number;
    }
  }
  const std::vector<int64_t>& keys() const { return keys_; }

 private:
  struct Slot {
    int64_t key;
    uint32_t number;
    uint32_t epoch;
  };
  // Keys are mixed already; the multiplication spreads sets of keys that were chosen to agree in their high bits.
  size_t home(int64_t key) const { return (static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ULL) >> shift_; }

  PageArray<Slot> slots_;
  size_t mask_ = 0;
  unsigned shift_ = 0;
  uint32_t epoch_ = 0;
  std::vector<int64_t> keys_;
};

}  // namespace hybridrec
