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

template <class S> void typical(const float* x, int64_t n, float peak, float scale, float center, float* out) {
  const auto top = S::set1(peak), factor = S::set1(scale), middle = S::set1(center), lowest = S::set1(-100.0f);
  each<S>(n, [&](int64_t i, int count) {
    const auto t = S::max(S::mul(S::sub(get<S>(x + i, count), top), factor), lowest);
    put<S>(out + i, S::sub(S::zero(), S::abs(S::sub(t, middle))), count);
  });
}

template <class S> void range(const float* key, int64_t n, float* low, float* high) {
  auto least = S::set1(key[0]), most = least;
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) {
    const auto k = S::load(key + i);
    least = S::min(least, k), most = S::max(most, k);
  }
  *low = -S::top(S::sub(S::zero(), least)), *high = S::top(most);
  for (; i < n; ++i) {
    if (key[i] < *low) *low = key[i];
    if (key[i] > *high) *high = key[i];
  }
}

template <class S> double above(const float* key, const float* weight, int64_t n, float bar) {
  const auto limit = S::set1(bar);
  double total = 0;
  for (int64_t first = 0; first < n; first += kSampleBlock) {
    const int64_t left = n - first;
    auto sum = S::zero();
    each<S>(left < kSampleBlock ? left : kSampleBlock, [&](int64_t i, int count) {
      sum = S::add(sum, S::zero_where_less(get<S>(weight + first + i, count), get<S>(key + first + i, count), limit));
    });
    total += static_cast<double>(S::sum(sum));
  }
  return total;
}

// Without branches, which could not be foreseen.
inline int64_t divide_each(float* key, float* weight, int64_t n, float bar, bool upper) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float k = key[i], w = weight[i];
    key[kept] = k, weight[kept] = w;
    kept += (k >= bar) == upper;
  }
  return kept;
}

template <class S> const SampleKernels* sample_table(decltype(SampleKernels::divide) divide) {
  static const SampleKernels table{peak<S>, weigh<S>, typical<S>, range<S>, above<S>, divide};
  return &table;
}

}  // namespace
}  // namespace ridgeline
