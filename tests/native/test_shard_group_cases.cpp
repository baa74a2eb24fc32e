// A shard group: cases that random calls meet rarely, and calls at the wrong time.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "hybridrec/shard_group.h"

using namespace hybridrec;

namespace {

constexpr uint32_t kDim = 3;  // no multiple of 4: the unaligned path

struct OneTable {
  std::vector<float> weights = std::vector<float>(8 * kDim);
  ShardGroup group{0, 1};
  OneTable(uint32_t num_slots, FullPolicy policy = FullPolicy::kGrow, uint64_t max_rows = 0) {
    ShardSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    spec.num_slots = num_slots;
    spec.max_rows = max_rows;
    spec.full_policy = policy;
    group.add_table(spec);
    group.bind_slots(0, {weights.data(), {}, {}, true});
  }
  Plan plan(const std::vector<int64_t>& keys) {
    const int64_t offsets[] = {0, static_cast<int64_t>(keys.size())};
    const int64_t table[] = {0};
    std::vector<int64_t> slots(keys.size());
    return group.plan({keys.data(), keys.size(), offsets, table, 1}, slots.data());
  }
  std::map<int64_t, uint32_t> scores() {
    const size_t n = group.num_entries(0);
    std::vector<int64_t> keys(n), slots(n);
    std::vector<uint32_t> rows(n), scores(n), pins(n);
    group.entries(0, keys.data(), rows.data(), scores.data(), slots.data(), pins.data());
    std::map<int64_t, uint32_t> result;
    for (size_t i = 0; i < n; ++i) result[keys[i]] = scores[i];
    return result;
  }
};

// Two forwards, the older one is abandoned: what the newer one uses passes to it.
void test_undo_out_of_order() {
  OneTable t(8);
  t.plan({1, 2});
  t.group.swap(1);
  t.plan({2, 3});
  t.group.swap(2);
  t.group.undo(1);
  t.group.check();
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{2, 2}, {3, 2}}));
  t.plan({3});
  t.group.undo(2);
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{3, 3}}));  // inserted by 2, kept by 3
  t.group.undo(3);
  CHECK(t.scores().empty() && t.group.counters(0).pins == 0 && t.group.counters(0).resident == 0);
  t.group.check();
  // A row that passes to a batch that is committed already counts as inserted by it.
  CHECK(t.plan({5}).ordinal == 3);  // 3 was the newest; 1 and 2 are gaps
  t.group.swap(3);
  t.plan({5});
  t.group.commit(4);
  t.group.undo(3);
  CHECK(t.group.counters(0).inserted == 1 && (t.scores() == std::map<int64_t, uint32_t>{{5, 4}}));
  CHECK(t.plan({5}).ordinal == 5);
}

void test_evicted_rows_pass_on() {
  OneTable t(8, FullPolicy::kEvict, 2);
  t.plan({1, 2});
  t.group.swap(1);
  t.group.commit(1);
  for (uint64_t i = 2; i < 15; ++i) {
    t.plan({2});
    t.group.commit(i);
  }
  CHECK(t.plan({3}).status == 0);  // 1 goes
  t.group.swap(15);
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{2, 14}, {3, 15}}));
  t.plan({2});
  t.group.undo(15);  // nothing stands in the way of 1
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{1, 1}, {2, 16}}));
  t.group.undo(16);
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{1, 1}, {2, 14}}));
  CHECK(t.plan({7, 8, 9}).status == static_cast<int64_t>(PlanStatus::kQuota));
  CHECK((t.scores() == std::map<int64_t, uint32_t>{{1, 1}, {2, 14}}));
  t.group.check();
}

void test_illegal_calls() {
  OneTable t(2);
  CHECK_THROWS(t.group.commit(1), StateError);
  CHECK(t.plan({1, 2, 3}).status == static_cast<int64_t>(PlanStatus::kNoSlots));
  t.plan({1});
  CHECK_THROWS(t.group.commit(1), StateError);
  t.plan({1});
  CHECK_THROWS(t.group.commit(2), StateError);
  CHECK_THROWS(t.group.undo(1), StateError);
  CHECK_THROWS(t.group.flush(), StateError);
  t.group.swap(1);
  CHECK_THROWS(t.group.swap(1), StateError);
  CHECK_THROWS(t.group.resize_slots(0, 4), StateError);
  t.group.commit(1);
  CHECK_THROWS(t.group.undo(1), StateError);
  CHECK_THROWS(t.group.commit(1), StateError);
  t.group.commit(2);
  t.group.resize_slots(0, 4);
  CHECK_THROWS(t.group.flush(), StateError);  // not bound any more
  CHECK_THROWS(t.group.resize_slots(0, 3), std::invalid_argument);
  const int64_t key = 1;
  const int64_t offsets[] = {0, 2};
  const int64_t table = 0;
  int64_t slot = 0;
  CHECK_THROWS(t.group.plan({&key, 1, offsets, &table, 1}, &slot), std::invalid_argument);
  const int64_t no_table = -1;
  CHECK_THROWS(t.group.plan({&key, 1, offsets, &no_table, 1}, &slot), std::invalid_argument);
  CHECK(t.plan({}).status == 0 && t.plan({9}).ordinal == 4);
}

// Large batches over several threads give what one thread gives.
void test_threads_change_nothing() {
  std::vector<std::vector<int64_t>> results;
  for (size_t num_threads : {1, 3}) {
    ShardGroup group(0, num_threads);
    std::vector<std::vector<float>> weights(5);
    for (size_t t = 0; t < 5; ++t) {
      ShardSpec spec;
      spec.name = "t" + std::to_string(t);
      spec.dim = 4;
      spec.num_slots = 6000;
      spec.initial_rows = {InitKind::kUniform, -1.0f, 1.0f, nullptr, 0, t, 4};
      group.add_table(spec);
      weights[t].resize(6000 * 4);
      group.bind_slots(t, {weights[t].data(), {}, {}, true});
    }
    Random random(9);
    std::vector<int64_t> result;
    const std::vector<int64_t> offsets = {0, 4000, 8000, 12000, 16000, 20000};
    const std::vector<int64_t> tables = {4, 1, 2, 3, 0};
    for (uint64_t ordinal = 1; ordinal <= 12; ++ordinal) {
      std::vector<int64_t> keys(20000), slots(20000);
      for (int64_t& key : keys) key = static_cast<int64_t>(mix64(random.below(9000)));
      CHECK(group.plan({keys.data(), keys.size(), offsets.data(), tables.data(), 5}, slots.data()).status == 0);
      group.swap(ordinal);
      for (size_t f = 0; f < 5; ++f) {
        for (int64_t i = offsets[f]; i < offsets[f + 1]; ++i) {
          const auto at = static_cast<size_t>(slots[static_cast<size_t>(i)]) * 4;
          float& weight = weights[static_cast<size_t>(tables[f])][at];
          int32_t bits = 0;
          std::memcpy(&bits, &weight, 4);
          result.push_back(slots[static_cast<size_t>(i)]);
          result.push_back(bits);
          weight += 1.0f;
        }
      }
      group.commit(ordinal);
    }
    group.check();
    results.push_back(std::move(result));
  }
  CHECK(results[0] == results[1]);
}

// A flush through staging that something came between would write old values: it is refused.
void test_staged_flush_begins_again() {
  OneTable t(4);
  CHECK_THROWS(t.group.flush_records(nullptr), StateError);
  t.plan({1, 2});
  int64_t count = 0;
  CHECK_THROWS(t.group.flush_counts(&count), StateError);
  t.group.swap(1);
  t.group.commit(1);
  t.group.flush_counts(&count);
  CHECK(count == 2);
  std::vector<int64_t> slots(2);
  std::vector<float> staging(2 * kDim, 7.0f);
  t.group.flush_slots(slots.data());
  CHECK(slots[0] == 0 && slots[1] == 1);
  t.plan({2});
  t.group.commit(2);
  CHECK_THROWS(t.group.flush_records(staging.data()), StateError);
  t.group.flush_slots(slots.data());
  t.group.flush_records(staging.data());
  t.group.flush_counts(&count);
  CHECK(count == 0);
  const uint32_t rows[] = {0, 1};
  std::vector<float> records(2 * kDim);
  t.group.read_records(0, rows, 2, records.data());
  CHECK(records == staging);
}

}  // namespace

void test_shard_group_cases() {
  test_undo_out_of_order();
  test_evicted_rows_pass_on();
  test_illegal_calls();
  test_threads_change_nothing();
  test_staged_flush_begins_again();
}
