// TableShard: moving and reading rows, and what it tells about itself.
#include <algorithm>
#include <stdexcept>

#include "hybridrec/table_shard.h"

namespace hybridrec {

namespace {

constexpr size_t kRowsAhead = 6;

void prefetch_floats(const float* start, uint64_t n) {
  for (uint64_t i = 0; i < n && i < 256; i += 16) prefetch(start + i);
}

}  // namespace

TableShard::TableShard(ShardSpec spec, Budget& budget)
    : spec_(std::move(spec)),
      budget_(budget),
      ids_(budget),
      store_(budget, spec_.wide_floats(), spec_.num_row_wise_states),
      slots_(budget) {
  if (!slots_.grow(spec_.num_slots)) {
    throw std::runtime_error("table '" + spec_.name + "': the index of its slots needs " +
                             std::to_string(budget_.last_refused()) + " bytes of host memory in all, the budget is " +
                             std::to_string(budget_.limit()) + ". Give a larger host budget or fewer slots.");
  }
}

uint64_t TableShard::planned_bytes(uint64_t wide_floats, uint32_t num_row_wise_states, uint64_t num_rows,
                                   uint32_t num_slots, uint64_t store_rows) {
  Budget no_limit(0);
  const RowStore store(no_limit, wide_floats, num_row_wise_states);
  return IdMap::planned_bytes(num_rows) + decltype(key_of_row_)::planned_bytes(num_rows) +
         decltype(slot_of_row_)::planned_bytes(num_rows) + SlotIndex::bytes_for(num_slots) +
         store.planned_bytes(store_rows);
}

bool TableShard::resize_slots(uint32_t num_slots) {
  if (!slots_.grow(num_slots)) return false;
  bound_ = SlotPointers{};
  return true;
}

uint64_t TableShard::growth_bound(uint64_t n) const {
  const uint64_t rows = next_unused_row_ + n;
  const uint64_t row_numbers = row_number_bytes_ / 2 + 2 * 12 * n + 4 * kPageBytes;
  const uint64_t absent_chunks = store_.num_chunks_below(rows) - store_.bytes() / store_.chunk_bytes();
  return ids_.growth_bound(n) + row_numbers + std::min(n, absent_chunks) * store_.chunk_bytes();
}

void TableShard::write_record(uint32_t row, uint32_t slot) {
  if (!snapshots_.empty()) keep_for_snapshots(row);
  float* record = store_.record(row);
  const uint64_t dim = spec_.dim, words = spec_.weight_words();
  stream_floats(record, bound_.weights + slot * words, words);
  for (uint32_t m = 0; m < spec_.num_row_states; ++m) {
    stream_floats(record + words + m * dim, bound_.row_states[m] + slot * dim, dim);
  }
  for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) {
    *store_.row_wise(row, a) = bound_.row_wise_states[a][slot];
  }
}

void TableShard::write_back_victims(const TableJournal& journal) {
  const auto& victims = journal.victims;
  const uint64_t dim = spec_.dim, words = spec_.weight_words();
  for (size_t i = 0; i < victims.size(); ++i) {
    const Victim& ahead = victims[std::min(i + kRowsAhead, victims.size() - 1)];
    prefetch_floats(bound_.weights + ahead.slot * words, words);
    for (float* states : bound_.row_states) prefetch_floats(states + ahead.slot * dim, dim);
    prefetch_for_snapshots(victims, i);
    if (victims[i].is_dirty) write_record(victims[i].row, victims[i].slot);
  }
  stream_fence();
}

void TableShard::fill_initial(int64_t key, float* weights, std::span<float* const> row_states) const {
  spec_.initial_rows.fill(key, weights);
  for (size_t m = 0; m < row_states.size(); ++m) {
    std::fill_n(row_states[m], spec_.dim, spec_.state_initial_values[m]);
  }
}

void TableShard::load(const TableJournal& journal) {
  const auto& misses = journal.misses;
  const uint64_t dim = spec_.dim, words = spec_.weight_words();
  std::vector<float*> states(spec_.num_row_states);
  for (size_t i = 0; i < misses.size(); ++i) {
    const Unique& ahead = journal.uniques[misses[std::min(i + kRowsAhead, misses.size() - 1)]];
    if (!ahead.is_inserted()) store_.prefetch_record(ahead.row);
    const Unique& unique = journal.uniques[misses[i]];
    const uint64_t slot = journal.slots[misses[i]];
    for (size_t m = 0; m < states.size(); ++m) states[m] = bound_.row_states[m] + slot * dim;
    float* weights = bound_.weights + slot * words;
    if (unique.is_inserted()) {
      fill_initial(key_of_row_[unique.row], weights, states);
      for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) {
        bound_.row_wise_states[a][slot] = spec_.state_initial_values[spec_.num_row_states + a];
      }
      continue;
    }
    const float* record = store_.record(unique.row);
    std::memcpy(weights, record, words * sizeof(float));
    for (size_t m = 0; m < states.size(); ++m) {
      std::memcpy(states[m], record + words + m * dim, dim * sizeof(float));
    }
    for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) {
      bound_.row_wise_states[a][slot] = *store_.row_wise(unique.row, a);
    }
  }
}

void TableShard::write_staged_record(uint32_t row, const float* record) {
  if (!snapshots_.empty()) keep_for_snapshots(row);
  const uint64_t floats = record_floats() - spec_.num_row_wise_states;
  stream_floats(store_.record(row), record, floats);
  for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) *store_.row_wise(row, a) = record[floats + a];
}

void TableShard::write_initial_record(uint32_t row) {
  if (!snapshots_.empty()) keep_for_snapshots(row);
  float* record = store_.record(row);
  std::vector<float*> states(spec_.num_row_states);
  for (size_t m = 0; m < states.size(); ++m) states[m] = record + spec_.weight_words() + m * spec_.dim;
  fill_initial(key_of_row_[row], record, states);
  for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) {
    *store_.row_wise(row, a) = spec_.state_initial_values[spec_.num_row_states + a];
  }
}

void TableShard::scatter_victims(const TableJournal& journal, const float* staging) {
  const auto& victims = journal.victims;
  for (size_t i = 0; i < victims.size(); ++i) {
    prefetch_for_snapshots(victims, i);
    if (!victims[i].is_dirty) continue;
    write_staged_record(victims[i].row, staging);
    staging += record_floats();
  }
  stream_fence();
}

void TableShard::gather_loads(const TableJournal& journal, float* staging) {
  const auto& misses = journal.misses;
  const uint64_t dim = spec_.dim, words = spec_.weight_words();
  const uint64_t floats = record_floats() - spec_.num_row_wise_states;
  std::vector<float*> states(spec_.num_row_states);
  for (size_t i = 0; i < misses.size(); ++i, staging += record_floats()) {
    const Unique& ahead = journal.uniques[misses[std::min(i + kRowsAhead, misses.size() - 1)]];
    if (!ahead.is_inserted()) store_.prefetch_record(ahead.row);
    const Unique& unique = journal.uniques[misses[i]];
    if (unique.is_inserted()) {
      for (size_t m = 0; m < states.size(); ++m) states[m] = staging + words + m * dim;
      fill_initial(key_of_row_[unique.row], staging, states);
      for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) {
        staging[floats + a] = spec_.state_initial_values[spec_.num_row_states + a];
      }
      continue;
    }
    stream_floats(staging, store_.record(unique.row), floats);
    for (uint32_t a = 0; a < spec_.num_row_wise_states; ++a) staging[floats + a] = *store_.row_wise(unique.row, a);
  }
  stream_fence();
}

void TableShard::count_victims(const TableJournal& journal) {
  counters_.victims += journal.victims.size();
  counters_.write_backs += journal.write_backs;
  counters_.write_back_bytes += journal.write_backs * record_floats() * sizeof(float);
}

void TableShard::count_loads(const TableJournal& journal) {
  counters_.loads += journal.loads();
  counters_.load_bytes += journal.loads() * record_floats() * sizeof(float);
}

uint64_t TableShard::num_dirty_chunks() const {
  std::vector<uint32_t> chunks;
  for (uint32_t slot = 0; slot < slots_.num_slots(); ++slot) {
    if (!slots_.state(slot).dirty) continue;
    const uint32_t chunk = store_.chunk_of(slots_.row_of(slot));
    if (!store_.has_chunk(chunk)) chunks.push_back(chunk);
  }
  std::sort(chunks.begin(), chunks.end());
  return static_cast<uint64_t>(std::unique(chunks.begin(), chunks.end()) - chunks.begin());
}

uint64_t TableShard::num_dirty() const {
  uint64_t n = 0;
  for (uint32_t slot = 0; slot < slots_.num_slots(); ++slot) n += slots_.state(slot).dirty;
  return n;
}

int64_t* TableShard::dirty_slots(int64_t* slots) const {
  for (uint32_t slot = 0; slot < slots_.num_slots(); ++slot) {
    if (slots_.state(slot).dirty) *slots++ = slot;
  }
  return slots;
}

// write(row, slot) for every dirty slot, which is clean then.
template <typename Write>
void TableShard::flush_each(Write&& write) {
  for (uint32_t slot = 0; slot < slots_.num_slots(); ++slot) {
    if (!slots_.state(slot).dirty) continue;
    const uint32_t row = slots_.row_of(slot);
    const uint32_t chunk = store_.chunk_of(row);
    if (!store_.has_chunk(chunk) && !store_.allocate_chunk(chunk)) throw std::bad_alloc();
    write(row, slot);
    slots_.state(slot).dirty = 0;
  }
  stream_fence();
}

void TableShard::flush() {
  flush_each([this](uint32_t row, uint32_t slot) { write_record(row, slot); });
}

void TableShard::flush_records(const float* staging) {
  flush_each([&](uint32_t row, uint32_t) {
    write_staged_record(row, staging);
    staging += record_floats();
  });
}

int64_t TableShard::slot_of_key(int64_t key) const {
  const IdEntry* entry = ids_.find(key);
  if (entry == nullptr || slot_of_row_[entry->row] == kNoSlot) return -1;
  return slot_of_row_[entry->row];
}

void TableShard::read_weights(int64_t key, float* out) const {
  const IdEntry* entry = ids_.find(key);
  if (entry == nullptr) {
    spec_.initial_rows.fill(key, out);
    return;
  }
  const uint64_t slot = slot_of_row_[entry->row];
  const uint64_t words = spec_.weight_words();
  const float* weights = slot == kNoSlot ? store_.record(entry->row) : bound_.weights + slot * words;
  std::memcpy(out, weights, words * sizeof(float));
}

void TableShard::entries(int64_t* keys, uint32_t* rows, uint32_t* scores, int64_t* slots, uint32_t* pins) const {
  std::vector<IdEntry> sorted;
  sorted.reserve(ids_.size());
  ids_.for_each([&](const IdEntry& entry) { sorted.push_back(entry); });
  std::sort(sorted.begin(), sorted.end(), [](const IdEntry& a, const IdEntry& b) { return a.row < b.row; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    const uint32_t slot = slot_of_row_[sorted[i].row];
    keys[i] = sorted[i].key;
    rows[i] = sorted[i].row;
    scores[i] = sorted[i].score;
    slots[i] = slot == kNoSlot ? -1 : int64_t{slot};
    pins[i] = slot == kNoSlot ? 0 : slots_.state(slot).pins;
  }
}

void TableShard::require_stored(uint32_t row) const {
  const std::string where = "table '" + spec_.name + "': row " + std::to_string(row);
  const IdEntry* entry = row < next_unused_row_ ? ids_.find(key_of_row_[row]) : nullptr;
  if (entry == nullptr || entry->row != row) throw std::invalid_argument(where + " is no live row.");
  const uint32_t slot = slot_of_row_[row];
  if (slot != kNoSlot && slots_.state(slot).dirty) {
    throw std::invalid_argument(where + " is newer in slot " + std::to_string(slot) + " than in the store. Call flush().");
  }
}

void TableShard::prefetch_stored(const uint32_t* rows, size_t i, size_t num_rows) const {
  constexpr size_t kNear = 8, kFar = 24;
  if (i + kFar < num_rows && rows[i + kFar] < next_unused_row_) {
    prefetch(&key_of_row_[rows[i + kFar]]);
    prefetch(&slot_of_row_[rows[i + kFar]]);
  }
  if (i + kNear < num_rows && rows[i + kNear] < next_unused_row_) {
    const uint32_t row = rows[i + kNear];
    prefetch(ids_.home(key_of_row_[row]));
    if (store_.has_chunk(store_.chunk_of(row))) store_.prefetch_record(row);
  }
}

void TableShard::read_record(uint32_t row, float* out) const {
  require_stored(row);
  read_stored(row, out);
}

void TableShard::write_record(uint32_t row, const float* record) {
  require_stored(row);
  write_staged_record(row, record);
}

void TableShard::batch_rows(const TableJournal& journal, uint32_t* rows, int64_t* slots) const {
  for (uint32_t u = 0; u < journal.num_uniques; ++u) {
    rows[u] = journal.uniques[u].row;
    const uint32_t slot = slot_of_row_[rows[u]];
    slots[u] = slot == kNoSlot ? -1 : int64_t{slot};
  }
}

Counters TableShard::counters() const {
  Counters counters = counters_;
  counters.rows = ids_.size();
  counters.resident = slots_.num_in_use();
  counters.pins = slots_.num_pins();
  counters.host_bytes = ids_.bytes() + row_number_bytes_ + slots_.bytes() + store_.bytes() + removals_.bytes();
  return counters;
}

void TableShard::check() const {
  ids_.check();
  slots_.check();
  uint64_t with_slot = 0;
  for (uint32_t row = 0; row < next_unused_row_; ++row) {
    const uint32_t slot = slot_of_row_[row];
    if (slot == kNoSlot || slot == kFreeRow) continue;
    ++with_slot;
    if (slots_.row_of(slot) != row) throw std::logic_error("table shard: row and slot disagree");
  }
  if (with_slot != slots_.num_in_use()) throw std::logic_error("table shard: a slot without a row");
  ids_.for_each([&](const IdEntry& entry) {
    if (entry.row >= next_unused_row_ || key_of_row_[entry.row] != entry.key || slot_of_row_[entry.row] == kFreeRow) {
      throw std::logic_error("table shard: id map and row numbers disagree");
    }
  });
}

}  // namespace hybridrec
