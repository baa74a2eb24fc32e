#include "hybridrec/id_map.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace hybridrec {

namespace {

constexpr uint32_t kFirstLines = 4;
constexpr uint64_t kPlannedSegments = 1024;  // whose limits planned_bytes() looks at
constexpr uint32_t kDoublingLines = 8192;  // below, a segment doubles; then it goes to kMaxLines at once

uint32_t next_line(uint32_t line, uint32_t num_lines) { return line + 1 == num_lines ? 0 : line + 1; }

IdEntry* find_in_line(IdLine& line, int64_t key) {
  for (IdEntry& entry : line.entry) {
    if (entry.key == key && entry.row != kNoRow) return &entry;
  }
  return nullptr;
}

}  // namespace

IdMap::IdMap(Budget& budget) : budget_(budget) {
  segments_.push_back(make_segment(kFirstLines, 0, 0));
  directory_.resize(1);
  segment_index_.resize(1, 0);
  bytes_ = segment_bytes(kFirstLines);
  budget_.take(bytes_);
  publish(0);
}

IdMap::~IdMap() {
  for (auto& segment : segments_) free_segment(*segment);
  budget_.give_back(bytes_);
}

std::unique_ptr<IdMap::Segment> IdMap::make_segment(uint32_t num_lines, uint32_t depth, uint64_t prefix) {
  auto segment = std::make_unique<Segment>();
  const size_t bytes = segment_bytes(num_lines);
  void* memory = bytes * 2 > kHugePageBytes ? memory::allocate_zeroed(bytes, kHugePageBytes)
                                            : std::aligned_alloc(64, round_up(bytes, 64));
  if (memory == nullptr) throw std::bad_alloc();
  segment->lines = static_cast<IdLine*>(memory);
  segment->passed = reinterpret_cast<uint32_t*>(segment->lines + num_lines);
  segment->num_lines = num_lines;
  segment->depth = depth;
  segment->prefix = prefix;
  segment->limit = key_limit(num_lines, depth, prefix);
  for (uint32_t i = 0; i < num_lines; ++i) {
    for (IdEntry& entry : segment->lines[i].entry) entry = {kFreeKey, kNoRow, 0};
    segment->passed[i] = 0;
  }
  return segment;
}

void IdMap::free_segment(Segment& segment) {
  const size_t bytes = segment_bytes(segment.num_lines);
  if (bytes * 2 > kHugePageBytes) {
    memory::release(segment.lines, bytes);
  } else {
    std::free(segment.lines);
  }
  segment.lines = nullptr;
}

IdEntry* IdMap::find(int64_t key) const {
  const Segment& segment = segment_of(key);
  uint32_t line = line_index(static_cast<uint64_t>(key), segment.depth, segment.num_lines);
  for (;;) {
    if (IdEntry* entry = find_in_line(segment.lines[line], key)) return entry;
    if (segment.passed[line] == 0) return nullptr;
    line = next_line(line, segment.num_lines);
  }
}

IdEntry* IdMap::insert_into(Segment& segment, int64_t key, uint32_t row, uint32_t score) {
  uint32_t line = line_index(static_cast<uint64_t>(key), segment.depth, segment.num_lines);
  for (;;) {  // ends: the load is below 1
    for (IdEntry& entry : segment.lines[line].entry) {
      if (entry.row == kNoRow) {
        entry = {key, row, score};
        ++segment.size;
        return &entry;
      }
    }
    ++segment.passed[line];
    line = next_line(line, segment.num_lines);
  }
}

IdEntry* IdMap::insert(int64_t key, uint32_t row, uint32_t score) {
  ++size_;
  return insert_into(segment_of(key), key, row, score);
}

void IdMap::erase(int64_t key) {
  Segment& segment = segment_of(key);
  uint32_t line = line_index(static_cast<uint64_t>(key), segment.depth, segment.num_lines);
  for (;;) {
    if (IdEntry* entry = find_in_line(segment.lines[line], key)) {
      *entry = {kFreeKey, kNoRow, 0};
      break;
    }
    if (segment.passed[line] == 0) throw std::logic_error("id map: erase of an absent key");
    --segment.passed[line];
    line = next_line(line, segment.num_lines);
  }
  --segment.size;
  --size_;
}

bool IdMap::can_split(const Segment& segment) const {
  return segment.depth < global_depth_ || (uint64_t{2} << global_depth_) <= 64 + size_ / 64;
}

uint32_t IdMap::next_num_lines(uint32_t num_lines) {
  if (num_lines < kDoublingLines) return num_lines * 2;
  if (num_lines < kMaxLines) return kMaxLines;
  return num_lines + num_lines / 2;  // keys that agree in their high bits; such a segment is never split again
}

uint64_t IdMap::planned_bytes(uint64_t n) {
  uint32_t num_lines = kFirstLines;
  while (num_lines < kMaxLines && n > key_limit(num_lines, 0, 0)) num_lines = next_num_lines(num_lines);
  if (num_lines < kMaxLines) return segment_bytes(num_lines);
  // Keys are spread evenly, and limits differ by less than a factor of two: at one depth some segments have split and
  // some have not, above it all have, below it none. With many segments, a part of them stands for all.
  for (uint32_t depth = 0;; ++depth) {
    const uint64_t num_segments = uint64_t{1} << depth;
    const uint64_t num_seen = std::min<uint64_t>(num_segments, kPlannedSegments);
    const double keys = static_cast<double>(n) / static_cast<double>(num_segments);
    // Standard deviation of the binomial number of keys with one prefix.
    const double deviation = std::sqrt(keys * (1.0 - 1.0 / static_cast<double>(num_segments)));
    double num_split = 0;
    for (uint64_t prefix = 0; prefix < num_seen; ++prefix) {
      const double excess = keys - static_cast<double>(key_limit(kMaxLines, depth, prefix));
      if (std::fabs(excess) >= 6 * deviation) {
        num_split += excess > 0;
      } else {
        num_split += 0.5 * std::erfc(-excess / (deviation * std::sqrt(2.0)));
      }
    }
    const double share = num_split / static_cast<double>(num_seen);
    if (share < 1) {
      return static_cast<uint64_t>((1 + share) * static_cast<double>(num_segments * segment_bytes(kMaxLines)));
    }
  }
}

bool IdMap::reserve_one(int64_t key, bool must) {
  // A split can leave all keys on one side, so look again.
  for (;;) {
    const uint32_t index = segment_index_[prefix(static_cast<uint64_t>(key), global_depth_)];
    const Segment& segment = *segments_[index];
    if (segment.size < segment.limit) return true;
    const bool is_split = segment.num_lines == kMaxLines && can_split(segment);
    const uint32_t num_lines = next_num_lines(segment.num_lines);
    const uint64_t extra =
        is_split ? segment_bytes(kMaxLines) : segment_bytes(num_lines) - segment_bytes(segment.num_lines);
    if (must) {
      budget_.take(extra);
    } else if (!budget_.try_take(extra)) {
      return false;
    }
    try {
      is_split ? split(index) : enlarge(index, num_lines);
    } catch (...) {
      budget_.give_back(extra);
      throw;
    }
    bytes_ += extra;
  }
}

void IdMap::move_entries(const Segment& from, uint32_t bit_depth, Segment& zero, Segment& one) {
  for (uint32_t i = 0; i < from.num_lines; ++i) {
    for (const IdEntry& entry : from.lines[i].entry) {
      if (entry.row == kNoRow) continue;
      const bool bit = (prefix(static_cast<uint64_t>(entry.key), bit_depth) & 1) != 0;
      insert_into(bit ? one : zero, entry.key, entry.row, entry.score);
    }
  }
}

void IdMap::enlarge(uint32_t index, uint32_t num_lines) {
  Segment& old = *segments_[index];
  auto segment = make_segment(num_lines, old.depth, old.prefix);
  move_entries(old, 0, *segment, *segment);
  free_segment(old);
  segments_[index] = std::move(segment);
  publish(index);
}

void IdMap::split(uint32_t index) {
  Segment& old = *segments_[index];
  // Both halves are as large as the whole: all keys may go to one of them.
  auto zero = make_segment(kMaxLines, old.depth + 1, old.prefix * 2);
  std::unique_ptr<Segment> one;
  try {
    one = make_segment(kMaxLines, old.depth + 1, old.prefix * 2 + 1);
    segments_.reserve(segments_.size() + 1);
    if (old.depth == global_depth_) double_directory();
  } catch (...) {
    free_segment(*zero);
    if (one != nullptr) free_segment(*one);
    throw;
  }
  move_entries(old, old.depth + 1, *zero, *one);
  free_segment(old);
  segments_[index] = std::move(zero);
  segments_.push_back(std::move(one));
  publish(index);
  publish(static_cast<uint32_t>(segments_.size() - 1));
}

void IdMap::double_directory() {
  std::vector<View> directory(directory_.size() * 2);
  std::vector<uint32_t> segment_index(directory.size());
  for (size_t i = 0; i < directory.size(); ++i) {
    directory[i] = directory_[i / 2];
    segment_index[i] = segment_index_[i / 2];
  }
  directory_.swap(directory);
  segment_index_.swap(segment_index);
  ++global_depth_;
}

void IdMap::publish(uint32_t index) {
  const Segment& segment = *segments_[index];
  const uint64_t span = uint64_t{1} << (global_depth_ - segment.depth);
  for (uint64_t i = segment.prefix * span; i < (segment.prefix + 1) * span; ++i) {
    directory_[i] = {segment.lines, segment.num_lines, segment.depth};
    segment_index_[i] = index;
  }
}

void IdMap::check() const {
  uint64_t size = 0;
  uint64_t bytes = 0;
  for (const auto& segment : segments_) {
    std::vector<uint32_t> passed(segment->num_lines, 0);
    uint64_t in_segment = 0;
    for (uint32_t i = 0; i < segment->num_lines; ++i) {
      for (const IdEntry& entry : segment->lines[i].entry) {
        if (entry.row == kNoRow) continue;
        ++in_segment;
        const auto key = static_cast<uint64_t>(entry.key);
        if (prefix(key, segment->depth) != segment->prefix) throw std::logic_error("id map: key in a wrong segment");
        if (find(entry.key) != &entry) throw std::logic_error("id map: key not found where it is");
        uint32_t line = line_index(key, segment->depth, segment->num_lines);
        for (; line != i; line = next_line(line, segment->num_lines)) ++passed[line];
      }
    }
    for (uint32_t i = 0; i < segment->num_lines; ++i) {
      if (passed[i] != segment->passed[i]) throw std::logic_error("id map: overflow counter is wrong");
    }
    if (in_segment != segment->size) throw std::logic_error("id map: segment size is wrong");
    size += in_segment;
    bytes += segment_bytes(segment->num_lines);
  }
  if (size != size_ || bytes != bytes_) throw std::logic_error("id map: totals are wrong");
}

}  // namespace hybridrec
