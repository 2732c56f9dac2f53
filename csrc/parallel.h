// A team of threads that works through one call at a time: fork, phases with barriers between them, join.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ridgeline {

// Cores this process may use: the affinity mask, further limited by the cgroup's CPU quota.
int usable_cores();

struct Span {
  const uint8_t *at, *end;
};

// Memory that a thread will read next. It asks for it while it waits for others, so that memory does not idle meanwhile.
class Ahead {
 public:
  void clear() { spans_.clear(), next_ = 0; }
  void add(Span span) { spans_.push_back(span); }
  // Asks for the next few lines; false: nothing is left.
  bool step();

 private:
  std::vector<Span> spans_;
  size_t next_ = 0;
};

class Team {
 public:
  // threads <= 0: usable_cores(). The caller of run() is one of them.
  explicit Team(int threads = 0);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // body(thread) on every thread; returns when all are done. One caller at a time; others wait.
  void run(const std::function<void(int)>& body);

  // To be called by every thread of a run: nobody goes on before all have arrived.
  void barrier(int thread);

  // What `thread` fetches while it waits, in barriers and for the next run. Only for this thread itself, within a run.
  Ahead& ahead(int thread) { return slots_[static_cast<size_t>(thread)].ahead; }

 private:
  void serve(int thread);

  struct alignas(64) Slot {
    Ahead ahead;
  };
  int size_;
  std::vector<Slot> slots_;
  std::vector<std::thread> workers_;
  std::mutex callers_;                       // one run at a time
  const std::function<void(int)>* body_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};     // counts runs; a worker waits for the next value
  alignas(64) std::atomic<int32_t> busy_{0};       // workers that have not finished this run
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};     // counts barriers
  std::atomic<bool> stop_{false};
};

// The part [first, last) of `count` items that a thread takes: contiguous, equal to one item.
struct Range {
  int64_t first, last;
};
inline Range share(int64_t count, int thread, int threads) {
  return {count * thread / threads, count * (thread + 1) / threads};
}

}  // namespace ridgeline
