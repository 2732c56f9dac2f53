// The pruned head in plain loops.
#include <cmath>
#include <limits>

#include "../packed.h"
#include "head.h"
#include "parts.h"

namespace ridgeline::scalar {
namespace {

// Nibble of row i, column c of block b of a tile.
int high_nibble(const uint8_t* tile, int64_t b, int i, int c) {
  const int g = c / 4;
  return tile[b * kPlane + 64 * (g & 3) + 4 * i + c % 4] >> (g < 4 ? 0 : 4) & 15;
}
int low_nibble(const uint8_t* tile, int64_t b, int i, int c) {
  return tile[b * kPlane + 64 * (i % 4) + 16 * (i / 4) + c % 16] >> (c < 16 ? 0 : 4) & 15;
}

}  // namespace

void head_bounds(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, float* score,
                 int64_t score_ld, float* upper, int64_t ld, bool* broken) {
  const int64_t blocks = w.blocks();
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t t = first; t < last; ++t)
      for (int i = 0; i < kTile; ++i) {
        float likely = 0, bound = 0;
        for (int64_t b = 0; b < blocks; ++b) {
          const HeadFactors& f = factors[r * blocks + b];
          const float scale = half_at(w.scales + (t * blocks + b) * 32 + 2 * i);
          int32_t dot = 0;
          for (int c = 0; c < kBlock; ++c)
            dot += high_nibble(w.high + t * blocks * kPlane, b, i, c) * x.q[r * x.stride + b * kBlock + c];
          likely += scale * (static_cast<float>(dot) * f.dot + f.offset);
          bound += std::fabs(scale) * f.bound;
        }
        const bool real = t * kTile + i < w.rows;
        score[r * score_ld + (t - first) * kTile + i] = likely;
        upper[r * ld + t * kTile + i] = real ? likely + bound : -std::numeric_limits<float>::infinity();
        if (real && !(likely + bound <= std::numeric_limits<float>::max())) broken[r] = true;
      }
}

int64_t head_doubtful(const float* upper, int64_t ld, int64_t rows, const float* bar, int64_t first, int64_t last,
                      int32_t* quads) {
  int64_t found = 0;
  for (int64_t t = first; t < last; ++t)
    for (int64_t i = 0; i < kQuads; ++i) {
      bool doubt = false;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = i; j < kTile; j += kQuads) doubt |= upper[r * ld + t * kTile + j] >= bar[r];
      if (doubt) quads[found++] = static_cast<int32_t>(kQuads * t + i);
    }
  return found;
}

int64_t head_refine(const SplitHead& w, const Acts& x, const HeadFactors* factors, int64_t first, int64_t last, int32_t* quads,
                    int64_t count, float* upper, int64_t ld, const float* bar) {
  const int64_t blocks = w.blocks();
  int64_t kept = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t t = quads[n] / kQuads;
    bool doubt = false;
    for (int64_t r = 0; r < x.rows; ++r)
      for (int i = static_cast<int>(quads[n] % kQuads); i < kTile; i += kQuads) {
        float change = 0;
        for (int64_t b = first; b < last; ++b) {
          const HeadFactors& f = factors[r * blocks + b];
          const float scale = half_at(w.scales + (t * blocks + b) * 32 + 2 * i);
          int32_t dot = 0;
          for (int c = 0; c < kBlock; ++c)
            dot += low_nibble(w.low + t * blocks * kPlane, b, i, c) * x.q[r * x.stride + b * kBlock + c];
          change += scale * (static_cast<float>(dot) * f.scale + f.middle) - std::fabs(scale) * f.width;
        }
        float& value = upper[r * ld + t * kTile + i];
        value += change;
        doubt |= value >= bar[r];
      }
    if (doubt) quads[kept++] = quads[n];
  }
  return kept;
}

void head_tile(const SplitHead& w, int64_t tile, uint8_t* quants) {
  const int64_t blocks = w.blocks(), from = tile * blocks * kPlane;
  for (int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < kTile; ++i)
      for (int c = 0; c < kBlock; ++c)
        quants[b * 512 + 64 * (c / 4) + 4 * i + c % 4] =
            static_cast<uint8_t>(high_nibble(w.high + from, b, i, c) << 4 | low_nibble(w.low + from, b, i, c));
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
