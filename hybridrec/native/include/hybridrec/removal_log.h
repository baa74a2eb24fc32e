// Keys that left a table for good since a mark, for those who follow it by deltas. Bounded: what does not fit is not
// dropped in silence, the log is lost as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridrec {

class RemovalLog {
 public:
  static uint64_t bytes_of(size_t max_keys) { return max_keys * sizeof(int64_t); }

  // Throws std::bad_alloc, and is as before then.
  void open(size_t max_keys) {
    std::vector<int64_t> keys;
    keys.reserve(max_keys);  // a commit allocates nothing
    keys_.swap(keys);
    max_keys_ = max_keys;
    is_whole_ = true;
  }
  void lose() {
    keys_ = {};
    max_keys_ = 0;
    is_whole_ = false;
  }
  // Whether it was opened and has had room since.
  bool is_whole() const { return is_whole_; }
  uint64_t bytes() const { return bytes_of(max_keys_); }
  const std::vector<int64_t>& keys() const { return keys_; }
  void clear() { keys_.clear(); }
  void add(int64_t key) {
    if (!is_whole_) return;
    if (keys_.size() == max_keys_) {
      is_whole_ = false;  // the memory stays until it is opened or closed: the budget has counted it
    } else {
      keys_.push_back(key);
    }
  }

 private:
  std::vector<int64_t> keys_;
  size_t max_keys_ = 0;
  bool is_whole_ = false;
};

}  // namespace hybridrec
