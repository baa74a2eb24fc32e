// TableShard: rows that leave for a snapshot and rows that come from one.
#include <algorithm>
#include <cstring>
#include <new>
#include <unordered_map>
#include <unordered_set>

#include "hybridrec/mix64.h"
#include "hybridrec/table_shard.h"

namespace hybridrec {

namespace {

constexpr size_t kRowsAhead = 8;

int64_t id_of(int64_t key) { return static_cast<int64_t>(unmix64(static_cast<uint64_t>(key))); }
int64_t key_of(int64_t id) { return static_cast<int64_t>(mix64(static_cast<uint64_t>(id))); }

}  // namespace

// What the batches in flight did to the table, played back without changing it: see undo(). In no order.
std::vector<SnapshotRow> TableShard::committed_rows(std::span<const InFlightJournal> newest_first,
                                                    uint32_t above_score) const {
  std::unordered_map<uint32_t, uint32_t> old_scores;  // of rows that batches in flight use; kInserted: not there
  uint64_t size = ids_.size();
  std::vector<SnapshotRow> restored;
  std::unordered_set<int64_t> restored_keys;
  for (const InFlightJournal& batch : newest_first) {
    const TableJournal& journal = *batch.journal;
    for (uint32_t u = 0; u < journal.num_uniques; ++u) {
      const Unique unique = journal.uniques[u];
      const auto known = old_scores.find(unique.row);
      const uint32_t score = known != old_scores.end() ? known->second : ids_.find(key_of_row_[unique.row])->score;
      if (score != batch.ordinal) continue;  // a later batch used it and is committed
      old_scores[unique.row] = unique.is_inserted() ? kInserted : unique.old_score;
      size -= unique.is_inserted();
    }
    for (size_t e = journal.evicted.size(); e-- > 0;) {
      const EvictedRow& evicted = journal.evicted[e];
      const IdEntry* entry = ids_.find(evicted.key);
      const bool is_live = entry != nullptr && !(old_scores.contains(entry->row) && old_scores[entry->row] == kInserted);
      if ((batch.is_before_committed && size >= spec_.max_rows) || is_live || !restored_keys.insert(evicted.key).second) continue;
      if (evicted.score > above_score) restored.push_back({id_of(evicted.key), evicted.row, evicted.score});
      ++size;
    }
  }
  std::vector<SnapshotRow> rows = std::move(restored);
  if (above_score == 0) rows.reserve(size);
  ids_.for_each([&](const IdEntry& entry) {
    const auto found = old_scores.empty() ? old_scores.end() : old_scores.find(entry.row);
    const uint32_t score = found == old_scores.end() ? entry.score : found->second;
    if (score != kInserted && score > above_score) rows.push_back({id_of(entry.key), entry.row, score});
  });
  return rows;
}

std::shared_ptr<RowSnapshot> TableShard::begin_snapshot(SnapshotBlocks& blocks,
                                                        std::span<const InFlightJournal> newest_first,
                                                        uint32_t above_score) {
  auto snapshot = std::make_shared<RowSnapshot>(budget_, blocks, committed_rows(newest_first, above_score),
                                                next_unused_row_, record_floats());
  snapshots_.push_back(snapshot.get());
  return snapshot;
}

void TableShard::end_snapshot(const RowSnapshot* snapshot) { std::erase(snapshots_, snapshot); }

void TableShard::read_row_wise(uint32_t row, float* out) const {
  for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) out[a] = *store_.row_wise(row, a);
}

void TableShard::read_stored(uint32_t row, float* out) const {
  const uint64_t floats = record_floats() - spec_.num_row_wise_states;
  std::memcpy(out, store_.record(row), floats * sizeof(float));
  read_row_wise(row, out + floats);
}

// Before stream_fence().
void TableShard::keep_for_snapshots(uint32_t row) {
  const uint64_t floats = record_floats() - spec_.num_row_wise_states;
  for (RowSnapshot* snapshot : snapshots_) {
    if (!snapshot->waits_for(row)) continue;
    float* kept = snapshot->keep(row);
    stream_floats(kept, store_.record(row), floats);
    read_row_wise(row, kept + floats);
  }
}

// Of a loop that writes victims back, at its i-th: what a later one will keep.
void TableShard::prefetch_for_snapshots(const std::vector<Victim>& victims, size_t i) const {
  const Victim& ahead = victims[std::min(i + kRowsAhead, victims.size() - 1)];
  if (!ahead.is_dirty) return;
  for (const RowSnapshot* snapshot : snapshots_) {
    if (snapshot->waits_for(ahead.row)) store_.prefetch_record(ahead.row);
  }
}

void TableShard::read_snapshot(RowSnapshot& snapshot, size_t num_rows, int64_t* ids, int64_t* scores,
                               float* records) const {
  for (size_t i = 0; i < num_rows; ++i, records += record_floats()) {
    const uint32_t ahead = snapshot.row_ahead(kRowsAhead).row;
    snapshot.waits_for(ahead) ? store_.prefetch_record(ahead) : snapshot.prefetch_kept(ahead);
    const auto [row, kept] = snapshot.take();
    ids[i] = row.id;
    scores[i] = row.score;
    if (kept == nullptr) {
      read_stored(row.row, records);
    } else {
      std::copy_n(kept, record_floats(), records);
    }
  }
}

Refusal TableShard::import_rows(const int64_t* ids, const int64_t* scores, const float* records, size_t num_rows) {
  std::vector<uint32_t> rows;
  const Refusal refusal = make_rows(ids, num_rows, rows);
  if (refusal.status != PlanStatus::kOk) return refusal;
  stop_tracking();  // these rows change without a batch that trains them
  for (size_t i = 0; i < num_rows; ++i, records += record_floats()) {
    const uint32_t row = rows[i];
    if (slot_of_row_[row] != kNoSlot) {  // what the slot holds is not the row's value any more
      slots_.release(slot_of_row_[row]);
      slot_of_row_[row] = kNoSlot;
    }
    ids_.find(key_of_row_[row])->score = static_cast<uint32_t>(scores[i]);
    write_staged_record(row, records);
  }
  stream_fence();
  return refusal;
}

bool TableShard::track_removals(size_t max_keys) {
  const uint64_t bytes = RemovalLog::bytes_of(max_keys), old_bytes = removals_.bytes();
  if (bytes > old_bytes && !budget_.try_take(bytes - old_bytes)) return false;
  try {
    removals_.open(max_keys);
  } catch (const std::bad_alloc&) {  // refused by the system rather than by the budget
    if (bytes > old_bytes) budget_.give_back(bytes - old_bytes);
    throw;
  }
  if (bytes < old_bytes) budget_.give_back(old_bytes - bytes);
  return true;
}

void TableShard::stop_tracking() {
  budget_.give_back(removals_.bytes());
  removals_.lose();
}

std::vector<int64_t> TableShard::take_removed(std::span<const TableJournal* const> open,
                                              std::span<const InFlightJournal> newest_first) {
  std::vector<int64_t> removed = removals_.keys();
  for (const TableJournal* journal : open) {
    for (const EvictedRow& row : journal->evicted) removed.push_back(row.key);
  }
  removals_.clear();
  if (removed.empty()) return removed;
  for (int64_t& key : removed) key = id_of(key);
  std::sort(removed.begin(), removed.end());
  removed.erase(std::unique(removed.begin(), removed.end()), removed.end());
  if (newest_first.empty()) {
    std::erase_if(removed, [&](int64_t id) { return ids_.find(key_of(id)) != nullptr; });
    return removed;
  }
  std::vector<SnapshotRow> rows = committed_rows(newest_first, 0);
  std::ranges::sort(rows, {}, &SnapshotRow::id);
  std::erase_if(removed, [&](int64_t id) {
    return std::ranges::binary_search(rows, id, {}, &SnapshotRow::id);
  });
  return removed;
}

void TableShard::take_over(const TableShard& old) {
  bound_ = old.bound_;
  counters_ = old.counters_;
}

}  // namespace hybridrec
