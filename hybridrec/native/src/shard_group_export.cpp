// ShardGroup: snapshots of its tables, and rows that come from outside.
#include <algorithm>
#include <memory>
#include <new>
#include <string>

#include "hybridrec/shard_group.h"

namespace hybridrec {

void ShardGroup::require_no_batches(const char* call) const {
  if (!batches_.empty()) {
    throw StateError(std::string(call) + ": batch " + std::to_string(batches_.front()->ordinal) +
                     " is in flight. Commit or undo it first.");
  }
}

std::vector<InFlightJournal> ShardGroup::in_flight_journals(size_t table) const {
  std::vector<InFlightJournal> in_flight;
  bool is_before_committed = false;
  for (size_t b = batches_.size(); b-- > 0;) {
    const Batch& batch = *batches_[b];
    if (batch.state == State::kCommitted) {
      is_before_committed = true;
    } else {
      in_flight.push_back({&batch.tables[table], batch.ordinal, is_before_committed});
    }
  }
  return in_flight;
}

std::pair<uint64_t, size_t> ShardGroup::export_begin(size_t table, uint64_t above_score) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  require_all_moved("export_begin");
  if (shard.num_dirty() != 0) {
    throw StateError("export_begin: rows of table '" + shard.spec().name +
                     "' are newer in their slots than in the store. Call flush().");
  }
  const std::vector<InFlightJournal> in_flight = in_flight_journals(table);
  std::shared_ptr<RowSnapshot> snapshot;
  try {
    snapshot = shard.begin_snapshot(snapshot_blocks_, in_flight, static_cast<uint32_t>(above_score));
  } catch (const std::bad_alloc&) {
    throw StateError("export_begin: table '" + shard.spec().name + "' needs " +
                     std::to_string(shard.num_rows() * sizeof(SnapshotRow)) + " bytes for the list of its rows.");
  }
  const size_t num_rows = snapshot->size();
  exports_.emplace(next_export_, Export{table, std::move(snapshot)});
  return {next_export_++, num_rows};
}

ShardGroup::Export& ShardGroup::export_at(uint64_t handle) {
  const auto found = exports_.find(handle);
  if (found == exports_.end()) {
    throw std::invalid_argument("export " + std::to_string(handle) + " does not exist or was ended.");
  }
  return found->second;
}

void ShardGroup::export_next(uint64_t handle, size_t num_rows, int64_t* ids, int64_t* scores, float* records) {
  std::shared_ptr<RowSnapshot> snapshot;  // stays until it is sorted, whoever ends the export meanwhile
  {
    std::lock_guard lock(mutex_);
    snapshot = export_at(handle).snapshot;
  }
  if (snapshot->has_whole_blocks()) snapshot_blocks_.make_ready();
  snapshot->sort();
  std::lock_guard lock(mutex_);
  const Export& one = export_at(handle);
  if (num_rows > snapshot->num_left()) {
    throw std::invalid_argument("export_next: " + std::to_string(num_rows) + " rows were asked for, " +
                                std::to_string(snapshot->num_left()) + " are left.");
  }
  tables_[one.table]->read_snapshot(*snapshot, num_rows, ids, scores, records);
}

void ShardGroup::export_end(uint64_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = exports_.find(handle);
  if (found == exports_.end()) return;
  tables_[found->second.table]->end_snapshot(found->second.snapshot.get());
  exports_.erase(found);
}

void ShardGroup::import_rows(size_t table, size_t num_rows, const int64_t* ids, const int64_t* scores,
                             const float* records) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  require_no_batches("import_rows");
  const auto newest = static_cast<int64_t>(next_ordinal_ - 1);
  for (size_t i = 0; i < num_rows; ++i) {
    if (scores[i] < 1 || scores[i] > newest) {
      throw std::invalid_argument("import_rows: table '" + shard.spec().name + "': id " + std::to_string(ids[i]) +
                                  " has score " + std::to_string(scores[i]) + ". Accepted: 1 to " +
                                  std::to_string(newest) + ", the newest ordinal; see set_ordinal().");
    }
  }
  const Refusal refusal = shard.import_rows(ids, scores, records, num_rows);
  ++dirty_version_;
  if (refusal.status == PlanStatus::kTooManyRows) {
    throw StateError("import_rows: table '" + shard.spec().name + "' would have more than " +
                     std::to_string(refusal.available) + " rows on this rank. Use more ranks.");
  }
  if (refusal.status != PlanStatus::kOk) {
    throw StateError("import_rows: table '" + shard.spec().name + "' needs " + std::to_string(refusal.needed) +
                     " bytes of host memory in all, the budget is " + std::to_string(refusal.available) + ".");
  }
}

void ShardGroup::clear_rows(size_t table) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  require_no_batches("clear_rows");
  for (const auto& [handle, one] : exports_) {
    if (one.table == table) throw StateError("clear_rows: table '" + shard.spec().name + "' is being exported.");
  }
  ShardSpec spec = shard.spec();
  spec.num_slots = shard.num_slots();
  auto fresh = std::make_unique<TableShard>(std::move(spec), budget_);
  fresh->take_over(shard);
  tables_[table] = std::move(fresh);
  ++dirty_version_;
}

void ShardGroup::track_removals(size_t table, int64_t max_ids) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  if (max_ids < 0) {
    shard.stop_tracking();
    return;
  }
  try {
    if (shard.track_removals(static_cast<size_t>(max_ids))) return;
  } catch (const std::bad_alloc&) {
    throw StateError("track_removals: table '" + shard.spec().name + "' needs " + std::to_string(max_ids * 8) +
                     " bytes for " + std::to_string(max_ids) + " ids, which the system does not have.");
  }
  throw StateError("track_removals: table '" + shard.spec().name + "' needs " +
                   std::to_string(budget_.last_refused()) + " bytes of host memory in all, the budget is " +
                   std::to_string(budget_.limit()) + ".");
}

size_t ShardGroup::collect_removed(size_t table) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  require_all_moved("removed_ids");
  if (!shard.is_tracking()) {
    throw StateError("removed_ids: table '" + shard.spec().name +
                     "' does not know which ids it lost: track_removals() was not called, more ids left than it was "
                     "given room for, or rows were imported or dropped since.");
  }
  std::vector<const TableJournal*> open;
  for (const auto& batch : batches_) open.push_back(&batch->tables[table]);
  removed_[table] = shard.take_removed(open, in_flight_journals(table));
  return removed_[table].size();
}

void ShardGroup::removed_ids(size_t table, int64_t* ids) {
  std::lock_guard lock(mutex_);
  const std::vector<int64_t> removed = std::move(removed_[table]);
  removed_.erase(table);
  std::copy(removed.begin(), removed.end(), ids);
}

uint64_t ShardGroup::final_ordinal() {
  std::lock_guard lock(mutex_);
  return batches_.empty() ? next_ordinal_ - 1 : batches_.front()->ordinal - uint64_t{1};
}

uint64_t ShardGroup::ordinal() {
  std::lock_guard lock(mutex_);
  return next_ordinal_ - 1;
}

void ShardGroup::set_ordinal(uint64_t ordinal) {
  std::lock_guard lock(mutex_);
  require_no_batches("set_ordinal");
  if (ordinal + 1 < next_ordinal_) {
    for (const auto& table : tables_) {
      if (table->num_rows() != 0) {
        throw StateError("set_ordinal: " + std::to_string(ordinal) + " is below the newest ordinal, " +
                         std::to_string(next_ordinal_ - 1) + ", that rows may bear. Call clear_rows() for all tables.");
      }
    }
  }
  if (ordinal >= kInsertedBeyondPlan - 2) throw std::invalid_argument("set_ordinal: ordinals end at 2^32 - 3.");
  if (ordinal + 1 < next_ordinal_) {
    for (const auto& table : tables_) table->stop_tracking();  // scores to come may be those of before
  }
  next_ordinal_ = ordinal + 1;
  num_plans_ = std::max(num_plans_, ordinal);
}

}  // namespace hybridrec
