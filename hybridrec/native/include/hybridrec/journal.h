// What one batch did to one table, so that it can be undone: see docs/design/transaction.md.
//
// Buffers are reused from batch to batch: in steady state a plan allocates nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridrec/memory.h"
#include "hybridrec/slot_index.h"

namespace hybridrec {

// Values of Unique::old_score that are no ordinal: the batch inserted the row (the second: beyond planned_rows).
inline constexpr uint32_t kInserted = 0;
inline constexpr uint32_t kInsertedBeyondPlan = 0xffffffffu;

struct Unique {
  uint32_t row;
  uint32_t old_score;
  bool is_inserted() const { return old_score == kInserted || old_score == kInsertedBeyondPlan; }
};

struct Victim {
  uint32_t row;
  uint32_t slot;
  bool is_dirty;
};

struct EvictedRow {
  int64_t key;
  uint32_t row;
  uint32_t score;
};

struct TableJournal {
  bool is_aside = false;      // the batch has no slots: its rows are read from and written to the store
  PageArray<Unique> uniques;  // [num_uniques], in order of first occurrence
  PageArray<uint32_t> slots;  // [num_uniques], each pinned once; none of a batch that is aside
  uint32_t num_uniques = 0;
  std::vector<uint32_t> misses;       // positions in `uniques` of rows that had no slot
  std::vector<Victim> victims;        // victims[i] made room for misses[misses.size() - victims.size() + i]
  std::vector<SlotUse> victim_uses;   // the victims' former places in the order of use
  std::vector<EvictedRow> evicted;    // dropped from the table; the row numbers stay reserved until the journal is final

  uint64_t accesses = 0;
  uint64_t access_hits = 0;
  uint64_t inserted = 0;
  uint64_t grown = 0;
  uint64_t inits = 0;
  uint64_t write_backs = 0;

  uint64_t loads() const { return misses.size() - inits; }
  void clear() {
    is_aside = false;
    num_uniques = 0;
    misses.clear();
    victims.clear();
    victim_uses.clear();
    evicted.clear();
    accesses = access_hits = inserted = grown = inits = write_backs = 0;
  }
};

}  // namespace hybridrec
