#include "parallel.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ridgeline {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spin for about 20 us, since the other side is usually there within one, then let others have the core: HTTP and
// tokenising share it, and a thread that was descheduled must be able to come back. What is still to be fetched comes first.
constexpr auto kSpin = std::chrono::microseconds(20);

template <class Done>
bool spin(Ahead& ahead, Done done) {
  while (ahead.step())
    if (done()) return true;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  std::ifstream file("/sys/fs/cgroup/cpu.max");       // "quota period" in microseconds, or "max period"
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0) {
    char* end = nullptr;
    const double value = std::strtod(quota.c_str(), &end);
    if (end != quota.c_str() && value > 0) cores = std::min(cores, static_cast<int>(std::ceil(value / period)));
  }
  return std::max(1, cores);
}

bool Ahead::step() {
  constexpr int kLines = 4;
  while (next_ < spans_.size() && spans_[next_].at >= spans_[next_].end) ++next_;
  if (next_ == spans_.size()) return false;
  Span& span = spans_[next_];
  for (int i = 0; i < kLines; ++i, span.at += 64) __builtin_prefetch(span.at, 0, 2);
  return true;
}

Team::Team(int threads) : size_(threads > 0 ? threads : usable_cores()), slots_(static_cast<size_t>(size_)) {
  for (int t = 1; t < size_; ++t) workers_.emplace_back([this, t] { serve(t); });
}

Team::~Team() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Team::run(const std::function<void(int)>& body) {
  std::lock_guard<std::mutex> lock(callers_);
  if (size_ == 1) return body(0);
  body_ = &body;
  busy_.store(size_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  body(0);
  if (!spin(slots_[0].ahead, [this] { return busy_.load(std::memory_order_acquire) == 0; })) {
    for (int32_t left = busy_.load(std::memory_order_acquire); left != 0; left = busy_.load(std::memory_order_acquire))
      busy_.wait(left, std::memory_order_acquire);
  }
}

void Team::serve(int thread) {
  uint32_t seen = 0;
  Ahead& ahead = slots_[static_cast<size_t>(thread)].ahead;
  for (;;) {
    if (!spin(ahead, [&] { return epoch_.load(std::memory_order_acquire) != seen; })) epoch_.wait(seen, std::memory_order_acquire);
    const uint32_t now = epoch_.load(std::memory_order_acquire);
    if (now == seen) continue;
    seen = now;
    if (stop_.load()) return;
    (*body_)(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

void Team::barrier(int thread) {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  // On a busy machine the others may have lost their cores; to yield in a loop would keep taking them away.
  Ahead& ahead = slots_[static_cast<size_t>(thread)].ahead;
  if (!spin(ahead, [&] { return phase_.load(std::memory_order_acquire) != phase; })) phase_.wait(phase, std::memory_order_acquire);
}

}  // namespace ridgeline
