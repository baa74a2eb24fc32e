#include <cstdio>

#include "check.h"

int main() {
  test_parts();
  test_shard_group();
  test_shard_group_cases();
  std::puts("native tests passed");
}
