// Initial rows: a pure function of (table seed, key, column), the same bits in C++, in numpy and on any processor.
//
// Integers on uint64 with wrap-around; float32 operations rounded one by one (-ffp-contract=off), no libm. The exact
// definition is docs/design/initial_rows.md. Cost: one mix64 for two uniform columns, three for a normal one.
#pragma once

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "hybridrec/mix64.h"

namespace hybridrec {

enum class InitKind : int { kUniform = 0, kNormal = 1, kConstant = 2, kBank = 3 };

// What a row's weights are. The store, slots and records hold them as 32-bit words, whatever they are: two 16-bit values
// a word, the first in the low half, the last one padded with zeros.
enum class RowType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

inline uint32_t weight_words(RowType type, uint32_t dim) { return type == RowType::kFloat32 ? dim : dim / 2 + dim % 2; }

// To the nearest, ties to even; too large: infinity.
inline uint16_t bfloat16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays one
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
uint16_t float16_of(float value);

struct InitialRows {
  InitKind kind = InitKind::kUniform;
  float a = 0.0f;
  float b = 0.0f;
  const float* bank = nullptr;  // [bank_rows, dim], kept by the caller
  uint64_t bank_rows = 0;
  uint64_t seed = 0;
  uint32_t dim = 0;
  RowType row_type = RowType::kFloat32;
  uint32_t first_column = 0;  // of the dim columns; the bank starts there

  // Throws std::invalid_argument.
  void validate() const;
  // Writes the row of `key`, weight_words(row_type, dim) words: the columns from first_column on.
  void fill(int64_t key, float* out) const;

 private:
  void fill_floats(int64_t key, float* out) const;
};

}  // namespace hybridrec
