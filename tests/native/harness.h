// A shard group against a dictionary: random plans, swaps, commits and undos over tiny tables, where every row is
// moved again and again. The model knows only ids, scores and values; where rows are is the group's own business.
//
// Rows are "trained" before each commit: the slots of the batch get values that depend on (id, ordinal), so that a row
// that was not written back, or was read from elsewhere, shows at its next use.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "hybridrec/shard_group.h"

namespace harness {

using namespace hybridrec;

constexpr uint32_t kDim = 3;  // no multiple of 4: the unaligned path
constexpr uint32_t kRecord = kDim * 2 + 1;

inline uint64_t num_calls = 0;  // of all harnesses so far

struct ModelRow {
  uint32_t score;
  std::vector<float> record;
};
using Model = std::unordered_map<int64_t, ModelRow>;

struct Setup {
  size_t num_tables = 2;
  uint32_t num_slots = 16;
  uint64_t max_rows = 0;
  FullPolicy policy = FullPolicy::kGrow;
  uint64_t num_ids = 60;
  size_t num_threads = 1;
  bool is_staged = false;
  uint64_t budget_bytes = 0;
  bool is_crafted = false;  // keys that agree in their high bits: all of one home line of the id map
};

struct Table {
  std::vector<float> weights, states, row_wise;
  Model committed_or_planned;
};

struct InFlight {
  uint64_t ordinal;
  std::vector<std::vector<int64_t>> unique_keys;  // per table, in order of first occurrence
  std::vector<std::unordered_map<int64_t, int64_t>> slots;
  std::vector<Model> before;  // per table, the whole model before the plan: undo newest first restores it
  bool is_moved;
};

class Harness {
 public:
  explicit Harness(const Setup& setup, uint64_t seed)
      : setup_(setup), most_slots_(setup.num_slots + 8), random_(seed), group_(setup.budget_bytes, setup.num_threads), tables_(setup.num_tables) {
    for (size_t t = 0; t < setup.num_tables; ++t) {
      ShardSpec spec;
      spec.name = "t" + std::to_string(t);
      spec.dim = kDim;
      spec.num_row_states = 1;
      spec.num_row_wise_states = 1;
      spec.state_initial_values = {0.25f, 0.75f};
      spec.num_slots = setup.num_slots;
      spec.planned_rows = setup.num_ids / 2;
      spec.max_rows = setup.max_rows;
      spec.full_policy = setup.policy;
      spec.initial_rows = initial_rows(t);
      CHECK(group_.add_table(spec) == t);
      bind(t, setup.num_slots);
    }
  }

  void step() {
    ++num_calls;
    const uint64_t choice = random_.below(100);
    if (choice < 4 && setup_.budget_bytes == 0) {
      train_aside();
    } else if (choice < 45) {
      plan();
    } else if (choice < 50) {
      read();
    } else if (choice < 52 && in_flight_.empty() && setup_.budget_bytes == 0) {
      setup_.is_staged ? flush_staged() : group_.flush();
      check_export();
    } else if (choice < 53 && in_flight_.empty() && setup_.num_slots < most_slots_ && setup_.budget_bytes == 0) {
      resize(setup_.num_slots + 1);
    } else if (!in_flight_.empty()) {
      choice < 85 ? commit() : undo();
    }
  }

  // Ends what is in flight and gives every table so many slots.
  void grow(uint32_t num_slots) {
    while (!in_flight_.empty()) commit();
    resize(num_slots);
  }

  std::vector<std::string> dump() {
    std::vector<std::string> tables;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const size_t n = group_.num_entries(t);
      std::vector<int64_t> keys(n), slots(n);
      std::vector<uint32_t> rows(n), scores(n), pins(n);
      group_.entries(t, keys.data(), rows.data(), scores.data(), slots.data(), pins.data());
      std::string text;
      for (size_t i = 0; i < n; ++i) {
        for (int64_t x : {keys[i], int64_t{rows[i]}, int64_t{scores[i]}, slots[i], int64_t{pins[i]}}) {
          text += std::to_string(x) + " ";
        }
      }
      const Counters c = group_.counters(t);
      text += std::to_string(c.resident) + " " + std::to_string(c.pins) + " " + std::to_string(c.inserted);
      tables.push_back(text);
    }
    return tables;
  }

  ShardGroup& group() { return group_; }
  uint64_t num_refused() const { return num_refused_; }
  uint64_t num_evicted() { return group_.counters(0).evicted; }

 protected:
  static InitialRows initial_rows(size_t table) {
    return {InitKind::kUniform, -1.0f, 1.0f, nullptr, 0, table_seed(5, "t" + std::to_string(table)), kDim};
  }

  void bind(size_t t, uint32_t num_slots) {
    Table& table = tables_[t];
    table.weights.resize(num_slots * kDim);
    table.states.resize(num_slots * kDim);
    table.row_wise.resize(num_slots);
    group_.bind_slots(t, {table.weights.data(), {table.states.data()}, {table.row_wise.data()}, true});
  }

  void resize(uint32_t num_slots) {
    setup_.num_slots = num_slots;
    for (size_t t = 0; t < tables_.size(); ++t) {
      group_.resize_slots(t, setup_.num_slots);
      bind(t, setup_.num_slots);
    }
  }

  std::vector<float> initial_record(size_t table, int64_t key) const {
    std::vector<float> record(kRecord, 0.25f);
    initial_rows(table).fill(key, record.data());
    record.back() = 0.75f;
    return record;
  }

  std::vector<float> slot_record(const Table& table, int64_t slot) const {
    std::vector<float> record(table.weights.begin() + slot * kDim, table.weights.begin() + (slot + 1) * kDim);
    record.insert(record.end(), table.states.begin() + slot * kDim, table.states.begin() + (slot + 1) * kDim);
    record.push_back(table.row_wise[static_cast<size_t>(slot)]);
    return record;
  }

  void write_slot(Table& table, int64_t slot, const std::vector<float>& record) {
    std::copy_n(record.begin(), kDim, table.weights.begin() + slot * kDim);
    std::copy_n(record.begin() + kDim, kDim, table.states.begin() + slot * kDim);
    table.row_wise[static_cast<size_t>(slot)] = record.back();
  }

  int64_t random_key() {
    static constexpr int64_t kExtreme[] = {0, -1, INT64_MIN, INT64_MAX, IdMap::kFreeKey};
    const uint64_t id = random_.below(setup_.num_ids);
    if (setup_.is_crafted) return static_cast<int64_t>(uint64_t{5} << 60 | id);
    return id < 5 ? kExtreme[id] : static_cast<int64_t>(mix64(id));
  }

  // Now and then a length at which loops over lines, vectors and pages end; mostly repetitions then.
  uint64_t random_length(uint64_t longest) {
    static constexpr uint64_t kAwkward[] = {0, 1, 31, 32, 33, 63, 64, 65, 4095, 4096, 4097};
    const uint64_t dice = random_.below(1000);
    return dice < 11 ? kAwkward[dice] : random_.below(longest + 1);
  }

  // Features visit the tables in turn, twice, so that a table's features are not adjacent.
  void random_batch(std::vector<int64_t>& keys, std::vector<int64_t>& offsets, std::vector<int64_t>& feature_table) {
    offsets = {0};
    const uint64_t longest = random_.below(4) == 0 ? 2 * setup_.num_slots : setup_.num_slots / 2;
    for (size_t f = 0; f < 2 * tables_.size(); ++f) {
      feature_table.push_back(static_cast<int64_t>(f % tables_.size()));
      for (uint64_t n = random_length(longest); n > 0; --n) keys.push_back(random_key());
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
  }

  void plan() {
    std::vector<int64_t> keys, offsets, feature_table;
    random_batch(keys, offsets, feature_table);
    std::vector<int64_t> slots(keys.size(), -9);
    const auto before = dump();
    const Plan plan = group_.plan({keys.data(), keys.size(), offsets.data(), feature_table.data(), feature_table.size()},
                                  slots.data());
    group_.check();
    if (plan.status != 0) {
      ++num_refused_;
      CHECK(plan.table >= 0 && plan.ordinal == 0 && dump() == before);
      return;
    }
    CHECK(plan.ordinal == static_cast<int64_t>(++last_ordinal_));
    InFlight batch{last_ordinal_, {}, {}, {}, false};
    batch.unique_keys.resize(tables_.size());
    batch.slots.resize(tables_.size());
    for (size_t t = 0; t < tables_.size(); ++t) batch.before.push_back(tables_[t].committed_or_planned);
    for (size_t f = 0; f < feature_table.size(); ++f) {
      const auto t = static_cast<size_t>(feature_table[f]);
      for (int64_t i = offsets[f]; i < offsets[f + 1]; ++i) {
        const int64_t key = keys[static_cast<size_t>(i)];
        const int64_t slot = slots[static_cast<size_t>(i)];
        CHECK(slot >= 0 && slot < setup_.num_slots);
        const auto [at, is_first] = batch.slots[t].emplace(key, slot);
        CHECK(at->second == slot);
        if (is_first) batch.unique_keys[t].push_back(key);
      }
    }
    uint64_t num_uniques = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      num_uniques += batch.unique_keys[t].size();
      std::set<int64_t> distinct;
      for (const auto& [key, slot] : batch.slots[t]) distinct.insert(slot);
      CHECK(distinct.size() == batch.slots[t].size());
      model_plan(t, batch.unique_keys[t]);
    }
    CHECK(num_uniques == static_cast<uint64_t>(plan.num_unique));
    if (random_.below(12) == 0) {  // refused on another rank: undone before anything was moved
      batch.is_moved = plan.num_loads + plan.num_inits == 0;
      group_.undo(batch.ordinal);
      group_.check();
      for (size_t t = 0; t < tables_.size(); ++t) tables_[t].committed_or_planned = batch.before[t];
      --last_ordinal_;
      check_ids();
      return;
    }
    move(batch.ordinal);
    for (size_t t = 0; t < tables_.size(); ++t) {
      for (const auto& [key, slot] : batch.slots[t]) {
        CHECK(slot_record(tables_[t], slot) == tables_[t].committed_or_planned.at(key).record);
      }
    }
    check_ids();
    in_flight_.push_back(std::move(batch));
  }

  // A batch without slots: planned, trained where its rows are, and committed or undone, beside others in flight.
  void train_aside() {
    std::vector<int64_t> keys, offsets, feature_table;
    random_batch(keys, offsets, feature_table);
    std::vector<int64_t> index(keys.size(), -9), counts(tables_.size(), -9);
    const auto before = dump();
    const Plan plan = group_.plan_aside(
        {keys.data(), keys.size(), offsets.data(), feature_table.data(), feature_table.size()}, index.data(), counts.data());
    group_.check();
    if (plan.status != 0) {
      ++num_refused_;
      CHECK(plan.table >= 0 && plan.ordinal == 0 && dump() == before);
      return;
    }
    CHECK(plan.ordinal == static_cast<int64_t>(++last_ordinal_) && plan.num_loads + plan.num_inits == 0);
    setup_.is_staged ? flush_staged() : group_.flush();
    const bool is_undone = random_.below(3) == 0 && !is_mixed_;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const Model model_before = tables_[t].committed_or_planned;
      std::vector<int64_t> unique_keys;
      for (size_t f = 0; f < feature_table.size(); ++f) {
        if (static_cast<size_t>(feature_table[f]) != t) continue;
        for (auto i = static_cast<size_t>(offsets[f]); i < static_cast<size_t>(offsets[f + 1]); ++i) {
          const auto number = static_cast<size_t>(index[i]);
          CHECK(number <= unique_keys.size());
          if (number == unique_keys.size()) unique_keys.push_back(keys[i]);
          CHECK(unique_keys[number] == keys[i]);
        }
      }
      CHECK(unique_keys.size() == static_cast<size_t>(counts[t]));
      model_plan(t, unique_keys);
      write_aside(t, unique_keys, /*is_trained=*/!is_undone);
      if (is_undone) tables_[t].committed_or_planned = model_before;
    }
    is_undone ? group_.undo(last_ordinal_) : group_.commit(last_ordinal_);
    group_.check();
    if (is_undone) {
      --last_ordinal_;
    } else {
      is_mixed_ = is_mixed_ || !in_flight_.empty();
    }
    check_ids();
  }

  // Reads the rows of the newest batch, which has no slots, and writes them, trained or as they were.
  void write_aside(size_t t, const std::vector<int64_t>& unique_keys, bool is_trained) {
    const size_t n = group_.num_batch_rows(last_ordinal_, t);
    CHECK(n == unique_keys.size());
    std::vector<uint32_t> rows(n);
    std::vector<int64_t> slots(n);
    group_.batch_rows(last_ordinal_, t, rows.data(), slots.data());
    std::vector<float> records(n * kRecord);
    group_.read_records(t, rows.data(), n, records.data());
    for (size_t i = 0; i < n; ++i) {
      const auto at = records.begin() + static_cast<ptrdiff_t>(i * kRecord);
      const auto& record = tables_[t].committed_or_planned.at(unique_keys[i]).record;
      CHECK(std::equal(record.begin(), record.end(), at));
      if (!is_trained) continue;
      const auto trained = trained_record(unique_keys[i], last_ordinal_);
      set_model(t, unique_keys[i], trained);
      std::copy(trained.begin(), trained.end(), at);
      if (slots[i] >= 0) write_slot(tables_[t], slots[i], trained);
    }
    group_.write_records(t, rows.data(), n, records.data());
  }

  static std::vector<float> trained_record(int64_t key, uint64_t ordinal) {
    std::vector<float> record(kRecord);
    for (uint32_t c = 0; c < kRecord; ++c) {
      record[c] = static_cast<float>(mix64(static_cast<uint64_t>(key) + ordinal * 64 + c) >> 40);
    }
    return record;
  }

  // A row's new value, also in what an undo of batches in flight must bring back.
  void set_model(size_t t, int64_t key, const std::vector<float>& record) {
    tables_[t].committed_or_planned.at(key).record = record;
    for (InFlight& other : in_flight_) {
      const auto found = other.before[t].find(key);
      if (found != other.before[t].end()) found->second.record = record;
    }
  }

  void model_plan(size_t t, const std::vector<int64_t>& unique_keys) {
    Model& model = tables_[t].committed_or_planned;
    for (int64_t key : unique_keys) {
      const auto found = model.find(key);
      if (found == model.end()) {
        model.emplace(key, ModelRow{last_ordinal_, initial_record(t, key)});
      } else {
        found->second.score = last_ordinal_;
      }
    }
    if (setup_.policy == FullPolicy::kGrow) return;
    std::vector<std::pair<uint32_t, uint64_t>> by_score;
    for (const auto& [key, row] : model) {
      const bool is_pinned = std::any_of(in_flight_.begin(), in_flight_.end(),
                                         [&, k = key](const InFlight& b) { return b.slots[t].count(k) != 0; });
      if (!is_pinned) by_score.emplace_back(row.score, static_cast<uint64_t>(key));
    }
    std::sort(by_score.begin(), by_score.end());
    for (const auto& [score, key] : by_score) {
      if (model.size() <= setup_.max_rows) break;
      CHECK(score + 12 < last_ordinal_);
      model.erase(static_cast<int64_t>(key));
    }
  }

  void move(uint64_t ordinal) {
    if (!setup_.is_staged) {
      group_.swap(ordinal);
      return;
    }
    std::vector<int64_t> counts(2 * tables_.size());
    group_.swap_counts(ordinal, counts.data());
    size_t num_loads = 0;
    size_t num_victims = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      num_loads += static_cast<size_t>(counts[2 * t]);
      num_victims += static_cast<size_t>(counts[2 * t + 1]);
    }
    if (num_loads == 0) return;
    std::vector<int64_t> load_slots(num_loads), victim_slots(num_victims);
    group_.swap_slots(ordinal, load_slots.data(), victim_slots.data());
    std::vector<float> out, in(num_loads * kRecord);
    for (size_t t = 0, v = 0; t < tables_.size(); ++t) {
      for (int64_t i = 0; i < counts[2 * t + 1]; ++i) {
        const auto record = slot_record(tables_[t], victim_slots[v++]);
        out.insert(out.end(), record.begin(), record.end());
      }
    }
    const bool gather_first = random_.below(2) == 0;
    if (num_victims != 0 && !gather_first) group_.scatter_victims(ordinal, out.data());
    group_.gather_loads(ordinal, in.data());
    if (num_victims != 0 && gather_first) {
      CHECK_THROWS(group_.undo(ordinal), StateError);
      group_.scatter_victims(ordinal, out.data());
    }
    for (size_t t = 0, l = 0; t < tables_.size(); ++t) {
      for (int64_t i = 0; i < counts[2 * t]; ++i, ++l) {
        const auto begin = in.begin() + static_cast<ptrdiff_t>(l * kRecord);
        write_slot(tables_[t], load_slots[l], std::vector<float>(begin, begin + kRecord));
      }
    }
  }

  void flush_staged() {
    std::vector<int64_t> counts(tables_.size());
    group_.flush_counts(counts.data());
    std::vector<int64_t> slots(static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
    group_.flush_slots(slots.data());
    std::vector<float> staging;
    for (size_t t = 0, s = 0; t < tables_.size(); ++t) {
      for (int64_t i = 0; i < counts[t]; ++i) {
        const auto record = slot_record(tables_[t], slots[s++]);
        staging.insert(staging.end(), record.begin(), record.end());
      }
    }
    group_.flush_records(staging.data());
    CHECK_THROWS(group_.flush_records(staging.data()), StateError);
    group_.flush_counts(counts.data());
    CHECK(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == 0);
  }

  // The oldest or, one time in four, another one. A row that a later batch uses too is trained by both.
  void commit() {
    const size_t at = random_.below(4) == 0 ? random_.below(in_flight_.size()) : 0;
    InFlight& batch = in_flight_[at];
    for (size_t t = 0; t < tables_.size(); ++t) {
      for (const auto& [key, slot] : batch.slots[t]) {
        const auto record = trained_record(key, batch.ordinal);
        write_slot(tables_[t], slot, record);
        set_model(t, key, record);
      }
      for (size_t later = at + 1; later < in_flight_.size(); ++later) {
        CHECK(in_flight_[later].before[t].size() >= batch.slots[t].size());
      }
    }
    group_.commit(batch.ordinal);
    group_.check();
    is_mixed_ = is_mixed_ || at != 0;
    in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(at));
    if (in_flight_.empty()) is_mixed_ = false;
    check_ids();
  }

  // Newest first, while no later batch is committed: the model then is simply what it was.
  void undo() {
    if (is_mixed_) return commit();
    InFlight& batch = in_flight_.back();
    group_.undo(batch.ordinal);
    group_.check();
    for (size_t t = 0; t < tables_.size(); ++t) tables_[t].committed_or_planned = std::move(batch.before[t]);
    last_ordinal_ = static_cast<uint32_t>(batch.ordinal) - 1;
    in_flight_.pop_back();
    check_ids();
  }

  void check_ids() {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const Model& model = tables_[t].committed_or_planned;
      const size_t n = group_.num_entries(t);
      CHECK(n == model.size());
      std::vector<int64_t> keys(n), slots(n);
      std::vector<uint32_t> rows(n), scores(n), pins(n);
      group_.entries(t, keys.data(), rows.data(), scores.data(), slots.data(), pins.data());
      for (size_t i = 0; i < n; ++i) CHECK(model.at(keys[i]).score == scores[i]);
    }
  }

  // After a flush every row is in the store as it was trained.
  void check_export() {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const size_t n = group_.num_entries(t);
      std::vector<int64_t> keys(n), slots(n);
      std::vector<uint32_t> rows(n), scores(n), pins(n);
      group_.entries(t, keys.data(), rows.data(), scores.data(), slots.data(), pins.data());
      std::vector<float> records(n * kRecord);
      group_.read_records(t, rows.data(), n, records.data());
      for (size_t i = 0; i < n; ++i) {
        const auto& record = tables_[t].committed_or_planned.at(keys[i]).record;
        CHECK(std::equal(record.begin(), record.end(), records.begin() + static_cast<ptrdiff_t>(i * kRecord)));
      }
    }
  }

  void read() {
    std::vector<int64_t> keys, offsets, feature_table;
    random_batch(keys, offsets, feature_table);
    const auto before = dump();
    std::vector<int64_t> index(keys.size()), counts(tables_.size());
    const uint64_t handle = group_.read_plan(
        {keys.data(), keys.size(), offsets.data(), feature_table.data(), feature_table.size()}, index.data(),
        counts.data());
    std::vector<std::vector<float>> buffers(tables_.size());
    std::vector<float*> pointers;
    for (size_t t = 0; t < tables_.size(); ++t) {
      buffers[t].resize(static_cast<size_t>(counts[t]) * kDim);
      pointers.push_back(buffers[t].data());
    }
    if (random_.below(2) == 0) {
      group_.read_rows(handle, pointers, false);
      CHECK_THROWS(group_.read_rows(handle, pointers, false), std::invalid_argument);
    } else {
      group_.read_rows(handle, pointers, true);
      for (size_t t = 0; t < tables_.size(); ++t) {
        const size_t n = group_.num_read_resident(handle, t);
        std::vector<int64_t> positions(n), slots(n);
        group_.read_resident(handle, t, positions.data(), slots.data());
        for (size_t i = 0; i < n; ++i) {
          std::copy_n(tables_[t].weights.begin() + slots[i] * kDim, kDim, buffers[t].begin() + positions[i] * kDim);
        }
      }
      group_.end_read(handle);
    }
    for (size_t f = 0; f < feature_table.size(); ++f) {
      const auto t = static_cast<size_t>(feature_table[f]);
      for (auto i = static_cast<size_t>(offsets[f]); i < static_cast<size_t>(offsets[f + 1]); ++i) {
        const auto found = tables_[t].committed_or_planned.find(keys[i]);
        const auto record =
            found == tables_[t].committed_or_planned.end() ? initial_record(t, keys[i]) : found->second.record;
        CHECK(std::equal(record.begin(), record.begin() + kDim, buffers[t].begin() + index[i] * kDim));
      }
    }
    CHECK(dump() == before);
  }

  Setup setup_;
  const uint32_t most_slots_;
  Random random_;
  ShardGroup group_;
  std::vector<Table> tables_;
  std::vector<InFlight> in_flight_;
  uint32_t last_ordinal_ = 0;
  bool is_mixed_ = false;  // a batch was committed before an older one
  uint64_t num_refused_ = 0;
};

}  // namespace harness
