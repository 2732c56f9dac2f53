// Matrix products with floating-point activations: fp32 FMA for every kind, and the bf16 dot product for kind bf16.
#include "avx512_traits.h"
#include "parts.h"

namespace ridgeline {
namespace {

constexpr int64_t kRows = 48;     // rows at once: 48 x 4,096 fp32 activations fit in the L2 cache
constexpr int64_t kAhead = 4096;  // bytes to prefetch ahead when memory binds

// Column k of 16 output rows as fp32.
template <Kind K>
struct Floats;
template <>
struct Floats<Kind::f32> {
  static constexpr int kBytes = 4, kChains = 1;
  static __m512 load(const uint8_t* p, int64_t k) { return _mm512_loadu_ps(p + k * 64); }
};
template <>
struct Floats<Kind::f16> {
  static constexpr int kBytes = 2, kChains = 2;
  static __m512 load(const uint8_t* p, int64_t k) { return halves(p + k * 32); }
};
template <>
struct Floats<Kind::bf16> {  // pairs of columns: the even one in the low half of each lane
  static constexpr int kBytes = 2, kChains = 2;
  static __m512 load(const uint8_t* p, int64_t k) {
    const __m512i v = bytes(p + (k >> 1) * 64);
    return _mm512_castsi512_ps(k & 1 ? _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                     : _mm512_slli_epi32(v, 16));
  }
};

template <int R, int V>
inline void clear(__m512 (&f)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) f[r][v] = _mm512_setzero_ps();
}
template <int R, int V>
inline void store(const __m512 (&f)[R][V], float* out, int64_t ld, __mmask16 last) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      _mm512_mask_storeu_ps(out + r * ld + v * kTile, v == V - 1 ? last : static_cast<__mmask16>(0xffff), f[r][v]);
}
template <int V>
inline void ahead(const uint8_t* p, int64_t tile, int lines) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v)
    for (int i = 0; i < lines; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(p + v * tile + kAhead + 64 * i), _MM_HINT_T0);
}

// An output is the sum over the even columns plus the sum over the odd ones, each in ascending order (for f32 one sum),
// whatever R and V are: a row's bits do not depend on the batch. An FMA takes 4 cycles: with one chain a lone row reads
// 2-byte weights at 25 GB/s, with two at 30.
template <Kind K>
struct FloatKernel {
  using Value = float;
  template <int R, int V>
  static void run(const uint8_t* p, int64_t tile, const uint8_t*, int64_t, int64_t cols, const float* x, int64_t stride,
                  float* out, int64_t ld, __mmask16 last) {
    using T = Floats<K>;
    __m512 f[T::kChains][R][V];
    for (auto& chain : f) clear(chain);
    auto &even = f[0], &odd = f[T::kChains - 1];
    const auto column = [&](int64_t k, __m512(&sum)[R][V]) {
      __m512 w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = T::load(p + v * tile, k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512 a = _mm512_set1_ps(x[r * stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(w[v], a, sum[r][v]);
      }
    };
    int64_t k = 0;
    for (; k + 4 <= cols; k += 4) {
      if constexpr (R <= 2) ahead<V>(p + k * kTile * T::kBytes, tile, T::kBytes);
#pragma GCC unroll 2
      for (int i = 0; i < 4; i += 2) {
        column(k + i, even);
        column(k + i + 1, odd);
      }
    }
    for (; k < cols; ++k) column(k, k & 1 ? odd : even);
    if constexpr (T::kChains == 2) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) even[r][v] = _mm512_add_ps(even[r][v], odd[r][v]);
    }
    store(even, out, ld, last);
  }
};

// Quantised weights become fp32 in registers, rounded as ggml's dequantisation does: (scale * code), then - minimum.
template <Kind K>
struct DequantisedKernel {
  using Value = float;
  template <int R, int V>
  static void run(const uint8_t* p, int64_t tile, const uint8_t* s, int64_t tile_scales, int64_t cols, const float* x,
                  int64_t stride, float* out, int64_t ld, __mmask16 last) {
    using T = Traits<K>;
    constexpr Layout L = layout(K);
    constexpr int kGroups = T::kHalves ? 4 : 8;
    __m512 f[R][V];
    clear(f);
    for (int64_t b = 0; b * kBlock < cols; ++b) {
      const int inner = static_cast<int>(b % L.super);
      for (int g = 0; g < 8; ++g) {
        const int64_t k = b * kBlock + g * kGroup;
        const int width = cols - k >= kGroup ? kGroup : static_cast<int>(cols - k);
        __m512 w[V][kGroup];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const uint8_t* at = s + v * tile_scales + b / L.super * L.scales;
          const Head head = T::head(at);
          const __m512 scale = T::scale(head, at, inner, g / kGroups),
                       minimum = T::minimum(head, at, inner, g / kGroups);
          const __m512i u = load_group<T>(p + v * tile + b * L.quants, g);
#pragma GCC unroll 4
          for (int j = 0; j < kGroup; ++j) {
            const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(u, 8 * j), _mm512_set1_epi32(255));
            __m512 code = _mm512_cvtepi32_ps(_mm512_sub_epi32(byte, _mm512_set1_epi32(T::kOffset)));
            if constexpr (is_grouped(K)) code = _mm512_sub_ps(code, T::zero(at));      // exact: small integers
            w[v][j] = _mm512_mul_ps(scale, code);
            if constexpr (T::kMinimum && !is_grouped(K)) w[v][j] = _mm512_sub_ps(w[v][j], minimum);
          }
        }
        for (int j = 0; j < width; ++j)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
              f[r][v] = _mm512_fmadd_ps(w[v][j], _mm512_set1_ps(x[r * stride + k + j]), f[r][v]);
      }
    }
    store(f, out, ld, last);
  }

 private:
  template <typename T>
  static __m512i load_group(const uint8_t* p, int g) {  // T::load wants a constant
    switch (g) {
      case 0: return T::load(p, 0);
      case 1: return T::load(p, 1);
      case 2: return T::load(p, 2);
      case 3: return T::load(p, 3);
      case 4: return T::load(p, 4);
      case 5: return T::load(p, 5);
      case 6: return T::load(p, 6);
      default: return T::load(p, 7);
    }
  }
};

// vdpbf16ps: two columns a lane. An odd last column is paired with zero, never with what lies behind the row.
struct Bf16Kernel {
  using Value = uint16_t;
  template <int R, int V>
  static void run(const uint8_t* p, int64_t tile, const uint8_t*, int64_t, int64_t cols, const uint16_t* x,
                  int64_t stride, float* out, int64_t ld, __mmask16 last) {
    __m512 f[R][V];
    clear(f);
    const auto step = [&](int64_t k, auto&& pair) {
      __m512bh w[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) w[v] = reinterpret_cast<__m512bh>(bytes(p + v * tile + k * 32));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair(x + r * stride + k)));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) f[r][v] = _mm512_dpbf16_ps(f[r][v], w[v], a);
      }
    };
    int64_t k = 0;
    for (; k + 4 <= cols; k += 4) {
      if constexpr (R <= 2) ahead<V>(p + k * 32, tile, 2);
      step(k, word);
      step(k + 2, word);
    }
    for (; k + 2 <= cols; k += 2) step(k, word);
    if (k < cols) step(k, [](const uint16_t* a) { return static_cast<int32_t>(*a); });
    store(f, out, ld, last);
  }
};

// bf16 activations without vdpbf16ps.
struct WidenedKernel {
  using Value = uint16_t;
  template <int R, int V>
  static void run(const uint8_t* p, int64_t tile, const uint8_t*, int64_t, int64_t cols, const uint16_t* x,
                  int64_t stride, float* out, int64_t ld, __mmask16 last) {
    __m512 f[R][V];
    clear(f);
    for (int64_t k = 0; k < cols; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const __m512 w = Floats<Kind::bf16>::load(p + v * tile, k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 a = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int32_t>(x[r * stride + k]) << 16));
          f[r][v] = _mm512_fmadd_ps(w, a, f[r][v]);
        }
      }
    store(f, out, ld, last);
  }
};

template <typename Kernel, int V>
void tiles(const Weights& w, const typename Kernel::Value* x, int64_t rows, int64_t stride, int64_t t, float* out,
           int64_t ld) {
  const Layout l = layout(w.kind);
  const int64_t tq = w.blocks() * l.quants, ts = w.supers() * l.scales, left = w.rows - (t + V - 1) * kTile;
  const __mmask16 last = left >= kTile ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  int64_t r = 0;
  const auto call = [&]<int R>() {
    Kernel::template run<R, V>(w.quants + t * tq, tq, w.scales + t * ts, ts, w.cols, x + r * stride, stride,
                               out + r * ld + t * kTile, ld, last);
  };
  for (; r + 6 <= rows; r += 6) call.template operator()<6>();
  for (; r + 3 <= rows; r += 3) call.template operator()<3>();
  if (rows - r == 2) call.template operator()<2>();
  if (rows - r == 1) call.template operator()<1>();
}

template <typename Kernel, int kWide>  // kWide tiles at once
void gemm_with(const Weights& w, const typename Kernel::Value* x, int64_t rows, int64_t stride, int64_t first,
               int64_t last, float* out, int64_t ld) {
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t n = rows - row < kRows ? rows - row : kRows;
    int64_t t = first;
    if constexpr (kWide > 1) {
      if (rows > 2)  // one or two rows read one tile at a time: a single stream in address order, 29 GB/s and not 24
        for (; t + 2 <= last; t += 2) tiles<Kernel, 2>(w, x + row * stride, n, stride, t, out + row * ld, ld);
    }
    for (; t < last; ++t) tiles<Kernel, 1>(w, x + row * stride, n, stride, t, out + row * ld, ld);
  }
}

}  // namespace

namespace avx512 {

void gemm_float(const Weights& w, const float* x, int64_t rows, int64_t stride, int64_t first, int64_t last, float* out,
                int64_t ld) {
  switch (w.kind) {
    case Kind::f32: return gemm_with<FloatKernel<Kind::f32>, 2>(w, x, rows, stride, first, last, out, ld);
    case Kind::f16: return gemm_with<FloatKernel<Kind::f16>, 2>(w, x, rows, stride, first, last, out, ld);
    case Kind::bf16: return gemm_with<FloatKernel<Kind::bf16>, 2>(w, x, rows, stride, first, last, out, ld);
#define DEQUANTISED(kind) \
  case Kind::kind: return gemm_with<DequantisedKernel<Kind::kind>, 1>(w, x, rows, stride, first, last, out, ld)
      DEQUANTISED(q4_0);
      DEQUANTISED(q4_1);
      DEQUANTISED(q5_0);
      DEQUANTISED(q5_1);
      DEQUANTISED(q8_0);
      DEQUANTISED(q2_k);
      DEQUANTISED(q3_k);
      DEQUANTISED(q4_k);
      DEQUANTISED(q5_k);
      DEQUANTISED(q6_k);
      DEQUANTISED(iq4_nl);
      DEQUANTISED(iq4_xs);
      DEQUANTISED(i4_32);
      DEQUANTISED(i4_64);
      DEQUANTISED(i4_128);
      DEQUANTISED(i8_32);
      DEQUANTISED(i8_128);
#undef DEQUANTISED
    default: __builtin_trap();
  }
}

void gemm_bf16(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
               float* out, int64_t ld) {
  if (w.kind != Kind::bf16) __builtin_trap();
  gemm_with<Bf16Kernel, 2>(w, x, rows, stride, first, last, out, ld);
}

void gemm_bf16_widened(const Weights& w, const uint16_t* x, int64_t rows, int64_t stride, int64_t first, int64_t last,
                       float* out, int64_t ld) {
  if (w.kind != Kind::bf16) __builtin_trap();
  gemm_with<WidenedKernel, 2>(w, x, rows, stride, first, last, out, ld);
}

}  // namespace avx512
}  // namespace ridgeline
