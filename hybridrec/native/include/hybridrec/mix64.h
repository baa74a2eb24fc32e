// Keys, seeds and hashes.
//
// key = mix64(id) is a bijection of 64-bit integers, so an id and its key name the same row and nothing is lost or
// doubled by storing keys only. Ids that differ in a few bits get keys that differ in half of theirs: owner ranks may
// take the low bits and the id map the high ones, without a second hash.
// Source: the 64-bit finalizer of MurmurHash3 by Austin Appleby (public domain); FNV-1a by Fowler, Noll and Vo.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hybridrec {

inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;  // 2^64 / golden ratio, odd; as in SplitMix64

constexpr uint64_t mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// Inverse of mix64. x ^= x >> 33 undoes itself; the factors are the inverses modulo 2^64.
constexpr uint64_t unmix64(uint64_t x) {
  constexpr uint64_t kInverse1 = 0x4f74430c22a54005ULL;
  constexpr uint64_t kInverse2 = 0x9cb4b2f8129337dbULL;
  static_assert(kInverse1 * 0xff51afd7ed558ccdULL == 1 && kInverse2 * 0xc4ceb9fe1a85ec53ULL == 1);
  x ^= x >> 33;
  x *= kInverse2;
  x ^= x >> 33;
  x *= kInverse1;
  x ^= x >> 33;
  return x;
}

constexpr uint64_t fnv1a64(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (char c : bytes) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

// The seed of one table's initial rows. `name` is UTF-8.
constexpr uint64_t table_seed(uint64_t seed, std::string_view name) {
  return mix64(fnv1a64(name) ^ mix64(seed + kGolden));
}

}  // namespace hybridrec
