// Random calls of a shard group against a dictionary, over many capacities, policies and budgets.
#include <vector>

#include "check.h"
#include "export_harness.h"

using harness::ExportHarness;
using harness::Harness;
using harness::Setup;
using hybridrec::FullPolicy;

namespace {

const std::vector<Setup> kSetups = {
    {},
    {.num_slots = 7, .num_ids = 20},
    {.num_slots = 32, .num_ids = 400, .is_staged = true},
    {.num_slots = 8, .max_rows = 90, .policy = FullPolicy::kEvict, .num_ids = 300},
    {.num_slots = 7, .max_rows = 80, .policy = FullPolicy::kEvict, .num_ids = 250, .is_staged = true},
    {.num_slots = 16, .max_rows = 30, .policy = FullPolicy::kError},
    {.num_tables = 3, .num_slots = 33, .num_ids = 300, .num_threads = 3},
    {.num_slots = 24, .num_ids = 300, .is_crafted = true},
    {.num_slots = 20, .max_rows = 200, .policy = FullPolicy::kEvict, .num_ids = 500, .is_crafted = true},
};
const std::vector<uint32_t> kCapacities = {1,  2,  3,  4,  5,  7,  8,   9,   15,  16,  17,  31,  32,
                                           33, 63, 64, 65, 66, 127, 128, 129, 255, 256, 257, 511, 512, 513};

void walk(const Setup& setup, uint64_t seed, uint64_t num_steps) {
  ExportHarness harness(setup, seed);
  for (uint64_t i = 0; i < num_steps; ++i) harness.step();
  harness.finish();
  if (num_steps < 2000) return;
  CHECK(harness.num_refused() > 10 && harness.num_read() > 100);
  if (setup.policy == FullPolicy::kEvict) CHECK(harness.num_evicted() > 10 && harness.num_removed() > 0);
}

void test_random_calls(uint64_t num_steps) {
  uint64_t seed = 0;
  for (const Setup& setup : kSetups) walk(setup, ++seed, num_steps);
}

// Slots, then rows, of awkward numbers; batches that need more than there are.
void test_random_calls_of_every_capacity(uint64_t num_steps) {
  for (uint32_t capacity : kCapacities) {
    const uint64_t share = 64 * num_steps / (64 + capacity);  // larger tables take longer
    walk({.num_slots = capacity, .num_ids = capacity * 5 / 2 + 3}, capacity, share);
    walk({.num_slots = capacity, .num_ids = capacity * 2 + 3, .is_staged = true}, capacity + 1, share / 2);
    walk({.num_slots = 24, .max_rows = capacity, .policy = FullPolicy::kError, .num_ids = capacity * 3}, capacity + 2,
         share / 2);
    if (capacity < 60) continue;  // fewer rows than a few batches use can hardly be evicted
    walk({.num_slots = 6, .max_rows = capacity, .policy = FullPolicy::kEvict, .num_ids = capacity * 3}, capacity + 3,
         share / 2);
  }
}

// A host budget so small that maps, row numbers and chunks are refused at some point; nothing may change then.
void test_host_budget(uint64_t num_steps) {
  for (uint64_t budget_bytes : {20000, 40000, 3000000, 6000000}) {
    Harness harness({.num_ids = 3000, .budget_bytes = budget_bytes}, budget_bytes);
    for (uint64_t i = 0; i < num_steps / 4; ++i) harness.step();
    CHECK(budget_bytes > 1000000 || harness.num_refused() > 10);
    uint64_t used = 0;
    for (size_t t = 0; t < 2; ++t) used += harness.group().counters(t).host_bytes;
    CHECK(used <= budget_bytes);
  }
}

// recsys-examples #328: a capacity that was no multiple of the alignment was read past its end once it had grown.
void test_slots_of_every_number_grow() {
  for (uint32_t num_slots = 16; num_slots <= 300; ++num_slots) {
    Harness harness({.num_tables = 1, .num_slots = num_slots, .num_ids = 6 * num_slots}, num_slots);
    for (int i = 0; i < 6; ++i) harness.step();
    harness.grow(num_slots * 4);
    for (int i = 0; i < 6; ++i) harness.step();
    harness.group().check();
  }
}

}  // namespace

void test_shard_group(uint64_t num_steps) {
  test_random_calls(num_steps);
  test_random_calls_of_every_capacity(num_steps);
  test_host_budget(num_steps);
  test_slots_of_every_number_grow();
}
