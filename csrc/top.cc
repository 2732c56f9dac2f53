// The k most likely tokens of a head without its logits.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "blocks.h"
#include "kernels/head.h"

namespace ridgeline {
namespace {

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

Touched touched_of(const TopQuery& query, int64_t row, bool wanted) {
  return {query.touched + query.offsets[row], query.touched + query.offsets[row + 1],
          wanted ? query.touched_scores + query.offsets[row] : nullptr};
}

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

// The tiles that hold touched output rows, ascending.
std::vector<int64_t> touched_tiles(const TopQuery& query, int64_t rows) {
  std::vector<int64_t> tiles;
  for (int64_t i = 0; i < query.offsets[rows]; ++i) {
    const int64_t t = query.touched[i] / kTile;
    if (tiles.empty() || tiles.back() != t) tiles.push_back(t);
  }
  std::sort(tiles.begin(), tiles.end());
  tiles.erase(std::unique(tiles.begin(), tiles.end()), tiles.end());
  return tiles;
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
  const std::unique_ptr<Best[]> bests(new Best[static_cast<size_t>(threads * rows)]);
  team.run([&](int thread) {
    take(in, x, precision_of(linear), thread);
    team.barrier();
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
    team.barrier();
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
  const Matrix& head = *linear.matrix;
  const SplitHead w = head.planes();
  const int64_t rows = in.rows, tiles = w.tiles(), ld = tiles * kTile, threads = team.size(), width = kStrip * kTile;
  const std::vector<int64_t> apart = touched_tiles(query, rows);
  wide_[0].need(static_cast<size_t>(rows * ld) * 4);
  tiles_.need(static_cast<size_t>(threads * rows * kTile) * 4);
  float* upper = wide_[0].as<float>();
  const std::unique_ptr<Best[]> bests(new Best[static_cast<size_t>(threads * rows)]);
  std::vector<float> lower(static_cast<size_t>(rows * threads));
  std::vector<int64_t> at(lower.size()), exact(static_cast<size_t>(threads));
  // Of each row: the candidates with the largest upper bounds, and their exact scores. The k-th largest of any k exact
  // scores is at most the k-th largest of all.
  std::vector<int64_t> leaders(static_cast<size_t>(rows * kMostTop));
  std::vector<float> leader_scores(leaders.size()), bar(static_cast<size_t>(rows));
  std::vector<int64_t> found(static_cast<size_t>(rows));
  std::vector<std::atomic<bool>> broken(static_cast<size_t>(rows));
  team.run([&](int thread) {
    take(in, x, Precision::i8, thread);
    team.barrier();
    const Range t = share(tiles, thread, static_cast<int>(threads));
    const int64_t from = t.first * kTile, to = std::min(w.rows, t.last * kTile);
    float* scores = tiles_.as<float>() + thread * rows * kTile;
    Best* best = bests.get() + thread * rows;
    isa.kernels->head_bounds(w, {in.q, in.scale, in.sum, rows, in.stride}, t.first, t.last, upper, ld,
                             lower.data() + thread * rows, at.data() + thread * rows);
    for (int64_t r = 0; r < rows; ++r) {
      best[r].start(query.k[r], query.k[r] ? -kMost : kMost);
      Touched touched = touched_of(query, r, false);
      touched.skip(from);
      touched.take(upper + r * ld, 0, to, nullptr);
      for (int64_t i = from; i < to; i += width) best[r].look(*isa.kernels, upper + r * ld + i, std::min(width, to - i), i);
      if (best[r].broken) broken[static_cast<size_t>(r)] = true;
    }
    team.barrier();
    if (thread == 0)
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<std::pair<float, int32_t>> all;
        for (int64_t i = 0; i < threads; ++i) {
          const Best& b = bests[static_cast<size_t>(i * rows + r)];
          for (int64_t j = 0; j < b.count; ++j) all.emplace_back(b.scores[j], b.ids[j]);
        }
        const int64_t n = std::min<int64_t>(query.k[r], static_cast<int64_t>(all.size()));
        std::partial_sort(all.begin(), all.begin() + n, all.end(), std::greater<>());
        for (int64_t j = 0; j < n; ++j) leaders[static_cast<size_t>(r * kMostTop + j)] = all[static_cast<size_t>(j)].second;
        found[static_cast<size_t>(r)] = n;
      }
    team.barrier();
    int64_t turn = 0;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < found[static_cast<size_t>(r)]; ++j) {
        if (turn++ % threads != thread) continue;
        const int64_t leader = leaders[static_cast<size_t>(r * kMostTop + j)], tile = leader / kTile;
        multiply(linear, in, tile, tile + 1, scores - tile * kTile, kTile);
        leader_scores[static_cast<size_t>(r * kMostTop + j)] = scores[r * kTile + leader % kTile];
      }
    team.barrier();
    for (int64_t r = 0; r < rows; ++r) {
      const float* first = leader_scores.data() + r * kMostTop;
      const int64_t n = found[static_cast<size_t>(r)];
      best[r].start(query.k[r], query.k[r] == 0 ? kMost : n < query.k[r] ? -kMost : *std::min_element(first, first + n));
    }
    for (int64_t tile = t.first; tile < t.last; ++tile) {
      bool any = std::binary_search(apart.begin(), apart.end(), tile);
      for (int64_t r = 0; r < rows && !any; ++r) {
        const float* u = upper + r * ld + tile * kTile;
        float top = u[0];
        for (int i = 1; i < kTile; ++i) top = std::max(top, u[i]);
        any = top >= best[r].least;
      }
      if (!any) continue;
      const int64_t first = tile * kTile, n = std::min<int64_t>(kTile, w.rows - first);
      multiply(linear, in, tile, tile + 1, scores - first, kTile);
      exact[static_cast<size_t>(thread)] += n;
      for (int64_t r = 0; r < rows; ++r) {
        Touched touched = touched_of(query, r, true);
        touched.skip(first);
        touched.take(scores + r * kTile, first, n, &best[r].broken);
        best[r].look(*isa.kernels, scores + r * kTile, n, first);
      }
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    if (broken[static_cast<size_t>(r)]) bests[static_cast<size_t>(r)].broken = true;
    answer(bests.get(), rows, threads, r, query);
  }
  return std::accumulate(exact.begin(), exact.end(), int64_t{0});
}

}  // namespace ridgeline
