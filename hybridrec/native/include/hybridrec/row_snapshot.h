// The rows of one table at one moment, read little by little while training goes on.
//
// Taken when the store holds the value of every committed row. From then on a row of the snapshot that is about to be
// overwritten there, and was not read yet, is copied aside first. So what is kept beside the table is at most the rows
// that were written back since, and never more than those that were still to be read; in blocks, whose places are used
// again and which go when the snapshot does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "hybridrec/memory.h"
#include "hybridrec/snapshot_blocks.h"

namespace hybridrec {

struct SnapshotRow {
  int64_t id;
  uint32_t row;
  uint32_t score;
};

class RowSnapshot {
 public:
  // `rows`: in any order. Throws std::bad_alloc if the budget refuses what they take.
  RowSnapshot(Budget& budget, SnapshotBlocks& blocks, std::vector<SnapshotRow> rows, uint32_t num_row_numbers,
              size_t record_floats)
      : budget_(budget),
        all_blocks_(blocks),
        rows_(std::move(rows)),
        is_waiting_((num_row_numbers + 63) / 64),
        record_floats_(record_floats),
        rows_of_block_(std::max<size_t>(1, SnapshotBlocks::kBlockFloats / record_floats)),
        block_floats_(std::max(SnapshotBlocks::kBlockFloats, record_floats)) {
    if (rows_.size() < rows_of_block_) block_floats_ = rows_.size() * record_floats;
    for (const SnapshotRow& row : rows_) is_waiting_[row.row / 64] |= bit(row.row);
    bytes_ = rows_.size() * sizeof(SnapshotRow) + is_waiting_.size() * sizeof(uint64_t) +
             place_of_row_.capacity_for(num_row_numbers) * sizeof(uint32_t);
    if (!budget_.try_take(bytes_)) throw std::bad_alloc();
    try {
      place_of_row_.reserve(num_row_numbers);
    } catch (const std::bad_alloc&) {
      budget_.give_back(bytes_);
      throw;
    }
    all_blocks_.add_user();
  }
  RowSnapshot(const RowSnapshot&) = delete;  // its memory is accounted once
  RowSnapshot& operator=(const RowSnapshot&) = delete;
  ~RowSnapshot() {
    for (SnapshotBlocks::Block& block : blocks_) all_blocks_.give_back(std::move(block));
    all_blocks_.remove_user();
    budget_.give_back(bytes_);
  }

  // To be called before rows are read: puts them into the order of reading, ascending by id. It takes long, and needs no
  // lock: who writes rows back does not look at the list.
  void sort() {
    std::call_once(is_sorted_, [this] { std::ranges::sort(rows_, {}, &SnapshotRow::id); });
  }

  size_t size() const { return rows_.size(); }
  size_t num_left() const { return rows_.size() - next_; }
  bool has_whole_blocks() const { return block_floats_ == SnapshotBlocks::kBlockFloats; }
  const SnapshotRow& row_ahead(size_t distance) const { return rows_[std::min(next_ + distance, rows_.size() - 1)]; }

  // Whether the store's record of a row must be kept before it is overwritten.
  bool waits_for(uint32_t row) const {
    return row / 64 < is_waiting_.size() && (is_waiting_[row / 64] & bit(row)) != 0;
  }
  // Where the caller copies the record of a row that is waited for.
  float* keep(uint32_t row) {
    const uint32_t place = free_place();
    place_of_row_[row] = place + 1;
    is_waiting_[row / 64] &= ~bit(row);
    return record(place);
  }

  void prefetch_kept(uint32_t row) {
    if (place_of_row_[row] == 0) return;
    const float* kept = record(place_of_row_[row] - 1);
    for (size_t i = 0; i < record_floats_ && i < 256; i += 16) prefetch(kept + i);
  }

  // The next row, and its record if it was kept (until the next `keep`): else it is in the store.
  std::pair<SnapshotRow, const float*> take() {
    const SnapshotRow row = rows_[next_++];
    is_waiting_[row.row / 64] &= ~bit(row.row);
    const uint32_t kept = std::exchange(place_of_row_[row.row], 0);
    if (kept == 0) return {row, nullptr};
    free_places_.push_back(kept - 1);
    return {row, record(kept - 1)};
  }

 private:
  static uint64_t bit(uint32_t row) { return uint64_t{1} << (row % 64); }

  float* record(uint32_t place) {
    return blocks_[place / rows_of_block_].data() + (place % rows_of_block_) * record_floats_;
  }
  uint32_t free_place() {
    if (!free_places_.empty()) {
      const uint32_t place = free_places_.back();
      free_places_.pop_back();
      return place;
    }
    if (num_places_ == blocks_.size() * rows_of_block_) {
      blocks_.reserve(blocks_.size() + 1);  // a block that was taken is not lost
      blocks_.push_back(all_blocks_.take(block_floats_));
    }
    return num_places_++;
  }

  Budget& budget_;
  SnapshotBlocks& all_blocks_;
  std::vector<SnapshotRow> rows_;
  std::once_flag is_sorted_;
  std::vector<uint64_t> is_waiting_;  // a bit a row number
  size_t record_floats_;
  // Records that were kept: never moved, and their places used again.
  size_t rows_of_block_;
  size_t block_floats_;
  std::vector<SnapshotBlocks::Block> blocks_;
  std::vector<uint32_t> free_places_;
  uint32_t num_places_ = 0;
  PageArray<uint32_t> place_of_row_;  // [row numbers], one more than the place; 0: it was not kept
  size_t next_ = 0;
  uint64_t bytes_ = 0;  // without blocks
};

}  // namespace hybridrec
