// The pruned head with AVX-512 VNNI.
#include <immintrin.h>

#include "head.h"
#include "parts.h"

namespace ridgeline::avx512 {

namespace {

template <int R>
void bounds(const SplitHead& w, const Acts& x, int64_t first, int64_t last, float* upper, int64_t ld, float* lower,
            int64_t* at) {
  const int64_t blocks = w.blocks();
  const __m512i low4 = _mm512_set1_epi8(15);
  HeadFactors factors[R][kHeadBlocks];
  __m512 best[R];
  __m512i where[R];
  for (int r = 0; r < R; ++r) {
    for (int64_t b = 0; b < blocks; ++b) factors[r][b] = head_factors(x, r, b);
    best[r] = _mm512_set1_ps(-__builtin_inff());
    where[r] = _mm512_set1_epi32(-1);
  }
  const auto four = [&](int r, int64_t column) {
    return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x.q + r * x.stride + column));
  };
  for (int64_t t = first; t < last; ++t) {
    const int64_t left = w.rows - t * kTile;
    const __mmask16 real = left >= kTile ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const uint8_t* p = w.high + t * blocks * kPlane;
    const uint8_t* s = w.scales + t * blocks * 32;
    __m512 score[R], bound[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) score[r] = bound[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b, p += kPlane, s += 32) {
      __m512i even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g) {
        const __m512i v = _mm512_loadu_si512(p + 64 * g);
        _mm_prefetch(reinterpret_cast<const char*>(p + 64 * g + 4096), _MM_HINT_T0);
        const __m512i l = _mm512_and_si512(v, low4), h = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          even[r] = _mm512_dpbusd_epi32(even[r], l, four(r, b * kBlock + 4 * g));
          odd[r] = _mm512_dpbusd_epi32(odd[r], h, four(r, b * kBlock + 4 * g + 16));
        }
      }
      _mm_prefetch(reinterpret_cast<const char*>(s + 1024), _MM_HINT_T0);
      const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s)));
      const __m512 size = _mm512_abs_ps(scale);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const HeadFactors f = factors[r][b];
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even[r], odd[r]));
        score[r] = _mm512_fmadd_ps(scale, _mm512_fmadd_ps(dot, _mm512_set1_ps(f.dot), _mm512_set1_ps(f.offset)), score[r]);
        bound[r] = _mm512_fmadd_ps(size, _mm512_set1_ps(f.bound), bound[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      _mm512_storeu_ps(upper + r * ld + t * kTile, _mm512_add_ps(score[r], bound[r]));
      const __m512 least = _mm512_sub_ps(score[r], bound[r]);
      const __mmask16 more = _mm512_mask_cmp_ps_mask(real, least, best[r], _CMP_GT_OQ);
      best[r] = _mm512_mask_mov_ps(best[r], more, least);
      where[r] = _mm512_mask_mov_epi32(where[r], more, _mm512_set1_epi32(static_cast<int>(t)));
    }
  }
  for (int r = 0; r < R; ++r) {
    alignas(64) float values[kTile];
    alignas(64) int32_t tiles[kTile];
    _mm512_store_ps(values, best[r]);
    _mm512_store_si512(tiles, where[r]);
    lower[r] = -__builtin_inff();
    at[r] = -1;
    for (int i = 0; i < kTile; ++i)
      if (tiles[i] >= 0 && values[i] > lower[r]) {
        lower[r] = values[i];
        at[r] = int64_t{tiles[i]} * kTile + i;
      }
  }
}

}  // namespace

void head_bounds(const SplitHead& w, const Acts& x, int64_t first, int64_t last, float* upper, int64_t ld, float* lower,
                 int64_t* at) {
  switch (x.rows) {
    case 1: return bounds<1>(w, x, first, last, upper, ld, lower, at);
    case 2: return bounds<2>(w, x, first, last, upper, ld, lower, at);
    case 3: return bounds<3>(w, x, first, last, upper, ld, lower, at);
    case 4: return bounds<4>(w, x, first, last, upper, ld, lower, at);
    default: __builtin_trap();
  }
}

void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants) {
  const int64_t blocks = w.blocks();
  const __m512i low4 = _mm512_set1_epi8(15), high4 = _mm512_set1_epi8(static_cast<char>(0xf0));
  const uint8_t* h = w.high + tile * blocks * kPlane;
  const uint8_t* l = w.low + tile * blocks * kPlane;
  for (int64_t b = 0; b < blocks; ++b, h += kPlane, l += kPlane, quants += 2 * kPlane)
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m512i x = _mm512_loadu_si512(h + 64 * g), y = _mm512_loadu_si512(l + 64 * g);
      _mm_prefetch(reinterpret_cast<const char*>(h + 64 * g + 4096), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(l + 64 * g + 4096), _MM_HINT_T0);
      _mm512_storeu_si512(quants + 64 * g, _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi16(x, 4), high4), _mm512_and_si512(y, low4)));
      _mm512_storeu_si512(quants + 64 * (g + 4), _mm512_or_si512(_mm512_and_si512(x, high4),
                                                                 _mm512_and_si512(_mm512_srli_epi16(y, 4), low4)));
    }
}

bool row_max(const float* x, int64_t n, int64_t offset, float* best, int64_t* at) {
  __m512 top = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
  __m512i where = _mm512_set1_epi32(-1), index = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(1))) {
    const __mmask16 real = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 v = _mm512_mask_loadu_ps(top, real, x + i);
    const __mmask16 more = _mm512_mask_cmp_ps_mask(real, v, top, _CMP_GT_OQ);
    top = _mm512_mask_mov_ps(top, more, v);
    where = _mm512_mask_mov_epi32(where, more, index);
    sum = _mm512_mask_add_ps(sum, real, sum, _mm512_sub_ps(v, v));      // NaN for what is not finite
  }
  alignas(64) float values[16];
  alignas(64) int32_t vectors[16];
  _mm512_store_ps(values, top);
  _mm512_store_si512(vectors, where);
  for (int lane = 0; lane < 16; ++lane) {
    if (vectors[lane] < 0) continue;
    const int64_t place = offset + int64_t{vectors[lane]} * 16 + lane;
    if (values[lane] > *best || (values[lane] == *best && place < *at)) {
      *best = values[lane];
      *at = place;
    }
  }
  return _mm512_reduce_add_ps(sum) == 0.0f;
}

int64_t collect(const float* x, int64_t n, int64_t offset, float least, float* scores, int32_t* ids, bool* broken) {
  const __m512 bar = _mm512_set1_ps(least), top = _mm512_set1_ps(__FLT_MAX__);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t found = 0;
  __mmask16 bad = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 real = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 v = _mm512_maskz_loadu_ps(real, x + i);
    bad |= _mm512_mask_cmp_ps_mask(real, v, top, _CMP_NLE_UQ);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(real, v, bar, _CMP_GE_OQ);
    if (!hit) continue;
    // Compressed in a register: compressing into memory is microcoded on Zen 4.
    _mm512_storeu_ps(scores + found, _mm512_maskz_compress_ps(hit, v));
    const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(offset + i)));
    _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(hit, places));
    found += __builtin_popcount(hit);
  }
  if (bad) *broken = true;
  return found;
}

}  // namespace ridgeline::avx512
