// The rows of one table at one moment, read little by little while training goes on.
//
// Taken when the store holds the value of every committed row. From then on a row of the snapshot that is about to be
// overwritten there, and was not read yet, is copied aside first. So what is kept beside the table is at most the rows
// that were written back since, and never more than those that are still to be read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridrec/memory.h"

namespace hybridrec {

struct SnapshotRow {
  int64_t id;
  uint32_t row;
  uint32_t score;
};

class RowSnapshot {
 public:
  // `rows`: in any order. Throws std::bad_alloc if the budget refuses what they take.
  RowSnapshot(Budget& budget, std::vector<SnapshotRow> rows, uint32_t num_row_numbers)
      : budget_(budget), rows_(std::move(rows)), is_waiting_((num_row_numbers + 63) / 64) {
    for (const SnapshotRow& row : rows_) is_waiting_[row.row / 64] |= bit(row.row);
    bytes_ = rows_.size() * sizeof(SnapshotRow) + is_waiting_.size() * sizeof(uint64_t);
    if (!budget_.try_take(bytes_)) throw std::bad_alloc();
  }
  RowSnapshot(const RowSnapshot&) = delete;  // its memory is accounted once
  RowSnapshot& operator=(const RowSnapshot&) = delete;
  ~RowSnapshot() { budget_.give_back(bytes_); }

  // To be called before rows are read: puts them into the order of reading, ascending by id. It takes long, and needs no
  // lock: who writes rows back does not look at the list.
  void sort() {
    std::call_once(is_sorted_, [this] { std::ranges::sort(rows_, {}, &SnapshotRow::id); });
  }

  size_t size() const { return rows_.size(); }
  size_t num_left() const { return rows_.size() - next_; }
  const SnapshotRow& row_ahead(size_t distance) const { return rows_[std::min(next_ + distance, rows_.size() - 1)]; }

  // Whether the store's record of a row must be kept before it is overwritten.
  bool waits_for(uint32_t row) const {
    return row / 64 < is_waiting_.size() && (is_waiting_[row / 64] & bit(row)) != 0;
  }
  void keep(uint32_t row, std::vector<float> record) {
    // Not refused: the step that writes the row back cannot be taken back here.
    budget_.take(record.size() * sizeof(float));
    bytes_ += record.size() * sizeof(float);
    kept_.emplace(row, std::move(record));
    is_waiting_[row / 64] &= ~bit(row);
  }

  // The next row, and its record if it was kept: else it is in the store.
  std::pair<SnapshotRow, std::vector<float>> take() {
    const SnapshotRow row = rows_[next_++];
    is_waiting_[row.row / 64] &= ~bit(row.row);
    const auto found = kept_.find(row.row);
    if (found == kept_.end()) return {row, {}};
    std::vector<float> record = std::move(found->second);
    kept_.erase(found);
    bytes_ -= record.size() * sizeof(float);
    budget_.give_back(record.size() * sizeof(float));
    return {row, std::move(record)};
  }

 private:
  static uint64_t bit(uint32_t row) { return uint64_t{1} << (row % 64); }

  Budget& budget_;
  std::vector<SnapshotRow> rows_;
  std::once_flag is_sorted_;
  std::vector<uint64_t> is_waiting_;  // a bit a row number
  std::unordered_map<uint32_t, std::vector<float>> kept_;
  size_t next_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace hybridrec
