// Reads by several threads while another moves rows: FBGEMM #5480, where a prefetch evicted what was being read.
//
// The training thread plans, swaps and commits without changing a value, so that every read has one right answer;
// rows are in a slot at one moment, in the store at the next.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "hybridrec/shard_group.h"

using namespace hybridrec;

namespace {

constexpr uint32_t kDim = 5;
constexpr uint32_t kSlots = 256;
constexpr uint64_t kRows = 5000;
constexpr size_t kTables = 3;

float value(size_t table, int64_t key) {
  return static_cast<float>(mix64(static_cast<uint64_t>(key) + table) >> 40);
}

class Tables {
 public:
  Tables() {
    for (size_t t = 0; t < kTables; ++t) {
      ShardSpec spec;
      spec.name = "t" + std::to_string(t);
      spec.dim = kDim;
      spec.num_slots = kSlots;
      spec.initial_rows = {InitKind::kConstant, -7.0f, 0.0f, nullptr, 0, t, kDim};
      group_.add_table(spec);
      weights_[t].resize(kSlots * kDim);
      group_.bind_slots(t, {weights_[t].data(), {}, {}, true});
    }
    for (uint64_t first = 0; first < kRows; first += 100) {
      std::vector<int64_t> keys;
      for (size_t t = 0; t < kTables; ++t) {
        for (uint64_t i = 0; i < 100; ++i) keys.push_back(static_cast<int64_t>(mix64(first + i)));
      }
      move(keys, 100, /*is_first=*/true);
    }
  }

  void train(Random& random) {
    std::vector<int64_t> keys(3 * 80);
    for (int64_t& key : keys) key = static_cast<int64_t>(mix64(random.below(kRows)));
    move(keys, 80, /*is_first=*/false);
  }

  // Returns whether the rows could be read at that moment. One key in eight has no row.
  bool read(Random& random) {
    constexpr size_t kPerTable = 40;
    std::vector<int64_t> keys(kTables * kPerTable), index(keys.size()), counts(kTables);
    for (int64_t& key : keys) key = static_cast<int64_t>(mix64(random.below(kRows * 8 / 7)));
    const std::vector<int64_t> offsets = {0, 40, 80, 120}, tables = {0, 1, 2};
    const uint64_t handle =
        group_.read_plan({keys.data(), keys.size(), offsets.data(), tables.data(), 3}, index.data(), counts.data());
    std::vector<std::vector<float>> rows(kTables);
    std::vector<float*> pointers;
    for (size_t t = 0; t < kTables; ++t) {
      rows[t].resize(static_cast<size_t>(counts[t]) * kDim);
      pointers.push_back(rows[t].data());
    }
    try {
      group_.read_rows(handle, pointers, false);
    } catch (const StateError&) {  // a batch is planned and not moved
      group_.end_read(handle);
      return false;
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      const size_t t = i / kPerTable;
      const bool is_known = unmix64(static_cast<uint64_t>(keys[i])) < kRows;
      for (uint32_t c = 0; c < kDim; ++c) {
        CHECK(rows[t][static_cast<size_t>(index[i]) * kDim + c] == (is_known ? value(t, keys[i]) : -7.0f));
      }
    }
    return true;
  }

  uint64_t num_victims() { return group_.counters(0).victims; }

 private:
  void move(const std::vector<int64_t>& keys, int64_t per_table, bool is_first) {
    const std::vector<int64_t> offsets = {0, per_table, 2 * per_table, 3 * per_table}, tables = {0, 1, 2};
    std::vector<int64_t> slots(keys.size());
    const Plan plan = group_.plan({keys.data(), keys.size(), offsets.data(), tables.data(), 3}, slots.data());
    CHECK(plan.status == 0);
    const auto ordinal = static_cast<uint64_t>(plan.ordinal);
    if (plan.num_loads + plan.num_inits > 0) group_.swap(ordinal);
    for (size_t i = 0; i < keys.size() && is_first; ++i) {
      const size_t t = i / static_cast<size_t>(per_table);
      for (uint32_t c = 0; c < kDim; ++c) weights_[t][static_cast<size_t>(slots[i]) * kDim + c] = value(t, keys[i]);
    }
    group_.commit(ordinal);
  }

  std::vector<std::vector<float>> weights_{kTables};
  ShardGroup group_{0, 2};
};

}  // namespace

void test_readers() {
  Tables tables;
  const uint64_t victims_before = tables.num_victims();
  std::atomic<uint64_t> num_reads{0};
  std::atomic<bool> is_over{false};
  std::vector<std::thread> readers;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    readers.emplace_back([&, seed] {
      Random random(seed);
      while (!is_over) num_reads += tables.read(random);
    });
  }
  Random random(99);
  for (int step = 0; step < 500 || num_reads < 400; ++step) tables.train(random);
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(tables.num_victims() > victims_before + 10000);
}
