// The parts by themselves: mix64, initial rows, id map, slot index, unique keys, thread pool.
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "hybridrec/id_map.h"
#include "hybridrec/initial_rows.h"
#include "hybridrec/mix64.h"
#include "hybridrec/slot_index.h"
#include "hybridrec/thread_pool.h"
#include "hybridrec/unique_keys.h"

using namespace hybridrec;

namespace {

const std::vector<int64_t> kExtremeKeys = {0, -1, INT64_MIN, INT64_MAX, 1, IdMap::kFreeKey, IdMap::kFreeKey ^ 1};

void test_mix64() {
  for (int64_t id : kExtremeKeys) {
    const auto x = static_cast<uint64_t>(id);
    CHECK(unmix64(mix64(x)) == x && mix64(unmix64(x)) == x);
  }
  CHECK(mix64(1) == 0xb456bcfc34c2cb2cULL);  // the value that MurmurHash3's fmix64 is known by
  CHECK(table_seed(0, "a") != table_seed(0, "b") && table_seed(0, "a") != table_seed(1, "a"));
}

void test_initial_rows() {
  constexpr uint32_t kDim = 33;
  std::vector<float> row(kDim + 1, -7.0f);
  InitialRows rows{InitKind::kNormal, 0.5f, 2.0f, nullptr, 0, 42, kDim};
  double sum = 0;
  double squares = 0;
  constexpr int kRows = 4000;
  for (int64_t key = 0; key < kRows; ++key) {
    rows.fill(key, row.data());
    for (uint32_t c = 0; c < kDim; ++c) {
      sum += row[c];
      squares += double{row[c]} * row[c];
    }
  }
  const double mean = sum / (kRows * kDim);
  CHECK(std::fabs(mean - 0.5) < 0.03 && std::fabs(squares / (kRows * kDim) - mean * mean - 4.0) < 0.1);
  rows.kind = InitKind::kUniform;
  rows.a = -1.0f;
  rows.b = 1.0f;
  rows.fill(7, row.data());
  for (uint32_t c = 0; c < kDim; ++c) CHECK(row[c] >= -1.0f && row[c] < 1.0f);
  CHECK(row[kDim] == -7.0f);  // nothing is written behind the row
  // recsys-examples #27: a buffer that ends where the row ends.
  for (uint32_t dim = 1; dim <= 4097; dim += dim < 70 || dim > 4090 ? 1 : 61) {
    for (InitKind kind : {InitKind::kUniform, InitKind::kNormal, InitKind::kConstant}) {
      std::vector<float> exact(dim, 9.0f);
      rows.kind = kind;
      rows.dim = dim;
      rows.fill(dim, exact.data());
      CHECK(exact.back() != 9.0f);
    }
  }
  rows.dim = kDim;
  rows.kind = InitKind::kBank;
  CHECK_THROWS(rows.validate(), std::invalid_argument);
}

// Exact while there is one segment, then what evenly spread keys give.
void test_planned_bytes() {
  Budget budget(0);
  IdMap map(budget);
  PageArray<uint32_t> array;
  uint64_t num_off = 0;
  for (uint32_t n = 0; n < 400000; ++n) {
    const uint64_t planned = IdMap::planned_bytes(n);
    num_off += planned * 100 > map.bytes() * 105 || planned * 100 < map.bytes() * 95;
    if (n < 70000) CHECK(planned == map.bytes() && PageArray<uint32_t>::planned_bytes(n) == array.bytes());
    const auto key = static_cast<int64_t>(mix64(n));
    CHECK(map.reserve_one(key, /*must=*/false));
    map.insert(key, n, 1);
    array.reserve(n + 1);
  }
  CHECK(num_off < 400000 / 30);
}

void check_map(const IdMap& map, const std::unordered_map<int64_t, uint32_t>& model) {
  map.check();
  CHECK(map.size() == model.size());
  for (const auto& [key, row] : model) {
    const IdEntry* entry = map.find(key);
    CHECK(entry != nullptr && entry->row == row && entry->score == row + 1);
  }
  uint64_t visited = 0;
  map.for_each([&](const IdEntry& entry) {
    ++visited;
    CHECK(model.count(entry.key) == 1);
  });
  CHECK(visited == model.size());
}

void insert(IdMap& map, std::unordered_map<int64_t, uint32_t>& model, int64_t key, uint32_t row) {
  CHECK(map.reserve_one(key, false));
  map.insert(key, row, row + 1);
  model.emplace(key, row);
}

void test_id_map_sizes() {
  for (size_t n : {0, 1, 31, 32, 33, 4095, 4096, 4097, 200000}) {
    Budget budget(0);
    {
      IdMap map(budget);
      std::unordered_map<int64_t, uint32_t> model;
      for (size_t i = 0; i < n; ++i) {
        const int64_t key = i < kExtremeKeys.size() ? kExtremeKeys[i] : static_cast<int64_t>(mix64(i));
        insert(map, model, key, static_cast<uint32_t>(i));
      }
      check_map(map, model);
      CHECK(map.find(123456789) == nullptr && map.bytes() == budget.used());
      while (!model.empty()) {
        map.erase(model.begin()->first);
        model.erase(model.begin());
      }
      check_map(map, model);
    }
    CHECK(budget.used() == 0);
  }
}

void test_id_map_churn() {
  Budget budget(0);
  IdMap map(budget);
  std::unordered_map<int64_t, uint32_t> model;
  Random random(1);
  for (uint32_t i = 0; i < 200000; ++i) {
    const auto key = static_cast<int64_t>(mix64(random.below(3000)));
    if (model.count(key) == 0) {
      CHECK(map.find(key) == nullptr);
      insert(map, model, key, i);
    } else if (random.below(2) == 0) {
      map.erase(key);
      model.erase(key);
    }
    if (i % 20000 == 0) check_map(map, model);
  }
  check_map(map, model);
}

// Keys that agree in their high bits share a home line in every segment: slow, but exact and of bounded size.
void test_id_map_crafted_keys() {
  for (int64_t high : {int64_t{0}, INT64_MIN, int64_t{-1} * (int64_t{1} << 40)}) {
    Budget budget(0);
    IdMap map(budget);
    std::unordered_map<int64_t, uint32_t> model;
    for (uint32_t i = 0; i < 1000; ++i) insert(map, model, high + i, i);
    check_map(map, model);
    CHECK(map.bytes() < 200000);
    for (uint32_t i = 0; i < 1000; i += 2) {
      map.erase(high + i);
      model.erase(high + i);
    }
    check_map(map, model);
    CHECK_THROWS(map.erase(high + 2), std::logic_error);
  }
}

void test_id_map_budget() {
  Budget budget(4096);
  IdMap map(budget);
  std::unordered_map<int64_t, uint32_t> model;
  uint32_t i = 0;
  while (map.reserve_one(static_cast<int64_t>(mix64(i)), false)) {
    insert(map, model, static_cast<int64_t>(mix64(i)), i);
    ++i;
  }
  CHECK(i > 20 && budget.used() <= 4096 && budget.last_refused() > 4096);
  check_map(map, model);
  CHECK(map.reserve_one(static_cast<int64_t>(mix64(i)), true) && budget.used() > 4096);
}

void test_slot_index() {
  Budget budget(0);
  SlotIndex slots(budget);
  CHECK(slots.grow(5));
  uint32_t ordinal = 1;
  for (uint32_t i = 0; i < 5; ++i) {
    const uint32_t slot = slots.take_free();
    CHECK(slot == i);
    slots.assign(slot, 100 + i, false);
    slots.append_use(slot, ordinal, i);
  }
  for (uint32_t round = 0; round < 100; ++round) {  // far more uses than the queue holds
    ++ordinal;
    slots.reserve_uses(2);
    slots.append_use(3, ordinal, 0);
    slots.append_use(1, ordinal, 1);
    slots.check();
  }
  slots.pin(0);
  std::vector<SlotUse> victims;
  CHECK(slots.choose_victims(4, victims));
  CHECK(victims[0].slot == 2 && victims[1].slot == 4 && victims[2].slot == 3 && victims[3].slot == 1);
  victims.clear();
  CHECK(!slots.choose_victims(5, victims));
  slots.unpin(0);
  slots.release(2);
  slots.release(4);
  CHECK(slots.grow(7) && slots.take_free() == 4 && slots.take_free() == 2 && slots.take_free() == 5);
}

void test_unique_keys() {
  UniqueKeys unique;
  Random random(3);
  std::vector<size_t> sizes = {10, 5000};
  for (size_t n = 0; n <= 4097; n += n < 70 || n > 4090 ? 1 : 61) sizes.push_back(n);
  for (size_t n : sizes) {
    unique.start(n);
    std::unordered_map<int64_t, uint32_t> model;
    for (size_t i = 0; i < n; ++i) {
      const auto key = static_cast<int64_t>(random.below(n)) - 2;
      const auto [at, is_new] = model.emplace(key, static_cast<uint32_t>(model.size()));
      CHECK(unique.number(key) == at->second);
      if (is_new) CHECK(unique.keys().back() == key);
    }
    CHECK(unique.keys().size() == model.size());
  }
}

void test_thread_pool() {
  for (size_t num_threads : {1, 2, 4}) {
    ThreadPool pool(num_threads);
    for (size_t n : {0, 1, 2, 50}) {
      std::vector<int> calls(n, 0);  // no lock: a task that runs twice is a data race
      for (int round = 0; round < 20; ++round) pool.for_each(n, [&](size_t i) { ++calls[i]; });
      for (int count : calls) CHECK(count == 20);
    }
    const auto fails = [](size_t i) {
      if (i == 3) throw std::runtime_error("3");
    };
    CHECK_THROWS(pool.for_each(9, fails), std::runtime_error);
    std::atomic<int> sum{0};
    pool.for_each(9, [&](size_t i) { sum += static_cast<int>(i); });
    CHECK(sum == 36);
  }
}

}  // namespace

void test_parts() {
  test_mix64();
  test_initial_rows();
  test_planned_bytes();
  test_id_map_sizes();
  test_id_map_churn();
  test_id_map_crafted_keys();
  test_id_map_budget();
  test_slot_index();
  test_unique_keys();
  test_thread_pool();
}
