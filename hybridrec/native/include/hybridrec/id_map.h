// The id map of one table shard: key -> {row number, score}.
//
// Structure. A directory, indexed by the top bits of the key, points to segments; a segment is an array of 64-byte
// lines of four entries {int64 key, uint32 row, uint32 score}. The home line of a key is a multiply-shift of its bits
// below the segment's prefix; a key that finds its line full goes to the next one, cyclically. For each line there is
// a counter of the keys that passed it on their way to a later line: a search stops at a line whose counter is 0, and
// erase decrements what insert incremented, so there are no tombstones and churn does not wear the table out.
//
// Every int64 is an ordinary key: an entry is free when its *row* is kNoRow. Free entries hold kFreeKey, so that a
// mere comparison of keys almost never stops at one.
//
// Growth. A segment that reaches its load (0.58 .. 0.70, differing from segment to segment, so that they do not all
// grow in the same batch) is enlarged up to kMaxLines = 2 MiB, then splits in two by the next bit: a batch pays for the
// segments it fills, never for the whole map. Keys chosen to share all high bits make one segment long and slow, not
// the directory large: it may not exceed 64 entries + 1 for every 64 keys.
//
// Cost: a hit is one random cache line (about 1.1 at the highest load), insert the same, iteration is sequential.
// Idea of overflow counters: Folly's F14 (Bronson, Shi 2019). Extendible directory: Fagin et al. 1979.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hybridrec/memory.h"
#include "hybridrec/mix64.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hybridrec {

inline constexpr uint32_t kNoRow = 0xffffffffu;

struct IdEntry {
  int64_t key;
  uint32_t row;
  uint32_t score;
};

struct alignas(64) IdLine {
  IdEntry entry[4];
};
static_assert(sizeof(IdLine) == 64);

class IdMap {
 public:
  static constexpr int64_t kFreeKey = static_cast<int64_t>(0xd1b54a32d192ed03ULL);
  static constexpr uint32_t kMaxLines = 30720;  // lines and counters together fill one huge page

  explicit IdMap(Budget& budget);
  IdMap(const IdMap&) = delete;  // owns its segments
  IdMap& operator=(const IdMap&) = delete;
  ~IdMap();

  uint64_t size() const { return size_; }
  uint64_t bytes() const { return bytes_; }
  // What `bytes()` will be once n keys are inserted; of so many segments as split on average.
  static uint64_t planned_bytes(uint64_t n);
  // More than `bytes()` can rise by while n keys are inserted.
  uint64_t growth_bound(uint64_t n) const { return bytes_ + bytes_ / 2 + 96 * n + kHugePageBytes; }

  // The line at which the search for a key begins. Valid until the next insert.
  IdLine* home(int64_t key) const {
    const View& view = directory_[prefix(static_cast<uint64_t>(key), global_depth_)];
    return view.lines + line_index(static_cast<uint64_t>(key), view.depth, view.num_lines);
  }
  // The entry of `key` in its home line `line`, or nullptr: then find() decides.
  static IdEntry* match(IdLine* line, int64_t key);
  // The entry of `key`, or nullptr.
  IdEntry* find(int64_t key) const;

  // Makes room for one more key. False: the budget refused, nothing changed. `must`: the budget is not asked.
  bool reserve_one(int64_t key, bool must);
  // Adds an absent key after reserve_one().
  IdEntry* insert(int64_t key, uint32_t row, uint32_t score);
  // Removes a present key.
  void erase(int64_t key);

  template <typename Visitor>
  void for_each(Visitor&& visit) const {
    for (const auto& segment : segments_) {
      for (uint32_t i = 0; i < segment->num_lines; ++i) {
        for (const IdEntry& entry : segment->lines[i].entry) {
          if (entry.row != kNoRow) visit(entry);
        }
      }
    }
  }
  // Throws std::logic_error if an invariant is broken. O(entries * lines of a chain), for tests.
  void check() const;

 private:
  struct Segment {
    IdLine* lines = nullptr;
    uint32_t* passed = nullptr;  // [num_lines] keys that passed the line on their way to a later one
    uint32_t num_lines = 0;
    uint32_t depth = 0;  // length of the prefix
    uint64_t prefix = 0;
    uint64_t size = 0;
    uint64_t limit = 0;  // keys at which it grows
  };
  struct View {  // what a search needs of a segment, 16 bytes, in the directory itself
    IdLine* lines;
    uint32_t num_lines;
    uint32_t depth;
  };

  static uint64_t prefix(uint64_t key, uint32_t depth) { return (key >> 1) >> (63 - depth); }
  static uint32_t line_index(uint64_t key, uint32_t depth, uint32_t num_lines) {
    return static_cast<uint32_t>(((key << depth) >> 32) * num_lines >> 32);
  }
  static uint64_t segment_bytes(uint32_t num_lines) { return uint64_t{num_lines} * (sizeof(IdLine) + 4); }
  // Keys at which a segment grows; a pure function of its place, so equal histories give equal maps.
  static uint64_t key_limit(uint32_t num_lines, uint32_t depth, uint64_t prefix) {
    const uint64_t jitter = mix64(prefix * 64 + depth + kGolden) >> 56;
    return uint64_t{num_lines} * 4 * (594 + jitter * 123 / 256) / 1024;
  }
  static uint32_t next_num_lines(uint32_t num_lines);
  static std::unique_ptr<Segment> make_segment(uint32_t num_lines, uint32_t depth, uint64_t prefix);
  static void free_segment(Segment& segment);
  static IdEntry* insert_into(Segment& segment, int64_t key, uint32_t row, uint32_t score);
  static void move_entries(const Segment& from, uint32_t bit_depth, Segment& zero, Segment& one);

  Segment& segment_of(int64_t key) const {
    return *segments_[segment_index_[prefix(static_cast<uint64_t>(key), global_depth_)]];
  }
  bool can_split(const Segment& segment) const;
  void enlarge(uint32_t index, uint32_t num_lines);
  void split(uint32_t index);
  void publish(uint32_t index);
  void double_directory();

  Budget& budget_;
  std::vector<View> directory_;
  std::vector<uint32_t> segment_index_;  // as long as the directory
  std::vector<std::unique_ptr<Segment>> segments_;
  uint32_t global_depth_ = 0;
  uint64_t size_ = 0;
  uint64_t bytes_ = 0;
};

inline IdEntry* IdMap::match(IdLine* line, int64_t key) {
#if defined(__SSE2__)
  // Branch-free: which of the four entries matches is random, a branch on it would be mispredicted.
  const __m128i wanted = _mm_set1_epi64x(key);
  // Keys only, never a whole entry: a hot entry's score was written a moment ago, and a load wider than a store that
  // is still in the store buffer waits for it.
  const auto load_keys = [line](int i, int j) {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&line->entry[i].key));
    const auto* high = reinterpret_cast<const __m64*>(&line->entry[j].key);
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), high));
  };
  const __m128i keys01 = load_keys(0, 1);
  const __m128i keys23 = load_keys(2, 3);
  const __m128 equal01 = _mm_castsi128_ps(_mm_cmpeq_epi32(keys01, wanted));
  const __m128 equal23 = _mm_castsi128_ps(_mm_cmpeq_epi32(keys23, wanted));
  const __m128 low = _mm_shuffle_ps(equal01, equal23, _MM_SHUFFLE(2, 0, 2, 0));
  const __m128 high = _mm_shuffle_ps(equal01, equal23, _MM_SHUFFLE(3, 1, 3, 1));
  const unsigned mask = static_cast<unsigned>(_mm_movemask_ps(_mm_and_ps(low, high)));
#else
  unsigned mask = 0;
  for (unsigned i = 0; i < 4; ++i) mask |= static_cast<unsigned>(line->entry[i].key == key) << i;
#endif
  if (mask == 0) return nullptr;
  IdEntry* entry = &line->entry[__builtin_ctz(mask)];
  return entry->row != kNoRow ? entry : nullptr;
}

}  // namespace hybridrec
