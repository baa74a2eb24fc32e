// TableShard: MAP.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <new>
#include <unordered_set>

#include "hybridrec/mix64.h"
#include "hybridrec/table_shard.h"
#include "hybridrec/unique_keys.h"

namespace hybridrec {

namespace {

constexpr size_t kKeysAhead = 24;   // lines of the id map in flight; a core sustains 20 to 25
constexpr size_t kSlotsAhead = 16;

}  // namespace

Refusal TableShard::host_budget_refusal() const {
  // Without a limit it was the system that had no memory: then the refused amount is not known.
  return {PlanStatus::kHostBudget, std::max(budget_.last_refused(), budget_.used()), budget_.limit(), 0};
}

bool TableShard::reserve_row_number(uint32_t row) {
  if (row < key_of_row_.capacity() && row < slot_of_row_.capacity()) return true;
  const size_t n = size_t{row} + 1;
  const uint64_t bytes = uint64_t{key_of_row_.capacity_for(n)} * sizeof(int64_t) +
                         uint64_t{slot_of_row_.capacity_for(n)} * sizeof(uint32_t);
  const uint64_t extra = bytes - row_number_bytes_;
  if (!budget_.try_take(extra)) return false;
  row_number_bytes_ = bytes;
  key_of_row_.reserve(n);
  slot_of_row_.reserve(n);
  return true;
}

void TableShard::free_row_number(uint32_t row) {
  slot_of_row_[row] = kFreeRow;
  freed_rows_.push_back(row);
}

IdEntry* TableShard::find_or_insert(int64_t key, Refusal& refusal) {
  if (IdEntry* entry = ids_.find(key)) return entry;
  const bool is_reused = !freed_rows_.empty();
  const uint32_t row = is_reused ? freed_rows_.back() : next_unused_row_;
  if (row == kNoRow) {
    refusal = {PlanStatus::kTooManyRows, uint64_t{kNoRow} + 1, kNoRow, 0};
    return nullptr;
  }
  bool fits = false;
  try {
    fits = reserve_row_number(row) && ids_.reserve_one(key, /*must=*/false);
  } catch (const std::bad_alloc&) {  // refused by the system rather than by the budget
  }
  if (!fits) {
    refusal = host_budget_refusal();
    return nullptr;
  }
  if (is_reused) {
    freed_rows_.pop_back();
  } else {
    ++next_unused_row_;
  }
  key_of_row_[row] = key;
  slot_of_row_[row] = kNoSlot;
  return ids_.insert(key, row, kInserted);
}

static_assert(offsetof(IdEntry, score) == offsetof(IdEntry, row) + sizeof(uint32_t) && sizeof(Unique) == 8);

bool TableShard::map_keys(const int64_t* keys, size_t begin, size_t end, uint32_t ordinal, TableJournal& journal,
                          int64_t* slots, Refusal& refusal) {
  Unique* uniques = journal.uniques.data();
  uint32_t u = journal.num_uniques;
  const size_t last = end - 1;
  for (size_t i = begin; i < std::min(begin + kKeysAhead, end); ++i) prefetch_for_write(ids_.home(keys[i]));
  for (size_t i = begin; i < end; ++i) {
    prefetch_for_write(ids_.home(keys[std::min(i + kKeysAhead, last)]));
    const int64_t key = keys[i];
    IdEntry* entry = IdMap::match(ids_.home(key), key);
    if (entry == nullptr) [[unlikely]] {
      entry = find_or_insert(key, refusal);
      if (entry == nullptr) {
        journal.num_uniques = u;
        return false;
      }
    }
    // One load and one store of eight bytes: a hot entry is loaded again while its store is still in the store buffer,
    // and that is fast only if both are equally wide.
    uint64_t row_and_score;
    std::memcpy(&row_and_score, &entry->row, sizeof row_and_score);
    const auto unique = std::bit_cast<Unique>(row_and_score);
    const auto stamped = std::bit_cast<uint64_t>(Unique{unique.row, ordinal});
    std::memcpy(&uniques[u], &row_and_score, sizeof row_and_score);
    std::memcpy(&entry->row, &stamped, sizeof stamped);
    u += unique.old_score != ordinal;
    slots[i] = unique.row;
  }
  journal.num_uniques = u;
  return true;
}

bool TableShard::evict(uint64_t count, uint32_t ordinal, TableJournal& journal) {
  std::vector<EvictedRow> evicted;
  std::unordered_set<uint32_t> kept;
  for (const TableJournal* other : kept_) {
    for (uint32_t u = 0; u < other->num_uniques; ++u) kept.insert(other->uniques[u].row);
  }
  ids_.for_each([&](const IdEntry& entry) {
    if (entry.score + kEvictionDistance >= ordinal || (!kept.empty() && kept.contains(entry.row))) return;
    const uint32_t slot = slot_of_row_[entry.row];
    if (slot != kNoSlot && slots_.state(slot).pins != 0) return;
    evicted.push_back({entry.key, entry.row, entry.score});
  });
  if (evicted.size() < count) return false;
  const auto goes_first = [](const EvictedRow& a, const EvictedRow& b) {
    return a.score != b.score ? a.score < b.score : static_cast<uint64_t>(a.key) < static_cast<uint64_t>(b.key);
  };
  std::nth_element(evicted.begin(), evicted.begin() + static_cast<ptrdiff_t>(count) - 1, evicted.end(), goes_first);
  evicted.resize(count);
  std::sort(evicted.begin(), evicted.end(), goes_first);
  journal.evicted.assign(evicted.begin(), evicted.end());
  for (const EvictedRow& row : journal.evicted) ids_.erase(row.key);
  return true;
}

bool TableShard::apply_quota(uint32_t ordinal, TableJournal& journal, Refusal& refusal) {
  const uint64_t rows = ids_.size();
  if (journal.inserted == 0) return true;  // imported rows may be more than that
  if (spec_.full_policy == FullPolicy::kGrow || spec_.max_rows == 0 || rows <= spec_.max_rows) return true;
  if (spec_.full_policy == FullPolicy::kEvict && evict(rows - spec_.max_rows, ordinal, journal)) return true;
  refusal = {PlanStatus::kQuota, rows, spec_.max_rows, 0};
  return false;
}

void TableShard::mark_grown(TableJournal& journal) const {
  if (journal.inserted == 0 || ids_.size() <= spec_.planned_rows) return;
  uint64_t left = std::min(journal.inserted, ids_.size() - spec_.planned_rows);
  journal.grown = left;
  for (uint32_t u = journal.num_uniques; left > 0;) {
    --u;
    if (!journal.uniques[u].is_inserted()) continue;
    journal.uniques[u].old_score = kInsertedBeyondPlan;
    --left;
  }
}

void TableShard::find_slots(TableJournal& journal) {
  const Unique* uniques = journal.uniques.data();
  uint32_t* slots = journal.slots.data();
  const uint32_t num_uniques = journal.num_uniques;
  uint64_t misses = 0;
  for (uint32_t u = 0; u < num_uniques; ++u) {
    prefetch(&slot_of_row_[uniques[std::min<size_t>(u + kSlotsAhead, num_uniques - 1)].row]);
    slots[u] = slot_of_row_[uniques[u].row];
    misses += slots[u] == kNoSlot;
  }
  if (misses == 0) return;
  journal.misses.reserve(misses);
  for (uint32_t u = 0; u < num_uniques; ++u) {
    if (slots[u] == kNoSlot) journal.misses.push_back(u);
  }
}

// The store's chunk of a row that is about to be written there, remembered in new_chunks_ if it is new.
bool TableShard::allocate_chunk_of(uint32_t row) {
  const uint32_t chunk = store_.chunk_of(row);
  if (store_.has_chunk(chunk)) return true;
  new_chunks_.reserve(new_chunks_.size() + 1);
  if (!store_.allocate_chunk(chunk)) return false;
  new_chunks_.push_back(chunk);
  return true;
}

// All chunks or none.
template <typename Allocate>
bool TableShard::allocate_chunks(Allocate&& allocate) {
  new_chunks_.clear();
  bool fits = false;
  try {
    fits = allocate();
  } catch (const std::bad_alloc&) {  // refused by the system rather than by the budget
  }
  if (!fits) {
    for (uint32_t chunk : new_chunks_) store_.free_chunk(chunk);
  }
  return fits;
}

bool TableShard::allocate_chunks_for_victims(const TableJournal& journal) {
  return allocate_chunks([&] {
    return std::all_of(journal.victims.begin(), journal.victims.end(), [&](const Victim& victim) {
      return !victim.is_dirty || allocate_chunk_of(victim.row);
    });
  });
}

// A batch that is aside: new rows begin in the store. False: refused, nothing was written.
bool TableShard::store_new_rows(const TableJournal& journal, Refusal& refusal) {
  const std::span<const Unique> uniques(journal.uniques.data(), journal.num_uniques);
  const bool fits = allocate_chunks([&] {
    return std::all_of(uniques.begin(), uniques.end(), [&](const Unique& unique) {
      return !unique.is_inserted() || allocate_chunk_of(unique.row);
    });
  });
  if (!fits) {
    refusal = host_budget_refusal();
    return false;
  }
  for (const Unique& unique : uniques) {
    if (unique.is_inserted()) write_initial_record(unique.row);
  }
  stream_fence();
  return true;
}

// Of rows that come from outside: numbers for the ids and room for their records, or nothing at all.
Refusal TableShard::make_rows(const int64_t* ids, size_t num_rows, std::vector<uint32_t>& rows) {
  std::vector<uint32_t> inserted;
  Refusal refusal;
  rows.reserve(num_rows);
  inserted.reserve(num_rows);
  const bool fits = allocate_chunks([&] {
    const auto key_at = [&](size_t i) { return static_cast<int64_t>(mix64(static_cast<uint64_t>(ids[i]))); };
    for (size_t i = 0; i < num_rows; ++i) {
      prefetch_for_write(ids_.home(key_at(std::min(i + kKeysAhead, num_rows - 1))));
      const uint64_t before = ids_.size();
      const IdEntry* entry = find_or_insert(key_at(i), refusal);
      if (entry == nullptr) return false;
      rows.push_back(entry->row);
      if (ids_.size() != before) inserted.push_back(entry->row);
      if (!allocate_chunk_of(entry->row)) return false;
    }
    return true;
  });
  if (fits) return refusal;
  if (refusal.status == PlanStatus::kOk) refusal = host_budget_refusal();
  for (size_t i = inserted.size(); i-- > 0;) {
    ids_.erase(key_of_row_[inserted[i]]);
    free_row_number(inserted[i]);
  }
  return refusal;
}

// A batch that is aside: rows -> their numbers in order of first occurrence, which is that of the journal.
void TableShard::number_rows(const KeyRanges& ranges, size_t num_keys, int64_t* rows) const {
  UniqueKeys numbers;
  numbers.start(num_keys);
  for (const auto& [begin, end] : ranges) {
    for (size_t i = begin; i < end; ++i) rows[i] = numbers.number(rows[i]);
  }
}

bool TableShard::place(TableJournal& journal, Refusal& refusal) {
  journal.slots.reserve(journal.num_uniques);
  old_uses_.reserve(journal.num_uniques);
  slots_.reserve_uses(journal.num_uniques);  // before anything is pinned: it may throw
  find_slots(journal);
  return journal.misses.empty() || place_misses(journal, refusal);
}

// Pins the hits and gives every miss a slot. False: refused, the slots are as they were.
bool TableShard::place_misses(TableJournal& journal, Refusal& refusal) {
  const uint64_t num_misses = journal.misses.size();
  const uint64_t num_pinned_by_others = slots_.num_pinned();
  journal.victims.reserve(num_misses);  // nothing below may throw
  journal.victim_uses.reserve(num_misses);
  for (uint32_t u = 0; u < journal.num_uniques; ++u) {
    if (journal.slots[u] != kNoSlot) slots_.pin(journal.slots[u]);
  }
  const uint64_t num_free = std::min(slots_.num_free(), num_misses);
  bool fits = num_misses <= slots_.num_slots() - slots_.num_pinned();
  if (!fits) {
    refusal = {PlanStatus::kNoSlots, journal.num_uniques, slots_.num_slots(), num_pinned_by_others};
  } else {
    slots_.choose_victims(num_misses - num_free, journal.victim_uses);
    for (const SlotUse& use : journal.victim_uses) {
      const bool is_dirty = slots_.state(use.slot).dirty;
      journal.victims.push_back({slots_.row_of(use.slot), use.slot, is_dirty});
      journal.write_backs += is_dirty;
    }
    fits = allocate_chunks_for_victims(journal);
    if (!fits) refusal = host_budget_refusal();
  }
  if (!fits) {
    for (uint32_t u = 0; u < journal.num_uniques; ++u) {
      if (journal.slots[u] != kNoSlot) slots_.unpin(journal.slots[u]);
    }
    return false;
  }
  for (const Victim& victim : journal.victims) slot_of_row_[victim.row] = kNoSlot;
  for (uint64_t m = 0; m < num_misses; ++m) {
    const Unique& unique = journal.uniques[journal.misses[m]];
    const uint32_t slot = m < num_free ? slots_.take_free() : journal.victims[m - num_free].slot;
    slots_.assign(slot, unique.row, unique.is_inserted());
    slots_.pin(slot);
    journal.slots[journal.misses[m]] = slot;
    journal.inits += unique.is_inserted();
    slot_of_row_[unique.row] = slot | kNewSlot;
  }
  return true;
}

void TableShard::stamp_slots(uint32_t plan_number, TableJournal& journal) {
  const bool are_pinned = !journal.misses.empty();  // place_misses() did
  slots_.use_all(journal.slots.data(), journal.num_uniques, plan_number, !are_pinned, old_uses_.data());
}

void TableShard::write_slots(const KeyRanges& ranges, TableJournal& journal, int64_t* slots) {
  uint64_t misses = 0;
  for (const auto& [begin, end] : ranges) {
    const uint32_t* slot_of_row = slot_of_row_.data();
    for (size_t i = begin; i < end; ++i) {
      const uint32_t slot = slot_of_row[static_cast<uint32_t>(slots[i])];
      misses += slot >> 31;
      slots[i] = slot & ~kNewSlot;
    }
    journal.accesses += end - begin;
  }
  journal.access_hits = journal.accesses - misses;
  for (uint32_t u : journal.misses) slot_of_row_[journal.uniques[u].row] &= ~kNewSlot;
}

Refusal TableShard::plan(const int64_t* keys, const KeyRanges& ranges, uint32_t ordinal, uint32_t plan_number,
                         TableJournal& journal, int64_t* slots) {
  size_t num_keys = 0;
  for (const auto& [begin, end] : ranges) num_keys += end - begin;
  Refusal refusal;
  if (num_keys == 0) return refusal;
  try {
    journal.uniques.reserve(num_keys + 1);  // one more than can be used: pass 1 writes first and counts afterwards
  } catch (const std::bad_alloc&) {
    return host_budget_refusal();
  }
  const uint64_t rows_before = ids_.size();
  bool fits = true;
  for (size_t r = 0; fits && r < ranges.size(); ++r) {
    if (ranges[r].first < ranges[r].second) {
      fits = map_keys(keys, ranges[r].first, ranges[r].second, ordinal, journal, slots, refusal);
    }
  }
  journal.inserted = ids_.size() - rows_before;
  try {
    if (fits) fits = apply_quota(ordinal, journal, refusal);
    if (fits) {
      mark_grown(journal);
      if (journal.is_aside) number_rows(ranges, num_keys, slots);
      fits = journal.is_aside ? store_new_rows(journal, refusal) : place(journal, refusal);
    }
  } catch (const std::bad_alloc&) {
    fits = false;
    refusal = host_budget_refusal();
  }
  if (!fits) {
    undo_ids(journal);
    restore_evicted(journal);
    return refusal;
  }
  if (journal.is_aside) {
    journal.accesses = num_keys;
    return refusal;
  }
  stamp_slots(plan_number, journal);
  write_slots(ranges, journal, slots);
  return refusal;
}

}  // namespace hybridrec
