// One table's shard on one rank: id map, row numbers, slot index and row store, and what a batch does to them.
//
// The hot path is plan() when every row has a slot. It makes three passes over a table's part of the batch:
//   1. keys -> rows, one prefetched line of the id map a key. The score in the line equals the ordinal if the key was
//      seen before in this batch: that is the whole deduplication. First occurrences go to the journal, branch-free.
//   2. unique rows -> slots, pinned and stamped.
//   3. rows -> slots for every key, out of arrays that passes 1 and 2 left in the cache.
// Everything else (inserting, evicting, choosing victims) costs only for the rows concerned.
//
// A plan that is refused leaves the shard as it was; only memory may have grown.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridrec/id_map.h"
#include "hybridrec/initial_rows.h"
#include "hybridrec/journal.h"
#include "hybridrec/memory.h"
#include "hybridrec/removal_log.h"
#include "hybridrec/row_snapshot.h"
#include "hybridrec/row_store.h"
#include "hybridrec/slot_index.h"

namespace hybridrec {

enum class FullPolicy { kGrow, kEvict, kError };
enum class PlanStatus : int64_t { kOk = 0, kNoSlots = 1, kQuota = 2, kHostBudget = 3, kTooManyRows = 4 };

// Batches within which a row counts as in use: the greatest pipeline depth, whatever depth is in use.
inline constexpr uint64_t kEvictionDistance = 12;

struct ShardSpec {
  std::string name;
  uint32_t dim = 0;
  uint32_t num_row_states = 0;
  uint32_t num_row_wise_states = 0;
  std::vector<float> state_initial_values;  // row-sized states first
  uint32_t num_slots = 0;
  uint64_t planned_rows = 0;
  uint64_t max_rows = 0;  // 0 = no quota
  FullPolicy full_policy = FullPolicy::kGrow;
  InitialRows initial_rows;

  uint32_t weight_words() const { return hybridrec::weight_words(initial_rows.row_type, dim); }
  // Of weights and row-sized states.
  uint64_t wide_floats() const { return weight_words() + uint64_t{dim} * num_row_states; }
};

struct Refusal {
  PlanStatus status = PlanStatus::kOk;
  uint64_t needed = 0;
  uint64_t available = 0;
  uint64_t pinned = 0;
};

// In the order of hybridrec.native.protocol.Counters.
struct Counters {
  uint64_t accesses = 0, access_hits = 0, uniques = 0, unique_hits = 0, inserted = 0;
  uint64_t loads = 0, victims = 0, write_backs = 0, load_bytes = 0, write_back_bytes = 0;
  uint64_t rows = 0, resident = 0, grown = 0, evicted = 0, rejected = 0, pins = 0, host_bytes = 0;
};

// Where the slots are, if in host memory.
struct SlotPointers {
  float* weights = nullptr;                // [C, D]
  std::vector<float*> row_states;          // M x [C, D]
  std::vector<float*> row_wise_states;     // A x [C]
  bool is_bound = false;
};

// Positions [first, second) of the batch's keys that belong to the table, ascending.
using KeyRanges = std::vector<std::pair<size_t, size_t>>;

// A journal that a later batch holds open.
struct LaterJournal {
  TableJournal* journal;
  bool is_committed;
};

// A journal of a batch that is planned and neither committed nor undone.
struct InFlightJournal {
  const TableJournal* journal;
  uint32_t ordinal;
  bool is_before_committed;  // a later batch is committed, so that what this one evicted may have no room any more
};

class TableShard {
 public:
  TableShard(ShardSpec spec, Budget& budget);
  TableShard(const TableShard&) = delete;  // its memory is accounted once
  TableShard& operator=(const TableShard&) = delete;
  ~TableShard() { budget_.give_back(row_number_bytes_ + removals_.bytes()); }

  const ShardSpec& spec() const { return spec_; }
  uint64_t record_floats() const {
    return spec_.wide_floats() + spec_.num_row_wise_states;
  }

  // What Counters::host_bytes will be once `num_rows` rows live, the first `store_rows` of which were written back.
  static uint64_t planned_bytes(uint64_t wide_floats, uint32_t num_row_wise_states, uint64_t num_rows,
                                uint32_t num_slots, uint64_t store_rows);

  void bind_slots(SlotPointers slots) { bound_ = std::move(slots); }
  bool is_bound() const { return bound_.is_bound; }
  uint32_t num_slots() const { return slots_.num_slots(); }
  uint64_t num_pins() const { return slots_.num_pins(); }
  // Unbinds. False: the budget refused.
  bool resize_slots(uint32_t num_slots);

  // MAP. Fills `journal` (cleared by the caller) and slots[i] for every i in `ranges`. `plan_number`: see slot_index.h.
  Refusal plan(const int64_t* keys, const KeyRanges& ranges, uint32_t ordinal, uint32_t plan_number,
               TableJournal& journal, int64_t* slots);
  // Takes back a plan that succeeded here, exactly, because another table refused the batch.
  void roll_back(TableJournal& journal);
  // More bytes than a plan of n keys can take.
  uint64_t growth_bound(uint64_t n) const;

  // SWAP, slots in host memory: victims first, then loads.
  void write_back_victims(const TableJournal& journal);
  void load(const TableJournal& journal);
  // SWAP through staging records [weights | row states | row-wise states].
  void scatter_victims(const TableJournal& journal, const float* staging);
  void gather_loads(const TableJournal& journal, float* staging);
  void count_victims(const TableJournal& journal);
  void count_loads(const TableJournal& journal);

  void commit(const TableJournal& journal);
  // `later`: the open journals of later batches. Not moved implies that there are none.
  void undo(TableJournal& journal, uint32_t ordinal, bool is_moved, bool have_victims_left,
            std::span<const LaterJournal> later);
  // Frees what the evicted rows had kept.
  void finalize(const TableJournal& journal);

  uint64_t num_dirty_chunks() const;  // chunks that flush() would have to allocate
  uint64_t chunk_bytes() const { return store_.chunk_bytes(); }
  void flush();
  uint64_t num_dirty() const;
  int64_t* dirty_slots(int64_t* slots) const;  // returns the end of what it wrote
  void flush_records(const float* staging);    // of all dirty slots, in order

  // The slot of a key's row, or -1.
  int64_t slot_of_key(int64_t key) const;
  void prefetch_key(int64_t key) const { prefetch(ids_.home(key)); }
  // The weights of a key's row: from its slot, the store, or its initial row.
  void read_weights(int64_t key, float* out) const;

  void entries(int64_t* keys, uint32_t* rows, uint32_t* scores, int64_t* slots, uint32_t* pins) const;
  void read_record(uint32_t row, float* out) const;
  // Of a loop over rows, at its i-th: what later ones will look at.
  void prefetch_stored(const uint32_t* rows, size_t i, size_t num_rows) const;
  // The record of a live row that is not newer in a slot; what a slot holds of it stays as it is.
  void write_record(uint32_t row, const float* record);
  // The unique rows of a batch and their slots, -1 for none.
  void batch_rows(const TableJournal& journal, uint32_t* rows, int64_t* slots) const;
  // Rows of these batches are not evicted by the next plan: batches aside have no pins that would keep them.
  void keep_rows_of(std::vector<const TableJournal*> journals) { kept_ = std::move(journals); }

  // The rows as they would be if all batches in flight were undone, newest first; those whose score is above
  // `above_score`. No slot is dirty. Must be ended before the shard goes.
  std::shared_ptr<RowSnapshot> begin_snapshot(SnapshotBlocks& blocks, std::span<const InFlightJournal> newest_first,
                                              uint32_t above_score);
  void end_snapshot(const RowSnapshot* snapshot);
  // The next rows of a snapshot that is sorted.
  void read_snapshot(RowSnapshot& snapshot, size_t num_rows, int64_t* ids, int64_t* scores, float* records) const;
  // Inserts or replaces rows, whose records go to the store; no batch is in flight. Refused, nothing changed.
  Refusal import_rows(const int64_t* ids, const int64_t* scores, const float* records, size_t num_rows);
  // From now on keep the keys that leave for good, up to `max_keys` of them. False: the budget refused,
  // and nothing changed.
  bool track_removals(size_t max_keys);
  void stop_tracking();
  bool is_tracking() const { return removals_.is_whole(); }
  // Ids that left since, and are not there if all batches in flight are undone, newest first; ascending. `open`: journals
  // of all batches that are not final. Empties the log.
  std::vector<int64_t> take_removed(std::span<const TableJournal* const> open,
                                    std::span<const InFlightJournal> newest_first);
  // For a new shard that takes the place of another: its slots' memory and counters.
  void take_over(const TableShard& old);

  Counters counters() const;
  void count_rejection() { ++counters_.rejected; }
  uint64_t num_rows() const { return ids_.size(); }
  // Throws std::logic_error if an invariant is broken; for tests.
  void check() const;

 private:
  // A row that is free has this for its slot.
  static constexpr uint32_t kFreeRow = 0x7ffffffeu;
  static constexpr uint32_t kNewSlot = 0x80000000u;

  IdEntry* find_or_insert(int64_t key, Refusal& refusal);
  bool reserve_row_number(uint32_t row);
  void free_row_number(uint32_t row);
  bool map_keys(const int64_t* keys, size_t begin, size_t end, uint32_t ordinal, TableJournal& journal, int64_t* slots,
                Refusal& refusal);
  bool apply_quota(uint32_t ordinal, TableJournal& journal, Refusal& refusal);
  bool evict(uint64_t count, uint32_t ordinal, TableJournal& journal);
  void mark_grown(TableJournal& journal) const;
  void find_slots(TableJournal& journal);
  bool place_misses(TableJournal& journal, Refusal& refusal);
  bool place(TableJournal& journal, Refusal& refusal);
  bool allocate_chunk_of(uint32_t row);
  template <typename Allocate>
  bool allocate_chunks(Allocate&& allocate);
  bool allocate_chunks_for_victims(const TableJournal& journal);
  bool store_new_rows(const TableJournal& journal, Refusal& refusal);
  void number_rows(const KeyRanges& ranges, size_t num_keys, int64_t* rows) const;
  void stamp_slots(uint32_t plan_number, TableJournal& journal);
  void write_slots(const KeyRanges& ranges, TableJournal& journal, int64_t* slots);
  void undo_ids(TableJournal& journal);
  void roll_back_slots(TableJournal& journal);
  void restore_evicted(const TableJournal& journal);
  void undo_placement(TableJournal& journal, bool have_victims_left);
  template <typename Write>
  void flush_each(Write&& write);
  void write_record(uint32_t row, uint32_t slot);
  void write_staged_record(uint32_t row, const float* record);
  void write_initial_record(uint32_t row);
  void require_stored(uint32_t row) const;
  std::vector<SnapshotRow> committed_rows(std::span<const InFlightJournal> newest_first, uint32_t above_score) const;
  void read_stored(uint32_t row, float* out) const;
  void read_row_wise(uint32_t row, float* out) const;
  void keep_for_snapshots(uint32_t row);
  void prefetch_for_snapshots(const std::vector<Victim>& victims, size_t i) const;
  Refusal make_rows(const int64_t* ids, size_t num_rows, std::vector<uint32_t>& rows);
  void read_slot_record(const float* staging_record, uint32_t row);
  void fill_initial(int64_t key, float* weights, std::span<float* const> row_states) const;
  Refusal host_budget_refusal() const;

  const ShardSpec spec_;
  Budget& budget_;
  IdMap ids_;
  RowStore store_;
  SlotIndex slots_;
  SlotPointers bound_;
  PageArray<int64_t> key_of_row_;
  PageArray<uint32_t> slot_of_row_;  // kNoSlot: none; kFreeRow: the row number is free
  std::vector<uint32_t> freed_rows_;
  uint32_t next_unused_row_ = 0;
  uint64_t row_number_bytes_ = 0;
  PageArray<uint32_t> old_uses_;  // of the current plan: the unique rows' slots' former last use
  std::vector<uint32_t> new_chunks_;  // of the current plan
  std::vector<const TableJournal*> kept_;
  std::vector<RowSnapshot*> snapshots_;  // being read
  RemovalLog removals_;
  Counters counters_;
};

}  // namespace hybridrec
