#include "hybridrec/shard_group.h"

#include <algorithm>
#include <string>

namespace hybridrec {

namespace {

// Below so many keys or rows, waking threads costs more than it saves.
constexpr size_t kMinKeysForThreads = 16384;

std::string batch_name(const char* call, uint64_t ordinal) {
  return std::string(call) + ": batch " + std::to_string(ordinal);
}

}  // namespace

ShardGroup::ShardGroup(uint64_t host_budget_bytes, size_t num_threads)
    : budget_(host_budget_bytes), snapshot_blocks_(budget_), threads_(std::max<size_t>(num_threads, 1)) {}

size_t ShardGroup::add_table(ShardSpec spec) {
  std::lock_guard lock(mutex_);
  const std::string where = "table '" + spec.name + "': ";
  if (num_plans_ != 0) throw StateError(where + "tables cannot be added after the first plan.");
  if (spec.dim == 0) throw std::invalid_argument(where + "dim must be positive.");
  if (spec.num_slots >= kNoSlot - 1) throw std::invalid_argument(where + "num_slots must be below 2^31 - 2.");
  if (spec.state_initial_values.size() != size_t{spec.num_row_states} + spec.num_row_wise_states) {
    throw std::invalid_argument(where + "state_initial_values must hold one value for each optimizer state.");
  }
  if (spec.full_policy != FullPolicy::kGrow && spec.max_rows == 0) {
    throw std::invalid_argument(where + "full_policy \"evict\" and \"error\" need max_rows.");
  }
  spec.initial_rows.dim = spec.dim;
  spec.initial_rows.validate();
  tables_.push_back(std::make_unique<TableShard>(std::move(spec), budget_));
  return tables_.size() - 1;
}

TableShard& ShardGroup::table_at(size_t table) {
  if (table >= tables_.size()) {
    throw std::invalid_argument("table " + std::to_string(table) + " does not exist; there are " +
                                std::to_string(tables_.size()) + ".");
  }
  return *tables_[table];
}

void ShardGroup::bind_slots(size_t table, SlotPointers slots) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  if (slots.row_states.size() != shard.spec().num_row_states ||
      slots.row_wise_states.size() != shard.spec().num_row_wise_states) {
    throw std::invalid_argument("bind_slots: table '" + shard.spec().name + "' has " +
                                std::to_string(shard.spec().num_row_states) + " row-sized and " +
                                std::to_string(shard.spec().num_row_wise_states) + " row-wise states.");
  }
  slots.is_bound = true;
  shard.bind_slots(std::move(slots));
}

void ShardGroup::resize_slots(size_t table, uint64_t num_slots) {
  std::lock_guard lock(mutex_);
  TableShard& shard = table_at(table);
  const std::string where = "resize_slots: table '" + shard.spec().name + "' ";
  const uint64_t now = shard.num_slots();
  if (num_slots < now || num_slots >= kNoSlot - 1) {
    throw std::invalid_argument(where + "has " + std::to_string(now) + " slots, which can only grow, to below 2^31 - 2.");
  }
  if (shard.num_pins() != 0) throw StateError(where + "has pinned slots. Finish the batches in flight first.");
  if (!shard.resize_slots(static_cast<uint32_t>(num_slots))) {
    throw StateError(where + "needs " + std::to_string(budget_.last_refused()) + " bytes of host memory in all, the budget is " +
                     std::to_string(budget_.limit()) + ".");
  }
}

void ShardGroup::split_by_table(const KeyBatch& batch) {
  if (batch.num_keys >= kNoRow) throw std::invalid_argument("a batch may hold up to 2^32 - 2 keys on a rank.");
  ranges_.resize(tables_.size());
  for (KeyRanges& ranges : ranges_) ranges.clear();
  int64_t end = 0;
  for (size_t f = 0; f < batch.num_features; ++f) {
    const int64_t begin = batch.feature_offsets[f];
    if (begin != end || batch.feature_offsets[f + 1] < begin) {
      throw std::invalid_argument("feature_offsets must start with 0 and not decrease.");
    }
    end = batch.feature_offsets[f + 1];
    const auto table = static_cast<uint64_t>(batch.feature_table[f]);
    if (table >= tables_.size()) {
      throw std::invalid_argument("feature_table[" + std::to_string(f) + "] names no table.");
    }
    if (begin < end) ranges_[table].emplace_back(begin, end);
  }
  if (static_cast<uint64_t>(end) != batch.num_keys) {
    throw std::invalid_argument("feature_offsets must end with the number of keys.");
  }
}

std::unique_ptr<ShardGroup::Batch> ShardGroup::new_batch() {
  if (unused_.empty()) {
    auto batch = std::make_unique<Batch>();
    batch->tables.resize(tables_.size());
    return batch;
  }
  auto batch = std::move(unused_.back());
  unused_.pop_back();
  return batch;
}

void ShardGroup::recycle(std::unique_ptr<Batch> batch) {
  for (TableJournal& journal : batch->tables) journal.clear();
  batch->has_moves = false;
  unused_.push_back(std::move(batch));
}

Plan ShardGroup::plan(const KeyBatch& keys, int64_t* slots) {
  std::lock_guard lock(mutex_);
  return plan_batch(keys, slots, /*is_aside=*/false);
}

Plan ShardGroup::plan_aside(const KeyBatch& keys, int64_t* index, int64_t* unique_counts) {
  std::lock_guard lock(mutex_);
  const Plan plan = plan_batch(keys, index, /*is_aside=*/true);
  if (plan.status != static_cast<int64_t>(PlanStatus::kOk)) return plan;
  for (const TableJournal& journal : batches_.back()->tables) *unique_counts++ = journal.num_uniques;
  return plan;
}

void ShardGroup::keep_rows_of_batches_aside() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    std::vector<const TableJournal*> journals;
    for (const auto& batch : batches_) {
      if (batch->is_aside && batch->state != State::kCommitted) journals.push_back(&batch->tables[t]);
    }
    tables_[t]->keep_rows_of(std::move(journals));
  }
}

Plan ShardGroup::plan_batch(const KeyBatch& keys, int64_t* slots, bool is_aside) {
  split_by_table(keys);
  if (num_plans_ >= kInsertedBeyondPlan - 1) throw StateError("plan: 2^32 - 2 batches were planned, the most there can be.");
  const auto ordinal = static_cast<uint32_t>(next_ordinal_);
  const auto plan_number = static_cast<uint32_t>(num_plans_ + 1);
  keep_rows_of_batches_aside();
  auto batch = new_batch();
  batch->is_aside = is_aside;
  for (TableJournal& journal : batch->tables) journal.is_aside = is_aside;
  refusals_.assign(tables_.size(), Refusal{});
  const auto plan_table = [&](size_t t) {
    refusals_[t] = tables_[t]->plan(keys.keys, ranges_[t], ordinal, plan_number, batch->tables[t], slots);
  };
  // Which table meets the end of the host budget must not depend on threads: near it, one after the other.
  uint64_t growth_bound = 0;
  if (budget_.limit() != 0) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      uint64_t num_keys = 0;
      for (const auto& [begin, end] : ranges_[t]) num_keys += end - begin;
      if (num_keys != 0) growth_bound += tables_[t]->growth_bound(num_keys);
    }
  }
  const bool is_tight = budget_.limit() != 0 && budget_.used() + growth_bound > budget_.limit();
  size_t refused = tables_.size();
  if (is_tight || keys.num_keys < kMinKeysForThreads) {
    for (size_t t = 0; t < tables_.size() && refused == tables_.size(); ++t) {
      plan_table(t);
      if (refusals_[t].status != PlanStatus::kOk) refused = t;
    }
  } else {
    threads_.for_each(tables_.size(), plan_table);
    for (size_t t = tables_.size(); t-- > 0;) {
      if (refusals_[t].status != PlanStatus::kOk) refused = t;
    }
  }
  Plan plan;
  if (refused < tables_.size()) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (refusals_[t].status == PlanStatus::kOk) tables_[t]->roll_back(batch->tables[t]);
    }
    recycle(std::move(batch));
    tables_[refused]->count_rejection();
    const Refusal& refusal = refusals_[refused];
    plan.status = static_cast<int64_t>(refusal.status);
    plan.table = static_cast<int64_t>(refused);
    plan.needed = static_cast<int64_t>(refusal.needed);
    plan.available = static_cast<int64_t>(refusal.available);
    plan.pinned = static_cast<int64_t>(refusal.pinned);
    return plan;
  }
  plan.ordinal = ordinal;
  for (const TableJournal& journal : batch->tables) {
    plan.num_unique += journal.num_uniques;
    plan.num_loads += static_cast<int64_t>(journal.loads());
    plan.num_inits += static_cast<int64_t>(journal.inits);
    plan.num_victims += static_cast<int64_t>(journal.victims.size());
    plan.num_write_backs += static_cast<int64_t>(journal.write_backs);
  }
  batch->ordinal = ordinal;
  const bool has_moves = plan.num_loads + plan.num_inits != 0;
  batch->has_moves = has_moves;
  batch->state = has_moves ? State::kPlanned : State::kMoved;
  batches_.push_back(std::move(batch));
  ++next_ordinal_;
  ++num_plans_;
  if (has_moves) ++dirty_version_;
  return plan;
}

ShardGroup::Batches::iterator ShardGroup::find_batch(uint64_t ordinal, const char* call) {
  const auto found = std::find_if(batches_.begin(), batches_.end(), [&](const auto& b) { return b->ordinal == ordinal; });
  if (found == batches_.end() || (*found)->state == State::kCommitted) {
    throw StateError(batch_name(call, ordinal) + " is not in flight.");
  }
  return found;
}

void ShardGroup::require_all_moved(const char* call) const {
  for (const auto& batch : batches_) {
    if (batch->state < State::kMoved) {
      throw StateError(batch_name(call, batch->ordinal) + " is planned but its rows were not moved yet.");
    }
  }
}

void ShardGroup::require_bound(const Batch* batch, const char* call) const {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (batch != nullptr && batch->tables[t].misses.empty()) continue;
    if (!tables_[t]->is_bound()) {
      throw StateError(std::string(call) + ": the slots of table '" + tables_[t]->spec().name +
                       "' are not bound. Call bind_slots().");
    }
  }
}

// The batch, if it and no earlier one is waiting for its rows to be moved.
ShardGroup::Batch& ShardGroup::batch_to_move(uint64_t ordinal, const char* call) {
  const auto found = find_batch(ordinal, call);
  for (auto earlier = batches_.begin(); earlier != found; ++earlier) {
    if ((*earlier)->state < State::kMoved) {
      throw StateError(batch_name(call, ordinal) + " must wait until the rows of batch " +
                       std::to_string((*earlier)->ordinal) + " were moved.");
    }
  }
  return **found;
}

void ShardGroup::swap(uint64_t ordinal) {
  std::lock_guard lock(mutex_);
  Batch& batch = batch_to_move(ordinal, "swap");
  if (!batch.has_moves) return;
  if (batch.state != State::kPlanned) throw StateError(batch_name("swap", ordinal) + " was moved already, or half of it.");
  require_bound(&batch, "swap");
  threads_.for_each(tables_.size(), [&](size_t t) {
    TableJournal& journal = batch.tables[t];
    if (journal.misses.empty()) return;
    tables_[t]->write_back_victims(journal);
    tables_[t]->load(journal);
    tables_[t]->count_victims(journal);
    tables_[t]->count_loads(journal);
  });
  batch.state = State::kMoved;
}

void ShardGroup::swap_counts(uint64_t ordinal, int64_t* counts) {
  std::lock_guard lock(mutex_);
  const Batch& batch = **find_batch(ordinal, "swap_counts");
  for (size_t t = 0; t < tables_.size(); ++t) {
    counts[2 * t] = static_cast<int64_t>(batch.tables[t].misses.size());
    counts[2 * t + 1] = static_cast<int64_t>(batch.tables[t].write_backs);
  }
}

void ShardGroup::swap_slots(uint64_t ordinal, int64_t* load_slots, int64_t* victim_slots) {
  std::lock_guard lock(mutex_);
  const Batch& batch = **find_batch(ordinal, "swap_slots");
  for (const TableJournal& journal : batch.tables) {
    for (uint32_t u : journal.misses) *load_slots++ = journal.slots[u];
    for (const Victim& victim : journal.victims) {
      if (victim.is_dirty) *victim_slots++ = victim.slot;
    }
  }
}

// Where each table's records begin in the staging buffer, in floats.
std::vector<uint64_t> ShardGroup::staging_offsets(const Batch& batch, bool of_victims) const {
  std::vector<uint64_t> offsets(tables_.size() + 1, 0);
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableJournal& journal = batch.tables[t];
    const uint64_t num_records = of_victims ? journal.write_backs : journal.misses.size();
    offsets[t + 1] = offsets[t] + num_records * tables_[t]->record_floats();
  }
  return offsets;
}

void ShardGroup::scatter_victims(uint64_t ordinal, const float* staging) {
  std::lock_guard lock(mutex_);
  Batch& batch = batch_to_move(ordinal, "scatter_victims");
  if (!batch.has_moves) return;
  if (batch.state != State::kPlanned && batch.state != State::kGathered) {
    throw StateError(batch_name("scatter_victims", ordinal) + " was moved already.");
  }
  const auto offsets = staging_offsets(batch, /*of_victims=*/true);
  threads_.for_each(tables_.size(), [&](size_t t) {
    tables_[t]->scatter_victims(batch.tables[t], staging + offsets[t]);
    tables_[t]->count_victims(batch.tables[t]);
  });
  batch.state = batch.state == State::kGathered ? State::kMoved : State::kScattered;
}

void ShardGroup::gather_loads(uint64_t ordinal, float* staging) {
  std::lock_guard lock(mutex_);
  Batch& batch = batch_to_move(ordinal, "gather_loads");
  if (!batch.has_moves) return;
  if (batch.state != State::kPlanned && batch.state != State::kScattered) {
    throw StateError(batch_name("gather_loads", ordinal) + " was moved already.");
  }
  // Rows that come are none of those that leave: which half goes first changes nothing.
  uint64_t write_backs = 0;
  for (const TableJournal& journal : batch.tables) write_backs += journal.write_backs;
  const bool have_victims_left = batch.state == State::kScattered;
  const auto offsets = staging_offsets(batch, /*of_victims=*/false);
  threads_.for_each(tables_.size(), [&](size_t t) {
    tables_[t]->gather_loads(batch.tables[t], staging + offsets[t]);
    tables_[t]->count_loads(batch.tables[t]);
    if (!have_victims_left && write_backs == 0) tables_[t]->count_victims(batch.tables[t]);
  });
  batch.state = have_victims_left || write_backs == 0 ? State::kMoved : State::kGathered;
}

void ShardGroup::finalize_front() {
  while (!batches_.empty() && batches_.front()->state == State::kCommitted) {
    auto batch = std::move(batches_.front());
    batches_.pop_front();
    for (size_t t = 0; t < tables_.size(); ++t) tables_[t]->finalize(batch->tables[t]);
    recycle(std::move(batch));
  }
}

void ShardGroup::commit(uint64_t ordinal) {
  std::lock_guard lock(mutex_);
  Batch& batch = batch_to_move(ordinal, "commit");
  if (batch.state != State::kMoved) throw StateError(batch_name("commit", ordinal) + " is planned but its rows were not moved yet.");
  uint64_t num_uniques = 0;
  for (const TableJournal& journal : batch.tables) num_uniques += journal.num_uniques;
  const auto commit_table = [&](size_t t) { tables_[t]->commit(batch.tables[t]); };
  if (num_uniques < kMinKeysForThreads) {
    for (size_t t = 0; t < tables_.size(); ++t) commit_table(t);
  } else {
    threads_.for_each(tables_.size(), commit_table);
  }
  batch.state = State::kCommitted;
  ++dirty_version_;
  finalize_front();
}

void ShardGroup::undo(uint64_t ordinal) {
  std::lock_guard lock(mutex_);
  const auto found = find_batch(ordinal, "undo");
  Batch& batch = **found;
  const bool is_moved = batch.state == State::kMoved;
  if (batch.state == State::kGathered) {
    throw StateError(batch_name("undo", ordinal) +
                     "'s victims were not written back and its rows are in their slots already: scatter_victims() first.");
  }
  if (!is_moved && found + 1 != batches_.end()) {
    throw StateError(batch_name("undo", ordinal) + "'s rows were never moved and batch " +
                     std::to_string((*(found + 1))->ordinal) +
                     " was planned after it. Move its rows, or undo the later batches, first.");
  }
  const bool have_victims_left = batch.state == State::kScattered;
  ++dirty_version_;
  std::vector<LaterJournal> later;
  for (size_t t = 0; t < tables_.size(); ++t) {
    later.clear();
    for (auto other = found + 1; other != batches_.end(); ++other) {
      later.push_back({&(*other)->tables[t], (*other)->state == State::kCommitted});
    }
    tables_[t]->undo(batch.tables[t], batch.ordinal, is_moved, have_victims_left, later);
  }
  auto undone = std::move(*found);
  batches_.erase(found);
  // Nothing bears the newest ordinal any more: its scores are taken back and no later batch took one over.
  if (ordinal + 1 == next_ordinal_) next_ordinal_ = ordinal;
  recycle(std::move(undone));
  finalize_front();
}

}  // namespace hybridrec
