// Initial rows: a pure function of (table seed, key, column), the same bits in C++, in numpy and on any processor.
//
// Integers on uint64 with wrap-around; float32 operations rounded one by one (-ffp-contract=off), no libm. The exact
// definition is docs/design/initial_rows.md. Cost: one mix64 for two uniform columns, three for a normal one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "hybridrec/mix64.h"

namespace hybridrec {

enum class InitKind : int { kUniform = 0, kNormal = 1, kConstant = 2, kBank = 3 };

struct InitialRows {
  InitKind kind = InitKind::kUniform;
  float a = 0.0f;
  float b = 0.0f;
  const float* bank = nullptr;  // [bank_rows, dim], kept by the caller
  uint64_t bank_rows = 0;
  uint64_t seed = 0;
  uint32_t dim = 0;
  uint32_t first_column = 0;  // of the dim columns; the bank starts there

  // Throws std::invalid_argument.
  void validate() const;
  // Writes the row of `key`, dim floats: the columns from first_column on.
  void fill(int64_t key, float* out) const;
};

}  // namespace hybridrec
