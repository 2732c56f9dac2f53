// The arithmetic of the pruned head that its kernels share.
//
// A weight is S (16 h + l - 128) with nibbles h and l. The score from h alone takes 7.5 for l, so it is off by at most
// 7.5 |x| for each column: with activations sx q, score = sum over blocks of S (16 sx sum(h q) - 120.5 sx sum(q)), and the
// exact one lies within sum of |S| 7.5 sx sum|q|. The low nibbles of a block then add S sx (sum(l q) - 7.5 sum(q)) to an
// upper bound and take |S| 7.5 sx sum|q| away; once all blocks did, it is the exact score and what kHeadSlack added.
#pragma once
#include "../api.h"

namespace ridgeline {

// What fp32 rounds away. The terms of a score are at most 128 |S| sx sum|q|, 17.1 times those of the bound, so a sum of n of
// them is off by at most (n + 3) 2^-24 17.1 of the bound: 0.53 thousandths for 512 blocks. gemm's sum and this one: 1.06. What
// the low plane adds and takes away is summed apart, 2 n terms no larger than the bound's, and added up to 8 times to the
// upper: 0.12 and 0.01 at most. Together below 1.5 thousandths.
constexpr float kHeadSlack = 1.002f;

inline HeadFactors head_factors(const Acts& x, int64_t row, int64_t block) {
  const int8_t* q = x.q + row * x.stride + block * kBlock;
  const float scale = x.scale[row * (x.stride / kBlock) + block];
  int32_t sum = 0, magnitude = 0;
  for (int i = 0; i < kBlock; ++i) {
    sum += q[i];
    magnitude += q[i] < 0 ? -q[i] : q[i];
  }
  const float width = 7.5f * scale * static_cast<float>(magnitude);
  return {16.0f * scale, -120.5f * scale * static_cast<float>(sum), width * kHeadSlack, scale,
          -7.5f * scale * static_cast<float>(sum), width};
}

constexpr int64_t kHeadBlocks = 512;    // columns up to 16,384
constexpr int64_t kHeadRows = 4;        // rows of one call at most

}  // namespace ridgeline
