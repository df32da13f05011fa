#include "base/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

// A pause is 40 to 140 cycles, so these are roughly 40 and 300 microseconds: longer than any phase of a small step, and longer than the
// caller needs between two steps, yet short enough to give the core back when others want it.
constexpr int kBarrierSpins = 2000;
constexpr int kIdleSpins = 12000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  try {
    for (int t = 1; t < num_threads; ++t) threads_.emplace_back([this, t] { work(t); });
  } catch (...) {  // the system gives no more threads: those that run must end before the error goes on
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(void (*job)(void*, int), void* context) {
  if (num_threads_ == 1) return job(context, 0);
  job_ = job;
  context_ = context;
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  job(context, 0);
  barrier();
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    // Sequentially consistent: the notification must not look for sleepers before the new value can be seen.
    generation_.store(generation + 1, std::memory_order_seq_cst);
    generation_.notify_all();
    return;
  }
  wait_for_change(generation_, generation, kBarrierSpins);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(epoch_, seen, kIdleSpins);
    ++seen;
    if (stopping_) return;
    job_(context_, thread);
    barrier();
  }
}

}  // namespace paceline
