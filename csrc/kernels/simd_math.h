// exp, tanh and the activations, the same polynomials for every vector type S (also for single floats). Coefficients:
// minimax fits of relative error. No std:: templates here: the linker could pick an AVX-512 copy for an old machine.
#pragma once
#include "../attention.h"

namespace ridgeline {
namespace {

// Relative error 1.2e-7 on [-87.3, 88]; 0 below, exp(88) above; exp(0) = 1 and exp(-inf) = 0 exactly; NaN stays.
template <class S> inline typename S::F exp_of(typename S::F x) {
  using F = typename S::F;
  const F low = S::set1(-87.33f);
  const F c = S::min(S::set1(88.0f), S::max(low, x));
  const F n = S::round(S::mul(c, S::set1(1.44269504f)));
  F r = S::fnma(n, S::set1(0.693359375f), c);
  r = S::fnma(n, S::set1(-2.12194440e-4f), r);
  F p = S::fma(S::set1(0.00138145999f), r, S::set1(0.00836871541f));
  p = S::fma(p, r, S::set1(0.0416683879f));
  p = S::fma(p, r, S::set1(0.166665206f));
  p = S::fma(p, r, S::set1(0.499999934f));
  p = S::add(S::fma(p, S::mul(r, r), r), S::set1(1.0f));
  return S::zero_where_less(S::mul(p, S::pow2(n)), x, low);
}

template <class S> inline typename S::F tanh_of(typename S::F x) {
  using F = typename S::F;
  const F t = S::mul(x, x);
  F p = S::fma(S::set1(-0.0055151547f), t, S::set1(0.0204694101f));
  p = S::fma(p, t, S::set1(-0.0536880195f));
  p = S::fma(p, t, S::set1(0.133308303f));
  p = S::fma(p, t, S::set1(-0.333332598f));
  const F inner = S::fma(S::mul(x, t), p, x);
  const F a = S::abs(x);
  const F e = exp_of<S>(S::add(a, a));
  const F outer = S::sub(S::set1(1.0f), S::div(S::set1(2.0f), S::add(e, S::set1(1.0f))));
  return S::select_less(a, S::set1(0.65f), inner, S::copysign(outer, x));
}

// x * Phi(x) through erfc, so that the negative tail keeps its relative precision.
template <class S> inline typename S::F gelu_of(typename S::F x) {
  using F = typename S::F;
  const F z = S::mul(S::abs(x), S::set1(0.707106781f));
  const F t = S::div(S::set1(1.0f), S::fma(z, S::set1(0.4f), S::set1(1.0f)));
  F p = S::fma(S::set1(0.0265688191f), t, S::set1(-0.0633525594f));
  p = S::fma(p, t, S::set1(-0.0901057212f));
  p = S::fma(p, t, S::set1(0.310498387f));
  p = S::fma(p, t, S::set1(-0.0969916315f));
  p = S::fma(p, t, S::set1(0.283655299f));
  p = S::fma(p, t, S::set1(0.172306586f));
  p = S::fma(p, t, S::set1(0.232433225f));
  p = S::fma(p, t, S::set1(0.224954727f));
  p = S::fma(p, t, S::set1(3.28947203e-05f));
  const F half = S::mul(S::mul(p, S::set1(0.5f)), exp_of<S>(S::sub(S::zero(), S::mul(z, z))));   // erfc(z) / 2
  return S::mul(x, S::select_less(x, S::zero(), half, S::sub(S::set1(1.0f), half)));
}

template <class S> inline typename S::F silu_of(typename S::F x) {
  return S::div(x, S::add(S::set1(1.0f), exp_of<S>(S::sub(S::zero(), x))));
}

// 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class S> inline typename S::F gelu_tanh_of(typename S::F x) {
  using F = typename S::F;
  const F u = S::mul(x, S::fma(S::mul(x, x), S::set1(-0.0713548163f), S::set1(-1.59576912f)));   // -2 u
  return S::div(x, S::add(S::set1(1.0f), exp_of<S>(u)));
}

template <class S, Act A> inline typename S::F act_of(typename S::F x) {
  if constexpr (A == Act::silu) return silu_of<S>(x);
  else if constexpr (A == Act::gelu) return gelu_of<S>(x);
  else if constexpr (A == Act::gelu_tanh) return gelu_tanh_of<S>(x);
  else return S::max(S::zero(), x);
}

}  // namespace
}  // namespace ridgeline
