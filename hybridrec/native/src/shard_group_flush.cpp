// ShardGroup: writing what is newer in slots back to the store, the rows staying where they are.
//
// Slots in host memory: flush(). Others: flush_counts() and flush_slots() say which slots, the caller copies their
// records into a staging buffer, flush_records() writes them to the store. What was read out of the slots is the rows'
// value only while no row has been trained or moved since, which `dirty_version_` tells.
#include <string>

#include "hybridrec/shard_group.h"

namespace hybridrec {

void ShardGroup::require_room_for_flush(const char* call) const {
  uint64_t bytes = 0;
  for (const auto& table : tables_) bytes += table->num_dirty_chunks() * table->chunk_bytes();
  if (budget_.limit() != 0 && budget_.used() + bytes > budget_.limit()) {
    throw StateError(std::string(call) + ": writing all rows back needs " + std::to_string(budget_.used() + bytes) +
                     " bytes of host memory in all, the budget is " + std::to_string(budget_.limit()) + ".");
  }
}

void ShardGroup::flush() {
  std::lock_guard lock(mutex_);
  require_all_moved("flush");
  require_bound(nullptr, "flush");
  if (flushed_version_ == dirty_version_) return;  // a snapshot of many tables asks once for each
  require_room_for_flush("flush");
  ++dirty_version_;
  threads_.for_each(tables_.size(), [&](size_t t) { tables_[t]->flush(); });
  flushed_version_ = dirty_version_;
}

void ShardGroup::flush_counts(int64_t* counts) {
  std::lock_guard lock(mutex_);
  require_all_moved("flush_counts");
  for (size_t t = 0; t < tables_.size(); ++t) counts[t] = static_cast<int64_t>(tables_[t]->num_dirty());
}

void ShardGroup::flush_slots(int64_t* slots) {
  std::lock_guard lock(mutex_);
  require_all_moved("flush_slots");
  for (const auto& table : tables_) slots = table->dirty_slots(slots);
  flushing_version_ = dirty_version_;
}

void ShardGroup::flush_records(const float* staging) {
  std::lock_guard lock(mutex_);
  require_all_moved("flush_records");
  if (flushing_version_ != dirty_version_) {
    throw StateError("flush_records: rows were trained or moved since flush_slots(), or it was not called. Begin again.");
  }
  require_room_for_flush("flush_records");
  std::vector<uint64_t> offsets(tables_.size() + 1, 0);
  for (size_t t = 0; t < tables_.size(); ++t) {
    offsets[t + 1] = offsets[t] + tables_[t]->num_dirty() * tables_[t]->record_floats();
  }
  ++dirty_version_;
  threads_.for_each(tables_.size(), [&](size_t t) { tables_[t]->flush_records(staging + offsets[t]); });
}

}  // namespace hybridrec
