// The most likely tokens of a head without its logits.
#include <algorithm>
#include <limits>
#include <memory>

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
  note_head(w, rows, team.size());
  const Input in = input(0, rows, w.cols);
  tiles_.need(static_cast<size_t>(threads * rows * width) * 4);
  std::vector<float> best(threads * rows, kLowest);
  std::vector<int64_t> at(threads * rows, -1);
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier(thread);
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
    expect(thread, pass_start_);
  });
  merge(best, at, rows, tokens);
  trace.end(Part::head);
}

int64_t Engine::greedy(const Linear& linear, const float* x, int64_t rows, int64_t* tokens) {
  trace.begin(-1, rows);
  const int64_t threads = team.size();
  const Input in = input(0, rows, linear.matrix->cols);
  const std::vector<int64_t> one(static_cast<size_t>(rows), 1), none(static_cast<size_t>(rows + 1));
  const TopQuery query{one.data(), none.data(), nullptr, nullptr, 0, nullptr, nullptr, nullptr, true};
  std::vector<float> best(static_cast<size_t>(threads * rows), kLowest);
  std::vector<int64_t> token(best.size(), -1);
  const std::unique_ptr<bool[]> broken(new bool[static_cast<size_t>(rows)]());
  const int64_t scored = prune(linear, in, x, query, broken.get(), [&](int thread, int64_t tile, float* scores) {
    for (int64_t r = 0; r < rows; ++r) {
      const size_t at = static_cast<size_t>(thread * rows + r);
      for (int64_t i = 0; i < kTile && tile * kTile + i < linear.matrix->rows; ++i)
        if (scores[r * kTile + i] > best[at]) best[at] = scores[r * kTile + i], token[at] = tile * kTile + i;
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    float value = kLowest;
    tokens[r] = -1;
    if (broken[static_cast<size_t>(r)]) continue;
    for (size_t i = static_cast<size_t>(r); i < best.size(); i += static_cast<size_t>(rows))
      if (token[i] >= 0 && (best[i] > value || (best[i] == value && token[i] < tokens[r])))
        value = best[i], tokens[r] = token[i];
  }
  trace.end(Part::head);
  return scored;
}

}  // namespace ridgeline
