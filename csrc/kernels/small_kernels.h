// Norms, rotation, activations and cache rows over a vector type S. A row's order of operations depends on n alone.
#pragma once
#include "simd_math.h"

namespace ridgeline {
namespace {

// f(vector index i, count): whole vectors first, then one partial vector.
template <class S, class Body> inline void each(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes) body(i, S::kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}
template <class S, class T> inline typename S::F get(const T* p, int count) {
  return count == S::kLanes ? S::load(p) : S::load_part(p, count);
}
template <class S> inline void put(float* p, typename S::F x, int count) {
  if (count == S::kLanes) S::store(p, x);
  else S::store_part(p, x, count);
}

// Sum of (x - mean)^2 over n, in four independent vectors.
template <class S> inline float square_sum(const float* x, int64_t n, float mean) {
  using F = typename S::F;
  const F mu = S::set1(mean);
  F s[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  int64_t i = 0;
  for (; i + 4 * S::kLanes <= n; i += 4 * S::kLanes)
    for (int k = 0; k < 4; ++k) {
      const F a = S::sub(S::load(x + i + k * S::kLanes), mu);
      s[k] = S::fma(a, a, s[k]);
    }
  each<S>(n - i, [&](int64_t j, int count) {
    const F a = S::sub(get<S>(x + i + j, count), count == S::kLanes ? mu : S::keep(mu, count));
    s[0] = S::fma(a, a, s[0]);
  });
  return S::sum(S::add(S::add(s[0], s[1]), S::add(s[2], s[3])));
}

template <class S> inline float plain_sum(const float* x, int64_t n) {
  typename S::F s = S::zero();
  each<S>(n, [&](int64_t i, int count) { s = S::add(s, get<S>(x + i, count)); });
  return S::sum(s);
}

template <class S, bool Add>
void norm(const float* x, const float* weight, const float* bias, int64_t n, float mean, float inverse, float* out) {
  using F = typename S::F;
  const F mu = S::set1(mean), scale = S::set1(inverse);
  each<S>(n, [&](int64_t i, int count) {
    F y = S::mul(S::sub(get<S>(x + i, count), mu), scale);
    if (weight) y = S::mul(y, get<S>(weight + i, count));
    if (bias) y = S::add(y, get<S>(bias + i, count));
    if (Add) y = S::add(get<S>(out + i, count), y);
    put<S>(out + i, y, count);
  });
}

template <class S, bool Add> void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float mean_square = square_sum<S>(x, n, 0.0f) / static_cast<float>(n);
  norm<S, Add>(x, weight, nullptr, n, 0.0f, 1.0f / S::root(mean_square + eps), out);
}

template <class S, bool Add>
void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out) {
  const float mean = plain_sum<S>(x, n) / static_cast<float>(n);
  const float variance = square_sum<S>(x, n, mean) / static_cast<float>(n);
  norm<S, Add>(x, weight, bias, n, mean, 1.0f / S::root(variance + eps), out);
}

template <class S> void rope(float* head, const float* cos, const float* sin, int64_t half) {
  using F = typename S::F;
  each<S>(half, [&](int64_t i, int count) {
    const F a = get<S>(head + i, count), b = get<S>(head + half + i, count);
    const F c = get<S>(cos + i, count), s = get<S>(sin + i, count);
    put<S>(head + i, S::fma(a, c, S::sub(S::zero(), S::mul(b, s))), count);
    put<S>(head + half + i, S::fma(b, c, S::mul(a, s)), count);
  });
}

// Blocks of the largest power of two that divides n, times a Hadamard matrix over the root of its size. Butterflies of
// ascending strides: the same roundings for every vector type.
template <class S> void hadamard(float* x, int64_t n) {
  using F = typename S::F;
  const int64_t size = n & -n;
  const F factor = S::set1(1.0f / S::root(static_cast<float>(size)));
  each<S>(n, [&](int64_t i, int count) {
    F a = get<S>(x + i, count);
    for (int h = 1; h < S::kLanes && h < size; h *= 2) a = S::butterfly(a, h);
    put<S>(x + i, size <= S::kLanes ? S::mul(a, factor) : a, count);
  });
  for (int64_t h = S::kLanes; h < size; h *= 2)
    for (int64_t base = 0; base < n; base += 2 * h)
      for (int64_t i = base; i < base + h; i += S::kLanes) {
        const F a = S::load(x + i), b = S::load(x + i + h), sum = S::add(a, b), rest = S::sub(a, b);
        S::store(x + i, 2 * h == size ? S::mul(sum, factor) : sum);
        S::store(x + i + h, 2 * h == size ? S::mul(rest, factor) : rest);
      }
}

template <class S, Act A> void act_rows(const float* gate, const float* up, int64_t n, float* out) {
  each<S>(n, [&](int64_t i, int count) {
    typename S::F y = act_of<S, A>(get<S>(gate + i, count));
    if (up) y = S::mul(y, get<S>(up + i, count));
    put<S>(out + i, y, count);
  });
}
template <class S> void act_mul(const float* gate, const float* up, int64_t n, float* out, Act act) {
  switch (act) {
    case Act::silu: return act_rows<S, Act::silu>(gate, up, n, out);
    case Act::gelu: return act_rows<S, Act::gelu>(gate, up, n, out);
    case Act::gelu_tanh: return act_rows<S, Act::gelu_tanh>(gate, up, n, out);
    case Act::relu: return act_rows<S, Act::relu>(gate, up, n, out);
  }
}

// The 16-bit and 8-bit forms of a float. bf16 by integers: vcvtneps2bf16 would flush denormals.
template <class S> void store_kv(const float* x, int64_t n, KvType type, void* out, float* scale) {
  if (type == KvType::i8) {
    typename S::F top = S::zero();
    each<S>(n, [&](int64_t i, int count) { top = S::max(top, S::abs(get<S>(x + i, count))); });
    const float m = S::top(top);
    *scale = m / 127.0f;
    const typename S::F inverse = S::set1(m > 1e-35f ? 127.0f / m : 0.0f);
    each<S>(n, [&](int64_t i, int count) {
      S::store_i8(static_cast<int8_t*>(out) + i, S::mul(get<S>(x + i, count), inverse), count);
    });
    return;
  }
  each<S>(n, [&](int64_t i, int count) {
    const typename S::F a = get<S>(x + i, count);
    if (type == KvType::f32) put<S>(static_cast<float*>(out) + i, a, count);
    else if (type == KvType::bf16) S::store_bf16(static_cast<uint16_t*>(out) + i, a, count);
    else S::store_f16(static_cast<uint16_t*>(out) + i, a, count);
  });
}

}  // namespace
}  // namespace ridgeline
