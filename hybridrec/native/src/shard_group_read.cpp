// ShardGroup: reading, which changes nothing that training can see.
#include <algorithm>
#include <string>

#include "hybridrec/shard_group.h"

namespace hybridrec {

namespace {

constexpr size_t kKeysAhead = 16;

}  // namespace

uint64_t ShardGroup::read_plan(const KeyBatch& batch, int64_t* index, int64_t* unique_counts) {
  std::lock_guard lock(mutex_);
  split_by_table(batch);
  std::vector<std::vector<int64_t>> unique_keys(tables_.size());
  for (size_t t = 0; t < tables_.size(); ++t) {
    size_t num_keys = 0;
    for (const auto& [begin, end] : ranges_[t]) num_keys += end - begin;
    unique_keys_.start(num_keys);
    for (const auto& [begin, end] : ranges_[t]) {
      for (size_t i = begin; i < end; ++i) {
        unique_keys_.prefetch_key(batch.keys[std::min(i + kKeysAhead, end - 1)]);
        index[i] = unique_keys_.number(batch.keys[i]);
      }
    }
    unique_keys[t] = unique_keys_.keys();
    unique_counts[t] = static_cast<int64_t>(unique_keys[t].size());
  }
  reads_.emplace(next_read_, std::move(unique_keys));
  return next_read_++;
}

const std::vector<std::vector<int64_t>>& ShardGroup::read_at(uint64_t handle) const {
  const auto found = reads_.find(handle);
  if (found == reads_.end()) {
    throw std::invalid_argument("read handle " + std::to_string(handle) + " does not exist or was ended.");
  }
  return found->second;
}

void ShardGroup::read_rows(uint64_t handle, const std::vector<float*>& buffers, bool host_only) {
  std::lock_guard lock(mutex_);
  const auto& unique_keys = read_at(handle);
  if (buffers.size() != tables_.size()) {
    throw std::invalid_argument("read_rows: there must be one buffer for each of the " +
                                std::to_string(tables_.size()) + " tables.");
  }
  require_all_moved("read_rows");
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (unique_keys[t].empty()) continue;
    if (buffers[t] == nullptr) {
      throw std::invalid_argument("read_rows: table '" + tables_[t]->spec().name + "' has rows but no buffer.");
    }
    if (!host_only && !tables_[t]->is_bound()) {
      throw StateError("read_rows: the slots of table '" + tables_[t]->spec().name + "' are not bound. Call bind_slots().");
    }
  }
  threads_.for_each(tables_.size(), [&](size_t t) {
    const auto& keys = unique_keys[t];
    for (size_t i = 0; i < keys.size(); ++i) {
      tables_[t]->prefetch_key(keys[std::min(i + kKeysAhead, keys.size() - 1)]);
      if (host_only && tables_[t]->slot_of_key(keys[i]) >= 0) continue;
      tables_[t]->read_weights(keys[i], buffers[t] + i * tables_[t]->spec().weight_words());
    }
  });
  if (!host_only) reads_.erase(handle);
}

size_t ShardGroup::num_read_resident(uint64_t handle, size_t table) {
  std::lock_guard lock(mutex_);
  const auto& unique_keys = read_at(handle);
  const TableShard& shard = table_at(table);
  require_all_moved("read_resident");
  return static_cast<size_t>(std::count_if(unique_keys[table].begin(), unique_keys[table].end(),
                                           [&](int64_t key) { return shard.slot_of_key(key) >= 0; }));
}

void ShardGroup::read_resident(uint64_t handle, size_t table, int64_t* positions, int64_t* slots) {
  std::lock_guard lock(mutex_);
  const auto& keys = read_at(handle);
  const TableShard& shard = table_at(table);
  require_all_moved("read_resident");
  for (size_t i = 0; i < keys[table].size(); ++i) {
    const int64_t slot = shard.slot_of_key(keys[table][i]);
    if (slot < 0) continue;
    *positions++ = static_cast<int64_t>(i);
    *slots++ = slot;
  }
}

void ShardGroup::end_read(uint64_t handle) {
  std::lock_guard lock(mutex_);
  reads_.erase(handle);
}

size_t ShardGroup::num_entries(size_t table) {
  std::lock_guard lock(mutex_);
  return table_at(table).num_rows();
}

void ShardGroup::entries(size_t table, int64_t* keys, uint32_t* rows, uint32_t* scores, int64_t* slots,
                         uint32_t* pins) {
  std::lock_guard lock(mutex_);
  table_at(table).entries(keys, rows, scores, slots, pins);
}

void ShardGroup::read_records(size_t table, const uint32_t* rows, size_t num_rows, float* out) {
  std::lock_guard lock(mutex_);
  const TableShard& shard = table_at(table);
  require_all_moved("read_records");
  for (size_t i = 0; i < num_rows; ++i) {
    shard.prefetch_stored(rows, i, num_rows);
    shard.read_record(rows[i], out + i * shard.record_floats());
  }
}

void ShardGroup::write_records(size_t table, const uint32_t* rows, size_t num_rows, const float* records) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  require_all_moved("write_records");
  for (size_t i = 0; i < num_rows; ++i) {
    shard.prefetch_stored(rows, i, num_rows);
    shard.write_record(rows[i], records + i * shard.record_floats());
  }
  stream_fence();
}

size_t ShardGroup::num_batch_rows(uint64_t ordinal, size_t table) {
  std::lock_guard lock(mutex_);
  table_at(table);
  return (*find_batch(ordinal, "batch_rows"))->tables[table].num_uniques;
}

void ShardGroup::batch_rows(uint64_t ordinal, size_t table, uint32_t* rows, int64_t* slots) {
  std::lock_guard lock(mutex_);
  require_all_moved("batch_rows");
  const auto& batch = *find_batch(ordinal, "batch_rows");
  table_at(table).batch_rows(batch->tables[table], rows, slots);
}

Counters ShardGroup::counters(size_t table) {
  std::lock_guard lock(mutex_);
  return table_at(table).counters();
}

void ShardGroup::check() {
  std::lock_guard lock(mutex_);
  for (const auto& table : tables_) table->check();
}

}  // namespace hybridrec
