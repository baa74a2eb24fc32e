// Where the rows that have no slot live: records [weights D | row-sized states M x D] and, beside them, row-wise states.
//
// A chunk is one huge page or a little less: as many records as fit with their row-wise states, which stand behind the
// records, a parallel array each. Records begin at multiples of 64 bytes, so a row never shares a cache line with
// another and can be written past the cache. Chunks are allocated when a row of theirs is first written back: a table
// that fits its slots costs nothing here. Chunks never move. The first chunk of a table has ordinary pages, which are
// taken as rows come: there may be thousands of small tables.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "hybridrec/memory.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hybridrec {

// Copies floats past the cache if the destination allows it: what is written back is not read soon.
inline void stream_floats(float* to, const float* from, size_t n) {
#if defined(__SSE2__)
  if (n % 4 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (size_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
    return;
  }
#endif
  std::memcpy(to, from, n * sizeof(float));
}

// Makes streamed writes visible to other threads.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

class RowStore {
 public:
  // record_floats: of weights and row-sized states.
  RowStore(Budget& budget, uint64_t record_floats, uint32_t num_row_wise_states)
      : budget_(budget),
        record_floats_(record_floats),
        stride_floats_(round_up(record_floats_, 16)),
        num_row_wise_(num_row_wise_states) {
    const uint64_t row_bytes = (stride_floats_ + num_row_wise_) * sizeof(float);
    rows_per_chunk_ = static_cast<uint32_t>(row_bytes < kHugePageBytes ? kHugePageBytes / row_bytes : 1);
    chunk_bytes_ = round_up(rows_per_chunk_ * row_bytes, kHugePageBytes);
  }
  RowStore(const RowStore&) = delete;  // owns its chunks
  RowStore& operator=(const RowStore&) = delete;
  ~RowStore() {
    for (float* chunk : chunks_) {
      if (chunk != nullptr) memory::release(chunk, chunk_bytes_);
    }
    budget_.give_back(bytes_);
  }

  uint64_t bytes() const { return bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint32_t chunk_of(uint32_t row) const { return row / rows_per_chunk_; }
  uint64_t planned_bytes(uint64_t rows) const { return num_chunks_below(rows) * chunk_bytes_; }
  uint64_t num_chunks_below(uint64_t rows) const { return (rows + rows_per_chunk_ - 1) / rows_per_chunk_; }
  bool has_chunk(uint32_t chunk) const { return chunk < chunks_.size() && chunks_[chunk] != nullptr; }

  // False: the budget refused, nothing changed.
  bool allocate_chunk(uint32_t chunk) {
    if (chunk >= chunks_.size()) chunks_.resize(chunk + 1, nullptr);
    if (!budget_.try_take(chunk_bytes_)) return false;
    try {
      chunks_[chunk] = static_cast<float*>(memory::allocate_zeroed(chunk_bytes_, kHugePageBytes, chunk != 0));
    } catch (...) {
      budget_.give_back(chunk_bytes_);
      throw;
    }
    bytes_ += chunk_bytes_;
    return true;
  }
  void free_chunk(uint32_t chunk) {
    memory::release(chunks_[chunk], chunk_bytes_);
    chunks_[chunk] = nullptr;
    bytes_ -= chunk_bytes_;
    budget_.give_back(chunk_bytes_);
  }

  // Of a row whose chunk exists.
  float* record(uint32_t row) const {
    return chunks_[row / rows_per_chunk_] + uint64_t{row % rows_per_chunk_} * stride_floats_;
  }
  float* row_wise(uint32_t row, uint32_t state) const {
    return chunks_[row / rows_per_chunk_] + rows_per_chunk_ * (stride_floats_ + state) + row % rows_per_chunk_;
  }
  void prefetch_record(uint32_t row) const {
    const float* start = record(row);
    for (uint64_t i = 0; i < record_floats_ && i < 256; i += 16) prefetch(start + i);
  }

 private:
  Budget& budget_;
  const uint64_t record_floats_;
  const uint64_t stride_floats_;
  const uint32_t num_row_wise_;
  uint32_t rows_per_chunk_ = 1;
  uint64_t chunk_bytes_ = 0;
  uint64_t bytes_ = 0;
  std::vector<float*> chunks_;
};

}  // namespace hybridrec
