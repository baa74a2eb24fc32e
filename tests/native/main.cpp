#include <cstdio>

#include "check.h"

int main() {
  test_parts();
  test_shard_group();
  std::puts("native tests passed");
}
