// What passes over a head collect: the best of each row, without the touched ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "blocks.h"

namespace ridgeline {

constexpr float kMost = std::numeric_limits<float>::max(), kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kStrip = 8;                      // tiles that are scored before they are looked through: 16 KB for 32 rows
constexpr int64_t kPlaces = 512;

// The best of what one thread has seen of one row. A value below the k-th largest so far is never kept.
struct Best {
  int64_t count, k;
  float least;                                     // what is smaller cannot be among the k largest
  bool broken, tied;
  float scores[kPlaces + kStrip * kTile + 16];
  int32_t ids[kPlaces + kStrip * kTile + 16];

  void start(int64_t wanted, float bar) { count = 0, k = wanted, least = bar, broken = tied = false; }

  // x: n <= kStrip * kTile values at places offset and on.
  void look(const Kernels& kernels, const float* x, int64_t n, int64_t offset) {
    count += kernels.collect(x, n, offset, least, scores + count, ids + count, &broken);
    if (count > kPlaces) shrink(kPlaces);
  }

  // Keeps the k largest and what ties with the last of them; more than `most`: tied.
  void shrink(int64_t most) {
    if (k == 0) count = 0;
    if (count > k) {
      float sorted[kPlaces + kStrip * kTile + 16];
      std::copy(scores, scores + count, sorted);
      std::nth_element(sorted, sorted + k - 1, sorted + count, std::greater<>());
      least = std::max(least, sorted[k - 1]);
      int64_t kept = 0;
      for (int64_t i = 0; i < count; ++i)
        if (scores[i] >= least) scores[kept] = scores[i], ids[kept] = ids[i], ++kept;
      count = kept;
    }
    // Room for one more strip must be left; what is dropped then is never missed, since the row is given up.
    if (count > most) tied = true, count = std::min(count, kPlaces / 2);
  }
};

// Removes the touched places within [first, first + n) from a strip of scores; gives their scores away if `out` is wanted.
struct Touched {
  const int64_t *at, *end;
  float* out;
  void skip(int64_t first) {
    const int64_t* next = std::lower_bound(at, end, first);
    if (out) out += next - at;
    at = next;
  }
  void take(float* strip, int64_t first, int64_t n, bool* broken) {
    for (; at < end && *at < first + n; ++at) {
      float& score = strip[*at - first];
      if (out) {
        *out++ = score;
        if (!std::isfinite(score)) *broken = true;
      }
      score = kNone;
    }
  }
};

inline Touched touched_of(const TopQuery& query, int64_t row, bool wanted) {
  return {query.touched + query.offsets[row], query.touched + query.offsets[row + 1],
          wanted ? query.touched_scores + query.offsets[row] : nullptr};
}

// The tiles that hold touched output rows, ascending.
inline std::vector<int64_t> touched_tiles(const TopQuery& query, int64_t rows) {
  std::vector<int64_t> tiles;
  for (int64_t i = 0; i < query.offsets[rows]; ++i) {
    const int64_t t = query.touched[i] / kTile;
    if (tiles.empty() || tiles.back() != t) tiles.push_back(t);
  }
  std::sort(tiles.begin(), tiles.end());
  tiles.erase(std::unique(tiles.begin(), tiles.end()), tiles.end());
  return tiles;
}

}  // namespace ridgeline
