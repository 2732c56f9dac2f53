// Passes over logits for a vector type S.
#pragma once
#include "../sample.h"
#include "small_kernels.h"

namespace ridgeline {
namespace {

template <class S> float peak(const float* x, int64_t n, bool* odd) {
  using F = typename S::F;
  const F none = S::set1(-__builtin_inff()), infinite = S::set1(__builtin_inff());
  F top[2] = {none, none}, bad = S::zero();
  int64_t i = 0;
  for (; i + 2 * S::kLanes <= n; i += 2 * S::kLanes)
    for (int k = 0; k < 2; ++k) {
      const F v = S::load(x + i + k * S::kLanes);
      top[k] = S::max(v, top[k]);
      bad = S::max(bad, S::select_less(v, infinite, S::zero(), S::set1(1.0f)));
    }
  float most = S::top(S::max(top[0], top[1]));
  bool strange = S::top(bad) > 0;
  for (; i < n; ++i) {
    if (x[i] > most) most = x[i];
    strange |= !(x[i] < __builtin_inff());
  }
  if (strange) *odd = true;
  return most;
}

template <class S>
float weigh(const float* x, int64_t n, float peak, float scale, float least, float* out, float* moment) {
  using F = typename S::F;
  const F top = S::set1(peak), factor = S::set1(scale), bar = S::set1(least), lowest = S::set1(-100.0f);
  F sum[2] = {S::zero(), S::zero()}, first = S::zero();
  int turn = 0;
  each<S>(n, [&](int64_t i, int count) {
    const F v = get<S>(x + i, count);
    const F t = S::mul(S::sub(v, top), factor);
    F w = S::zero_where_less(exp_of<S>(t), v, bar);
    if (count < S::kLanes) w = S::keep(w, count);
    sum[turn] = S::add(sum[turn], w);
    turn ^= 1;
    if (moment) first = S::fma(w, S::max(t, lowest), first);      // 0 * -infinity is no number
    if (out) put<S>(out + i, w, count);
  });
  if (moment) *moment = S::sum(first);
  return S::sum(S::add(sum[0], sum[1]));
}

template <class S> const SampleKernels* sample_table() {
  static const SampleKernels table{peak<S>, weigh<S>};
  return &table;
}

}  // namespace
}  // namespace ridgeline
