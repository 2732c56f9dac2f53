// The k most likely tokens of a head without its logits.
#include <algorithm>
#include <atomic>
#include <memory>

#include "best.h"
#include "kernels/head.h"

namespace ridgeline {
namespace {

// One row's answer from the bests of all threads (each `rows` apart).
void answer(Best* bests, int64_t rows, int64_t threads, int64_t row, const TopQuery& query) {
  int64_t& count = query.counts[row];
  std::vector<std::pair<float, int32_t>> all;
  bool tied = false;
  count = 0;
  for (int64_t i = 0; i < threads; ++i) {
    Best& best = bests[i * rows + row];
    if (best.broken) count = TopQuery::kBroken;
    best.shrink(query.capacity);
    tied |= best.tied;
    for (int64_t j = 0; j < best.count; ++j) all.emplace_back(best.scores[j], best.ids[j]);
  }
  if (count < 0 || query.k[row] == 0) return;
  const size_t k = static_cast<size_t>(query.k[row]);
  if (all.size() > k) {
    std::nth_element(all.begin(), all.begin() + static_cast<int64_t>(k) - 1, all.end(), std::greater<>());
    const float least = all[k - 1].first;
    std::erase_if(all, [&](const auto& a) { return a.first < least; });
  }
  if (tied || static_cast<int64_t>(all.size()) > query.capacity) {
    count = TopQuery::kTied;
    return;
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  count = static_cast<int64_t>(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    query.scores[row * query.capacity + static_cast<int64_t>(i)] = all[i].first;
    query.ids[row * query.capacity + static_cast<int64_t>(i)] = all[i].second;
  }
}

}  // namespace

int64_t Engine::top(const Linear& linear, const float* x, int64_t rows, const TopQuery& query) {
  trace.begin(-1, rows);
  const int64_t tiles = linear.matrix->view().tiles();
  const Input in = input(0, rows, linear.matrix->cols);
  // Reading single tiles costs their latency: not worth it where many are touched.
  const bool few = static_cast<int64_t>(touched_tiles(query, rows).size()) <= tiles / 8;
  const bool alone = std::all_of(query.k, query.k + rows, [](int64_t k) { return k == 0; });
  const bool pruned = query.prune && few && rows <= kHeadRows && linear.matrix->split() && isa.kernels->head_bounds &&
                      precision_of(linear) == Precision::i8;
  const int64_t scored = few && alone ? touched_alone(linear, in, x, query)
                         : pruned     ? top_pruned(linear, in, x, query)
                                      : top_whole(linear, in, x, query);
  trace.end(Part::head);
  return scored;
}

int64_t Engine::top_whole(const Linear& linear, const Input& in, const float* x, const TopQuery& query) {
  const Weights w = linear.matrix->view();
  const int64_t rows = in.rows, tiles = w.tiles(), threads = team.size(), width = kStrip * kTile;
  tiles_.need(static_cast<size_t>(threads * rows * width) * 4);
  note_head(w, rows, team.size());
  const std::unique_ptr<Best[]> bests(new Best[static_cast<size_t>(threads * rows)]);
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier(thread);
    const Range t = share((tiles + 1) / 2, thread, static_cast<int>(threads));
    float* strip = tiles_.as<float>() + thread * rows * width;
    Best* best = bests.get() + thread * rows;
    std::vector<Touched> touched;
    for (int64_t r = 0; r < rows; ++r) {
      best[r].start(query.k[r], query.k[r] ? -kMost : kMost);
      touched.push_back(touched_of(query, r, true));
      touched.back().skip(2 * t.first * kTile);
    }
    for (int64_t a = 2 * t.first; a < std::min(tiles, 2 * t.last); a += kStrip) {
      const int64_t b = std::min({tiles, 2 * t.last, a + kStrip}), first = a * kTile, n = std::min(w.rows, b * kTile) - first;
      multiply(linear, in, a, b, strip - first, width);        // column `first` of the product is the strip's first
      for (int64_t r = 0; r < rows; ++r) {
        touched[static_cast<size_t>(r)].take(strip + r * width, first, n, &best[r].broken);
        best[r].look(*isa.kernels, strip + r * width, n, first);
      }
    }
    expect(thread, pass_start_);
  });
  for (int64_t r = 0; r < rows; ++r) answer(bests.get(), rows, threads, r, query);
  return w.rows;
}

int64_t Engine::touched_alone(const Linear& linear, const Input& in, const float* x, const TopQuery& query) {
  const int64_t rows = in.rows, threads = team.size();
  const std::vector<int64_t> tiles = touched_tiles(query, rows);
  tiles_.need(static_cast<size_t>(threads * rows * kTile) * 4);
  std::vector<std::atomic<bool>> broken(static_cast<size_t>(rows));
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier(thread);
    const Range mine = share(static_cast<int64_t>(tiles.size()), thread, static_cast<int>(threads));
    float* scores = tiles_.as<float>() + thread * rows * kTile;
    for (int64_t i = mine.first; i < mine.last; ++i) {
      const int64_t first = tiles[static_cast<size_t>(i)] * kTile;
      multiply(linear, in, first / kTile, first / kTile + 1, scores - first, kTile);
      for (int64_t r = 0; r < rows; ++r) {
        bool bad = false;
        Touched touched = touched_of(query, r, true);
        touched.skip(first);
        touched.take(scores + r * kTile, first, kTile, &bad);
        if (bad) broken[static_cast<size_t>(r)] = true;
      }
    }
  });
  for (int64_t r = 0; r < rows; ++r) query.counts[r] = broken[static_cast<size_t>(r)] ? TopQuery::kBroken : 0;
  return std::min(linear.matrix->rows, static_cast<int64_t>(tiles.size()) * kTile);
}

int64_t Engine::top_pruned(const Linear& linear, const Input& in, const float* x, const TopQuery& query) {
  const int64_t rows = in.rows, threads = team.size();
  const std::unique_ptr<Best[]> bests(new Best[static_cast<size_t>(threads * rows)]);
  const std::unique_ptr<bool[]> broken(new bool[static_cast<size_t>(rows)]());
  for (int64_t i = 0; i < threads * rows; ++i)
    bests[static_cast<size_t>(i)].start(query.k[i % rows], query.k[i % rows] ? -kMost : kMost);
  const int64_t scored = prune(linear, in, x, query, broken.get(), [&](int thread, int64_t tile, float* scores) {
    const int64_t first = tile * kTile, n = std::min<int64_t>(kTile, linear.matrix->rows - first);
    for (int64_t r = 0; r < rows; ++r) {
      Best& best = bests[static_cast<size_t>(thread * rows + r)];
      Touched touched = touched_of(query, r, true);
      touched.skip(first);
      touched.take(scores + r * kTile, first, n, &best.broken);
      best.look(*isa.kernels, scores + r * kTile, n, first);
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    if (broken[static_cast<size_t>(r)]) bests[static_cast<size_t>(r)].broken = true;
    answer(bests.get(), rows, threads, r, query);
  }
  return scored;
}

}  // namespace ridgeline
