// How integer products walk through rows and tiles, and products of many rows from unpacked weights. AVX-512 files only.
#pragma once
#include "avx512_traits.h"

namespace ridgeline {
namespace {

// The hardware's prefetcher stops at pages and does not know the next tile. One or two rows read one tile at a time, a
// single stream in address order, and prefetch 4 KB ahead: 30 GB/s on one core, two tiles side by side 15. More rows: the
// next pair of tiles comes into L2 during the calls for this one.
constexpr int64_t kAhead = 4096;
constexpr int kStreamRows = 2;  // with 4 the K-quants lose up to a fifth at 3 and 4 rows
// Activations of this many rows stay in the L2 cache up to 4,096 columns, whatever the number of rows is.
constexpr int64_t kRows = 96;
constexpr int kMicroRows = 6;   // of a call: 6 x 2 integer and as many fp32 accumulators leave 8 registers

template <int N, _mm_hint Where>
inline void prefetch(const uint8_t* p) {
#pragma GCC unroll 8
  for (int i = 0; i < N; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), Where);
}

inline __mmask16 lanes(const Weights& w, int64_t tile) {
  const int64_t left = w.rows - tile * kTile;
  return left >= kTile ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
}

inline int64_t calls_for(int64_t rows) { return (rows + kMicroRows - 1) / kMicroRows; }

// Calls f.template operator()<R>(row) for rows first .. last - 1 in as few calls as possible, equal to one row. 8 rows as
// 4 and 4 rather than 6 and 2: q4_k 247 to 300 GOPS on one core, q6_k 210 to 261.
template <typename F>
inline void in_calls(int64_t first, int64_t last, const F& f) {
  const int64_t rows = last - first, calls = calls_for(rows);
  for (int64_t call = 0; call < calls; ++call) {
    const int64_t row = first + rows * call / calls;
    switch (first + rows * (call + 1) / calls - row) {
      case 6: f.template operator()<6>(row); break;
      case 5: f.template operator()<5>(row); break;
      case 4: f.template operator()<4>(row); break;
      case 3: f.template operator()<3>(row); break;
      case 2: f.template operator()<2>(row); break;
      default: f.template operator()<1>(row); break;
    }
  }
}

// From this many rows on, a pair of tiles of some kinds is unpacked once, 2,048 columns at a time, for all rows of a chunk (512 rows of
// q5_k: 261 to 316 GOPS on one core, q4_k 302 to 314).
constexpr int64_t kPanelRows = 48;
constexpr int64_t kPanel = 64;  // blocks; 74 KB unpacked, from the L2 cache. 16 blocks would stay in L1 and are slower

// Unpacked columns of a pair of tiles, and what 96 rows of activations bring to the same columns.
template <bool kHalves, bool kMinimum>
struct Panel {
  static constexpr int kParts = kHalves ? 2 : 1;
  struct Block {
    alignas(64) uint8_t codes[2][8][64];
    __m512 scale[2][kParts];
    __m512 minimum[kMinimum ? 2 : 1][kParts];
  };
  union Term {                                     // what the minimum is multiplied with, or where the sum starts
    float minimum;
    int32_t start;
  };
  Block blocks[kPanel];
  Term terms[kRows][kPanel][kParts];
};

// Blocks first .. first + count of tiles t .. t + V - 1.
template <Kind K, int V, typename P>
inline void unpack(const Weights& w, int64_t t, int64_t first, int64_t count, P& panel) {
  using T = Traits<K>;
  constexpr Layout L = layout(K);
  const int64_t tq = w.blocks() * L.quants, ts = w.supers() * L.scales;
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const uint8_t* q = w.quants + (t + v) * tq + first * L.quants;
    const uint8_t* s = w.scales + (t + v) * ts + first / L.super * L.scales;
    Head head{};
    for (int64_t b = 0; b < count; ++b, q += L.quants) {
      auto& to = panel.blocks[b];
      const int inner = static_cast<int>(b % L.super);
      if (inner == 0) head = T::head(s + b / L.super * L.scales);
      const uint8_t* super = s + b / L.super * L.scales;
#pragma GCC unroll 8
      for (int g = 0; g < 8; ++g) _mm512_store_si512(to.codes[v][g], T::load(q, g));
      for (int h = 0; h < P::kParts; ++h) {
        to.scale[v][h] = T::scale(head, super, inner, h);
        if constexpr (T::kMinimum) to.minimum[v][h] = T::minimum(head, super, inner, h);
      }
    }
  }
}

// The same operations in the same order as micro(): the same bits. Behind the first panel the sums go on from what out
// holds. next: the same columns of the next tiles, to be prefetched; null: not in this call.
template <Kind K, int R, int V, typename P>
inline void micro_panel(const P& panel, int64_t blocks, const Acts& x, int64_t row, int64_t first_block, int64_t term_row,
                        const uint8_t* next, int64_t tile_quants, float* out, int64_t ld, __mmask16 last) {
  constexpr bool kMinimum = Traits<K>::kMinimum;
  constexpr int kParts = P::kParts, kGroups = 8 / kParts;
  const int8_t* q[R];
  const float* sx[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    q[r] = x.q + (row + r) * x.stride + first_block * kBlock;
    sx[r] = x.scale + (row + r) * (x.stride / kBlock) + first_block;
  }
  const auto mask = [&](int v) { return v == V - 1 ? last : static_cast<__mmask16>(0xffff); };
  __m512 f[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      f[r][v] = first_block == 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask(v), out + (row + r) * ld + v * kTile);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) __builtin_prefetch(out + (row + r) * ld + v * kTile, 1);
#pragma GCC unroll 1
  for (int64_t b = 0; b < blocks; ++b) {
    const auto& block = panel.blocks[b];
    if (next) {
      constexpr int kQuants = layout(K).quants;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) prefetch<kQuants, _MM_HINT_T1>(next + v * tile_quants + b * kQuants);
    }
    const auto term = [&](int r, int h) { return panel.terms[term_row + r][b][h]; };
#pragma GCC unroll 2
    for (int h = 0; h < kParts; ++h) {
      __m512i acc[R][V];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
          acc[r][v] = kMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(term(r, h).start);
#pragma GCC unroll 8
      for (int i = 0; i < kGroups; ++i) {
        const int g = h * kGroups + i;
        __m512i w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) w[v] = _mm512_load_si512(block.codes[v][g]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i a = _mm512_set1_epi32(word(q[r] + b * kBlock + g * kGroup));
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) acc[r][v] = _mm512_dpbusd_epi32(acc[r][v], w[v], a);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 scale = _mm512_mul_ps(block.scale[v][h], _mm512_set1_ps(sx[r][b]));
          f[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][v]), scale, f[r][v]);
          if constexpr (kMinimum)
            f[r][v] = _mm512_fnmadd_ps(block.minimum[v][h], _mm512_set1_ps(term(r, h).minimum), f[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) _mm512_mask_storeu_ps(out + (row + r) * ld + v * kTile, mask(v), f[r][v]);
}

// Rows row .. end - 1 against columns of blocks first .. first + count of tiles t .. t + V - 1.
template <Kind K, int V, typename P>
inline void panel_tiles(const Weights& w, const Acts& x, int64_t row, int64_t end, int64_t t, int64_t last, int64_t first,
                        int64_t count, P& panel, float* out, int64_t ld) {
  constexpr Layout L = layout(K);
  const int64_t tq = w.blocks() * L.quants;
  const uint8_t* next = t + V < w.tiles() ? w.quants + (t + V) * tq + first * L.quants : nullptr;
  unpack<K, V>(w, t, first, count, panel);
  in_calls(row, end, [&]<int R>(int64_t r) {
    micro_panel<K, R, V>(panel, count, x, r, first, r - row, r == row ? next : nullptr, tq, out + t * kTile, ld,
                         lanes(w, t + V - 1));
  });
}

// Kinds that gain from it: those whose scales and minima take work as well. For others it is enough that the first call keeps
// its codes.
template <Kind K>
constexpr bool has_panels() {
  return layout(K).super == 8;
}

template <Kind K>
void gemm_panels(const Weights& w, const Acts& x, int64_t first, int64_t last, float* out, int64_t ld) {
  using T = Traits<K>;
  using P = Panel<T::kHalves, T::kMinimum>;
  P panel;
  const int64_t chunks = (x.rows + kRows - 1) / kRows;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t row = x.rows * chunk / chunks, end = x.rows * (chunk + 1) / chunks;
    for (int64_t b = 0; b < w.blocks(); b += kPanel) {
      const int64_t count = w.blocks() - b < kPanel ? w.blocks() - b : kPanel;
      for (int64_t r = row; r < end; ++r)
        for (int64_t i = 0; i < count; ++i) {
          const int32_t* sum = x.sum + r * (x.stride / 16) + 2 * (b + i);
          for (int h = 0; h < P::kParts; ++h) {
            const int32_t total = T::kHalves ? sum[h] : sum[0] + sum[1];
            if constexpr (T::kMinimum)
              panel.terms[r - row][i][h].minimum = x.scale[r * (x.stride / kBlock) + b + i] * static_cast<float>(total);
            else panel.terms[r - row][i][h].start = -T::kOffset * total;
          }
        }
      int64_t t = first;
      for (; t + 2 <= last; t += 2) panel_tiles<K, 2>(w, x, row, end, t, last, b, count, panel, out, ld);
      if (t < last) panel_tiles<K, 1>(w, x, row, end, t, last, b, count, panel, out, ld);
    }
  }
}

}  // namespace
}  // namespace ridgeline
