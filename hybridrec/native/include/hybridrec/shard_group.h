// The shards of one collection on one rank, and the batches in flight. The contract is hybridrec/native/protocol.py;
// the states of a batch are in docs/design/transaction.md.
//
// Every call takes the group's lock. Tables are independent of each other but for the host budget, so calls that touch
// all of them may use several threads and give the same results.
//
// Errors: std::invalid_argument for arguments, std::logic_error's sibling StateError for a call that is not legal now;
// nothing has changed when one is thrown.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "hybridrec/table_shard.h"
#include "hybridrec/thread_pool.h"
#include "hybridrec/unique_keys.h"

namespace hybridrec {

class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// In the order of hybridrec.native.protocol.Plan.
struct Plan {
  int64_t status = 0, table = -1, needed = 0, available = 0, pinned = 0;
  int64_t ordinal = 0, num_unique = 0, num_loads = 0, num_inits = 0, num_victims = 0, num_write_backs = 0;
};

// The keys of a batch, feature after feature. Not kept.
struct KeyBatch {
  const int64_t* keys;             // [num_keys]
  size_t num_keys;
  const int64_t* feature_offsets;  // [num_features + 1]
  const int64_t* feature_table;    // [num_features]
  size_t num_features;
};

class ShardGroup {
 public:
  ShardGroup(uint64_t host_budget_bytes, size_t num_threads);
  ShardGroup(const ShardGroup&) = delete;  // owns threads and shards
  ShardGroup& operator=(const ShardGroup&) = delete;

  // Before the first plan. Returns the table's index.
  size_t add_table(ShardSpec spec);
  void bind_slots(size_t table, SlotPointers slots);
  void resize_slots(size_t table, uint64_t num_slots);

  Plan plan(const KeyBatch& batch, int64_t* slots);
  Plan plan_aside(const KeyBatch& batch, int64_t* index, int64_t* unique_counts);
  size_t num_batch_rows(uint64_t ordinal, size_t table);
  void batch_rows(uint64_t ordinal, size_t table, uint32_t* rows, int64_t* slots);
  void write_records(size_t table, const uint32_t* rows, size_t num_rows, const float* records);
  void swap(uint64_t ordinal);
  void swap_counts(uint64_t ordinal, int64_t* counts);
  void swap_slots(uint64_t ordinal, int64_t* load_slots, int64_t* victim_slots);
  void scatter_victims(uint64_t ordinal, const float* staging);
  void gather_loads(uint64_t ordinal, float* staging);
  void commit(uint64_t ordinal);
  void undo(uint64_t ordinal);

  uint64_t read_plan(const KeyBatch& batch, int64_t* index, int64_t* unique_counts);
  void read_rows(uint64_t handle, const std::vector<float*>& buffers, bool host_only);
  size_t num_read_resident(uint64_t handle, size_t table);
  void read_resident(uint64_t handle, size_t table, int64_t* positions, int64_t* slots);
  void end_read(uint64_t handle);

  void flush();
  void flush_counts(int64_t* counts);
  void flush_slots(int64_t* slots);
  void flush_records(const float* staging);
  size_t num_entries(size_t table);
  void entries(size_t table, int64_t* keys, uint32_t* rows, uint32_t* scores, int64_t* slots, uint32_t* pins);
  void read_records(size_t table, const uint32_t* rows, size_t num_rows, float* out);
  std::pair<uint64_t, size_t> export_begin(size_t table, uint64_t above_score);
  void export_next(uint64_t handle, size_t num_rows, int64_t* ids, int64_t* scores, float* records);
  void export_end(uint64_t handle);
  void import_rows(size_t table, size_t num_rows, const int64_t* ids, const int64_t* scores, const float* records);
  void clear_rows(size_t table);
  // Negative: stop. collect_removed() tells how many ids removed_ids() will write.
  void track_removals(size_t table, int64_t max_ids);
  size_t collect_removed(size_t table);
  void removed_ids(size_t table, int64_t* ids);
  uint64_t ordinal();
  uint64_t final_ordinal();
  void set_ordinal(uint64_t ordinal);
  Counters counters(size_t table);
  // Throws std::logic_error if an invariant is broken; for tests.
  void check();

 private:
  // Scattered: victims are in the store; gathered: rows are in their slots; moved: both.
  enum class State { kPlanned, kScattered, kGathered, kMoved, kCommitted };
  struct Batch {
    uint32_t ordinal = 0;
    State state = State::kPlanned;
    bool has_moves = false;
    bool is_aside = false;
    std::vector<TableJournal> tables;
  };
  using Batches = std::deque<std::unique_ptr<Batch>>;
  struct Export {
    size_t table;
    std::shared_ptr<RowSnapshot> snapshot;
  };

  TableShard& table_at(size_t table);
  Plan plan_batch(const KeyBatch& batch, int64_t* slots, bool is_aside);
  void keep_rows_of_batches_aside();
  void split_by_table(const KeyBatch& batch);
  std::unique_ptr<Batch> new_batch();
  void recycle(std::unique_ptr<Batch> batch);
  Batches::iterator find_batch(uint64_t ordinal, const char* call);
  Batch& batch_to_move(uint64_t ordinal, const char* call);
  void require_all_moved(const char* call) const;
  void require_bound(const Batch* batch, const char* call) const;
  void require_room_for_flush(const char* call) const;
  void require_no_batches(const char* call) const;
  Export& export_at(uint64_t handle);
  std::vector<InFlightJournal> in_flight_journals(size_t table) const;
  void finalize_front();
  const std::vector<std::vector<int64_t>>& read_at(uint64_t handle) const;
  std::vector<uint64_t> staging_offsets(const Batch& batch, bool of_victims) const;

  std::mutex mutex_;
  Budget budget_;
  std::vector<std::unique_ptr<TableShard>> tables_;
  Batches batches_;                              // planned or committed but not final, by ordinal
  std::vector<std::unique_ptr<Batch>> unused_;   // journals whose buffers are reused
  std::vector<KeyRanges> ranges_;                // of the current call, per table
  std::vector<Refusal> refusals_;
  uint64_t next_ordinal_ = 1;   // undo gives the newest one back
  uint64_t num_plans_ = 0;      // that succeeded, undone ones included: at least the newest ordinal
  // Rises with whatever changes which slots are dirty, or their rows. A move needs no count: its plan had one.
  uint64_t dirty_version_ = 1;
  uint64_t flushing_version_ = 0;  // at the last flush_slots()
  uint64_t flushed_version_ = 0;   // behind the last flush()
  std::map<uint64_t, std::vector<std::vector<int64_t>>> reads_;  // handle -> per table, unique keys
  uint64_t next_read_ = 1;
  SnapshotBlocks snapshot_blocks_;
  std::map<uint64_t, Export> exports_;  // by handle
  uint64_t next_export_ = 1;
  std::map<size_t, std::vector<int64_t>> removed_;  // by table: collected, not yet read
  UniqueKeys unique_keys_;
  ThreadPool threads_;
};

}  // namespace hybridrec
