// Partial results of chunks, added in ascending order, and the division at the end.
#pragma once
#include "simd_math.h"

namespace ridgeline {
namespace {

// What several chunks sum to: m, l, acc += those of the next chunk.
template <class S> struct Merge {
  using F = typename S::F;
  static float exp1(float x) { return S::lane0(exp_of<S>(S::set1(x))); }

  static void add(float& m, float& l, float* acc, float m2, float l2, const float* acc2, int64_t dv) {
    if (m2 == -__builtin_inff()) return;
    const float peak = m2 > m ? m2 : m;
    const float a = exp1(m - peak), b = exp1(m2 - peak);
    m = peak;
    l = S::lane0(S::fma(S::set1(l), S::set1(a), S::set1(l2 * b)));
    const F x = S::set1(a), y = S::set1(b);
    int64_t i = 0;
    for (; i + S::kLanes <= dv; i += S::kLanes)
      S::store(acc + i, S::fma(S::load(acc + i), x, S::mul(S::load(acc2 + i), y)));
    if (i < dv) {
      const int n = static_cast<int>(dv - i);
      S::store_part(acc + i, S::fma(S::load_part(acc + i, n), x, S::mul(S::load_part(acc2 + i, n), y)), n);
    }
  }
  static void finish(const AttentionTask& task, int64_t row, float m, float l, const float* acc, int64_t dv) {
    float factor = 1.0f;
    if (task.sinks) {
      const float sink = task.sinks[row % task.group], peak = sink > m ? sink : m;
      factor = exp1(m - peak);
      l = l * factor + exp1(sink - peak);
    }
    const F scale = S::set1(l == 0.0f ? 0.0f : factor / l);   // nothing visible: 0. NaN stays NaN.
    float* out = task.out + row / task.group * task.out_token + row % task.group * task.out_head;
    int64_t i = 0;
    for (; i + S::kLanes <= dv; i += S::kLanes) S::store(out + i, S::mul(S::load(acc + i), scale));
    if (i < dv) {
      const int n = static_cast<int>(dv - i);
      S::store_part(out + i, S::mul(S::load_part(acc + i, n), scale), n);
    }
  }
};

template <class S>
void combine(const AttentionTask& task, int64_t first, int64_t last, int64_t parts, const float* m, const float* l,
             const float* acc) {
  const int64_t rows = (last - first) * task.group;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = first * task.group + r;
    float* sum = task.out + row / task.group * task.out_token + row % task.group * task.out_head;
    float mt = -__builtin_inff(), lt = 0;
    for (int64_t i = 0; i < task.dv; ++i) sum[i] = 0;
    for (int64_t p = 0; p < parts; ++p)
      Merge<S>::add(mt, lt, sum, m[p * rows + r], l[p * rows + r], acc + (p * rows + r) * task.dv, task.dv);
    Merge<S>::finish(task, row, mt, lt, sum, task.dv);
  }
}

}  // namespace
}  // namespace ridgeline
