// The Python module hybridrec._native: addresses and numbers in, numbers out. hybridrec.native wraps it.
//
// Every *_ptr is the address of C-contiguous host memory that the caller has checked and keeps alive during the call
// (bind_slots and banks: as long as the group lives); 0 is legal for empty arrays. Every call releases the GIL.
// Errors: ValueError = bad argument, RuntimeError = not legal now, MemoryError; nothing changed then.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "hybridrec/initial_rows.h"
#include "hybridrec/mix64.h"
#include "hybridrec/shard_group.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using hybridrec::Counters;
using hybridrec::FullPolicy;
using hybridrec::InitialRows;
using hybridrec::InitKind;
using hybridrec::KeyBatch;
using hybridrec::Plan;
using hybridrec::RowType;
using hybridrec::ShardGroup;
using hybridrec::ShardSpec;
using hybridrec::SlotPointers;
using hybridrec::TableShard;

using Address = uintptr_t;
using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::vector<float*> float_pointers(const std::vector<Address>& addresses) {
  std::vector<float*> pointers;
  for (Address address : addresses) pointers.push_back(at<float>(address));
  return pointers;
}

FullPolicy parse_full_policy(const std::string& name) {
  if (name == "grow") return FullPolicy::kGrow;
  if (name == "evict") return FullPolicy::kEvict;
  if (name == "error") return FullPolicy::kError;
  throw std::invalid_argument("full_policy is '" + name + "'. It must be 'grow', 'evict' or 'error'.");
}

InitialRows make_initial_rows(uint32_t dim, int row_type, uint32_t first_column, uint64_t seed, int kind, double a, double b,
                              Address bank, uint64_t bank_rows) {
  InitialRows rows;
  rows.kind = static_cast<InitKind>(kind);
  rows.a = static_cast<float>(a);
  rows.b = static_cast<float>(b);
  rows.bank = at<const float>(bank);
  rows.bank_rows = bank_rows;
  rows.seed = seed;
  rows.dim = dim;
  rows.row_type = static_cast<RowType>(row_type);
  rows.first_column = first_column;
  rows.validate();
  return rows;
}

void bind_functions(nb::module_& m) {
  m.def(
      "mix64",
      [](Address ids, Address out, size_t n) {
        for (size_t i = 0; i < n; ++i) at<uint64_t>(out)[i] = hybridrec::mix64(at<const uint64_t>(ids)[i]);
      },
      "ids_ptr"_a, "out_ptr"_a, "n"_a, WithoutGil(), "int64 [n] ids -> int64 [n] keys. May work in place.");
  m.def(
      "unmix64",
      [](Address keys, Address out, size_t n) {
        for (size_t i = 0; i < n; ++i) at<uint64_t>(out)[i] = hybridrec::unmix64(at<const uint64_t>(keys)[i]);
      },
      "keys_ptr"_a, "out_ptr"_a, "n"_a, WithoutGil(), "int64 [n] keys -> int64 [n] ids. May work in place.");
  m.def(
      "table_seed", [](uint64_t seed, const std::string& name) { return hybridrec::table_seed(seed, name); }, "seed"_a,
      "name"_a, "The uint64 seed of one table's initial rows.");
  m.def(
      "initial_rows",
      [](uint32_t dim, int row_type, uint32_t first_column, uint64_t table_seed, int init_kind, double init_a, double init_b,
         Address bank, uint64_t bank_rows, Address keys, size_t n, Address out) {
        const auto rows = make_initial_rows(dim, row_type, first_column, table_seed, init_kind, init_a, init_b, bank, bank_rows);
        const uint64_t words = hybridrec::weight_words(rows.row_type, dim);
        for (size_t i = 0; i < n; ++i) rows.fill(at<const int64_t>(keys)[i], at<float>(out) + i * words);
      },
      nb::kw_only(), "dim"_a, "row_type"_a, "first_column"_a, "table_seed"_a, "init_kind"_a, "init_a"_a, "init_b"_a, "bank_ptr"_a,
      "bank_rows"_a, "keys_ptr"_a, "n"_a, "out_ptr"_a, WithoutGil(), "Initial rows of int64 [n] keys -> [n, words of a row].");
}

void bind_planning(nb::module_& m) {
  m.def("planned_host_bytes", &TableShard::planned_bytes, nb::kw_only(), "wide_floats"_a,
        "num_row_wise_states"_a, "num_rows"_a, "num_slots"_a, "store_rows"_a,
        "What Counters.host_bytes will be of a shard of this shape.");
}

size_t add_table(ShardGroup& group, const std::string& name, uint32_t dim, uint32_t num_row_states,
                 uint32_t num_row_wise_states, const std::vector<double>& state_initial_values, uint32_t num_slots,
                 uint64_t planned_rows, uint64_t max_rows, const std::string& full_policy, int row_type, uint32_t first_column,
                 uint64_t table_seed, int init_kind, double init_a, double init_b, Address bank, uint64_t bank_rows) {
  ShardSpec spec;
  spec.name = name;
  spec.dim = dim;
  spec.num_row_states = num_row_states;
  spec.num_row_wise_states = num_row_wise_states;
  for (double value : state_initial_values) spec.state_initial_values.push_back(static_cast<float>(value));
  spec.num_slots = num_slots;
  spec.planned_rows = planned_rows;
  spec.max_rows = max_rows;
  spec.full_policy = parse_full_policy(full_policy);
  spec.initial_rows = make_initial_rows(dim, row_type, first_column, table_seed, init_kind, init_a, init_b, bank, bank_rows);
  return group.add_table(std::move(spec));
}

KeyBatch key_batch(Address keys, size_t num_keys, Address offsets, Address tables, size_t num_features) {
  return {at<const int64_t>(keys), num_keys, at<const int64_t>(offsets), at<const int64_t>(tables), num_features};
}

nb::tuple as_tuple(const Plan& p) {
  return nb::make_tuple(p.status, p.table, p.needed, p.available, p.pinned, p.ordinal, p.num_unique, p.num_loads,
                        p.num_inits, p.num_victims, p.num_write_backs);
}

nb::tuple plan_aside(ShardGroup& group, Address keys, size_t num_keys, Address offsets, Address tables,
                     size_t num_features, Address index, Address unique_counts) {
  Plan p;
  {
    nb::gil_scoped_release without_gil;
    p = group.plan_aside(key_batch(keys, num_keys, offsets, tables, num_features), at<int64_t>(index),
                         at<int64_t>(unique_counts));
  }
  return as_tuple(p);
}

nb::tuple plan(ShardGroup& group, Address keys, size_t num_keys, Address offsets, Address tables, size_t num_features,
               Address slots) {
  Plan p;
  {
    nb::gil_scoped_release without_gil;
    p = group.plan(key_batch(keys, num_keys, offsets, tables, num_features), at<int64_t>(slots));
  }
  return as_tuple(p);
}

nb::tuple counters(ShardGroup& group, size_t table) {
  Counters c;
  {
    nb::gil_scoped_release without_gil;
    c = group.counters(table);
  }
  return nb::make_tuple(c.accesses, c.access_hits, c.uniques, c.unique_hits, c.inserted, c.loads, c.victims,
                        c.write_backs, c.load_bytes, c.write_back_bytes, c.rows, c.resident, c.grown, c.evicted,
                        c.rejected, c.pins, c.host_bytes);
}

void bind_batches(nb::class_<ShardGroup>& group) {
  group
      .def("plan", &plan, "keys_ptr"_a, "num_keys"_a, "feature_offsets_ptr"_a, "feature_table_ptr"_a, "num_features"_a,
           "slots_ptr"_a, "The 11 fields of protocol.Plan. int64 [N], [F + 1], [F] -> int64 [N].")
      .def("plan_aside", &plan_aside, "keys_ptr"_a, "num_keys"_a, "feature_offsets_ptr"_a, "feature_table_ptr"_a,
           "num_features"_a, "index_ptr"_a, "unique_counts_ptr"_a, "As plan. int64 [N], [T] are written.")
      .def("num_batch_rows", &ShardGroup::num_batch_rows, "ordinal"_a, "table"_a, WithoutGil())
      .def(
          "batch_rows",
          [](ShardGroup& g, uint64_t o, size_t table, Address rows, Address slots) {
            g.batch_rows(o, table, at<uint32_t>(rows), at<int64_t>(slots));
          },
          "ordinal"_a, "table"_a, "rows_ptr"_a, "slots_ptr"_a, WithoutGil(), "uint32, int64 [num_batch_rows]")
      .def("swap", &ShardGroup::swap, "ordinal"_a, WithoutGil())
      .def(
          "swap_counts", [](ShardGroup& g, uint64_t o, Address counts) { g.swap_counts(o, at<int64_t>(counts)); },
          "ordinal"_a, "counts_ptr"_a, WithoutGil(), "int64 [T, 2]")
      .def(
          "swap_slots",
          [](ShardGroup& g, uint64_t o, Address loads, Address victims) {
            g.swap_slots(o, at<int64_t>(loads), at<int64_t>(victims));
          },
          "ordinal"_a, "load_slots_ptr"_a, "victim_slots_ptr"_a, WithoutGil(), "int64 [sum L], int64 [sum V]")
      .def(
          "scatter_victims",
          [](ShardGroup& g, uint64_t o, Address staging) { g.scatter_victims(o, at<const float>(staging)); },
          "ordinal"_a, "staging_ptr"_a, WithoutGil())
      .def(
          "gather_loads", [](ShardGroup& g, uint64_t o, Address staging) { g.gather_loads(o, at<float>(staging)); },
          "ordinal"_a, "staging_ptr"_a, WithoutGil())
      .def("commit", &ShardGroup::commit, "ordinal"_a, WithoutGil())
      .def("undo", &ShardGroup::undo, "ordinal"_a, WithoutGil())
      .def("flush", &ShardGroup::flush, WithoutGil())
      .def(
          "flush_counts", [](ShardGroup& g, Address counts) { g.flush_counts(at<int64_t>(counts)); }, "counts_ptr"_a,
          WithoutGil(), "int64 [T]")
      .def(
          "flush_slots", [](ShardGroup& g, Address slots) { g.flush_slots(at<int64_t>(slots)); }, "slots_ptr"_a,
          WithoutGil(), "int64 [sum of flush_counts]")
      .def(
          "flush_records", [](ShardGroup& g, Address staging) { g.flush_records(at<const float>(staging)); },
          "staging_ptr"_a, WithoutGil());
}

void bind_reads(nb::class_<ShardGroup>& group) {
  group
      .def(
          "read_plan",
          [](ShardGroup& g, Address keys, size_t num_keys, Address offsets, Address tables, size_t num_features,
             Address index, Address unique_counts) {
            return g.read_plan(key_batch(keys, num_keys, offsets, tables, num_features), at<int64_t>(index),
                               at<int64_t>(unique_counts));
          },
          "keys_ptr"_a, "num_keys"_a, "feature_offsets_ptr"_a, "feature_table_ptr"_a, "num_features"_a, "index_ptr"_a,
          "unique_counts_ptr"_a, WithoutGil(), "Returns a handle. int64 [N], [F + 1], [F] -> int64 [N], [T].")
      .def(
          "read_rows",
          [](ShardGroup& g, uint64_t handle, const std::vector<Address>& buffers, bool host_only) {
            g.read_rows(handle, float_pointers(buffers), host_only);
          },
          "handle"_a, "buffer_ptrs"_a, "host_only"_a, WithoutGil(), "One buffer a table; 0 where it has no rows.")
      .def("num_read_resident", &ShardGroup::num_read_resident, "handle"_a, "table"_a, WithoutGil())
      .def(
          "read_resident",
          [](ShardGroup& g, uint64_t handle, size_t table, Address positions, Address slots) {
            g.read_resident(handle, table, at<int64_t>(positions), at<int64_t>(slots));
          },
          "handle"_a, "table"_a, "positions_ptr"_a, "slots_ptr"_a, WithoutGil(), "int64 [num_read_resident] twice")
      .def("end_read", &ShardGroup::end_read, "handle"_a, WithoutGil())
      .def("num_entries", &ShardGroup::num_entries, "table"_a, WithoutGil())
      .def(
          "entries",
          [](ShardGroup& g, size_t table, Address keys, Address rows, Address scores, Address slots, Address pins) {
            g.entries(table, at<int64_t>(keys), at<uint32_t>(rows), at<uint32_t>(scores), at<int64_t>(slots),
                      at<uint32_t>(pins));
          },
          "table"_a, "keys_ptr"_a, "rows_ptr"_a, "scores_ptr"_a, "slots_ptr"_a, "pins_ptr"_a, WithoutGil(),
          "int64, uint32, uint32, int64, uint32, all [num_entries]")
      .def(
          "read_records",
          [](ShardGroup& g, size_t table, Address rows, size_t num_rows, Address out) {
            g.read_records(table, at<const uint32_t>(rows), num_rows, at<float>(out));
          },
          "table"_a, "rows_ptr"_a, "num_rows"_a, "out_ptr"_a, WithoutGil(), "uint32 [n] -> float32 [n, D(1 + M) + A]")
      .def(
          "write_records",
          [](ShardGroup& g, size_t table, Address rows, size_t num_rows, Address records) {
            g.write_records(table, at<const uint32_t>(rows), num_rows, at<const float>(records));
          },
          "table"_a, "rows_ptr"_a, "num_rows"_a, "records_ptr"_a, WithoutGil(), "uint32 [n], float32 [n, D(1 + M) + A]")
      .def(
          "export_begin",
          [](ShardGroup& g, size_t table, uint64_t above_score) { return g.export_begin(table, above_score); },
          "table"_a, "above_score"_a, WithoutGil(), "(handle, R)")
      .def(
          "export_next",
          [](ShardGroup& g, uint64_t handle, size_t num_rows, Address ids, Address scores, Address records) {
            g.export_next(handle, num_rows, at<int64_t>(ids), at<int64_t>(scores), at<float>(records));
          },
          "handle"_a, "num_rows"_a, "ids_ptr"_a, "scores_ptr"_a, "records_ptr"_a, WithoutGil(),
          "int64 [n], int64 [n], float32 [n, D(1 + M) + A] are written.")
      .def("export_end", &ShardGroup::export_end, "handle"_a, WithoutGil())
      .def(
          "import_rows",
          [](ShardGroup& g, size_t table, size_t num_rows, Address ids, Address scores, Address records) {
            g.import_rows(table, num_rows, at<const int64_t>(ids), at<const int64_t>(scores), at<const float>(records));
          },
          "table"_a, "num_rows"_a, "ids_ptr"_a, "scores_ptr"_a, "records_ptr"_a, WithoutGil(),
          "int64 [n], int64 [n], float32 [n, D(1 + M) + A]")
      .def("clear_rows", &ShardGroup::clear_rows, "table"_a, WithoutGil())
      .def("track_removals", &ShardGroup::track_removals, "table"_a, "max_ids"_a, WithoutGil(), "Negative: stop.")
      .def("collect_removed", &ShardGroup::collect_removed, "table"_a, WithoutGil(), "How many removed_ids will write.")
      .def(
          "removed_ids",
          [](ShardGroup& g, size_t table, Address ids) { g.removed_ids(table, at<int64_t>(ids)); }, "table"_a,
          "ids_ptr"_a, WithoutGil(), "int64 [collect_removed]")
      .def("ordinal", &ShardGroup::ordinal, WithoutGil())
      .def("final_ordinal", &ShardGroup::final_ordinal, WithoutGil())
      .def("set_ordinal", &ShardGroup::set_ordinal, "ordinal"_a, WithoutGil())
      .def("counters", &counters, "table"_a, "The 17 fields of protocol.Counters.")
      .def("check", &ShardGroup::check, WithoutGil(), "Raise if an internal invariant is broken; for tests.");
}

}  // namespace

NB_MODULE(_native, m) {
  // A model that lives until the interpreter ends is no leak, and users cannot act on what nanobind would say of it.
  nb::set_leak_warnings(false);
  m.doc() = "C++ core of hybridrec: ids, slots, rows and journals of table shards. Use hybridrec.native.";
  bind_functions(m);
  bind_planning(m);
  nb::class_<ShardGroup> group(m, "ShardGroup");
  group
      .def(nb::init<uint64_t, size_t>(), nb::kw_only(), "host_budget_bytes"_a = 0, "num_threads"_a = 1)
      .def("add_table", &add_table, nb::kw_only(), "name"_a, "dim"_a, "num_row_states"_a, "num_row_wise_states"_a,
           "state_initial_values"_a, "num_slots"_a, "planned_rows"_a, "max_rows"_a, "full_policy"_a,
           "row_type"_a, "first_column"_a, "table_seed"_a, "init_kind"_a, "init_a"_a, "init_b"_a, "bank_ptr"_a,
           "bank_rows"_a, WithoutGil(),
           "Returns the table's index. Before the first plan.")
      .def(
          "bind_slots",
          [](ShardGroup& g, size_t table, Address weights, const std::vector<Address>& row_states,
             const std::vector<Address>& row_wise_states) {
            g.bind_slots(table, SlotPointers{at<float>(weights), float_pointers(row_states),
                                             float_pointers(row_wise_states), true});
          },
          "table"_a, "weights_ptr"_a, "row_state_ptrs"_a, "row_wise_state_ptrs"_a, WithoutGil(),
          "float32 [C, words], M x [C, D], A x [C]; must outlive the group or the next bind.")
      .def("resize_slots", &ShardGroup::resize_slots, "table"_a, "num_slots"_a, WithoutGil(),
           "Only grows. Unbinds the slots.");
  bind_batches(group);
  bind_reads(group);
}
