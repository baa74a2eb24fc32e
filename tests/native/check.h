// A check that names itself and ends the test run, and the tests' random numbers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "hybridrec/mix64.h"

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition);   \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

#define CHECK_THROWS(expression, Error)                                             \
  do {                                                                              \
    bool was_thrown = false;                                                        \
    try {                                                                           \
      (void)(expression);                                                           \
    } catch (const Error&) {                                                        \
      was_thrown = true;                                                            \
    }                                                                               \
    CHECK(was_thrown && #Error);                                                    \
  } while (false)

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return hybridrec::mix64(state_ += hybridrec::kGolden); }
  uint64_t below(uint64_t n) { return next() % n; }

 private:
  uint64_t state_;
};

void test_parts();
void test_shard_group(uint64_t num_steps);
void test_shard_group_cases();
void test_readers();
void test_exports();
