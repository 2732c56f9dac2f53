// Sixteen floats: AVX-512 F, BW, DQ, VL.
#pragma once
#include <immintrin.h>

#include "../attention.h"

namespace ridgeline {
namespace {

struct Vec512 {
  static constexpr int kLanes = 16;
  static constexpr int kKeys = 4;    // vectors of keys and of value dimensions that a register tile of 6 rows holds
  static constexpr int kFused = 6;   // rows whose scores fit beside the keys that are transposed in registers
  using F = __m512;

  static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m512i bits(F x) { return _mm512_castps_si512(x); }
  static F floats(__m512i x) { return _mm512_castsi512_ps(x); }
  static F widen(__m256i x) { return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F keep(F x, int count) { return _mm512_maskz_mov_ps(first(count), x); }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load_part(const Bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static F load_part(const F16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  static F load_part(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static void store_bf16(uint16_t* p, F x, int n) {
    const __m512i u = bits(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(r));
  }
  static void store_f16(uint16_t* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_i8(int8_t* p, F x, int n) {
    _mm_mask_storeu_epi8(p, first(n), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }   // b where either is NaN
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F copysign(F a, F sign) { return _mm512_or_ps(a, _mm512_and_ps(sign, set1(-0.0f))); }   // a >= 0
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F pow2(F n) {   // n an integer in -126..127
    return floats(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  // 2^t for t <= 0: relative error 3.3e-6, what is below 2^-149 becomes 0; 2^0 = 1. For weights that are rounded anyway.
  static F power(F t) {
    const F x = max(set1(-200.0f), t), r = _mm512_reduce_ps(x, 0x09);   // x - floor(x)
    F p = fma(set1(0.013555747f), r, set1(0.05203237f));
    p = fma(p, r, set1(0.24137977f));
    p = fma(p, r, set1(0.69303215f));
    return _mm512_scalef_ps(fma(p, r, set1(1.0f)), x);                  // p * 2^floor(x)
  }
  static F zero_where_less(F a, F x, F low) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), a);
  }
  static F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
  }
  static F where(uint64_t mask, int vector, F yes, F no) {   // lanes of the vector-th 16 bits
    return _mm512_mask_mov_ps(no, static_cast<__mmask16>(mask >> (16 * vector)), yes);
  }
  static F butterfly(F a, int h) {   // lane i: lanes i and i ^ h added, or where i has the bit h subtracted
    switch (h) {
      case 1: return plus_minus<0xaaaa>(_mm512_permute_ps(a, 0xb1), a);
      case 2: return plus_minus<0xcccc>(_mm512_permute_ps(a, 0x4e), a);
      case 4: return plus_minus<0xf0f0>(_mm512_shuffle_f32x4(a, a, 0xb1), a);
      default: return plus_minus<0xff00>(_mm512_shuffle_f32x4(a, a, 0x4e), a);
    }
  }
  template <unsigned kMinus> static F plus_minus(F a, F b) { return _mm512_mask_sub_ps(_mm512_add_ps(a, b), kMinus, a, b); }
  static float lane0(F a) { return _mm512_cvtss_f32(a); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }
  static float top(F a) { return _mm512_reduce_max_ps(a); }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

  // Two 16-bit values a lane, as they lie in memory, and their lower and upper one as fp32.
  static F raw(const void* p) { return floats(_mm512_loadu_si512(p)); }
  static F lower_bf16(F x) { return floats(_mm512_slli_epi32(bits(x), 16)); }
  static F upper_bf16(F x) { return floats(_mm512_and_si512(bits(x),
      _mm512_set1_epi32(static_cast<int>(0xffff0000u)))); }

  // bf16 pairs: a 32-bit lane holds two values. Products of pairs, summed and added to fp32 (AVX512_BF16).
  static constexpr bool kDot = true;
  static F dot(F sum, F a, F b) { return _mm512_dpbf16_ps(sum, (__m512bh)bits(a), (__m512bh)bits(b)); }
  static F pack(F first, F second) {   // 32 bf16, in order
    return floats((__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
  // Integers, four a lane. A number u of 0 .. 65535 goes as two bytes, high and low: 256 high . k + low . k.
  // Through intrinsics and casts g++ 12 keeps a third of the accumulators on the stack: half the speed.
  using I = __m512i;
  static I zero_int() { return _mm512_setzero_si512(); }
  static I set1_int(int x) { return _mm512_set1_epi32(x); }
  static I load_int(const void* p) { return _mm512_loadu_si512(p); }
  static void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I ints(F x) { return bits(x); }
  static void dot4(I& sum, I u, I k) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(k)); }
  static I joined(I high, I low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
  static I minus_high_bit(I x, I sum) { return _mm512_sub_epi32(x, _mm512_slli_epi32(sum, 15)); }   // x - 32768 sum
  static F to_floats(I x) { return _mm512_cvtepi32_ps(x); }
  static void store_bytes(uint8_t* high, uint8_t* low, F x, int offset) {   // x + offset rounded
    const __m512i u = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(offset));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srli_epi32(u, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(u));
  }
  // Half `upper` of four rows of 64 bytes to lanes of one byte each: vector v of both halves, lane 4 q + e holds dimension
  // 16 q + 4 v + e.
  static void interleave4(I a, I b, I c, I d, int upper, I& first, I& second) {
    const I ab = upper ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    const I cd = upper ? _mm512_unpackhi_epi8(c, d) : _mm512_unpacklo_epi8(c, d);
    first = _mm512_unpacklo_epi16(ab, cd), second = _mm512_unpackhi_epi16(ab, cd);
  }
  // Rows a and b of 32 values to pairs (a, b): lanes 8 q .. 8 q + 3 in lo, the other ones in hi; weave restores the
  // order.
  static void interleave(F a, F b, F& lo, F& hi) {
    lo = floats(_mm512_unpacklo_epi16(bits(a), bits(b)));
    hi = floats(_mm512_unpackhi_epi16(bits(a), bits(b)));
  }
  static void weave(F& lo, F& hi) {
    const __m512i one = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i two = _mm512_add_epi32(one, _mm512_set1_epi32(8));
    const F a = lo, b = hi;
    lo = _mm512_permutex2var_ps(a, one, b);
    hi = _mm512_permutex2var_ps(a, two, b);
  }

  // 16 x 16 transposition of 32-bit lanes: 64 shuffles.
  static void transpose(F (&r)[16]) {
    F t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m512d a = _mm512_castps_pd(t[4 * i + h]), b = _mm512_castps_pd(t[4 * i + 2 + h]);
        r[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        r[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      }
    // r[4 i + c]: in each 128-bit lane q, rows 4 i .. 4 i + 3 of column 4 q + c
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);            // columns c, c + 8 of rows 0..3, then 4..7
      t[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);        // columns c + 4, c + 12
      t[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
      t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
      r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
      r[4 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0x88);
      r[12 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0xdd);
    }
  }
};

}  // namespace
}  // namespace ridgeline
