// The pruned head with AVX-512 VNNI.
#include "avx512_traits.h"
#include "head.h"
#include "parts.h"

namespace ridgeline::avx512 {

namespace {

inline __m512i sixteen(const int8_t* q) {        // bytes, in each 128-bit lane
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
}

template <int R>
void bounds(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
            int64_t score_ld, float* upper, int64_t ld, bool* broken) {
  const int64_t blocks = w.blocks();
  const __m512i low4 = _mm512_set1_epi8(15);
  const __m512 most = _mm512_set1_ps(__FLT_MAX__);
  __mmask16 bad[R] = {};
  const auto four = [&](int r, int64_t column) {
    return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x.q + r * x.stride + column));
  };
  for (int64_t t = first; t < last; ++t) {
    const int64_t left = w.rows - t * kTile;
    const __mmask16 real = left >= kTile ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const uint8_t* p = w.high + t * blocks * kPlane;
    const uint8_t* s = w.scales + t * blocks * 32;
    __m512 likely[R], bound[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) likely[r] = bound[r] = _mm512_setzero_ps();
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
      const __m512 scale = halves(s), size = _mm512_abs_ps(scale);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const HeadFactors& f = factors[r * blocks + b];
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(even[r], odd[r]));
        likely[r] = _mm512_fmadd_ps(scale, _mm512_fmadd_ps(dot, _mm512_set1_ps(f.dot), _mm512_set1_ps(f.offset)), likely[r]);
        bound[r] = _mm512_fmadd_ps(size, _mm512_set1_ps(f.bound), bound[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 top = _mm512_mask_add_ps(_mm512_set1_ps(-__builtin_inff()), real, likely[r], bound[r]);
      bad[r] |= _mm512_mask_cmp_ps_mask(real, top, most, _CMP_NLE_UQ);
      _mm512_storeu_ps(score + r * score_ld + (t - first) * kTile, likely[r]);
      _mm512_storeu_ps(upper + r * ld + t * kTile, top);
    }
  }
  for (int r = 0; r < R; ++r)
    if (bad[r]) broken[r] = true;
}

// Quads ahead whose lines are asked for: 40 to 64 lines on their way.
constexpr int64_t kQuadsAhead = 8;

template <int R>
int64_t refine(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, int32_t* quads,
               int64_t count, float* upper, int64_t ld, const float* bar) {
  const int64_t blocks = w.blocks();
  const __m512i low4 = _mm512_set1_epi8(15);
  const auto ask = [&](int64_t quad) {
    const uint8_t* p = w.low + (quad / kQuads * blocks + first) * kPlane + quad % kQuads * 64;
    const uint8_t* s = w.scales + (quad / kQuads * blocks + first) * 32;
    for (int64_t b = first; b < last; ++b, p += kPlane) _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
    for (const uint8_t* end = s + (last - first) * 32; s < end; s += 64)
      _mm_prefetch(reinterpret_cast<const char*>(s), _MM_HINT_T0);
  };
  for (int64_t n = 0; n < count && n < kQuadsAhead; ++n) ask(quads[n]);
  int64_t kept = 0;
  for (int64_t n = 0; n < count; ++n) {
    if (n + kQuadsAhead < count) ask(quads[n + kQuadsAhead]);
    const int64_t quad = quads[n], t = quad / kQuads;
    const int i = static_cast<int>(quad % kQuads);
    const __m512i own = _mm512_set1_epi32(i);          // word i of each lane is the quad's row of that lane
    const __mmask16 rows = static_cast<__mmask16>(0x1111 << i), one = 0x1111;
    const uint8_t* p = w.low + (t * blocks + first) * kPlane + i * 64;
    const uint8_t* s = w.scales + (t * blocks + first) * 32;
    __m512 change[R], width[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) change[r] = width[r] = _mm512_setzero_ps();
    for (int64_t b = first; b < last; ++b, p += kPlane, s += 32) {
      const __m512i v = _mm512_loadu_si512(p);
      const __m512i l = _mm512_and_si512(v, low4), h = _mm512_and_si512(_mm512_srli_epi16(v, 4), low4);
      const __m512 scale = _mm512_permutevar_ps(halves(s), own), size = _mm512_abs_ps(scale);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const HeadFactors& f = factors[r * blocks + b];
        const int8_t* q = x.q + r * x.stride + b * kBlock;
        const __m512i first16 = _mm512_dpbusd_epi32(_mm512_setzero_si512(), l, sixteen(q));
        const __m512i dot = _mm512_dpbusd_epi32(first16, h, sixteen(q + 16));
        // Four words of a lane add up to a row: the constants go to one of them.
        const __m512 middle = _mm512_maskz_mov_ps(one, _mm512_set1_ps(f.middle));
        const __m512 value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(f.scale), middle);
        change[r] = _mm512_fmadd_ps(scale, value, change[r]);
        width[r] = _mm512_fmadd_ps(size, _mm512_set1_ps(f.width), width[r]);
      }
    }
    __mmask16 doubt = 0;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512 sum = _mm512_add_ps(change[r], _mm512_permute_ps(change[r], 0x4e));
      sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
      float* to = upper + r * ld + t * kTile;
      const __m512 value = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_sub_ps(sum, width[r]));
      _mm512_mask_storeu_ps(to, rows, value);
      doubt |= _mm512_mask_cmp_ps_mask(rows, value, _mm512_set1_ps(bar[r]), _CMP_GE_OQ);
    }
    quads[kept] = static_cast<int32_t>(quad);
    kept += doubt != 0;
  }
  return kept;
}

}  // namespace

void head_bounds(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
                 int64_t score_ld, float* upper, int64_t ld, bool* broken) {
  switch (x.rows) {
    case 1: return bounds<1>(w, x, factors, first, last, score, score_ld, upper, ld, broken);
    case 2: return bounds<2>(w, x, factors, first, last, score, score_ld, upper, ld, broken);
    case 3: return bounds<3>(w, x, factors, first, last, score, score_ld, upper, ld, broken);
    case 4: return bounds<4>(w, x, factors, first, last, score, score_ld, upper, ld, broken);
    default: __builtin_trap();
  }
}

int64_t head_doubtful(const float* upper, int64_t ld, int64_t rows, const float* bar, int64_t first, int64_t last,
                      int32_t* quads) {
  int64_t found = 0;
  for (int64_t t = first; t < last; ++t) {
    unsigned doubt = 0;
    for (int64_t r = 0; r < rows; ++r)
      doubt |= _mm512_cmp_ps_mask(_mm512_loadu_ps(upper + r * ld + t * kTile), _mm512_set1_ps(bar[r]), _CMP_GE_OQ);
    if (!doubt) continue;
    doubt = (doubt | doubt >> 8) & 0xff;
    doubt = (doubt | doubt >> 4) & 0xf;
    for (; doubt; doubt &= doubt - 1) quads[found++] = static_cast<int32_t>(kQuads * t) + __builtin_ctz(doubt);
  }
  return found;
}

int64_t head_refine(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, int32_t* quads,
                    int64_t count, float* upper, int64_t ld, const float* bar) {
  switch (x.rows) {
    case 1: return refine<1>(w, x, factors, first, last, quads, count, upper, ld, bar);
    case 2: return refine<2>(w, x, factors, first, last, quads, count, upper, ld, bar);
    case 3: return refine<3>(w, x, factors, first, last, quads, count, upper, ld, bar);
    case 4: return refine<4>(w, x, factors, first, last, quads, count, upper, ld, bar);
    default: __builtin_trap();
  }
}

void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants) {
  using Split = Traits<Kind::q8_split>;
  const int64_t blocks = w.blocks();
  const uint8_t* h = w.high + tile * blocks * kPlane;
  const uint8_t* l = w.low + tile * blocks * kPlane;
  for (int64_t b = 0; b < blocks; ++b, h += kPlane, l += kPlane, quants += 2 * kPlane) {
    __m512i low[4];
    Split::quads(l, low);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) _mm512_storeu_si512(quants + 64 * g, Split::load(h, low[g & 3], g));
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
