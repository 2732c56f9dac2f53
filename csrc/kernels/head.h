// The arithmetic of the pruned head that its kernels share.
//
// A weight is S (16 h + l - 128) with nibbles h and l. The score from h alone takes 7.5 for l, so it is off by at most
// 7.5 |x| for each column: with activations sx q, score = sum over blocks of S (16 sx sum(h q) - 120.5 sx sum(q)), and the
// exact one lies within sum of |S| 7.5 sx sum|q|.
#pragma once
#include "../api.h"

namespace ridgeline {

struct HeadFactors {
  float dot, offset, bound;   // of sum(h q), of S, of |S|
};

// fp32 sums of 20 to 256 blocks in another order: far below a thousandth of the bound, whose terms are 1/17 of the score's.
constexpr float kHeadSlack = 1.001f;

inline HeadFactors head_factors(const Acts& x, int64_t row, int64_t block) {
  const int8_t* q = x.q + row * x.stride + block * kBlock;
  const float scale = x.scale[row * (x.stride / kBlock) + block];
  int32_t sum = 0, magnitude = 0;
  for (int i = 0; i < kBlock; ++i) {
    sum += q[i];
    magnitude += q[i] < 0 ? -q[i] : q[i];
  }
  return {16.0f * scale, -120.5f * scale * static_cast<float>(sum), 7.5f * scale * static_cast<float>(magnitude) * kHeadSlack};
}

constexpr int64_t kHeadBlocks = 512;    // columns up to 16,384
constexpr int64_t kHeadRows = 4;        // rows of one call at most

}  // namespace ridgeline
