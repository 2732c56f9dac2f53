// The pruned head in plain loops.
#include <cmath>
#include <limits>

#include "../packed.h"
#include "head.h"
#include "parts.h"

namespace ridgeline::scalar {
namespace {

// Nibble of row i, column c of a block of a plane.
int nibble(const uint8_t* plane, int i, int c) {
  const int g = c / 4;
  return plane[64 * (g & 3) + 4 * i + c % 4] >> (g < 4 ? 0 : 4) & 15;
}

}  // namespace

void head_bounds(const SplitHead& w, const Acts& x, int64_t first, int64_t last, float* upper, int64_t ld, float* lower,
                 int64_t* at) {
  const int64_t blocks = w.blocks();
  for (int64_t r = 0; r < x.rows; ++r) {
    lower[r] = -std::numeric_limits<float>::infinity();
    at[r] = -1;
    for (int64_t t = first; t < last; ++t)
      for (int i = 0; i < kTile; ++i) {
        float score = 0, bound = 0;
        for (int64_t b = 0; b < blocks; ++b) {
          const HeadFactors f = head_factors(x, r, b);
          const float scale = half_at(w.scales + (t * blocks + b) * 32 + 2 * i);
          int32_t dot = 0;
          for (int c = 0; c < kBlock; ++c)
            dot += nibble(w.high + (t * blocks + b) * kPlane, i, c) * x.q[r * x.stride + b * kBlock + c];
          score += scale * (static_cast<float>(dot) * f.dot + f.offset);
          bound += std::fabs(scale) * f.bound;
        }
        upper[r * ld + t * kTile + i] = score + bound;
        if (t * kTile + i < w.rows && score - bound > lower[r]) {
          lower[r] = score - bound;
          at[r] = t * kTile + i;
        }
      }
  }
}

void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants) {
  const int64_t blocks = w.blocks();
  for (int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < kTile; ++i)
      for (int c = 0; c < kBlock; ++c)
        quants[b * 512 + 64 * (c / 4) + 4 * i + c % 4] = static_cast<uint8_t>(
            nibble(w.high + (tile * blocks + b) * kPlane, i, c) << 4 | nibble(w.low + (tile * blocks + b) * kPlane, i, c));
}

bool row_max(const float* x, int64_t n, int64_t offset, float* best, int64_t* at) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    finite &= std::isfinite(x[i]);
    if (x[i] > *best) {
      *best = x[i];
      *at = offset + i;
    }
  }
  return finite;
}

int64_t collect(const float* x, int64_t n, int64_t offset, float least, float* scores, int32_t* ids, bool* broken) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(x[i] <= std::numeric_limits<float>::max())) *broken = true;
    if (!(x[i] >= least)) continue;
    scores[found] = x[i];
    ids[found++] = static_cast<int32_t>(offset + i);
  }
  return found;
}

}  // namespace ridgeline::scalar
