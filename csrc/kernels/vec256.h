// Eight floats: AVX2, FMA, F16C.
#pragma once
#include <immintrin.h>

#include "../attention.h"

namespace ridgeline {
namespace {

struct Vec256 {
  static constexpr int kLanes = 8;
  static constexpr int kKeys = 2;    // 6 rows x 2 vectors: 12 of the 16 registers
  static constexpr int kFused = 2;   // rows whose scores fit beside the keys that are transposed in registers
  using F = __m256;

  static __m256i bits(F x) { return _mm256_castps_si256(x); }
  static F floats(__m256i x) { return _mm256_castsi256_ps(x); }
  static F widen(__m128i x) { return floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static __m256i first(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F keep(F x, int count) { return _mm256_and_ps(x, floats(first(count))); }

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  template <class T> static F load_part(const T* p, int n) {
    T copy[8] = {};
    for (int i = 0; i < n; ++i) copy[i] = p[i];
    return load(copy);
  }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store_part(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  template <class T> static void store_some(T* p, const T* from, int n) {
    for (int i = 0; i < n; ++i) p[i] = from[i];
  }
  static void store_bf16(uint16_t* p, F x, int n) {
    const __m256i u = bits(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    alignas(16) uint16_t copy[8];
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_store_si128(reinterpret_cast<__m128i*>(copy), packed);
    store_some(p, copy, n);
  }
  static void store_f16(uint16_t* p, F x, int n) {
    alignas(16) uint16_t copy[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(copy), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    store_some(p, copy, n);
  }
  static void store_i8(int8_t* p, F x, int n) {
    alignas(32) int32_t copy[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(copy), _mm256_cvtps_epi32(x));
    for (int i = 0; i < n; ++i)
      p[i] = static_cast<int8_t>(copy[i] > 127 ? 127 : copy[i] < -128 ? -128 : copy[i]);
  }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }   // b where either is NaN
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
  static F copysign(F a, F sign) { return _mm256_or_ps(a, _mm256_and_ps(sign, set1(-0.0f))); }   // a >= 0
  static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {   // n an integer in -126..127
    return floats(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static F zero_where_less(F a, F x, F low) { return _mm256_and_ps(a, _mm256_cmp_ps(x, low, _CMP_NLT_UQ)); }
  static F select_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F where(uint64_t mask, int vector, F yes, F no) {   // lanes of the vector-th 8 bits
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i m = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask >> (8 * vector) & 255)), bit);
    return _mm256_blendv_ps(no, yes, floats(_mm256_cmpeq_epi32(m, bit)));
  }
  static F butterfly(F a, int h) {   // lane i: lanes i and i ^ h added, or where i has the bit h subtracted
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), bit = _mm256_and_si256(lane, _mm256_set1_epi32(h));
    const __m256i plus = _mm256_cmpeq_epi32(bit, _mm256_setzero_si256());
    const F minus = _mm256_andnot_ps(floats(plus), set1(-0.0f));
    const F other = h == 1 ? _mm256_permute_ps(a, 0xb1) : h == 2 ? _mm256_permute_ps(a, 0x4e)
                                                                 : _mm256_permute2f128_ps(a, a, 1);
    return add(other, _mm256_xor_ps(a, minus));
  }
  static float lane0(F a) { return _mm256_cvtss_f32(a); }
  static float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float top(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

  // Two 16-bit values a lane, as they lie in memory, and their lower and upper one as fp32.
  static F raw(const void* p) { return floats(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static F lower_bf16(F x) { return floats(_mm256_slli_epi32(bits(x), 16)); }
  static F upper_bf16(F x) { return floats(_mm256_and_si256(bits(x),
      _mm256_set1_epi32(static_cast<int>(0xffff0000u)))); }

  static constexpr bool kDot = false;   // no dot product of bf16 pairs

  // 8 x 8 transposition of 32-bit lanes: 24 shuffles.
  static void transpose(F (&r)[8]) {
    F t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256d a = _mm256_castps_pd(t[4 * i + h]), b = _mm256_castps_pd(t[4 * i + 2 + h]);
        r[4 * i + 2 * h] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        r[4 * i + 2 * h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
      }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
      t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
    }
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) r[c] = t[c];
  }
};

}  // namespace
}  // namespace ridgeline
