// A few threads that run one function together and meet at barriers inside it.
//
// Waiting spins for a bounded time (tens of microseconds) and then sleeps in the kernel: a pure spin collapses when other processes
// share the cores. The caller's thread is thread 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Runs job(context, thread) on every thread and returns when all have finished. Not reentrant.
  void run(void (*job)(void*, int), void* context);

  template <class Function>
  void run(Function&& function) {
    run([](void* f, int thread) { (*static_cast<std::remove_reference_t<Function>*>(f))(thread); }, &function);
  }

  // Inside a job: returns once every thread has arrived. All writes before it are visible after it.
  void barrier();

 private:
  void work(int thread);
  void stop();

  const int num_threads_;
  std::vector<std::thread> threads_;
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace paceline
