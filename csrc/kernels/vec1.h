// One float: the scalar twin's vector type. Multiply-adds round twice, since plain x86-64 has no fused one.
#pragma once
#include "../attention.h"

namespace ridgeline {
namespace {

inline uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

inline uint16_t to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

inline uint16_t to_f16(float x) {
  const uint32_t u = float_bits(x), a = u & 0x7fffffff;
  const uint32_t sign = u >> 16 & 0x8000;
  if (a > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (a >> 13 & 1023));   // NaN, quiet, payload kept
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);                     // 65520 and more
  // below 2^-14: multiples of 2^-24
  if (a < 0x38800000) {
    const float steps = bits_float(a) * 0x1p24f;
    return static_cast<uint16_t>(sign | (float_bits(steps + 0x1p23f) & 0x7ff));          // the addition rounds to even
  }
  return static_cast<uint16_t>(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13));
}

struct Vec1 {
  static constexpr int kLanes = 1;
  using F = float;
  static F zero() { return 0; }
  static F set1(float x) { return x; }
  static F keep(F x, int) { return x; }
  static F load(const float* p) { return *p; }
  static F load(const Bf16* p) { return bits_float(static_cast<uint32_t>(p->bits) << 16); }
  static F load(const F16* p) { return from_f16(p->bits); }
  static F load(const int8_t* p) { return *p; }
  template <class T> static F load_part(const T* p, int) { return load(p); }
  static void store(float* p, F x) { *p = x; }
  static void store_part(float* p, F x, int) { *p = x; }
  static void store_bf16(uint16_t* p, F x, int) { *p = to_bf16(x); }
  static void store_f16(uint16_t* p, F x, int) { *p = to_f16(x); }
  static void store_i8(int8_t* p, F x, int) {
    const F r = round(x);
    *p = static_cast<int8_t>(r > 127.0f ? 127 : r > -128.0f ? static_cast<int>(r) : -128);
  }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F fnma(F a, F b, F c) { return c - a * b; }
  static F max(F a, F b) { return a > b ? a : b; }   // b where either is NaN
  static F min(F a, F b) { return a < b ? a : b; }
  static F abs(F a) { return bits_float(float_bits(a) & 0x7fffffff); }
  static F copysign(F a, F sign) { return bits_float(float_bits(a) | (float_bits(sign) & 0x80000000)); }
  static F round(F a) { return a < 0 ? a - 0x1.8p23f + 0x1.8p23f : a + 0x1.8p23f - 0x1.8p23f; }   // |a| < 2^22
  static F pow2(F n) { return n == n ? bits_float(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23) : n; }
  static F zero_where_less(F a, F x, F low) { return x < low ? 0.0f : a; }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static F butterfly(F a, int) { return a; }
  static float lane0(F a) { return a; }
  static float sum(F a) { return a; }
  static float top(F a) { return a; }
  static float root(float x) { return __builtin_sqrtf(x); }
};

}  // namespace
}  // namespace ridgeline
