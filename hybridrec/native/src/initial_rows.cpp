#include "hybridrec/initial_rows.h"

#include <algorithm>
#include <cstring>

namespace hybridrec {

namespace {

uint64_t word(uint64_t base, uint64_t j) { return mix64(base + (j + 1) * kGolden); }

// `bits` < 2^24, so the conversion is exact and each of the three operations rounds once.
float uniform(float low, float span, uint64_t bits) {
  const float unit = static_cast<float>(static_cast<uint32_t>(bits)) * 0x1p-24f;
  return low + span * unit;
}

uint32_t lane_sum(uint64_t w) {
  return static_cast<uint32_t>((w & 0xffff) + ((w >> 16) & 0xffff) + ((w >> 32) & 0xffff) + (w >> 48));
}

// Two columns share a word: the even one has its high bits.
void fill_uniform(uint64_t base, float low, float high, uint32_t first, uint32_t dim, float* out) {
  const float span = high - low;
  const uint64_t last = uint64_t{first} + dim;
  uint64_t c = first;
  if (c % 2 == 1 && c < last) {
    *out++ = uniform(low, span, (word(base, c / 2) >> 8) & 0xffffff);
    ++c;
  }
  for (; c + 2 <= last; c += 2) {
    const uint64_t w = word(base, c / 2);
    *out++ = uniform(low, span, w >> 40);
    *out++ = uniform(low, span, (w >> 8) & 0xffffff);
  }
  if (c < last) *out = uniform(low, span, word(base, c / 2) >> 40);
}

// Irwin-Hall: the sum of twelve uniform 16-bit numbers has mean 393210 and standard deviation 2^16.
void fill_normal(uint64_t base, float mean, float deviation, uint32_t first, uint32_t dim, float* out) {
  for (uint32_t c = 0; c < dim; ++c) {
    const uint64_t j = 3 * (uint64_t{first} + c);
    const uint32_t sum = lane_sum(word(base, j)) + lane_sum(word(base, j + 1)) + lane_sum(word(base, j + 2));
    const float centred = static_cast<float>(static_cast<int32_t>(sum) - 393210) * 0x1p-16f;
    out[c] = mean + deviation * centred;
  }
}

}  // namespace

void InitialRows::validate() const {
  if (kind != InitKind::kUniform && kind != InitKind::kNormal && kind != InitKind::kConstant &&
      kind != InitKind::kBank) {
    throw std::invalid_argument("init_kind must be 0 (uniform), 1 (normal), 2 (constant) or 3 (bank)");
  }
  if (kind == InitKind::kBank && (bank == nullptr || bank_rows == 0)) {
    throw std::invalid_argument("init_kind 3 (bank) needs a bank of at least one row");
  }
}

uint16_t float16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;    // NaN
  if (size >= 0x477ff000) return sign | 0x7c00;   // from 65520 on: infinity
  if (size < 0x33000001) return sign;             // up to 2^-25: zero
  uint32_t kept = size - 0x38000000, drop = 13;   // the exponent's bias is 112 less
  if (size < 0x38800000) {                        // below 2^-14: no leading one is left out
    kept = (size & 0x7fffff) | 0x800000;
    drop = 126 - (size >> 23);
  }
  const uint32_t half = uint32_t{1} << (drop - 1);
  return sign | static_cast<uint16_t>((kept + half - 1 + (kept >> drop & 1)) >> drop);
}

void InitialRows::fill(int64_t key, float* out) const {
  if (row_type == RowType::kFloat32) return fill_floats(key, out);
  thread_local std::vector<float> floats;
  floats.resize(dim);
  fill_floats(key, floats.data());
  const auto convert = row_type == RowType::kBFloat16 ? bfloat16_of : float16_of;
  for (uint32_t c = 0; c < dim; c += 2) {
    const uint32_t high = c + 1 < dim ? convert(floats[c + 1]) : 0;
    const uint32_t both = high << 16 | convert(floats[c]);
    std::memcpy(out + c / 2, &both, sizeof(both));
  }
}

void InitialRows::fill_floats(int64_t key, float* out) const {
  const uint64_t base = mix64(static_cast<uint64_t>(key) + seed);
  switch (kind) {
    case InitKind::kUniform:
      fill_uniform(base, a, b, first_column, dim, out);
      return;
    case InitKind::kNormal:
      fill_normal(base, a, b, first_column, dim, out);
      return;
    case InitKind::kConstant:
      std::fill_n(out, dim, a);
      return;
    case InitKind::kBank:
      std::memcpy(out, bank + (base % bank_rows) * dim, dim * sizeof(float));
      return;
  }
}

}  // namespace hybridrec
