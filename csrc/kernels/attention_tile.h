// Online-softmax attention for a tile of query rows over a vector type S.
//
// Keys lie across the lanes. A score is the sum of two chains of multiply-adds, over the even and over the odd
// dimensions, whatever the number of rows beside it: with few rows the chains run side by side while the keys are
// transposed in registers; with many, a step's 64 keys are transposed once a tile into fp32 scratch and the chains run
// one after the other. Values are added key by key. So a row's result is the same bit for bit alone (decode), in a
// chunk (prefill) and in any tile; fully masked steps change nothing.
#pragma once
#include <immintrin.h>

#include "attention_int.h"
#include "attention_mask.h"
#include "attention_merge.h"
#include "attention_weigh.h"

namespace ridgeline {
namespace {

constexpr int kRows = 6;   // query rows of a register tile

// Dot: bf16 keys and values multiplied as bf16 pairs with bf16 queries and weights. Two dimensions make one "column" of q
// and keys, and the accumulators of 32 dimensions are shuffled until the end of a chunk.
// Dot of int8 keys and values: integers, see attention_int.h.
template <class S, class T, bool Dot>
struct Tile {
  using F = typename S::F;
  using Vector = S;
  using Element = T;
  static constexpr int kL = S::kLanes, kVectors = static_cast<int>(kStep) / kL;
  static constexpr float kNone = -__builtin_inff(), kLog2e = 1.44269504f;
  static constexpr bool kInt = Dot && __is_same(T, int8_t), kPairs = Dot && !kInt;

  const AttentionTask& task;
  Visibility visible;
  int64_t first, rows, dvp;        // rows [first, first + rows) of the run's tokens x group
  int64_t groups;                  // register tiles, as even as possible
  float *q, *keys, *scores, *own, *acc, *total, *m, *l, *mt, *lt, *correction;
  float* lanes;                    // of l, summed at the end of a chunk
  struct Pointers { const T* k[kStep]; const T* v[kStep]; };
  Pointers buffer[2], other;
  const Pointers *now, *next;
  int64_t columns;                 // of q and keys: dimensions, or pairs of them
  int64_t half;                    // even columns: they come first
  float k_scale[kStep], v_scale[kStep];
  float q_scale[kRowTile], weight_scale[kRowTile];
  int32_t key_sum[kStep];          // of each key's dimensions
  uint64_t seen[kRowTile];         // visible keys of each row in this step

  Tile(const AttentionTask& t, float* scratch) : task(t), visible(t), dvp(padded16(t.dv)), now(buffer), next(buffer),
                                             columns(Dot ? t.d / 2 : t.d), half((columns + 1) / 2) {
    q = scratch;
    keys = q + kRowTile * padded16(t.d);
    scores = keys + kStep * padded16(t.d);
    acc = scores + kRowTile * kStep;
    total = acc + kRowTile * dvp;
    m = total + kRowTile * dvp;
    l = m + kRowTile, mt = l + kRowTile, lt = mt + kRowTile, correction = lt + kRowTile, lanes = correction + kRowTile;
  }

  int64_t token(int64_t row) const { return (first + row) / task.group; }
  int64_t head(int64_t row) const { return (first + row) % task.group; }
  int64_t begin_of(int64_t g) const { return rows * g / groups; }

  int64_t slot(int64_t i) const { return (i & 1) * half + i / 2; }

  void open(int64_t first_row, int64_t count) {   // queries, times scale, dimension-major in each register tile
    first = first_row, rows = count;
    groups = (rows + kRows - 1) / kRows;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t a = begin_of(g), n = begin_of(g + 1) - a;
      for (int64_t r = 0; r < n; ++r) {
        const float* from = task.q + token(a + r) * task.q_token + head(a + r) * task.q_head;
        float* to = q + a * columns + r;
        if constexpr (kInt) {
          const F scale = S::set1(task.scale);
          F top = S::zero();
          for (int64_t i = 0; i < task.d; i += kL) top = S::max(S::abs(S::mul(S::load(from + i), scale)), top);
          const float most = S::top(top);
          q_scale[a + r] = most / 32767.0f;
          const F inverse = S::set1(most > 1e-30f ? 32767.0f / most : 0.0f);
          alignas(64) float high[kL / 4], low[kL / 4];
          for (int64_t i = 0; i < task.d; i += kL) {
            S::store_bytes(reinterpret_cast<uint8_t*>(high), reinterpret_cast<uint8_t*>(low),
                           S::mul(S::mul(S::load(from + i), scale), inverse), 32768);
            for (int64_t j = 0; j < kL / 4; ++j) {
              to[(i / 4 + j) * 2 * n] = high[j];
              to[((i / 4 + j) * 2 + 1) * n] = low[j];
            }
          }
        } else if constexpr (Dot) {
          const F scale = S::set1(task.scale);
          float pairs[kL];
          for (int64_t i = 0; i < task.d; i += 2 * kL) {
            S::store(pairs, S::pack(S::mul(S::load(from + i), scale), S::mul(S::load(from + i + kL), scale)));
            for (int64_t j = 0; j < kL; ++j) to[slot(i / 2 + j) * n] = pairs[j];
          }
        } else {
          for (int64_t i = 0; i < task.d; ++i) to[slot(i) * n] = from[i] * task.scale;
        }
      }
    }
  }
  void key_range(int64_t* begin, int64_t* end) const {
    *begin = task.context, *end = 0;
    for (int64_t t = token(0); t <= token(rows - 1); ++t) {
      *begin = smaller(*begin, visible.begin(t));
      *end = larger(*end, visible.end(t));
    }
  }

  // f(i, page, row, n) for keys base + i .. base + i + n - 1, which lie in one page: one division a step instead of one a
  // key, and loops without branches. i + n ends at min(64, end - base).
  template <class Body> void each_run(const int64_t* pages, int64_t base, int64_t end, Body body) const {
    int64_t at = base / task.page_size, row = base % task.page_size;
    const int64_t count = smaller(kStep, end - base);
    for (int64_t i = 0, n; i < count; i += n, row = 0) {
      n = smaller(task.page_size - row, count - i);
      body(i, pages[at++], row, n);
    }
  }
  // Keys from `end` on repeat the last one: their weight is 0.
  void locate(const AttentionAhead& what, int64_t base, Pointers& p) const {
    each_run(what.pages, base, what.end, [&](int64_t i, int64_t page, int64_t row, int64_t n) {
      const T* k = static_cast<const T*>(what.k) + page * task.k_page + row * task.d;
      const T* v = static_cast<const T*>(what.v) + page * task.v_page + row * task.dv;
      for (int64_t e = 0; e < n; ++e) p.k[i + e] = k + e * task.d, p.v[i + e] = v + e * task.dv;
    });
    for (int64_t i = smaller(kStep, what.end - base); i < kStep; ++i) p.k[i] = p.k[i - 1], p.v[i] = p.v[i - 1];
  }
  // Near the end of the keys: the 64 keys after this step's, this item's first, then those of the next item's first step.
  // Every step fetches as many keys as it reads, so that memory is never idle.
  void lead_over(const AttentionAhead& self, int64_t base, Pointers& p) {
    const int64_t rest = larger(0, self.end - base - kStep);
    if (rest > 0) locate(self, base + kStep, p);
    const int64_t start = task.ahead->begin / kStep * kStep, skip = larger(0, base + kStep - self.end);
    locate(*task.ahead, start, other);
    for (int64_t i = rest; i < kStep; ++i) {
      const int64_t j = smaller(kStep - 1, i - rest + skip);
      p.k[i] = other.k[j], p.v[i] = other.v[j];
    }
  }
  void locate_scales(int64_t base, int64_t end) {
    each_run(task.pages, base, end, [&](int64_t i, int64_t page, int64_t row, int64_t n) {
      const int64_t at = page * task.scale_page + row;
      for (int64_t e = 0; e < n; ++e) k_scale[i + e] = task.k_scale[at + e], v_scale[i + e] = task.v_scale[at + e];
    });
    for (int64_t i = smaller(kStep, end - base); i < kStep; ++i) k_scale[i] = k_scale[i - 1], v_scale[i] = v_scale[i - 1];
  }

  // Transposes keys c .. c + kL - 1 of the step and calls f(h, even, odd, has_odd) for columns 2 h and 2 h + 1, with h
  // a running base plus a constant, so that addresses made of it cost nothing. Ahead: the same lines of the next step
  // go to L2, since the hardware's prefetcher stops at pages (to L1 they would evict the scratch: 7 instead of 12
  // GB/s).
  template <bool Ahead, class Body> void each_pair(int c, Body body) const {
    const T* const* k = now->k + c;
    const T* const* ahead = next->k + c;
    int64_t i = 0;
    F r[kL];
    if constexpr (__is_same(T, Bf16)) {   // pairs of dimensions: half the shuffles
      for (; i + 2 * kL <= task.d; i += 2 * kL) {
#pragma GCC unroll 16
        for (int j = 0; j < kL; ++j) {
          r[j] = S::raw(k[j] + i);
          if (Ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead[j] + i), _MM_HINT_T1);
        }
        S::transpose(r);
        if constexpr (Dot) {
#pragma GCC unroll 16
          for (int j = 0; j < kL; j += 2) body((i >> 2) + j / 2, r[j], r[j + 1], true);
        } else {
#pragma GCC unroll 16
          for (int j = 0; j < kL; ++j) body((i >> 1) + j, S::lower_bf16(r[j]), S::upper_bf16(r[j]), true);
        }
      }
      if constexpr (Dot) return;
    }
    if constexpr (kInt) {   // four dimensions a lane, in `even` alone
      for (; i < task.d; i += 4 * kL) {
#pragma GCC unroll 16
        for (int j = 0; j < kL; ++j) {
          r[j] = S::raw(k[j] + i);
          if (Ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead[j] + i), _MM_HINT_T1);
        }
        S::transpose(r);
#pragma GCC unroll 16
        for (int j = 0; j < kL; ++j) body((i >> 2) + j, r[j], r[j], false);
      }
      return;
    }
    for (; i + kL <= task.d; i += kL) {
#pragma GCC unroll 16
      for (int j = 0; j < kL; ++j) {
        r[j] = S::load(k[j] + i);
        if (Ahead) _mm_prefetch(reinterpret_cast<const char*>(ahead[j] + i), _MM_HINT_T1);
      }
      S::transpose(r);
#pragma GCC unroll 16
      for (int j = 0; j < kL; j += 2) body((i >> 1) + j / 2, r[j], r[j + 1], true);
    }
    if (i < task.d) {
      const int n = static_cast<int>(task.d - i);
      for (int j = 0; j < kL; ++j) r[j] = S::load_part(k[j] + i, n);
      S::transpose(r);
      for (int j = 0; j < n; j += 2) body((i >> 1) + j / 2, r[j], r[j + 1], j + 1 < n);
    }
  }

  template <bool Ahead> void transpose_keys(int c) {   // keys[slot(i) * 64 + c ..] = column i
    if constexpr (kInt) {
      const auto one = S::set1_int(0x01010101);
      auto sum = S::zero_int();
      each_pair<Ahead>(c, [&](int64_t h, F four, F, bool) {
        S::store(keys + h * kStep + c, four);
        S::dot4(sum, one, S::ints(four));
      });
      S::store_int(key_sum + c, sum);
      return;
    }
    each_pair<Ahead>(c, [&](int64_t h, F even, F odd, bool has_odd) {
      S::store(keys + h * kStep + c, even);
      if (has_odd) S::store(keys + (half + h) * kStep + c, odd);
    });
  }

  static F product(F x, F y, F sum) {
    if constexpr (kPairs) return S::dot(sum, x, y);
    else return S::fma(x, y, sum);
  }

  // R rows, kL keys from column c
  template <int R, bool Ahead> void dots_in_registers(const float* rows_of_q, int c) {
    F s[R], t[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) s[r] = S::zero(), t[r] = S::zero();
    const float *a = rows_of_q, *b = rows_of_q + half * R;
    each_pair<Ahead>(c, [&](int64_t h, F even, F odd, bool has_odd) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) s[r] = product(S::set1(a[h * R + r]), even, s[r]);
      if (!has_odd) return;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) t[r] = product(S::set1(b[h * R + r]), odd, t[r]);
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) S::store(own + r * kStep + c, S::add(s[r], t[r]));
  }

  template <int R, int V> static void chain(F (&s)[R][V], const float* rows_of_q, const float* k, int64_t count) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) s[r][v] = S::zero();
    for (int64_t i = 0; i < count; ++i, k += kStep, rows_of_q += R) {
      F x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = S::load(k + v * kL);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F y = S::set1(rows_of_q[r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) s[r][v] = product(y, x[v], s[r][v]);
      }
    }
  }
  // scores of R rows, V vectors of keys from column c
  template <int R, int V> void dots(const float* rows_of_q, int c) {
    F s[R][V];
    chain<R, V>(s, rows_of_q, keys + c, half);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) S::store(own + r * kStep + c + v * kL, s[r][v]);
    chain<R, V>(s, rows_of_q + half * R, keys + half * kStep + c, columns - half);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* to = own + r * kStep + c + v * kL;
        S::store(to, S::add(S::load(to), s[r][v]));
      }
  }

  // acc[R rows][V vectors from dimension i] = acc * correction + sum over keys [a, b) of weight * value. Part: the last
  // vector has `count` dimensions.
  template <int R, int V, bool Part, bool Ahead>
  void values(int64_t row, int64_t i, int a, int b, int count) {
    F s[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        s[r][v] = S::mul(S::load(acc + (row + r) * dvp + i + v * kL), S::set1(correction[row + r]));
    for (int j = a; j < b; ++j) {
      const T* p = now->v[j] + i;
      if (Ahead) {
#pragma GCC unroll 4
        for (int line = 0; line < V * kL * static_cast<int>(sizeof(T)); line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(next->v[j] + i) + line, _MM_HINT_T1);
      }
      F x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = Part ? S::load_part(p + v * kL, count) : S::load(p + v * kL);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F w = S::set1(own[r * kStep + j]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) s[r][v] = S::fma(w, x[v], s[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) S::store(acc + (row + r) * dvp + i + v * kL, s[r][v]);
  }

  // The same for V / 2 blocks of 32 dimensions and pairs of keys.
  template <int R, int V, bool Ahead> void pair_values(int64_t row, int64_t i, int a, int b) {
    F s[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        s[r][v] = S::mul(S::load(acc + (row + r) * dvp + i + v * kL), S::set1(correction[row + r]));
    for (int j = a / 2; j < (b + 1) / 2; ++j) {
      F x[V];
      const T *one = now->v[2 * j] + i, *two = now->v[2 * j + 1] + i;
      if (Ahead) {
#pragma GCC unroll 4
        for (int line = 0; line < V * kL * static_cast<int>(sizeof(T)); line += 64) {
          _mm_prefetch(reinterpret_cast<const char*>(next->v[2 * j] + i) + line, _MM_HINT_T1);
          _mm_prefetch(reinterpret_cast<const char*>(next->v[2 * j + 1] + i) + line, _MM_HINT_T1);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < V; v += 2) S::interleave(S::raw(one + v * kL), S::raw(two + v * kL), x[v], x[v + 1]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F w = S::set1(own[r * kStep + j]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) s[r][v] = S::dot(s[r][v], w, x[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) S::store(acc + (row + r) * dvp + i + v * kL, s[r][v]);
  }

  template <int R, bool Ahead> void group_scores(int64_t row, uint64_t any) {
    const int a = __builtin_ctzll(any), b = 64 - __builtin_clzll(any);   // keys a .. b - 1
    const float* mine = q + row * columns;
    if constexpr (kInt) {
      if (groups == 1) {
        for (int c = a / kL * kL; c < b; c += kL) int_dots_in_registers<R, Ahead>(*this, row, mine, c);
      } else {
        for (int c = a / (2 * kL) * (2 * kL); c < b; c += 2 * kL) int_dots<R>(*this, row, mine, c);
      }
    } else if (R <= S::kFused && groups == 1) {
      if constexpr (R <= S::kFused)
        for (int c = a / kL * kL; c < b; c += kL) dots_in_registers<R, Ahead>(mine, c);
    } else {
      constexpr int kWide = S::kKeys * kL;
      for (int c = a / kWide * kWide; c < b; c += kWide) {
        if (a < c + kL && b > c + kWide - kL) {
          dots<R, S::kKeys>(mine, c);
        } else {
          for (int e = c; e < c + kWide; e += kL)
            if (e + kL > a && e < b) dots<R, 1>(mine, e);
        }
      }
    }
    weigh<R>(*this, row);
  }

  template <int R, bool Ahead> void group_values(int64_t row, uint64_t any) {
    const int a = __builtin_ctzll(any), b = 64 - __builtin_clzll(any);
    constexpr int kWide = S::kKeys * kL;
    int64_t i = 0;
    if constexpr (kInt) {
      for (; i < task.dv; i += 4 * kL) {
        if constexpr (R <= 3) {
          int_values<R, 4, Ahead>(*this, row, i, 0, a, b);
        } else {
          int_values<R, 2, Ahead>(*this, row, i, 0, a, b);
          int_values<R, 2, false>(*this, row, i, 2, a, b);
        }
      }
      return;
    } else if constexpr (Dot) {
      for (; i + kWide <= task.dv; i += kWide) pair_values<R, S::kKeys, Ahead>(row, i, a, b);
      for (; i < task.dv; i += 2 * kL) pair_values<R, 2, Ahead>(row, i, a, b);
      return;
    }
    for (; i + kWide <= task.dv; i += kWide) values<R, S::kKeys, false, Ahead>(row, i, a, b, 0);
    for (; i + kL <= task.dv; i += kL) values<R, 1, false, Ahead>(row, i, a, b, 0);
    if (i < task.dv) values<R, 1, true, false>(row, i, a, b, static_cast<int>(task.dv - i));
  }

  template <bool Ahead> void step(int64_t base) {
    uint64_t all = 0;
    int64_t last = -1;
    for (int64_t r = 0; r < rows; ++r) {
      seen[r] = token(r) == last ? seen[r - 1] : visible(token(r), base);
      last = token(r);
      all |= seen[r];
    }
    if (all == 0) return;
    if (rows > S::kFused)
      for (int c = __builtin_ctzll(all) / kL * kL; c < 64 - __builtin_clzll(all); c += kL) transpose_keys<Ahead>(c);
    // All scores, then all sums: with many rows keys and values do not fit the L1 cache together.
    for (int64_t g = 0; g < groups; ++g)
      by_group(g, [&]<int R>(Rows<R>, int64_t row, uint64_t any) { group_scores<R, Ahead>(row, any); });
    for (int64_t g = 0; g < groups; ++g)
      by_group(g, [&]<int R>(Rows<R>, int64_t row, uint64_t any) { group_values<R, Ahead>(row, any); });
  }
  template <int R> struct Rows {};
  template <class Body> void by_group(int64_t g, Body body) {
    const int64_t row = begin_of(g), n = begin_of(g + 1) - row;
    own = scores + row * kStep;
    uint64_t any = 0;
    for (int64_t r = row; r < row + n; ++r) any |= seen[r];
    if (any == 0) return;
    switch (n) {
      case 1: return body(Rows<1>{}, row, any);
      case 2: return body(Rows<2>{}, row, any);
      case 3: return body(Rows<3>{}, row, any);
      case 4: return body(Rows<4>{}, row, any);
      case 5: return body(Rows<5>{}, row, any);
      default: return body(Rows<6>{}, row, any);
    }
  }

  void prefetch(const Pointers& p, int64_t from, int64_t count) const {
    for (int64_t i = from; i < count; ++i) {
      for (int64_t x = 0; x < task.d; x += 64 / static_cast<int64_t>(sizeof(T)))
        _mm_prefetch(reinterpret_cast<const char*>(p.k[i] + x), _MM_HINT_T1);
      for (int64_t x = 0; x < task.dv; x += 64 / static_cast<int64_t>(sizeof(T)))
        _mm_prefetch(reinterpret_cast<const char*>(p.v[i] + x), _MM_HINT_T1);
    }
  }

  // The tile over keys [begin, end) of chunk c into m, l, acc. stop: keys beyond it are not even prefetched; cold:
  // nothing has been prefetched yet.
  void chunk(int64_t c, int64_t begin, int64_t end, int64_t stop, bool cold) {
    for (int64_t r = 0; r < rows; ++r) m[r] = kNone, S::store(lanes + r * kL, S::zero());
    for (int64_t i = 0; i < rows * dvp; i += kL) S::store(acc + i, S::zero());
    const int64_t from = larger(begin, c * kChunk) / kStep * kStep, to = smaller(end, (c + 1) * kChunk);
    const bool ahead = rows <= kFewRows;
    const AttentionAhead self{task.k, task.v, task.pages, begin, end};
    bool located = false;
    for (int64_t base = from; base < to; base += kStep) {
      if (!located) locate(self, base, buffer[base / kStep % 2]);
      located = false;
      now = buffer + base / kStep % 2;
      if (ahead && cold && base == from) prefetch(*now, 0, smaller(kStep, to - base));
      if constexpr (__is_same(T, int8_t)) locate_scales(base, end);
      const bool another = task.ahead && task.ahead->begin < task.ahead->end;
      Pointers& then = buffer[(base / kStep + 1) % 2];
      next = &then;
      if (ahead && base + kStep < stop && (base + 2 * kStep <= stop || !another)) {
        locate(self, base + kStep, then);
        located = true;
        step<true>(base);
      } else if (ahead && another) {
        lead_over(self, base, then);
        if (base <= begin) prefetch(other, 0, base + kStep - end);   // a single step fetches only as many as it reads
        step<true>(base);
      } else {
        step<false>(base);
      }
    }
    for (int64_t r = 0; r < rows; ++r) l[r] = S::sum(S::load(lanes + r * kL));
    if constexpr (kInt) {
      for (int64_t i = 0; i < rows * dvp; i += 4 * kL) {
        float mixed[4 * kL];   // vector v, lane 4 q + e: dimension 16 q + 4 v + e
        __builtin_memcpy(mixed, acc + i, sizeof mixed);
        for (int v = 0; v < 4; ++v)
          for (int p = 0; p < 4; ++p) __builtin_memcpy(acc + i + 16 * p + 4 * v, mixed + 16 * v + 4 * p, 16);
      }
    } else if constexpr (Dot) {
      for (int64_t i = 0; i < rows * dvp; i += 2 * kL) {
        F lo = S::load(acc + i), hi = S::load(acc + i + kL);
        S::weave(lo, hi);
        S::store(acc + i, lo);
        S::store(acc + i + kL, hi);
      }
    }
  }
};

}  // namespace
}  // namespace ridgeline
