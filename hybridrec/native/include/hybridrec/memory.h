// Host memory: the budget, and arrays that grow without copying.
//
// PageArray grows by moving page tables (mremap), so that the 10^9th row costs what the first did, and asks for huge
// pages, which halve the cost of random access. New memory is zero. HYBRIDREC_PLAIN_MEMORY (sanitizer builds, systems
// without mremap) takes it from the heap instead, where address checks work.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if !defined(__linux__)
#define HYBRIDREC_PLAIN_MEMORY 1
#endif
#if !defined(HYBRIDREC_PLAIN_MEMORY)
#include <sys/mman.h>
#endif

namespace hybridrec {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
inline void prefetch_for_write(const void* address) { __builtin_prefetch(address, 1, 3); }

// What all shards of a group may allocate. Tables grow on several threads, hence the atomic.
class Budget {
 public:
  explicit Budget(uint64_t limit_bytes) : limit_(limit_bytes) {}
  // Takes `bytes` or, if the limit would be passed, nothing.
  bool try_take(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (limit_ != 0 && (used > limit_ || bytes > limit_ - used)) {
        last_refused_.store(used + bytes, std::memory_order_relaxed);
        return false;
      }
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  // For memory that must not be refused: restoring what was there before.
  void take(uint64_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }
  void give_back(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t limit() const { return limit_; }
  // What the last request that was refused would have raised `used` to.
  uint64_t last_refused() const { return last_refused_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> last_refused_{0};
  std::atomic<uint64_t> used_{0};
};

namespace memory {

#if defined(HYBRIDREC_PLAIN_MEMORY)
inline void* allocate_zeroed(size_t bytes, size_t alignment, bool = true) {
  void* p = std::aligned_alloc(alignment, round_up(bytes, alignment));
  if (p == nullptr) throw std::bad_alloc();
  std::memset(p, 0, bytes);
  return p;
}
inline void release(void* p, size_t) { std::free(p); }
inline void* grow(void* p, size_t old_bytes, size_t new_bytes) {
  void* grown = allocate_zeroed(new_bytes, kPageBytes);
  if (p != nullptr) std::memcpy(grown, p, old_bytes);
  std::free(p);
  return grown;
}
#else
// Zeroed pages at a multiple of `alignment` (a power of two, >= kPageBytes).
inline void* allocate_zeroed(size_t bytes, size_t alignment, bool are_pages_huge = true) {
  bytes = round_up(bytes, kPageBytes);
  const size_t mapped = bytes + (alignment > kPageBytes ? alignment : 0);
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto start = reinterpret_cast<uintptr_t>(p);
  const uintptr_t aligned = round_up(start, alignment);
  if (aligned > start) munmap(p, aligned - start);
  const size_t tail = start + mapped - (aligned + bytes);
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  p = reinterpret_cast<void*>(aligned);
  // Advice only: without huge pages everything works, slower.
  if (bytes >= kHugePageBytes && are_pages_huge) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}
inline void release(void* p, size_t bytes) {
  if (p != nullptr) munmap(p, round_up(bytes, kPageBytes));
}
inline void* grow(void* p, size_t old_bytes, size_t new_bytes) {
  if (p == nullptr) return allocate_zeroed(new_bytes, new_bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes);
  void* grown = mremap(p, round_up(old_bytes, kPageBytes), round_up(new_bytes, kPageBytes), MREMAP_MAYMOVE);
  if (grown == MAP_FAILED) throw std::bad_alloc();
  if (new_bytes >= kHugePageBytes) madvise(grown, round_up(new_bytes, kPageBytes), MADV_HUGEPAGE);
  return grown;
}
#endif

}  // namespace memory

// A growing array of plain values. Memory not yet written reads as zero.
template <typename T>
class PageArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  PageArray() = default;
  PageArray(const PageArray&) = delete;  // owns its pages
  PageArray& operator=(const PageArray&) = delete;
  PageArray(PageArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}
  PageArray& operator=(PageArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~PageArray() { memory::release(data_, capacity_ * sizeof(T)); }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t capacity() const { return capacity_; }
  uint64_t bytes() const { return uint64_t{capacity_} * sizeof(T); }

  // The capacity that `reserve(n)` gives.
  size_t capacity_for(size_t n) const { return next_capacity(capacity_, n); }
  // Bytes of an array that grew from nothing to n elements one by one.
  static uint64_t planned_bytes(size_t n) {
    size_t capacity = 0;
    while (capacity < n) capacity = next_capacity(capacity, capacity + 1);
    return uint64_t{capacity} * sizeof(T);
  }
  void reserve(size_t n) {
    const size_t capacity = capacity_for(n);
    if (capacity == capacity_) return;
    data_ = static_cast<T*>(memory::grow(data_, capacity_ * sizeof(T), capacity * sizeof(T)));
    capacity_ = capacity;
  }

 private:
  // By half at least, in whole pages.
  static size_t next_capacity(size_t capacity, size_t n) {
    if (n <= capacity) return capacity;
    const size_t wanted = n > capacity + capacity / 2 ? n : capacity + capacity / 2;
    return round_up(wanted * sizeof(T), kPageBytes) / sizeof(T);
  }

  T* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace hybridrec
