// Where the time of a model's calls goes: one event for each part of a call, stamped by the calling thread when all
// threads have finished the part.
#pragma once
#include <chrono>
#include <cstdint>
#include <vector>

namespace ridgeline {

enum class Part : int32_t {
  embed, attention_norm, qkv, heads, core, out, attention_residual, mlp_norm, up, down, mlp_residual, final_norm, head, sample
};

constexpr const char* kPartNames[] = {
    "embed", "attention.norm", "attention.qkv", "attention.heads", "attention.core", "attention.out", "attention.residual",
    "mlp.norm", "mlp.up", "mlp.down", "mlp.residual", "final_norm", "head", "sample"};

struct Event {
  int64_t layer;                // -1: of no layer
  Part part;
  int64_t rows;
  int64_t start_ns, end_ns;     // of the monotonic clock
};

class Trace {
 public:
  bool on = false;
  std::vector<Event> events;

  // A call begins; its first part begins with it.
  void begin(int64_t layer, int64_t rows) {
    if (on) layer_ = layer, rows_ = rows, last_ = now();
  }
  // A part ends here, and the next one begins.
  void end(Part part) {
    if (!on) return;
    const int64_t t = now();
    events.push_back({layer_, part, rows_, last_, t});
    last_ = t;
  }

 private:
  static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
  int64_t layer_ = -1, rows_ = 0, last_ = 0;
};

}  // namespace ridgeline
