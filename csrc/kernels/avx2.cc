// AVX2 with FMA and F16C: a tile's sixteen rows are two vectors of eight, four columns a lane.
#include <immintrin.h>

#include "parts.h"
#include "../api.h"

namespace ridgeline {
namespace {

inline __m256i bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256i unsigned8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 signed8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline int32_t word(const void* p) {  // any alignment
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return value;
}

// Rows 8 half .. of group g: four-bit, two-bit and one-bit parts.
inline __m256i nibbles(const uint8_t* p, int g, int half) {
  const __m256i v = bytes(p + 64 * (g & 3) + 32 * half);
  return _mm256_and_si256(g < 4 ? v : _mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}
inline __m256i pairs(const uint8_t* p, int g, int half) {
  const __m256i v = bytes(p + 64 * (g >> 2) + 32 * half);
  return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(2 * (g & 3))), _mm256_set1_epi8(3));
}
inline __m256i with_bits(__m256i v, const uint8_t* p, int g, int half, char bit) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i select = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i mask = _mm256_shuffle_epi8(_mm256_set1_epi32(word(p + 8 * g + 4 * half)), spread);
  const __m256i on = _mm256_cmpeq_epi8(_mm256_and_si256(mask, select), select);
  return _mm256_or_si256(v, _mm256_and_si256(on, _mm256_set1_epi8(bit)));
}
inline __m256i codebook(__m256i nibble) {
  const __m128i values = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), nibble);
}

// Columns of group g as bytes: signed codes where kSigned, else unsigned ones, the code being the byte - kOffset.
// kSum groups may be added in 16 bits before widening: 127 * largest byte * 2 * kSum < 32,768.
struct Plain {
  static constexpr bool kSigned = false, kHalves = false, kMinimum = false;
  static constexpr int kOffset = 0, kSum = 8;
  static __m256 scale(const uint8_t* s, int, int, int half) { return halves(s + 16 * half); }
  static __m256 minimum(const uint8_t*, int, int, int) { return _mm256_setzero_ps(); }
};
struct PlainMinimum : Plain {
  static constexpr bool kMinimum = true;
  static __m256 minimum(const uint8_t* s, int, int, int half) {
    return _mm256_xor_ps(halves(s + 32 + 16 * half), _mm256_set1_ps(-0.0f));
  }
};
struct SuperMinimum : Plain {
  static constexpr bool kMinimum = true;
  static __m256 scale(const uint8_t* s, int b, int, int half) {
    return _mm256_mul_ps(halves(s + 16 * half), _mm256_cvtepi32_ps(unsigned8(s + 64 + 32 * b + 8 * half)));
  }
  static __m256 minimum(const uint8_t* s, int b, int, int half) {
    return _mm256_mul_ps(halves(s + 32 + 16 * half), _mm256_cvtepi32_ps(unsigned8(s + 64 + 32 * b + 16 + 8 * half)));
  }
};
struct SuperHalves : Plain {
  static constexpr bool kHalves = true;
  static __m256 scale(const uint8_t* s, int b, int part, int half) {
    return _mm256_mul_ps(halves(s + 16 * half), signed8(s + 32 + 32 * b + 16 * part + 8 * half));
  }
};

template <Kind K>
struct Traits;
template <>
struct Traits<Kind::q8_0> : Plain {
  static constexpr bool kSigned = true;
  static constexpr int kSum = 1;
  static __m256i load(const uint8_t* p, int g, int half) {
    return _mm256_xor_si256(bytes(p + 64 * g + 32 * half), _mm256_set1_epi8(static_cast<char>(128)));
  }
};
template <>
struct Traits<Kind::q4_0> : Plain {
  static constexpr int kOffset = 8;
  static __m256i load(const uint8_t* p, int g, int half) { return nibbles(p, g, half); }
};
template <>
struct Traits<Kind::q4_1> : PlainMinimum {
  static __m256i load(const uint8_t* p, int g, int half) { return nibbles(p, g, half); }
};
template <>
struct Traits<Kind::q5_0> : Plain {
  static constexpr int kOffset = 16, kSum = 4;
  static __m256i load(const uint8_t* p, int g, int half) {
    return with_bits(nibbles(p, g, half), p + 256, g, half, 16);
  }
};
template <>
struct Traits<Kind::q5_1> : PlainMinimum {
  static constexpr int kSum = 4;
  static __m256i load(const uint8_t* p, int g, int half) {
    return with_bits(nibbles(p, g, half), p + 256, g, half, 16);
  }
};
template <>
struct Traits<Kind::q4_k> : SuperMinimum {
  static __m256i load(const uint8_t* p, int g, int half) { return nibbles(p, g, half); }
};
template <>
struct Traits<Kind::q5_k> : SuperMinimum {
  static constexpr int kSum = 4;
  static __m256i load(const uint8_t* p, int g, int half) {
    return with_bits(nibbles(p, g, half), p + 256, g, half, 16);
  }
};
template <>
struct Traits<Kind::q6_k> : SuperHalves {
  static constexpr int kOffset = 32, kSum = 2;
  static __m256i load(const uint8_t* p, int g, int half) {
    return _mm256_or_si256(nibbles(p, g, half), _mm256_slli_epi16(pairs(p + 256, g, half), 4));
  }
};
template <>
struct Traits<Kind::q3_k> : SuperHalves {
  static constexpr int kOffset = 4;
  static __m256i load(const uint8_t* p, int g, int half) { return with_bits(pairs(p, g, half), p + 128, g, half, 4); }
};
template <>
struct Traits<Kind::q2_k> : Plain {
  static constexpr bool kHalves = true, kMinimum = true;
  static __m256i load(const uint8_t* p, int g, int half) { return pairs(p, g, half); }
  static __m256 scale(const uint8_t* s, int b, int part, int half) {
    const __m256i field = _mm256_and_si256(unsigned8(s + 64 + 32 * b + 16 * part + 8 * half), _mm256_set1_epi32(15));
    return _mm256_mul_ps(halves(s + 16 * half), _mm256_cvtepi32_ps(field));
  }
  static __m256 minimum(const uint8_t* s, int b, int part, int half) {
    const __m256i field = _mm256_srli_epi32(unsigned8(s + 64 + 32 * b + 16 * part + 8 * half), 4);
    return _mm256_mul_ps(halves(s + 32 + 16 * half), _mm256_cvtepi32_ps(field));
  }
};
template <>
struct Traits<Kind::iq4_nl> : Plain {
  static constexpr bool kSigned = true;
  static constexpr int kSum = 1;
  static __m256i load(const uint8_t* p, int g, int half) { return codebook(nibbles(p, g, half)); }
};
template <>
struct Traits<Kind::iq4_xs> : Traits<Kind::iq4_nl> {
  static __m256 scale(const uint8_t* s, int b, int, int half) {
    return _mm256_mul_ps(halves(s + 16 * half), signed8(s + 32 + 16 * b + 8 * half));
  }
};

struct Grouped : Plain {
  static constexpr bool kMinimum = true;
  static __m256 zero(const uint8_t* s, int half) { return signed8(s + 64 + 8 * half); }
  static __m256 scale(const uint8_t* s, int, int, int half) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(s + 32 * half));
  }
  static __m256 minimum(const uint8_t* s, int, int, int half) { return _mm256_mul_ps(scale(s, 0, 0, half), zero(s, half)); }
};
struct Grouped4 : Grouped {
  static constexpr int kOffset = 8;
  static __m256i load(const uint8_t* p, int g, int half) { return nibbles(p, g, half); }
};
struct Grouped8 : Grouped {
  static constexpr bool kSigned = true;
  static constexpr int kSum = 1;
  static __m256i load(const uint8_t* p, int g, int half) { return Traits<Kind::q8_0>::load(p, g, half); }
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

inline void store(float* out, __m256 v, int64_t lanes) {  // the first `lanes` of eight
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int n = lanes >= 8 ? 8 : lanes > 0 ? static_cast<int>(lanes) : 0;
  _mm256_maskstore_ps(out, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), v);
}

// One order of operations whatever R is.
template <Kind K, int R>
inline void micro(const Weights& w, const Acts& x, int64_t t, int64_t row, float* out, int64_t ld) {
  using T = Traits<K>;
  constexpr Layout L = layout(K);
  constexpr int kParts = T::kHalves ? 2 : 1, kGroups = 8 / kParts, kSum = T::kSum < kGroups ? T::kSum : kGroups;
  const int64_t blocks = w.blocks();
  const uint8_t* quants = w.quants + t * blocks * L.quants;
  const uint8_t* scales = w.scales + t * w.supers() * L.scales;
  __m256 f[R][2];
  for (int r = 0; r < R; ++r) f[r][0] = f[r][1] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* p = quants + b * L.quants;
    const uint8_t* s = scales + b / L.super * L.scales;
    const int inner = static_cast<int>(b % L.super);
    for (int i = 0; R == 1 && i < L.quants; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(p + i + 4096), _MM_HINT_T0);
    for (int part = 0; part < kParts; ++part) {
      int32_t total[R];
      __m256i acc[R][2];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        const int32_t* sum = x.sum + (row + r) * (x.stride / 16) + 2 * b;
        total[r] = kParts == 2 ? sum[part] : sum[0] + sum[1];
        acc[r][0] = acc[r][1] = _mm256_set1_epi32(-T::kOffset * total[r]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kGroups; i += kSum) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m256i narrow[R];
#pragma GCC unroll 8
          for (int k = 0; k < kSum; ++k) {
            const int g = part * kGroups + i + k;
            const __m256i u = T::load(p, g, half);
            const __m256i magnitude = T::kSigned ? _mm256_abs_epi8(u) : u;
#pragma GCC unroll 3
            for (int r = 0; r < R; ++r) {
              __m256i a = _mm256_set1_epi32(word(x.q + (row + r) * x.stride + b * kBlock + g * kGroup));
              // |code| <= 128 and |a| <= 127: a pair of products stays in 16 bits; an offset of 128 would not.
              if constexpr (T::kSigned) a = _mm256_sign_epi8(a, u);
              const __m256i product = _mm256_maddubs_epi16(magnitude, a);
              narrow[r] = k ? _mm256_add_epi16(narrow[r], product) : product;
            }
          }
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r)
            acc[r][half] = _mm256_add_epi32(acc[r][half], _mm256_madd_epi16(narrow[r], _mm256_set1_epi16(1)));
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256 scale = T::scale(s, inner, part, half), minimum = T::minimum(s, inner, part, half);
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) {
          const float a = x.scale[(row + r) * (x.stride / kBlock) + b];
          const __m256 product = _mm256_cvtepi32_ps(acc[r][half]);
          f[r][half] = _mm256_fmadd_ps(product, _mm256_mul_ps(scale, _mm256_set1_ps(a)), f[r][half]);
          if constexpr (T::kMinimum)
            f[r][half] = _mm256_fnmadd_ps(minimum, _mm256_set1_ps(a * static_cast<float>(total[r])), f[r][half]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half)
      store(out + (row + r) * ld + t * kTile + 8 * half, f[r][half], w.rows - t * kTile - 8 * half);
}

template <Kind K>
void gemm_kind(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  constexpr int64_t kRows = 96;  // as many rows of activations at once as stay in the L2 cache
  for (int64_t begin = 0; begin < x.rows; begin += kRows) {
    const int64_t end = x.rows - begin < kRows ? x.rows : begin + kRows;
    for (int64_t t = first; t < last; ++t) {
      int64_t r = begin;
      for (; r + 3 <= end; r += 3) micro<K, 3>(w, x, t, r, out, ld);
      if (end - r == 2) micro<K, 2>(w, x, t, r, out, ld);
      if (end - r == 1) micro<K, 1>(w, x, t, r, out, ld);
    }
  }
}

// Columns k of rows 8 half .. as fp32.
template <Kind K>
inline __m256 column(const uint8_t* p, int64_t k, int half) {
  if constexpr (K == Kind::f32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p + k * 64 + 32 * half));
  if constexpr (K == Kind::f16) return halves(p + k * 32 + 16 * half);
  const __m256i v = bytes(p + k / 2 * 64 + 32 * half);  // bf16: pairs, the even column in the low half of a lane
  return _mm256_castsi256_ps(k % 2 ? _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))
                                   : _mm256_slli_epi32(v, 16));
}
inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

// fp32 (or bf16, widened) activations: one accumulator an output, columns in ascending order.
template <Kind K, int R, typename X>
inline void micro_float(const Weights& w, const X* x, int64_t stride, int64_t t, float* out, int64_t ld) {
  constexpr Layout L = layout(K);
  constexpr bool kQuantised = K != Kind::f32 && K != Kind::f16 && K != Kind::bf16;
  const uint8_t* p = w.quants + t * w.blocks() * L.quants;
  __m256 f[R][2];
  for (int r = 0; r < R; ++r) f[r][0] = f[r][1] = _mm256_setzero_ps();
  const auto add = [&](__m256 v, int64_t k, int half) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) f[r][half] = _mm256_fmadd_ps(v, _mm256_set1_ps(widen(x[r * stride + k])), f[r][half]);
  };
  if constexpr (kQuantised) {  // rounded as ggml's dequantisation: (scale * code), then - minimum
    using T = Traits<K>;
    for (int64_t b = 0; b * kBlock < w.cols; ++b) {
      const uint8_t* s = w.scales + (t * w.supers() + b / L.super) * L.scales;
      const int inner = static_cast<int>(b % L.super);
      for (int g = 0; g < 8; ++g)
        for (int half = 0; half < 2; ++half) {
          const int part = T::kHalves ? g / 4 : 0;
          const __m256 scale = T::scale(s, inner, part, half), minimum = T::minimum(s, inner, part, half);
          const __m256i u = T::load(p + b * L.quants, g, half);
          for (int j = 0; j < kGroup && b * kBlock + g * kGroup + j < w.cols; ++j) {
            const __m256i high = _mm256_sll_epi32(u, _mm_cvtsi32_si128(24 - 8 * j));  // no kind's byte exceeds 127
            const __m256i code = _mm256_sub_epi32(_mm256_srai_epi32(high, 24), _mm256_set1_epi32(T::kOffset));
            __m256 value = _mm256_cvtepi32_ps(code);
            if constexpr (is_grouped(K)) value = _mm256_sub_ps(value, T::zero(s, half));
            __m256 v = _mm256_mul_ps(scale, value);
            if constexpr (T::kMinimum && !is_grouped(K)) v = _mm256_sub_ps(v, minimum);
            add(v, b * kBlock + g * kGroup + j, half);
          }
        }
    }
  } else {
    for (int64_t k = 0; k < w.cols; ++k)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) add(column<K>(p, k, half), k, half);
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half)
      store(out + r * ld + t * kTile + 8 * half, f[r][half], w.rows - t * kTile - 8 * half);
}

template <Kind K, typename X>
void gemm_float_kind(const Weights& w, const X* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
                     float* out, int64_t ld) {
  constexpr int64_t kRows = 48;
  for (int64_t begin = 0; begin < rows; begin += kRows) {
    const int64_t end = rows - begin < kRows ? rows : begin + kRows;
    for (int64_t t = first; t < last; ++t) {
      int64_t r = begin;
      for (; r + 4 <= end; r += 4) micro_float<K, 4>(w, x + r * stride, stride, t, out + r * ld, ld);
      for (; r < end; ++r) micro_float<K, 1>(w, x + r * stride, stride, t, out + r * ld, ld);
    }
  }
}

void gemm(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  switch (w.kind) {
#define INTEGER(kind) \
  case Kind::kind: return gemm_kind<Kind::kind>(w, x, first, last, out, ld);
#define QUANTISED(USE) \
  USE(q4_0)            \
  USE(q4_1) USE(q5_0) USE(q5_1) USE(q8_0) USE(q2_k) USE(q3_k) USE(q4_k) USE(q5_k) USE(q6_k) USE(iq4_nl) USE(iq4_xs) \
  USE(i4_32) USE(i4_64) USE(i4_128) USE(i8_32) USE(i8_128)
    QUANTISED(INTEGER)
    default: __builtin_trap();
  }
}

void gemm_float(const Weights& w, const float* x, int64_t rows, int64_t stride, int64_t first, int64_t last, float* out,
                int64_t ld) {
  switch (w.kind) {
#define FLOATING(kind) \
  case Kind::kind: return gemm_float_kind<Kind::kind>(w, x, rows, stride, first, last, out, ld);
    QUANTISED(FLOATING)
    FLOATING(f16)
    FLOATING(bf16)
    FLOATING(f32)
    default: __builtin_trap();
  }
}

void gemm_bf16(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
               float* out, int64_t ld) {
  if (w.kind != Kind::bf16) __builtin_trap();
  gemm_float_kind<Kind::bf16>(w, x, rows, stride, first, last, out, ld);
}

inline int32_t total(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline int32_t largest(__m256i v) {
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// See the AVX-512 kernel for the treatment of tiny and of non-finite blocks.
void quantise(const float* x, int64_t cols, int8_t* q, float* scale, int32_t* sum) {
  for (int64_t b = 0; b * kBlock < cols; ++b) {
    alignas(32) float padded[kBlock] = {};
    const float* from = x + b * kBlock;
    if (cols - b * kBlock < kBlock) {
      __builtin_memcpy(padded, from, sizeof(float) * static_cast<size_t>(cols - b * kBlock));
      from = padded;
    }
    __m256 v[4];
    __m256i top_vector = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(from + 8 * i);
      top_vector = _mm256_max_epi32(top_vector, _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v[i])));
    }
    const int32_t top_bits = largest(top_vector);
    const float top = __builtin_bit_cast(float, top_bits);
    const bool finite = top_bits < 0x7f800000, large = top >= 0x1p-100f && finite;
    const __m256 inverse = _mm256_set1_ps(large ? 127.0f / top : 0.0f);
    scale[b] = large ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
    const __m256i keep = _mm256_set1_epi32(large ? -1 : 0);
    __m256i n[4];
    for (int i = 0; i < 4; ++i) n[i] = _mm256_and_si256(keep, _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)));
    sum[2 * b] = total(_mm256_add_epi32(n[0], n[1]));
    sum[2 * b + 1] = total(_mm256_add_epi32(n[2], n[3]));
    // The packs work within 128-bit lanes; the permutation puts the 4-byte pieces back in order.
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + b * kBlock),
                        _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "avx2";
    k.quantise = quantise;
    k.gemm = gemm;
    k.gemm_float = gemm_float;
    k.gemm_bf16 = gemm_bf16;
    k.row_max = scalar::row_max;
    k.collect = scalar::collect;
    return k;
  }();
  return &table;
}

}  // namespace ridgeline
