// Integer matrix products with AVX-512 VNNI: sixteen output rows a vector, four columns a lane.
#include <algorithm>
#include <limits>
#include <vector>

#include "avx512_panel.h"
#include "head.h"
#include "parts.h"

namespace ridgeline {
namespace {

// Lines that a call asks for while it computes: `count` a block from `at` on, as far as `end`. Asking for all of the next tiles
// in one call of several fills the core's queue of misses and stalls it (q8_0, 8 rows, two threads: 440 instead of 570 GOPS).
struct Stream {
  const uint8_t *at, *end;
  int count;

  // Part `call` of `calls` of the bytes from `from` on.
  Stream(const uint8_t* from, int64_t bytes, int64_t call, int64_t calls, int64_t blocks) {
    const int64_t lines = (bytes + 63) / 64, first = lines * call / calls, last = lines * (call + 1) / calls;
    at = from + 64 * first, end = from + 64 * last;
    count = static_cast<int>((last - first + blocks - 1) / blocks);
  }
};

// Where a call takes the codes of its tiles from. Of several calls the first unpacks them and keeps them for the others, each as
// q8_0 has it: 512 bytes a block.
enum class Codes { packed, keep, kept };

// Asking for the lines of the output before the sums: K-quants gain 3 % at any number of rows, others 4 to 6 % at 512 rows, whose
// outputs the L2 cache does not hold, and lose 1 % at 16.
template <Kind K>
constexpr bool kAsksForOutput = layout(K).super > 1;
constexpr int64_t kManyRows = 96;

// Kinds with a minimum for whole blocks multiply it with terms, activation scale times sum; see terms_of().
template <Kind K>
constexpr bool has_terms() {
  return Traits<K>::kMinimum && !Traits<K>::kHalves;
}

// R rows of activations against V tiles. far: from a block of high nibbles to its low ones, of a split kind; terms: of these
// rows, `blocks` a row. first_call: of the calls for these tiles. One order of operations whatever R, V and C are, so that a
// row's result is the same bit for bit alone, in a chunk and in a batch.
template <Kind K, int R, int V, Codes C>
inline void micro(const uint8_t* quants, ptrdiff_t far, uint8_t* codes, int64_t tile_quants, const uint8_t* scales,
                  int64_t tile_scales, int64_t blocks, const float* terms, const Acts& x, int64_t row, bool first_call,
                  Stream ahead, float* out, int64_t ld, __mmask16 last) {
  using T = Traits<K>;
  constexpr Layout L = layout(K);
  constexpr int kParts = T::kHalves ? 2 : 1, kGroups = 8 / kParts;
  constexpr bool kStream = R <= kStreamRows && V == 1;  // bound by memory, not by arithmetic
  constexpr int kChains = R <= 2 && V == 1 ? 2 : 1;  // integer sums are exact in any order: shorter chains are free
  const int8_t* q[R];
  const float* sx[R];
  const int32_t* sum[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    q[r] = x.q + (row + r) * x.stride;
    sx[r] = x.scale + (row + r) * (x.stride / kBlock);
    sum[r] = x.sum + (row + r) * (x.stride / 16);
  }
  __m512 f[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) f[r][v] = _mm512_setzero_ps();
  if (kAsksForOutput<K> || x.rows >= kManyRows) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) __builtin_prefetch(out + (row + r) * ld + v * kTile, 1);
  }
  const uint8_t* s = scales;
  for (int64_t first = 0; first < blocks; first += L.super, s += L.scales) {
    Head head[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      head[v] = T::head(s + v * tile_scales);
      if constexpr (kStream)
        prefetch<L.scales, _MM_HINT_T0>(s + (L.super == 1 ? 1024 : 2 * L.scales));
      else if (first_call)
        prefetch<L.scales, _MM_HINT_T1>(s + (V + v) * tile_scales);
    }
    const int inside = L.super == 1 || blocks - first >= L.super ? L.super : static_cast<int>(blocks - first);
#pragma GCC unroll 1
    for (int inner = 0; inner < inside; ++inner) {
      const int64_t b = first + inner;
      const uint8_t* p = quants + b * L.quants;
      if constexpr (kStream) {
        prefetch<L.quants, _MM_HINT_T0>(p + kAhead);
        if constexpr (K == Kind::q8_split) prefetch<L.quants, _MM_HINT_T0>(p + far + kAhead);
      } else {
        if (ahead.at < ahead.end)
          for (int i = 0; i < ahead.count; ++i, ahead.at += 64) {
            prefetch<64, _MM_HINT_T1>(ahead.at);
            if constexpr (K == Kind::q8_split) prefetch<64, _MM_HINT_T1>(ahead.at + far);
          }
      }
      __m512i low[V][4];
      if constexpr (K == Kind::q8_split && C != Codes::kept)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) T::quads(p + far + v * tile_quants, low[v]);
#pragma GCC unroll 2
      for (int h = 0; h < kParts; ++h) {
        const auto total = [&](int r) { return kParts == 2 ? sum[r][2 * b + h] : sum[r][2 * b] + sum[r][2 * b + 1]; };
        __m512i acc[R][V][kChains];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i start = T::kOffset ? _mm512_set1_epi32(-T::kOffset * total(r)) : _mm512_setzero_si512();
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            acc[r][v][0] = start;
            if constexpr (kChains == 2) acc[r][v][1] = _mm512_setzero_si512();
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kGroups; ++i) {
          const int g = h * kGroups + i;
          __m512i w[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) {
            uint8_t* own = codes + ((v * blocks + b) * 8 + g) * 64;
            if constexpr (C == Codes::kept) w[v] = _mm512_load_si512(own);
            else if constexpr (K == Kind::q8_split) w[v] = T::load(p + v * tile_quants, low[v][g & 3], g);
            else w[v] = T::load(p + v * tile_quants, g);
            if constexpr (C == Codes::keep) _mm512_store_si512(own, w[v]);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const __m512i a = _mm512_set1_epi32(word(q[r] + b * kBlock + g * kGroup));
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v][i % kChains] = _mm512_dpbusd_epi32(acc[r][v][i % kChains], w[v], a);
          }
        }
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          const __m512 scale = T::scale(head[v], s + v * tile_scales, inner, h);
          const __m512 minimum = T::minimum(head[v], s + v * tile_scales, inner, h);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const float a = sx[r][b];
            __m512i integer = acc[r][v][0];
            if constexpr (kChains == 2) integer = _mm512_add_epi32(integer, acc[r][v][1]);
            f[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer), _mm512_mul_ps(scale, _mm512_set1_ps(a)), f[r][v]);
            if constexpr (T::kMinimum)
              f[r][v] = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(has_terms<K>() ? terms[r * blocks + b]
                                                                                : a * static_cast<float>(total(r))), f[r][v]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      _mm512_mask_storeu_ps(out + (row + r) * ld + v * kTile, v == V - 1 ? last : static_cast<__mmask16>(0xffff),
                            f[r][v]);
}

// From how many calls on it pays that the first keeps its codes, on one core from the L2 cache. 32 rows: q8_split and q5_0 x1.1,
// q5_k and q3_k x1.15; 16 rows: q6_k x1.04. Kinds that take hardly any work to unpack lose up to 4 %: never.
template <Kind K>
constexpr int64_t keeps_from() {
  if (K == Kind::q8_split || K == Kind::q5_0 || K == Kind::q5_1 || K == Kind::q5_k || K == Kind::q3_k) return 2;
  return K == Kind::q6_k ? 3 : std::numeric_limits<int64_t>::max();
}
constexpr int64_t kKept = 256;   // blocks of a pair of tiles whose codes are kept: 256 KB on the stack

// Rows first_row <= r < last_row against tiles t .. t + V - 1. terms: from row first_row on.
template <Kind K, int V>
void tiles(const Weights& w, const Acts& x, const float* terms, int64_t first_row, int64_t last_row, int64_t t, float* out,
           int64_t ld) {
  constexpr Layout L = layout(K);
  const int64_t blocks = w.blocks(), tq = blocks * L.quants, ts = w.supers() * L.scales;
  const uint8_t* q = w.quants + t * tq;
  const ptrdiff_t far = w.low ? w.low - w.quants : 0;
  const uint8_t* s = w.scales + t * ts;
  const int64_t calls = calls_for(last_row - first_row);
  int64_t call = 0;
  const auto one = [&]<int R, Codes C>(int64_t r, uint8_t* codes) {
    const Stream ahead(q + V * tq, V * tq, call++, calls, blocks);
    micro<K, R, V, C>(q, far, codes, tq, s, ts, blocks, has_terms<K>() ? terms + (r - first_row) * blocks : nullptr, x, r,
                      r == first_row, ahead, out + t * kTile, ld, lanes(w, t + V - 1));
  };
  if constexpr (keeps_from<K>() < kRows && V == 2)
    if (calls >= keeps_from<K>() && blocks <= kKept) {
      alignas(64) uint8_t codes[V * kKept * 512];
      in_calls(first_row, last_row, [&]<int R>(int64_t r) {
        if (r == first_row) one.template operator()<R, Codes::keep>(r, codes);
        else one.template operator()<R, Codes::kept>(r, codes);
      });
      return;
    }
  in_calls(first_row, last_row, [&]<int R>(int64_t r) { one.template operator()<R, Codes::packed>(r, nullptr); });
}

// Activation scale times sum of each block of some rows. Once for all tiles: a conversion, a product and a broadcast from a
// register for each block in a call cost q4_k 2 %, q4_1 3 %.
const float* terms_of(const Acts& x, int64_t first_row, int64_t last_row, int64_t blocks) {
  thread_local std::vector<float> terms;
  terms.resize(std::max(terms.size(), static_cast<size_t>((last_row - first_row) * blocks)));
  float* to = terms.data();
  for (int64_t r = first_row; r < last_row; ++r, to += blocks) {
    const float* scale = x.scale + r * (x.stride / kBlock);
    const int32_t* sum = x.sum + r * (x.stride / 16);
    for (int64_t b = 0; b < blocks; ++b) to[b] = scale[b] * static_cast<float>(sum[2 * b] + sum[2 * b + 1]);
  }
  return terms.data();
}

template <Kind K>
void gemm_kind(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  if constexpr (has_panels<K>())
    if (x.rows >= kPanelRows) return gemm_panels<K>(w, x, first, last, out, ld);
  const int64_t chunks = (x.rows + kRows - 1) / kRows;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t row = x.rows * chunk / chunks, end = x.rows * (chunk + 1) / chunks;
    const float* terms = has_terms<K>() ? terms_of(x, row, end, w.blocks()) : nullptr;
    int64_t t = first;
    // One or two rows read one tile at a time: a single stream in address order.
    if (x.rows > kStreamRows)
      for (; t + 2 <= last; t += 2) tiles<K, 2>(w, x, terms, row, end, t, out, ld);
    for (; t < last; ++t) tiles<K, 1>(w, x, terms, row, end, t, out, ld);
  }
}

void gemm(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  switch (w.kind) {
    case Kind::q4_0: return gemm_kind<Kind::q4_0>(w, x, first, last, out, ld);
    case Kind::q4_1: return gemm_kind<Kind::q4_1>(w, x, first, last, out, ld);
    case Kind::q5_0: return gemm_kind<Kind::q5_0>(w, x, first, last, out, ld);
    case Kind::q5_1: return gemm_kind<Kind::q5_1>(w, x, first, last, out, ld);
    case Kind::q8_0: return gemm_kind<Kind::q8_0>(w, x, first, last, out, ld);
    case Kind::q2_k: return gemm_kind<Kind::q2_k>(w, x, first, last, out, ld);
    case Kind::q3_k: return gemm_kind<Kind::q3_k>(w, x, first, last, out, ld);
    case Kind::q4_k: return gemm_kind<Kind::q4_k>(w, x, first, last, out, ld);
    case Kind::q5_k: return gemm_kind<Kind::q5_k>(w, x, first, last, out, ld);
    case Kind::q6_k: return gemm_kind<Kind::q6_k>(w, x, first, last, out, ld);
    case Kind::iq4_nl: return gemm_kind<Kind::iq4_nl>(w, x, first, last, out, ld);
    case Kind::q8_split: return gemm_kind<Kind::q8_split>(w, x, first, last, out, ld);
    case Kind::iq4_xs: return gemm_kind<Kind::iq4_xs>(w, x, first, last, out, ld);
    case Kind::i4_32: return gemm_kind<Kind::i4_32>(w, x, first, last, out, ld);
    case Kind::i4_64: return gemm_kind<Kind::i4_64>(w, x, first, last, out, ld);
    case Kind::i4_128: return gemm_kind<Kind::i4_128>(w, x, first, last, out, ld);
    case Kind::i8_32: return gemm_kind<Kind::i8_32>(w, x, first, last, out, ld);
    case Kind::i8_128: return gemm_kind<Kind::i8_128>(w, x, first, last, out, ld);
    default: __builtin_trap();
  }
}

// Four whole blocks of quantise(), with the reductions of all four together.
inline void quantise_four(const float* x, int8_t* q, float* scale, int32_t* sum) {
  __m512 v[8];
  __m512i m[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = _mm512_loadu_ps(x + 32 * i), v[2 * i + 1] = _mm512_loadu_ps(x + 32 * i + 16);
    m[i] = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(v[2 * i])),
                            _mm512_castps_si512(_mm512_abs_ps(v[2 * i + 1])));
  }
  const auto two = [](__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const __m512i m01 = two(m[0], m[1]), m23 = two(m[2], m[3]);
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(m01, m23), _mm512_unpackhi_epi64(m01, m23));
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  const __m128i bits = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128 top = _mm_castsi128_ps(bits), most = _mm_set1_ps(127.0f);
  const __mmask8 finite = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(0x7f800000));
  const __mmask8 large = _mm_mask_cmp_ps_mask(finite, top, _mm_set1_ps(0x1p-100f), _CMP_GE_OQ);
  const __m128 otherwise = _mm_mask_mov_ps(_mm_set1_ps(__builtin_nanf("")), finite, _mm_setzero_ps());
  _mm_storeu_ps(scale, _mm_mask_div_ps(otherwise, large, top, most));
  const __m512 inverse = _mm512_broadcast_f32x4(_mm_maskz_div_ps(large, most, top));
  __m512i n[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 own = _mm512_permutexvar_ps(_mm512_set1_epi32(i / 2), inverse);
    n[i] = _mm512_maskz_cvtps_epi32(static_cast<__mmask16>(-(large >> (i / 2) & 1)), _mm512_mul_ps(v[i], own));
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i fours[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i first = _mm512_packs_epi32(n[4 * i], n[4 * i + 1]), second = _mm512_packs_epi32(n[4 * i + 2], n[4 * i + 3]);
    const __m512i codes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
    _mm512_storeu_si512(q + 64 * i, codes);
    fours[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
  }
  const __m512i pairs =
      _mm512_add_epi32(_mm512_unpacklo_epi32(fours[0], fours[1]), _mm512_unpackhi_epi32(fours[0], fours[1]));
  const __m512i sums = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_BADC));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sum), _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sums)));
}

// Symmetric, one scale per 32: the largest magnitude becomes 127. Round to nearest even, as the scalar twin does.
// A block with an infinity or NaN gets the scale NaN and zeros: the damage shows in every output. A block below
// 2^-100 becomes zero: 127 / top would overflow.
void quantise(const float* x, int64_t cols, int8_t* q, float* scale, int32_t* sum) {
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  int64_t b = 0;
  for (; (b + 4) * kBlock <= cols; b += 4) quantise_four(x + b * kBlock, q + b * kBlock, scale + b, sum + 2 * b);
  for (; b < blocks; ++b) {
    const int64_t left = cols - b * kBlock;
    const __mmask16 m0 = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    const __mmask16 m1 = left >= 32 ? 0xffff : left <= 16 ? 0 : static_cast<__mmask16>((1u << (left - 16)) - 1);
    const __m512 a = _mm512_maskz_loadu_ps(m0, x + b * kBlock), c = _mm512_maskz_loadu_ps(m1, x + b * kBlock + 16);
    // As integers magnitudes order like floats, with infinity and NaN on top.
    const int32_t top_bits = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(c))));
    const float top = __builtin_bit_cast(float, top_bits);
    const bool finite = top_bits < 0x7f800000, large = top >= 0x1p-100f && finite;
    const __m512 inverse = _mm512_set1_ps(large ? 127.0f / top : 0.0f);
    scale[b] = large ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
    const __mmask16 keep = large ? 0xffff : 0;
    const __m512i i0 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(a, inverse));
    const __m512i i1 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(c, inverse));
    sum[2 * b] = _mm512_reduce_add_epi32(i0);
    sum[2 * b + 1] = _mm512_reduce_add_epi32(i1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + b * kBlock), _mm512_cvtsepi32_epi8(i0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + b * kBlock + 16), _mm512_cvtsepi32_epi8(i1));
  }
}

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = "avx512-vnni";
    k.quantise = quantise;
    k.gemm = gemm;
    k.gemm_float = avx512::gemm_float;
    k.gemm_bf16 = __builtin_cpu_supports("avx512bf16") ? avx512::gemm_bf16 : avx512::gemm_bf16_widened;
    k.head_bounds = avx512::head_bounds;
    k.head_doubtful = avx512::head_doubtful;
    k.head_refine = avx512::head_refine;
    k.head_tile = avx512::head_tile;
    k.row_max = avx512::row_max;
    k.collect = avx512::collect;
    return k;
  }();
  return &table;
}

}  // namespace ridgeline
