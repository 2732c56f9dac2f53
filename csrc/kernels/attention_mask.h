// Which keys a token sees, 64 at a time. Integer code, compiled into each instruction set's file under its own flags.
#pragma once
#include "../attention.h"

namespace ridgeline {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Bits [from, to) of a word, both clamped to 0..64.
inline uint64_t interval_bits(int64_t from, int64_t to) {
  from = larger(from, 0);
  to = smaller(to, 64);
  if (from >= to) return 0;
  const uint64_t upto = to == 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1;
  return upto & (~uint64_t{0} << from);
}

// 64 bits that begin at bit `offset` of an array of `words`; bits outside are 0.
inline uint64_t bits_at(const uint64_t* bits, int64_t words, int64_t offset) {
  const int64_t word = offset >= 0 ? offset / 64 : -((-offset + 63) / 64);
  const int64_t shift = offset - word * 64;
  const uint64_t low = word >= 0 && word < words ? bits[word] : 0;
  const uint64_t high = word + 1 >= 0 && word + 1 < words ? bits[word + 1] : 0;
  return shift == 0 ? low : (low >> shift) | (high << (64 - shift));
}

struct Visibility {
  const AttentionTask& task;
  bool linear;   // the run's positions are its cache positions: then a window is an interval

  explicit Visibility(const AttentionTask& t) : task(t), linear(true) {
    if (t.window > 0)
      for (int64_t i = 0; i < t.tokens && linear; ++i) linear = t.position[i] == t.run_start + i;
  }
  // Bounds that hold every visible key of token t, perhaps others too.
  int64_t begin(int64_t t) const {
    const int64_t lo = larger(task.lo[t], 0);
    if (task.window <= 0) return lo;
    const int64_t edge = task.position[t] - task.window + 1;
    return larger(lo, linear ? edge : smaller(edge, task.run_start));
  }
  int64_t end(int64_t t) const { return smaller(task.hi[t], task.context); }

  // Bit i = key base + i is visible to token t.
  uint64_t operator()(int64_t t, int64_t base) const {
    uint64_t bits = interval_bits(begin(t) - base, end(t) - base);
    const int64_t run = task.run_start - base;   // first bit of the run
    if (bits == 0 || run >= 64) return bits;
    const uint64_t before = interval_bits(0, run);
    if (task.ancestors) {
      const int64_t words = (task.tokens + 63) / 64;
      bits &= before | bits_at(task.ancestors + t * words, words, -run);
    }
    if (task.window > 0 && !linear) {
      for (int64_t i = larger(run, 0); i < smaller(64, run + task.tokens); ++i)
        if (task.position[i - run] <= task.position[t] - task.window) bits &= ~(uint64_t{1} << i);
    }
    return bits;
  }
};

}  // namespace
}  // namespace ridgeline
