// Snapshots beside training by several threads: what the thread that writes a snapshot reads is of the moment at which
// it began, whatever is planned, moved, trained, evicted and committed meanwhile.
//
// Each row tells who trained it last: its values follow from its key and its score. One thread maps batches ahead, one
// trains and commits them and begins exports between two batches, others read these; nobody else waits for them.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "hybridrec/shard_group.h"

using namespace hybridrec;

namespace {

constexpr uint32_t kDim = 5;
constexpr uint32_t kRecord = 2 * kDim;
constexpr uint32_t kSlots = 200;
constexpr uint64_t kMaxRows = 1500;
constexpr size_t kBatch = 40;
constexpr size_t kAhead = 3;
constexpr uint32_t kNumBatches = 1200;

float value(int64_t key, uint64_t score, uint32_t column) {
  return static_cast<float>(mix64(static_cast<uint64_t>(key) + score * 64 + column) >> 40);
}

struct Export {
  uint64_t handle;
  size_t num_rows;
  uint64_t ordinal;                                   // the newest that was committed
  std::unordered_map<int64_t, uint64_t> used_lately;  // key -> score, of the last batches: none of them may be gone
};

class Run {
 public:
  Run() : weights_(kSlots * kDim), states_(kSlots * kDim) {
    ShardSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    spec.num_row_states = 1;
    spec.state_initial_values = {0.5f};
    spec.num_slots = kSlots;
    spec.max_rows = kMaxRows;
    spec.full_policy = FullPolicy::kEvict;
    spec.initial_rows = {InitKind::kConstant, -7.0f, 0.0f, nullptr, 0, 1, kDim};
    group_.add_table(spec);
    group_.bind_slots(0, {weights_.data(), {states_.data()}, {}, true});
    group_.track_removals(0, 1 << 20);
  }

  void map_ahead() {
    Random random(1);
    for (uint32_t b = 0; b < kNumBatches; ++b) {
      Batch batch;
      for (size_t i = 0; i < kBatch; ++i) batch.keys.push_back(static_cast<int64_t>(mix64(random.below(6000))));
      batch.slots.resize(kBatch);
      std::unique_lock lock(mutex_);
      news_.wait(lock, [&] { return ahead_.size() < kAhead; });
      const std::vector<int64_t> offsets = {0, kBatch}, tables = {0};
      const Plan plan = group_.plan({batch.keys.data(), kBatch, offsets.data(), tables.data(), 1}, batch.slots.data());
      CHECK(plan.status == 0);
      batch.ordinal = static_cast<uint64_t>(plan.ordinal);
      group_.swap(batch.ordinal);
      ahead_.push_back(std::move(batch));
      news_.notify_all();
    }
  }

  void train() {
    for (uint32_t b = 0; b < kNumBatches; ++b) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        news_.wait(lock, [&] { return !ahead_.empty(); });
        batch = std::move(ahead_.front());
        ahead_.pop_front();
      }
      for (size_t i = 0; i < kBatch; ++i) {
        for (uint32_t c = 0; c < kDim; ++c) {
          const size_t at = static_cast<size_t>(batch.slots[i]) * kDim + c;
          weights_[at] = value(batch.keys[i], batch.ordinal, c);
          states_[at] = value(batch.keys[i], batch.ordinal, kDim + c);
        }
        last_use_[batch.keys[i]] = batch.ordinal;
      }
      group_.commit(batch.ordinal);
      news_.notify_all();
      if (b % 10 == 9) begin_export(batch.ordinal);
    }
    std::lock_guard lock(mutex_);
    is_over_ = true;
    news_.notify_all();
  }

  // Reads one export after the other, to their end or not.
  void write(uint64_t seed) {
    Random random(seed);
    for (;;) {
      Export one;
      {
        std::unique_lock lock(mutex_);
        news_.wait(lock, [&] { return !begun_.empty() || is_over_; });
        if (begun_.empty()) return;
        one = std::move(begun_.front());
        begun_.pop_front();
      }
      const bool is_given_up = random.below(10) == 0;
      read(one, is_given_up ? one.num_rows / 2 : one.num_rows, random);
      group_.export_end(one.handle);
    }
  }

  void check() {
    CHECK(group_.counters(0).evicted > 1000 && num_read_ > 10000 && num_removed_ > 1000);
    CHECK(group_.counters(0).pins == 0 && num_changed_ > 1000);
    group_.check();
  }

 private:
  struct Batch {
    uint64_t ordinal = 0;
    std::vector<int64_t> keys, slots;
  };

  void begin_export(uint64_t ordinal) {
    Export one;
    one.ordinal = ordinal;
    for (const auto& [key, score] : last_use_) {
      if (score + kEvictionDistance > ordinal) one.used_lately.emplace(key, score);
    }
    std::lock_guard lock(mutex_);  // all batches were moved, and none is planned meanwhile
    group_.flush();
    std::tie(one.handle, one.num_rows) = group_.export_begin(0, 0);
    CHECK(one.num_rows >= one.used_lately.size() && one.num_rows <= kMaxRows);
    std::vector<int64_t> removed(group_.collect_removed(0));
    group_.removed_ids(0, removed.data());
    num_removed_ += removed.size();
    const uint64_t mark = group_.final_ordinal();
    CHECK(mark == ordinal);
    const auto [changed, num_changed] = group_.export_begin(0, ordinal - 10);
    num_changed_ += num_changed;
    group_.export_end(changed);
    begun_.push_back(std::move(one));
    news_.notify_all();
  }

  void read(Export& one, size_t num_rows, Random& random) {
    size_t num_read = 0;
    size_t num_lately = 0;
    int64_t last = INT64_MIN;
    while (num_read < num_rows) {
      const size_t n = std::min(num_rows - num_read, static_cast<size_t>(1 + random.below(20)));
      std::vector<int64_t> ids(n), scores(n);
      std::vector<float> records(n * kRecord);
      group_.export_next(one.handle, n, ids.data(), scores.data(), records.data());
      for (size_t i = 0; i < n; ++i) {
        const auto key = static_cast<int64_t>(mix64(static_cast<uint64_t>(ids[i])));
        const auto score = static_cast<uint64_t>(scores[i]);
        CHECK((num_read + i == 0 || ids[i] > last) && score >= 1 && score <= one.ordinal);
        last = ids[i];
        for (uint32_t c = 0; c < kRecord; ++c) CHECK(records[i * kRecord + c] == value(key, score, c));
        const auto found = one.used_lately.find(key);
        if (found == one.used_lately.end()) continue;
        CHECK(found->second == score);
        ++num_lately;
      }
      num_read += n;
    }
    CHECK(num_rows < one.num_rows || num_lately == one.used_lately.size());
    std::lock_guard lock(mutex_);
    num_read_ += num_read;
  }

  std::vector<float> weights_, states_;
  std::unordered_map<int64_t, uint64_t> last_use_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Batch> ahead_;
  std::deque<Export> begun_;
  bool is_over_ = false;
  uint64_t num_read_ = 0, num_removed_ = 0, num_changed_ = 0;
  ShardGroup group_{0, 2};
};

void test_exports_beside_training() {
  Run run;
  std::thread map([&] { run.map_ahead(); });
  std::thread train([&] { run.train(); });
  std::thread first([&] { run.write(1); });
  std::thread second([&] { run.write(2); });
  for (std::thread* thread : {&map, &train, &first, &second}) thread->join();
  run.check();
}

// A budget without room for the list of rows, or for the log of removed ids: refused, and nothing is taken.
void test_exports_without_room() {
  ShardGroup group(3 << 20, 1);
  ShardSpec spec;
  spec.name = "t";
  spec.dim = 1;
  spec.num_slots = 4;
  spec.initial_rows = {InitKind::kConstant, 0.0f, 0.0f, nullptr, 0, 1, 1};
  group.add_table(spec);
  group.set_ordinal(3);
  std::vector<int64_t> ids(2000), scores(2000, 3);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  const std::vector<float> records(ids.size(), 1.0f);
  group.import_rows(0, ids.size(), ids.data(), scores.data(), records.data());
  const uint64_t before = group.counters(0).host_bytes;
  std::vector<uint64_t> handles;
  bool was_refused = false;
  while (!was_refused && handles.size() < 100) {
    try {
      handles.push_back(group.export_begin(0, 0).first);
    } catch (const StateError&) {
      was_refused = true;
    }
  }
  CHECK(was_refused && handles.size() > 3);
  CHECK_THROWS(group.track_removals(0, 1 << 20), StateError);
  std::vector<int64_t> out_ids(1), out_scores(1);
  std::vector<float> out(1);
  group.export_next(handles.front(), 1, out_ids.data(), out_scores.data(), out.data());
  CHECK(out_ids[0] == 0 && out_scores[0] == 3 && out[0] == 1.0f);
  for (uint64_t handle : handles) group.export_end(handle);
  CHECK(group.counters(0).host_bytes == before);
  group.export_end(group.export_begin(0, 0).first);
}

// What is ready is taken first, is in the budget, and goes with the last snapshot.
void test_snapshot_blocks() {
  constexpr uint64_t kBytes = SnapshotBlocks::kBlockBytes;
  Budget budget(10 * kBytes);
  SnapshotBlocks blocks(budget);
  blocks.add_user();
  blocks.add_user();
  blocks.give_back(blocks.take(10));
  blocks.make_ready();
  CHECK(blocks.num_ready() == 0 && budget.used() == 0);  // no whole block was wanted
  std::vector<SnapshotBlocks::Block> taken;
  const auto take = [&] { taken.push_back(blocks.take(SnapshotBlocks::kBlockFloats)); };
  take();
  blocks.make_ready();
  CHECK(blocks.num_ready() == 8 && budget.used() == 9 * kBytes);
  for (size_t i = 0; i < 7; ++i) take();
  CHECK(blocks.num_ready() == 1 && budget.used() == 9 * kBytes);
  blocks.make_ready();  // there is room for one
  CHECK(blocks.num_ready() == 2 && budget.used() == 10 * kBytes);
  for (size_t i = 0; i < 3; ++i) take();
  CHECK(blocks.num_ready() == 0 && budget.used() == 11 * kBytes);  // not refused
  for (SnapshotBlocks::Block& block : taken) blocks.give_back(std::move(block));
  CHECK(blocks.num_ready() == 8 && budget.used() == 8 * kBytes);
  blocks.remove_user();
  CHECK(blocks.num_ready() == 8);
  blocks.remove_user();
  CHECK(blocks.num_ready() == 0 && budget.used() == 0);
}

// Long rows, so that several whole blocks are kept while another thread reads; two exports, one after the other.
void test_exports_of_whole_blocks() {
  constexpr size_t kRows = 300, kFloats = 8192, kRounds = 3;
  ShardGroup group(0, 1);
  ShardSpec spec;
  spec.name = "t";
  spec.dim = kFloats;
  spec.num_slots = 4;
  spec.initial_rows = {InitKind::kConstant, 0.0f, 0.0f, nullptr, 0, 1, kFloats};
  group.add_table(spec);
  group.set_ordinal(3);
  const auto record_of = [](size_t row, size_t round) { return static_cast<float>(row + 1000 * round); };
  std::vector<int64_t> ids(kRows), scores(kRows, 3);
  std::vector<uint32_t> numbers(kRows);
  std::vector<float> records(kRows * kFloats);
  const auto fill = [&](size_t round) {
    for (size_t i = 0; i < kRows; ++i) std::fill_n(records.begin() + static_cast<ptrdiff_t>(i * kFloats), kFloats, record_of(i, round));
  };
  for (size_t i = 0; i < kRows; ++i) {
    ids[i] = static_cast<int64_t>(i);
    numbers[i] = static_cast<uint32_t>(i);
  }
  fill(0);
  group.import_rows(0, kRows, ids.data(), scores.data(), records.data());
  const auto read = [&](uint64_t handle, size_t begin, size_t end, size_t round) {
    std::vector<int64_t> out_ids(1), out_scores(1);
    std::vector<float> out(kFloats);
    for (size_t i = begin; i < end; ++i) {
      group.export_next(handle, 1, out_ids.data(), out_scores.data(), out.data());
      CHECK(out_ids[0] == ids[i]);
      CHECK(std::ranges::all_of(out, [&](float value) { return value == record_of(i, round); }));
    }
  };
  for (size_t round = 0; round < kRounds; ++round) {
    const auto [first, num_first] = group.export_begin(0, 0);
    const auto [second, num_second] = group.export_begin(0, 0);
    CHECK(num_first == kRows && num_second == kRows);
    read(first, 0, 2, round);
    fill(round + 1);
    std::thread reader([&, handle = first] { read(handle, 2, kRows, round); });
    group.write_records(0, numbers.data(), kRows, records.data());
    reader.join();
    group.export_end(first);
    read(second, 0, kRows, round);
    group.export_end(second);
  }
}

}  // namespace

void test_exports() {
  test_snapshot_blocks();
  test_exports_of_whole_blocks();
  test_exports_beside_training();
  test_exports_without_room();
}
