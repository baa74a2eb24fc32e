// TableShard: the end of a batch: committed, undone, or taken back because another table refused it.
#include <unordered_map>

#include "hybridrec/table_shard.h"

namespace hybridrec {

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
  if (!journal.is_aside) roll_back_slots(journal);
  undo_ids(journal);
  restore_evicted(journal);
}

void TableShard::roll_back_slots(TableJournal& journal) {
  for (uint32_t u = journal.num_uniques; u-- > 0;) slots_.unpin(journal.slots[u]);
  undo_placement(journal, /*have_victims_left=*/false);
  slots_.drop_uses(journal.num_uniques);
  for (uint32_t u = 0; u < journal.num_uniques; ++u) {
    SlotState& state = slots_.state(journal.slots[u]);
    if (slots_.row_of(journal.slots[u]) != kNoRow) state.last_use = old_uses_[u];
  }
}

void TableShard::undo(TableJournal& journal, uint32_t ordinal, bool is_moved, bool have_victims_left,
                      std::span<const LaterJournal> later) {
  for (uint32_t u = journal.is_aside ? 0 : journal.num_uniques; u-- > 0;) slots_.unpin(journal.slots[u]);
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
  if (!journal.is_aside) slots_.commit_all(journal.slots.data(), num_uniques);
  counters_.accesses += journal.accesses;
  counters_.access_hits += journal.access_hits;
  counters_.uniques += num_uniques;
  if (!journal.is_aside) counters_.unique_hits += num_uniques - journal.misses.size();
  counters_.inserted += journal.inserted;
  counters_.grown += journal.grown;
  counters_.evicted += journal.evicted.size();
}

void TableShard::finalize(const TableJournal& journal) {
  for (const EvictedRow& evicted : journal.evicted) {
    removals_.add(evicted.key);
    const uint32_t slot = slot_of_row_[evicted.row];
    if (slot != kNoSlot) slots_.release(slot);
    free_row_number(evicted.row);
  }
}

}  // namespace hybridrec
