// The most likely tokens of a head without its logits.
#include <algorithm>
#include <limits>

#include "blocks.h"

namespace ridgeline {
namespace {

constexpr int64_t kNotFinite = -2;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The best of each row over the threads' own (threads x rows); their ranges of tokens ascend, so the first of equals is the
// lowest. -1 where a thread met what is not finite.
void merge(const std::vector<float>& best, const std::vector<int64_t>& at, int64_t rows, int64_t* tokens) {
  for (int64_t r = 0; r < rows; ++r) {
    float value = kLowest;
    tokens[r] = -1;
    for (size_t i = static_cast<size_t>(r); i < best.size(); i += static_cast<size_t>(rows)) {
      if (at[i] == kNotFinite) {
        tokens[r] = -1;
        break;
      }
      if (best[i] > value) value = best[i], tokens[r] = at[i];
    }
  }
}

}  // namespace

void Engine::argmax(const Linear& linear, const float* x, int64_t rows, int64_t* tokens) {
  trace.begin(-1, rows);
  const Weights w = linear.matrix->view();
  const int64_t tiles = w.tiles(), threads = team.size(), width = 8 * kTile;      // a strip of 32 rows takes 16 KB
  const Input in = input(0, rows, w.cols);
  tiles_.need(static_cast<size_t>(threads * rows * width) * 4);
  std::vector<float> best(threads * rows, kLowest);
  std::vector<int64_t> at(threads * rows, -1);
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier();
    const Range t = share((tiles + 1) / 2, thread, static_cast<int>(threads));
    float* strip = tiles_.as<float>() + thread * rows * width;
    for (int64_t a = 2 * t.first; a < std::min(tiles, 2 * t.last); a += 8) {
      const int64_t b = std::min({tiles, 2 * t.last, a + 8}), first = a * kTile, n = std::min(w.rows, b * kTile) - first;
      multiply(linear, in, a, b, strip - first, width);       // column `first` of the product is the strip's first
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t i = thread * rows + r;
        if (at[i] != kNotFinite && !isa.kernels->row_max(strip + r * width, n, first, &best[i], &at[i])) at[i] = kNotFinite;
      }
    }
  });
  merge(best, at, rows, tokens);
  trace.end(Part::head);
}

int64_t Engine::greedy(const Linear& linear, const float* x, int64_t rows, int64_t* tokens) {
  trace.begin(-1, rows);
  const SplitHead w = linear.matrix->planes();
  const int64_t tiles = w.tiles(), ld = tiles * kTile, threads = team.size();
  const Input in = input(0, rows, w.cols);
  wide_[0].need(static_cast<size_t>(rows * ld) * 4);
  tiles_.need(static_cast<size_t>(threads * rows * kTile) * 4);
  float* upper = wide_[0].as<float>();
  std::vector<float> lower(threads * rows), best(threads * rows);
  std::vector<int64_t> at(threads * rows), token(threads * rows), exact(threads);
  team.run([&](int thread) {
    take(in, x, Precision::i8, thread);
    team.barrier();
    const Range t = share(tiles, thread, static_cast<int>(threads));
    isa.kernels->head_bounds(w, {in.q, in.scale, in.sum, in.rows, in.stride}, t.first, t.last, upper, ld,
                             lower.data() + thread * rows, at.data() + thread * rows);
    team.barrier();
    float* scores = tiles_.as<float>() + thread * rows * kTile;
    const auto score = [&](int64_t t) { multiply(linear, in, t, t + 1, scores - t * kTile, kTile); };
    // Threshold of each row: the exact score of the row with the largest lower bound of all.
    std::vector<float> threshold(rows);
    for (int64_t r = 0; r < rows; ++r) {
      int64_t leader = -1;
      float value = kLowest;
      for (int64_t i = 0; i < threads; ++i)
        if (lower[i * rows + r] > value) value = lower[i * rows + r], leader = at[i * rows + r];
      if (leader >= 0) {
        score(leader / kTile);
        value = scores[r * kTile + leader % kTile];
      }
      threshold[r] = value;
      best[thread * rows + r] = kLowest;
      token[thread * rows + r] = -1;
    }
    for (int64_t tile = t.first; tile < t.last; ++tile) {
      bool any = false;
      for (int64_t r = 0; r < rows; ++r) {
        const float* u = upper + r * ld + tile * kTile;
        float top = u[0];
        for (int i = 1; i < kTile; ++i) top = std::max(top, u[i]);
        any |= top >= threshold[r];
      }
      if (!any) continue;
      score(tile);
      exact[thread] += std::min<int64_t>(kTile, w.rows - tile * kTile);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < kTile && tile * kTile + i < w.rows; ++i)
          if (scores[r * kTile + i] > best[thread * rows + r]) {
            best[thread * rows + r] = scores[r * kTile + i];
            token[thread * rows + r] = tile * kTile + i;
          }
    }
  });
  int64_t total = 0;
  for (int64_t i = 0; i < threads; ++i) total += exact[i];
  merge(best, token, rows, tokens);
  trace.end(Part::head);
  return total;
}

}  // namespace ridgeline
