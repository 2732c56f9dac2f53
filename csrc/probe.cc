#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "memory.h"

namespace ridgeline {
namespace {

using Vector = uint64_t __attribute__((vector_size(64)));
constexpr int64_t kVectors = 8, kStep = kVectors * static_cast<int64_t>(sizeof(Vector)), kAhead = 4096;
constexpr int kPasses = 8;

// Vectors of what this machine has; chosen when the library is loaded, as the kernels are. Reads run ahead as theirs do.
#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t read_all(const uint8_t* data, int64_t steps, int64_t repeats) {
  Vector sums[kVectors] = {};
  for (int64_t again = 0; again < repeats; ++again) {
    const uint8_t* at = data;
    for (int64_t i = 0; i < steps; ++i, at += kStep) {
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) {
        __builtin_prefetch(at + kAhead + v * 64, 0, 2);
        sums[v] += reinterpret_cast<const Vector*>(at)[v];
      }
    }
  }
  uint64_t total = 0;
  for (const Vector& sum : sums)
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

template <class Body>
double best_seconds(int passes, Body body) {
  double best = 1e9;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

double read_bandwidth(Team& team, int64_t bytes, int64_t repeats) {
  const int64_t steps = bytes / kStep;
  const Buffer buffer(static_cast<size_t>(steps * kStep));
  std::atomic<uint64_t> sink{0};                     // what is read must be used
  team.run([&](int thread) {                         // untouched pages would all be one page of zeros
    const Range mine = share(steps, thread, team.size());
    std::fill(buffer.data() + mine.first * kStep, buffer.data() + mine.last * kStep, uint8_t{1});
  });
  const double seconds = best_seconds(kPasses, [&] {
    team.run([&](int thread) {
      const Range mine = share(steps, thread, team.size());
      sink.fetch_xor(read_all(buffer.data() + mine.first * kStep, mine.last - mine.first, repeats), std::memory_order_relaxed);
    });
  });
  return static_cast<double>(buffer.size()) * static_cast<double>(repeats) / seconds;
}

double barrier_seconds(Team& team) {
  constexpr int kCount = 200;
  return best_seconds(kPasses, [&] {
    team.run([&](int thread) {
      for (int i = 0; i < kCount; ++i) team.barrier(thread);
    });
  }) / kCount;
}

double fork_seconds(Team& team) {
  constexpr int kCount = 100;
  return best_seconds(kPasses, [&] {
    for (int i = 0; i < kCount; ++i) team.run([](int) {});
  }) / kCount;
}

}  // namespace ridgeline
