// Usage: native_tests [random calls of each setup]
#include <cstdio>
#include <cstdlib>

#include "check.h"
#include "harness.h"

int main(int argc, char** argv) {
  const uint64_t num_steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 6000;
  CHECK(num_steps > 0);
  test_parts();
  test_shard_group(num_steps);
  test_shard_group_cases();
  test_readers();
  test_exports();
  std::printf("native tests passed, %llu random calls\n", static_cast<unsigned long long>(harness::num_calls));
}
