#include "program/hardware_probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/thread_pool.h"
#include "program/program.h"

namespace paceline {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Sum of 64-bit words: eight independent chains, so that loads and not additions limit it.
uint64_t read_all(const uint64_t* words, size_t count) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8)
    for (size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
  uint64_t total = 0;
  for (uint64_t s : sums) total += s;
  return total;
}

}  // namespace

double measure_bandwidth(int num_threads) {
  constexpr size_t kBytes = size_t{256} << 20;
  constexpr int kPasses = 5;
  const Region region(kBytes);
  std::memset(region.as<uint8_t>(), 1, kBytes);
  ThreadPool pool(num_threads);
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double start = now();
    pool.run([&](int thread) {
      const size_t words = kBytes / 8 / static_cast<size_t>(num_threads) / 8 * 8;
      const uint64_t sum = read_all(region.as<uint64_t>() + words * static_cast<size_t>(thread), words);
      __asm__ volatile("" : : "r"(sum));
    });
    best = std::max(best, static_cast<double>(kBytes) / (now() - start) / 1e9);
  }
  return best;
}

double measure_int8_peak(const Kernels& kernels, int num_threads) {
  constexpr int64_t kIterations = 200000;
  constexpr int kPasses = 5;
  ThreadPool pool(num_threads);
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double start = now();
    pool.run([&](int) { kernels.int8_peak(kIterations); });
    const double operations = kernels.int8_peak(1) * static_cast<double>(kIterations) * num_threads;
    best = std::max(best, operations / (now() - start) / 1e9);
  }
  return best;
}

}  // namespace paceline
