// The harness, and what snapshots do beside everything else: exports that are read little by little, imports, tables
// that are emptied, and readers that follow a table by its changed rows and removed ids alone.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "harness.h"

namespace harness {

class ExportHarness : public Harness {
 public:
  using Harness::Harness;

  void step() {
    if (setup_.budget_bytes != 0 || random_.below(100) >= 18) return Harness::step();
    ++num_calls;
    const size_t t = random_.below(tables_.size());
    const uint64_t choice = random_.below(18);
    if (choice < 3) {
      begin_export(t);
    } else if (choice < 11) {
      read_export();
    } else if (choice < 13) {
      import_rows(t);
    } else if (choice < 14) {
      if (random_.below(10) == 0) clear_rows(t);
    } else {
      followed_.contains(t) ? apply_delta(t) : follow(t);
    }
  }

  void finish() {
    while (!exports_.empty()) read_export();
  }

  uint64_t num_read() const { return num_read_; }
  uint64_t num_removed() const { return num_removed_; }

 private:
  using Rows = std::map<int64_t, ModelRow>;  // by id

  struct OpenExport {
    uint64_t handle;
    std::vector<std::pair<int64_t, ModelRow>> rows;  // that are still to be read
  };
  struct Followed {
    uint64_t mark;
    Rows rows;
  };

  static int64_t id_of(int64_t key) { return static_cast<int64_t>(unmix64(static_cast<uint64_t>(key))); }

  // As if all batches in flight were undone, newest first. Not known here once a batch overtook an older one.
  Rows committed(size_t t) const {
    Rows rows;
    for (const auto& [key, row] : in_flight_.empty() ? tables_[t].committed_or_planned : in_flight_.front().before[t]) {
      rows.emplace(id_of(key), row);
    }
    return rows;
  }

  // Whether the rows can be looked at; a table with slots that are newer than the store refuses it.
  bool is_readable(size_t t) {
    if (is_mixed_) return false;
    if (random_.below(6) != 0) setup_.is_staged ? flush_staged() : group_.flush();
    std::vector<int64_t> dirty(tables_.size());
    group_.flush_counts(dirty.data());
    if (dirty[t] == 0) return true;
    CHECK_THROWS(group_.export_begin(t, 0), StateError);
    return false;
  }

  void begin_export(size_t t) {
    if (exports_.size() >= 4 || !is_readable(t)) return;
    const uint64_t above = random_.below(3) == 0 ? random_.below(last_ordinal_ + 1) : 0;
    const auto [handle, num_rows] = group_.export_begin(t, above);
    OpenExport one{handle, {}};
    for (auto& entry : committed(t)) {
      if (entry.second.score > above) one.rows.push_back(entry);
    }
    CHECK(num_rows == one.rows.size());
    exports_.push_back(std::move(one));
    exported_tables_.push_back(t);
  }

  // Some rows of one of them; the last ones end it, as does, now and then, the wish to read no more.
  void read_export() {
    if (exports_.empty()) return;
    const size_t at = random_.below(exports_.size());
    OpenExport& one = exports_[at];
    const size_t n = std::min(one.rows.size(), static_cast<size_t>(random_.below(9)));
    std::vector<int64_t> ids(n), scores(n);
    std::vector<float> records(n * kRecord);
    group_.export_next(one.handle, n, ids.data(), scores.data(), records.data());
    for (size_t i = 0; i < n; ++i) {
      const auto& [id, row] = one.rows[i];
      CHECK(ids[i] == id && scores[i] == row.score);
      CHECK(std::equal(row.record.begin(), row.record.end(), records.begin() + static_cast<ptrdiff_t>(i * kRecord)));
    }
    one.rows.erase(one.rows.begin(), one.rows.begin() + static_cast<ptrdiff_t>(n));
    num_read_ += n;
    CHECK_THROWS(group_.export_next(one.handle, one.rows.size() + 1, nullptr, nullptr, nullptr), std::invalid_argument);
    if (!one.rows.empty() && random_.below(40) != 0) return;
    group_.export_end(one.handle);
    CHECK_THROWS(group_.export_next(one.handle, 0, nullptr, nullptr, nullptr), std::invalid_argument);
    exports_.erase(exports_.begin() + static_cast<ptrdiff_t>(at));
    exported_tables_.erase(exported_tables_.begin() + static_cast<ptrdiff_t>(at));
  }

  // New values and scores of rows that live and, within the quota, of others.
  void import_rows(size_t t) {
    if (last_ordinal_ == 0) return;
    Model& model = tables_[t].committed_or_planned;
    std::vector<int64_t> ids, scores;
    std::vector<float> records;
    Model after = model;
    for (uint64_t n = random_.below(12); n > 0; --n) {
      const int64_t key = random_key();
      if (setup_.max_rows != 0 && !after.contains(key) && after.size() >= setup_.max_rows) continue;
      ids.push_back(id_of(key));
      scores.push_back(static_cast<int64_t>(1 + random_.below(last_ordinal_)));
      const auto record = trained_record(key, random_.below(1000) + (uint64_t{1} << 32));
      records.insert(records.end(), record.begin(), record.end());
      after[key] = ModelRow{static_cast<uint32_t>(scores.back()), record};
    }
    if (!in_flight_.empty()) {
      CHECK_THROWS(group_.import_rows(t, ids.size(), ids.data(), scores.data(), records.data()), StateError);
      return;
    }
    group_.import_rows(t, ids.size(), ids.data(), scores.data(), records.data());
    group_.check();
    model = std::move(after);
    followed_.erase(t);
    check_ids();
  }

  void clear_rows(size_t t) {
    const bool is_exported = std::ranges::count(exported_tables_, t) != 0;
    if (is_exported || !in_flight_.empty()) {
      CHECK_THROWS(group_.clear_rows(t), StateError);
      return;
    }
    group_.clear_rows(t);
    group_.check();
    tables_[t].committed_or_planned.clear();
    followed_.erase(t);
    check_ids();
  }

  uint64_t final_ordinal() const { return in_flight_.empty() ? last_ordinal_ : in_flight_.front().ordinal - 1; }

  void follow(size_t t) {
    if (!is_readable(t)) return;
    group_.track_removals(t, 100000);
    CHECK(group_.final_ordinal() == final_ordinal());
    followed_[t] = {final_ordinal(), committed(t)};
  }

  void apply_delta(size_t t) {
    if (!is_readable(t)) return;
    Followed& followed = followed_.at(t);
    std::vector<int64_t> removed(group_.collect_removed(t));
    group_.removed_ids(t, removed.data());
    CHECK(std::ranges::is_sorted(removed));
    const Rows now = committed(t);
    for (int64_t id : removed) {
      CHECK(!now.contains(id));
      followed.rows.erase(id);
    }
    num_removed_ += removed.size();
    const auto [handle, n] = group_.export_begin(t, followed.mark);
    std::vector<int64_t> ids(n), scores(n);
    std::vector<float> records(n * kRecord);
    group_.export_next(handle, n, ids.data(), scores.data(), records.data());
    group_.export_end(handle);
    for (size_t i = 0; i < n; ++i) {
      const auto begin = records.begin() + static_cast<ptrdiff_t>(i * kRecord);
      followed.rows[ids[i]] = ModelRow{static_cast<uint32_t>(scores[i]), std::vector<float>(begin, begin + kRecord)};
    }
    CHECK(followed.rows.size() == now.size());
    for (const auto& [id, row] : now) {
      const auto& mine = followed.rows.at(id);
      CHECK(mine.score == row.score && mine.record == row.record);
    }
    followed.mark = final_ordinal();
  }

  std::vector<OpenExport> exports_;
  std::vector<size_t> exported_tables_;
  std::map<size_t, Followed> followed_;
  uint64_t num_read_ = 0;
  uint64_t num_removed_ = 0;
};

}  // namespace harness
