// Products of a tile (attention_tile.h) over int8 keys and values, by integers throughout a step (VNNI). A query is
// rounded to 16 bits with a scale a row, the weights (times the values' scales) to 16 bits with a scale a row and step.
// Both enter as a high and a low byte, a query with 32768 added; that times the sum of the key is taken off again. Four
// dimensions make one column of keys; q has two columns for it, high and low. Sums are exact, so their order is free.
#pragma once
#include "../attention.h"

namespace ridgeline {
namespace {

template <class Tile, class I> void store_score(Tile& t, int64_t row, float* to, I high, I low, I sum) {
  using S = typename Tile::Vector;
  S::store(to, S::mul(S::to_floats(S::minus_high_bit(S::joined(high, low), sum)), S::set1(t.q_scale[row])));
}
// Scores of R rows and kL keys from column c of the step, transposed in registers.
template <int R, bool Ahead, class Tile>
void int_dots_in_registers(Tile& t, int64_t row, const float* rows_of_q, int c) {
  using S = typename Tile::Vector;
  using I = typename S::I;
  I high[R], low[R], sum = S::zero_int();
  const I one = S::set1_int(0x01010101);
  const auto* u = reinterpret_cast<const int32_t*>(rows_of_q);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) high[r] = S::zero_int(), low[r] = S::zero_int();
  t.template each_pair<Ahead>(c, [&](int64_t h, typename S::F four, typename S::F, bool) {
    const I k = S::ints(four);
    S::dot4(sum, one, k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      S::dot4(high[r], S::set1_int(u[h * 2 * R + r]), k);
      S::dot4(low[r], S::set1_int(u[h * 2 * R + R + r]), k);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store_score(t, row + r, t.own + r * kStep + c, high[r], low[r], sum);
}
// The same for two vectors of keys that lie in scratch.
template <int R, class Tile> void int_dots(Tile& t, int64_t row, const float* rows_of_q, int c) {
  using S = typename Tile::Vector;
  using I = typename S::I;
  constexpr int kL = S::kLanes;
  I high[R][2], low[R][2];
  const auto* u = reinterpret_cast<const int32_t*>(rows_of_q);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) high[r][v] = S::zero_int(), low[r][v] = S::zero_int();
  const float* k = t.keys + c;
  for (int64_t i = 0; i < t.task.d / 4; ++i, k += kStep, u += 2 * R) {
    const I x = S::load_int(k), y = S::load_int(k + kL);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I a = S::set1_int(u[r]), b = S::set1_int(u[R + r]);
      S::dot4(high[r][0], a, x), S::dot4(high[r][1], a, y);
      S::dot4(low[r][0], b, x), S::dot4(low[r][1], b, y);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      store_score(t, row + r, t.own + r * kStep + c + v * kL, high[r][v], low[r][v],
                  S::load_int(t.key_sum + c + v * kL));
}

// acc = acc * correction + sum over keys [a, b) of weight * value: R rows, V (2 or 4) quarters of the 64 dimensions from i
// on, the first one `part`; four keys at a time.
template <int R, int V, bool Ahead, class Tile>
void int_values(Tile& t, int64_t row, int64_t i, int part, int a, int b) {
  using S = typename Tile::Vector;
  using I = typename S::I;
  constexpr int kL = S::kLanes;
  I high[R][V], low[R][V];
  const auto* weights = reinterpret_cast<const int32_t*>(t.own);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) high[r][v] = S::zero_int(), low[r][v] = S::zero_int();
  for (int j = a / 4; j < (b + 3) / 4; ++j) {
    const int8_t* const* from = t.now->v + 4 * j;
    if (Ahead) {
#pragma GCC unroll 4
      for (int e = 0; e < 4; ++e) _mm_prefetch(reinterpret_cast<const char*>(t.next->v[4 * j + e] + i), _MM_HINT_T1);
    }
    const I one = S::load_int(from[0] + i), two = S::load_int(from[1] + i);
    const I three = S::load_int(from[2] + i), four = S::load_int(from[3] + i);
    I x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v += 2) S::interleave4(one, two, three, four, (part + v) / 2, x[v], x[v + 1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I h = S::set1_int(weights[r * kStep + j]), l = S::set1_int(weights[r * kStep + kL + j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) S::dot4(high[r][v], h, x[v]), S::dot4(low[r][v], l, x[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const typename S::F scale = S::set1(t.weight_scale[row + r]), old = S::set1(t.correction[row + r]);
    float* to = t.acc + (row + r) * t.dvp + i + part * kL;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      S::store(to + v * kL, S::fma(S::to_floats(S::joined(high[r][v], low[r][v])), scale,
                                   S::mul(S::load(to + v * kL), old)));
  }
}

}  // namespace
}  // namespace ridgeline
