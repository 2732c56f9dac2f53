// The online softmax of a tile (attention_tile.h): scores of one step become weights.
#pragma once
#include "simd_math.h"

namespace ridgeline {
namespace {

// Scores of R rows, at t.own, to weights exp(s - m); m, the lanes of l and the correction of what was summed before. No
// branch asks whether the maximum has moved: with branches and a sum over the lanes of each step 160 instead of 177
// GFLOP/s behind 4,096 tokens (together with the larger row tile and 2^x by vscalefps).
template <int R, class Tile> void weigh(Tile& t, int64_t row) {
  using S = typename Tile::Vector;
  using F = typename S::F;
  constexpr int kL = S::kLanes, kVectors = Tile::kVectors;
  constexpr bool kEight = __is_same(typename Tile::Element, int8_t), kPairs = Tile::kPairs, kInt = Tile::kInt;
  constexpr bool kRounded = kPairs || kInt;
  alignas(64) float best[kL] = {}, shifts[kL];
  F x[kVectors];
  for (int r = 0; r < R; ++r) {
    float* s = t.own + r * kStep;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      x[v] = S::load(s + v * kL);
      if constexpr (kEight) x[v] = S::mul(x[v], S::load(t.k_scale + v * kL));
    }
    if (t.task.softcap > 0) {
      const F cap = S::set1(t.task.softcap);
      for (int v = 0; v < kVectors; ++v) x[v] = S::mul(cap, tanh_of<S>(S::div(x[v], cap)));
    }
    F top = S::set1(Tile::kNone);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      x[v] = S::where(t.seen[row + r], v, x[v], S::set1(Tile::kNone));
      top = S::max(x[v], top);
      S::store(s + v * kL, x[v]);
    }
    best[r] = S::top(top);
  }
  const F old = S::load_part(t.m + row, R), peak = S::max(S::load(best), old);
  const F shift = S::select_less(peak, S::set1(-3e38f), S::zero(), peak);   // 0 while nothing has been seen
  S::store_part(t.m + row, peak, R);
  S::store_part(t.correction + row, exp_of<S>(S::sub(old, shift)), R);
  S::store(shifts, kRounded ? S::mul(shift, S::set1(-Tile::kLog2e)) : shift);
  for (int r = 0; r < R; ++r) {
    float* s = t.own + r * kStep;
    const F by = S::set1(shifts[r]);
    F sum = S::zero();
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kRounded) x[v] = S::power(S::fma(S::load(s + v * kL), S::set1(Tile::kLog2e), by));
      else x[v] = exp_of<S>(S::sub(S::load(s + v * kL), by));
      if constexpr (!kPairs) sum = S::add(sum, x[v]);
      if constexpr (kEight) x[v] = S::mul(x[v], S::load(t.v_scale + v * kL));
      if constexpr (!kRounded) S::store(s + v * kL, x[v]);
    }
    if constexpr (kPairs) {   // what is summed is what is multiplied, so that the weights still add up to 1
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; v += 2) {
        const F pairs = S::pack(x[v], x[v + 1]);
        sum = S::add(sum, S::add(S::lower_bf16(pairs), S::upper_bf16(pairs)));
        S::store(s + v / 2 * kL, pairs);
      }
    }
    if constexpr (kInt) {   // 64 high bytes, 64 low ones
      F most = x[0];
#pragma GCC unroll 8
      for (int v = 1; v < kVectors; ++v) most = S::max(most, x[v]);
      const float largest = S::top(most);
      t.weight_scale[row + r] = largest / 65535.0f;
      const F inverse = S::set1(largest > 1e-30f ? 65535.0f / largest : 0.0f);
      auto* bytes = reinterpret_cast<uint8_t*>(s);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        S::store_bytes(bytes + v * kL, bytes + kStep + v * kL, S::mul(x[v], inverse), 0);
    }
    float* sums = t.lanes + (row + r) * kL;
    S::store(sums, S::fma(S::load(sums), S::set1(t.correction[row + r]), sum));
  }
}

}  // namespace
}  // namespace ridgeline
