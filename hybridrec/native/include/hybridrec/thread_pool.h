// A few threads that work through the tables of one call together with the caller.
//
// Tables are handed out one by one through an atomic counter; which thread takes which table changes no result, since
// tables share nothing but the host budget (see ShardGroup::plan). With one thread nothing is started.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include <unistd.h>

namespace hybridrec {

class ThreadPool {
 public:
  explicit ThreadPool(size_t num_threads) : owner_(getpid()) {
    for (size_t i = 1; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ThreadPool(const ThreadPool&) = delete;  // threads hold `this`
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    if (getpid() != owner_) {  // after fork() the threads exist in the parent only
      for (std::thread& thread : threads_) thread.detach();
      return;
    }
    {
      std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Calls task(i) once for every i < n; returns when all are done. Rethrows the first exception that was noticed.
  template <typename Task>
  void for_each(size_t n, Task&& task) {
    if (threads_.empty() || n < 2 || getpid() != owner_) {
      for (size_t i = 0; i < n; ++i) task(i);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      call_ = [](void* t, size_t i) { (*static_cast<std::remove_reference_t<Task>*>(t))(i); };
      task_ = const_cast<void*>(static_cast<const void*>(&task));
      count_ = n;
      next_.store(0, std::memory_order_relaxed);
      num_working_ = threads_.size();
      error_ = nullptr;
      ++round_;
    }
    wake_.notify_all();
    take_tasks();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return num_working_ == 0; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  void take_tasks() {
    for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) {
      try {
        call_(task_, i);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (error_ == nullptr) error_ = std::current_exception();
      }
    }
  }
  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return is_closing_ || round_ != seen; });
        if (is_closing_) return;
        seen = round_;
      }
      take_tasks();
      std::lock_guard lock(mutex_);
      if (--num_working_ == 0) done_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> threads_;
  void (*call_)(void*, size_t) = nullptr;
  void* task_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  size_t num_working_ = 0;
  uint64_t round_ = 0;
  bool is_closing_ = false;
  std::exception_ptr error_;
};

}  // namespace hybridrec
