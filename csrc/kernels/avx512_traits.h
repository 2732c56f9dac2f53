// How the AVX-512 kernels read each quantised kind of the packed layout. Included by AVX-512 files only.
#pragma once
#include <immintrin.h>

#include "../api.h"

namespace ridgeline {
namespace {  // the same names exist for other instruction sets: nothing here may be shared between object files

inline __m512i bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512 halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 unsigned16(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512 signed16(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512i nibbles(const uint8_t* p, int g) {
  const __m512i v = bytes(p + 64 * (g & 3));
  return _mm512_and_si512(g < 4 ? v : _mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
inline __m512i pairs(const uint8_t* p, int g) {  // 2-bit fields, four groups a vector
  return _mm512_and_si512(_mm512_srli_epi16(bytes(p + 64 * (g >> 2)), 2 * (g & 3)), _mm512_set1_epi8(3));
}
inline int32_t word(const void* p) {  // any alignment
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return value;
}
inline __mmask64 bits(const uint8_t* p, int g) {
  return _load_mask64(reinterpret_cast<__mmask64*>(const_cast<uint8_t*>(p + 8 * g)));
}
inline __m512i set_bit(__m512i v, __mmask64 where, char bit) {
  return _mm512_mask_add_epi8(v, where, v, _mm512_set1_epi8(bit));
}

// A kind gives the unsigned columns of group g (0..7) of a block, the integer that was added to make them unsigned, and
// fp32 scales (for half h of the block where scales are per 16) and minima: w = S * (u - kOffset) - M. What is common
// to a superblock comes from head(), once.
struct Head {
  __m512 scale, minimum;
};
template <Kind K>
struct Traits;

struct Plain {                       // one scale a block, fp16
  static constexpr bool kHalves = false, kMinimum = false;
  static Head head(const uint8_t* s) { return {halves(s), _mm512_setzero_ps()}; }
  static __m512 scale(const Head& d, const uint8_t*, int, int) { return d.scale; }
  static __m512 minimum(const Head& d, const uint8_t*, int, int) { return d.minimum; }
};
struct PlainMinimum : Plain {        // scale and offset; stored as w = d * u + m
  static constexpr bool kMinimum = true;
  static Head head(const uint8_t* s) { return {halves(s), _mm512_xor_ps(halves(s + 32), _mm512_set1_ps(-0.0f))}; }
};
struct SuperMinimum {                // d, dmin per 256; 8-bit scale and minimum per 32
  static constexpr bool kHalves = false, kMinimum = true;
  static Head head(const uint8_t* s) { return {halves(s), halves(s + 32)}; }
  static __m512 scale(const Head& d, const uint8_t* s, int b, int) {
    return _mm512_mul_ps(d.scale, unsigned16(s + 64 + 32 * b));
  }
  static __m512 minimum(const Head& d, const uint8_t* s, int b, int) {
    return _mm512_mul_ps(d.minimum, unsigned16(s + 64 + 32 * b + 16));
  }
};
struct SuperHalves {                 // d per 256, signed 8-bit scale per 16
  static constexpr bool kHalves = true, kMinimum = false;
  static Head head(const uint8_t* s) { return {halves(s), _mm512_setzero_ps()}; }
  static __m512 scale(const Head& d, const uint8_t* s, int b, int h) {
    return _mm512_mul_ps(d.scale, signed16(s + 32 + 32 * b + 16 * h));
  }
  static __m512 minimum(const Head&, const uint8_t*, int, int) { return _mm512_setzero_ps(); }
};

template <>
struct Traits<Kind::q8_0> : Plain {
  static constexpr int kOffset = 128;
  static __m512i load(const uint8_t* p, int g) { return bytes(p + 64 * g); }
};
template <>
struct Traits<Kind::q8_split> : Plain {
  static constexpr int kOffset = 128;
  // low: what quads() made of the low plane's lines for group g & 3.
  static __m512i load(const uint8_t* high, __m512i low, int g) {
    const __m512i h = bytes(high + 64 * (g & 3)), mask = _mm512_set1_epi8(15);
    // mask ? a : b, bit by bit, is one instruction
    return g < 4 ? _mm512_ternarylogic_epi32(mask, low, _mm512_slli_epi16(h, 4), 0xca)
                 : _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(low, 4), h, 0xca);
  }
  // The lines of a block's quads as the vectors of four columns that the products take.
  static void quads(const uint8_t* low, __m512i* to) {
    const __m512i a = bytes(low), b = bytes(low + 64), c = bytes(low + 128), d = bytes(low + 192);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(ab, cd), to[1] = _mm512_unpackhi_epi64(ab, cd);
    to[2] = _mm512_unpacklo_epi64(ab2, cd2), to[3] = _mm512_unpackhi_epi64(ab2, cd2);
  }
};
template <>
struct Traits<Kind::q4_0> : Plain {
  static constexpr int kOffset = 8;
  static __m512i load(const uint8_t* p, int g) { return nibbles(p, g); }
};
template <>
struct Traits<Kind::q4_1> : PlainMinimum {
  static constexpr int kOffset = 0;
  static __m512i load(const uint8_t* p, int g) { return nibbles(p, g); }
};
template <>
struct Traits<Kind::q5_0> : Plain {
  static constexpr int kOffset = 16;
  static __m512i load(const uint8_t* p, int g) { return set_bit(nibbles(p, g), bits(p + 256, g), 16); }
};
template <>
struct Traits<Kind::q5_1> : PlainMinimum {
  static constexpr int kOffset = 0;
  static __m512i load(const uint8_t* p, int g) { return set_bit(nibbles(p, g), bits(p + 256, g), 16); }
};
template <>
struct Traits<Kind::q4_k> : SuperMinimum {
  static constexpr int kOffset = 0;
  static __m512i load(const uint8_t* p, int g) { return nibbles(p, g); }
};
template <>
struct Traits<Kind::q5_k> : SuperMinimum {
  static constexpr int kOffset = 0;
  static __m512i load(const uint8_t* p, int g) { return set_bit(nibbles(p, g), bits(p + 256, g), 16); }
};
template <>
struct Traits<Kind::q6_k> : SuperHalves {
  static constexpr int kOffset = 32;
  static __m512i load(const uint8_t* p, int g) {
    // The pair moves to bits 4 and 5 in one shift: half the work of pairs() and a shift back.
    const __m512i v = bytes(p + 256 + 64 * (g >> 2));
    const __m512i high = (g & 3) == 3 ? _mm512_srli_epi16(v, 2) : _mm512_slli_epi16(v, 4 - 2 * (g & 3));
    return _mm512_or_si512(nibbles(p, g), _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
  }
};
template <>
struct Traits<Kind::q3_k> : SuperHalves {
  static constexpr int kOffset = 4;
  static __m512i load(const uint8_t* p, int g) { return set_bit(pairs(p, g), bits(p + 128, g), 4); }
};
template <>
struct Traits<Kind::q2_k> {           // d, dmin per 256; a byte per 16: scale below, minimum above
  static constexpr bool kHalves = true, kMinimum = true;
  static constexpr int kOffset = 0;
  static __m512i load(const uint8_t* p, int g) { return pairs(p, g); }
  static Head head(const uint8_t* s) { return {halves(s), halves(s + 32)}; }
  static __m512i field(const uint8_t* s, int b, int h) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 64 + 32 * b + 16 * h)));
  }
  static __m512 scale(const Head& d, const uint8_t* s, int b, int h) {
    return _mm512_mul_ps(d.scale, _mm512_cvtepi32_ps(_mm512_and_si512(field(s, b, h), _mm512_set1_epi32(15))));
  }
  static __m512 minimum(const Head& d, const uint8_t* s, int b, int h) {
    return _mm512_mul_ps(d.minimum, _mm512_cvtepi32_ps(_mm512_srli_epi32(field(s, b, h), 4)));
  }
};
inline __m512i codebook(__m512i nibble) {         // IQ4's values, shifted by 128 to be unsigned
  const __m128i values = _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, static_cast<char>(129), static_cast<char>(141),
                                       static_cast<char>(153), static_cast<char>(166), static_cast<char>(181),
                                       static_cast<char>(197), static_cast<char>(217), static_cast<char>(241));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), nibble);
}
template <>
struct Traits<Kind::iq4_nl> : Plain {
  static constexpr int kOffset = 128;
  static __m512i load(const uint8_t* p, int g) { return codebook(nibbles(p, g)); }
};
template <>
struct Traits<Kind::iq4_xs> : Plain { // d per 256, signed 8-bit scale per 32
  static constexpr int kOffset = 128;
  static __m512i load(const uint8_t* p, int g) { return codebook(nibbles(p, g)); }
  static __m512 scale(const Head& d, const uint8_t* s, int b, int) {
    return _mm512_mul_ps(d.scale, signed16(s + 32 + 16 * b));
  }
};

struct Grouped {                      // fp32 scale and signed 8-bit zero for a superblock; w = S * (u - kOffset - zero)
  static constexpr bool kHalves = false, kMinimum = true;
  static __m512 zero(const uint8_t* s) { return signed16(s + 64); }
  static Head head(const uint8_t* s) {
    const __m512 scale = _mm512_loadu_ps(s);
    return {scale, _mm512_mul_ps(scale, zero(s))};
  }
  static __m512 scale(const Head& d, const uint8_t*, int, int) { return d.scale; }
  static __m512 minimum(const Head& d, const uint8_t*, int, int) { return d.minimum; }
};
struct Grouped4 : Grouped {
  static constexpr int kOffset = 8;
  static __m512i load(const uint8_t* p, int g) { return nibbles(p, g); }
};
struct Grouped8 : Grouped {
  static constexpr int kOffset = 128;
  static __m512i load(const uint8_t* p, int g) { return bytes(p + 64 * g); }
};
template <>
struct Traits<Kind::i4_32> : Grouped4 {};
template <>
struct Traits<Kind::i4_64> : Grouped4 {};
template <>
struct Traits<Kind::i4_128> : Grouped4 {};
template <>
struct Traits<Kind::i8_32> : Grouped8 {};
template <>
struct Traits<Kind::i8_128> : Grouped8 {};

}  // namespace
}  // namespace ridgeline
