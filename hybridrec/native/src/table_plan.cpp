// TableShard: MAP and its undoing.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <new>
#include <unordered_map>

#include "hybridrec/table_shard.h"

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
  ids_.for_each([&](const IdEntry& entry) {
    if (entry.score + kEvictionDistance >= ordinal) return;
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

bool TableShard::allocate_chunks_for_victims(TableJournal& journal) {
  new_chunks_.clear();
  bool fits = true;
  try {
    for (const Victim& victim : journal.victims) {
      const uint32_t chunk = store_.chunk_of(victim.row);
      if (!victim.is_dirty || store_.has_chunk(chunk)) continue;
      new_chunks_.reserve(new_chunks_.size() + 1);
      fits = store_.allocate_chunk(chunk);
      if (!fits) break;
      new_chunks_.push_back(chunk);
    }
  } catch (const std::bad_alloc&) {
    fits = false;
  }
  if (!fits) {
    for (uint32_t chunk : new_chunks_) store_.free_chunk(chunk);
  }
  return fits;
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
  slots_.reserve_uses(journal.num_uniques);
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
      journal.slots.reserve(journal.num_uniques);
      old_uses_.reserve(journal.num_uniques);
      find_slots(journal);
      fits = journal.misses.empty() || place_misses(journal, refusal);
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
  stamp_slots(plan_number, journal);
  write_slots(ranges, journal, slots);
  return refusal;
}

void TableShard::undo_ids(TableJournal& journal) {
  for (uint32_t u = journal.num_uniques; u-- > 0;) {
    const Unique unique = journal.uniques[u];
    const int64_t key = key_of_row_[unique.row];
    if (unique.is_inserted()) {
      ids_.erase(key);
      free_row_number(unique.row);
    } else {
      ids_.find(key)->score = unique.old_score;
    }
  }
}

void TableShard::restore_evicted(const TableJournal& journal) {
  for (const EvictedRow& row : journal.evicted) {
    ids_.reserve_one(row.key, /*must=*/true);
    ids_.insert(row.key, row.row, row.score);
  }
}

// Every miss loses its slot: to the victim, which is still in it, else to the free ones.
void TableShard::undo_placement(TableJournal& journal, bool have_victims_left) {
  const size_t num_misses = journal.misses.size();
  const size_t num_free = num_misses - journal.victims.size();
  for (size_t m = num_misses; m-- > 0;) {
    const uint32_t u = journal.misses[m];
    const uint32_t slot = journal.slots[u];
    slot_of_row_[journal.uniques[u].row] = kNoSlot;
    // A victim that "evict" had dropped may be gone for good by now.
    const Victim* victim = m < num_free || have_victims_left ? nullptr : &journal.victims[m - num_free];
    if (victim == nullptr || slot_of_row_[victim->row] == kFreeRow) {
      slots_.release(slot);
      if (victim != nullptr) journal.victim_uses[m - num_free].plan = 0;
      continue;
    }
    slots_.assign(slot, victim->row, victim->is_dirty);
    slots_.state(slot).last_use = 0;
    slot_of_row_[victim->row] = slot;
  }
}

void TableShard::roll_back(TableJournal& journal) {
  for (uint32_t u = journal.num_uniques; u-- > 0;) slots_.unpin(journal.slots[u]);
  undo_placement(journal, /*have_victims_left=*/false);
  slots_.drop_uses(journal.num_uniques);
  for (uint32_t u = 0; u < journal.num_uniques; ++u) {
    SlotState& state = slots_.state(journal.slots[u]);
    if (slots_.row_of(journal.slots[u]) != kNoRow) state.last_use = old_uses_[u];
  }
  undo_ids(journal);
  restore_evicted(journal);
}

void TableShard::undo(TableJournal& journal, uint32_t ordinal, bool is_moved, bool have_victims_left,
                      std::span<const LaterJournal> later) {
  for (uint32_t u = journal.num_uniques; u-- > 0;) slots_.unpin(journal.slots[u]);
  if (!is_moved) {
    undo_placement(journal, have_victims_left);
    if (!have_victims_left) {
      std::erase_if(journal.victim_uses, [](const SlotUse& use) { return use.plan == 0; });
      slots_.restore_uses(journal.victim_uses);
    }
  }
  // For each later journal, row -> position; built when the first row is met that a later batch uses too.
  std::vector<std::unordered_map<uint32_t, uint32_t>> users;
  for (uint32_t u = journal.num_uniques; u-- > 0;) {
    const Unique unique = journal.uniques[u];
    const int64_t key = key_of_row_[unique.row];
    IdEntry* entry = ids_.find(key);
    if (entry->score == ordinal) {
      if (unique.is_inserted()) {
        if (slot_of_row_[unique.row] != kNoSlot) slots_.release(slot_of_row_[unique.row]);
        ids_.erase(key);
        free_row_number(unique.row);
      } else {
        entry->score = unique.old_score;
      }
      continue;
    }
    if (users.empty()) {
      users.resize(later.size());
      for (size_t l = 0; l < later.size(); ++l) {
        for (uint32_t v = 0; v < later[l].journal->num_uniques; ++v) users[l][later[l].journal->uniques[v].row] = v;
      }
    }
    for (size_t l = 0; l < later.size(); ++l) {
      const auto found = users[l].find(unique.row);
      if (found == users[l].end()) continue;
      later[l].journal->uniques[found->second].old_score = unique.old_score;
      if (unique.is_inserted()) {
        const bool is_grown = unique.old_score == kInsertedBeyondPlan;
        later[l].journal->inserted += 1;
        later[l].journal->grown += is_grown;
        if (later[l].is_committed) {
          counters_.inserted += 1;
          counters_.grown += is_grown;
        }
      }
      break;
    }
  }
  if (later.empty()) {
    restore_evicted(journal);
    return;
  }
  // As if the batch had never been: the rows that it dropped come back, the last one first, as far as later batches left
  // them room and did not make a new row of the same key.
  std::vector<EvictedRow> passed;
  for (size_t e = journal.evicted.size(); e-- > 0;) {
    const EvictedRow& row = journal.evicted[e];
    if (ids_.size() < spec_.max_rows && ids_.find(row.key) == nullptr) {
      ids_.reserve_one(row.key, /*must=*/true);
      ids_.insert(row.key, row.row, row.score);
    } else {
      passed.push_back(row);
    }
  }
  std::vector<EvictedRow>& heir = later[0].journal->evicted;
  heir.insert(heir.begin(), passed.rbegin(), passed.rend());
  if (later[0].is_committed) counters_.evicted += passed.size();
}

void TableShard::commit(const TableJournal& journal) {
  const uint32_t num_uniques = journal.num_uniques;
  slots_.commit_all(journal.slots.data(), num_uniques);
  counters_.accesses += journal.accesses;
  counters_.access_hits += journal.access_hits;
  counters_.uniques += num_uniques;
  counters_.unique_hits += num_uniques - journal.misses.size();
  counters_.inserted += journal.inserted;
  counters_.grown += journal.grown;
  counters_.evicted += journal.evicted.size();
}

void TableShard::finalize(const TableJournal& journal) {
  for (const EvictedRow& evicted : journal.evicted) {
    const uint32_t slot = slot_of_row_[evicted.row];
    if (slot != kNoSlot) slots_.release(slot);
    free_row_number(evicted.row);
  }
}

}  // namespace hybridrec
