// The few tiles of a split head that can hold one of the k best rows.
#include <atomic>
#include <memory>
#include <numeric>

#include "best.h"
#include "kernels/head.h"

namespace ridgeline {
namespace {

constexpr int64_t kSegment = 5, kSegments = 8;     // blocks of a segment at least; segments of a row at most
constexpr int64_t kPassed = 64, kRefined = 256;    // tiles that a thread takes at once from the first pass, and from the second

// Low nibbles are read a segment of a quad's columns at a time, for as long as the quad stays doubtful: those columns first
// that narrow the bounds most. Top-64 of Gemma 3 270M: 33 % of the quads are doubtful, but 12 % of the low plane is read.
std::vector<Range> segments(const std::vector<HeadFactors>& factors, int64_t rows, int64_t blocks) {
  const int64_t count = std::clamp<int64_t>(blocks / kSegment, 1, kSegments);
  std::vector<float> share(static_cast<size_t>(blocks));
  for (int64_t r = 0; r < rows; ++r) {
    float all = 0;
    const HeadFactors* own = factors.data() + r * blocks;
    for (int64_t b = 0; b < blocks; ++b) all += own[b].width;
    for (int64_t b = 0; b < blocks && all > 0; ++b) share[static_cast<size_t>(b)] += own[b].width / all;
  }
  std::vector<std::pair<float, int64_t>> order;
  for (int64_t i = 0; i < count; ++i) {
    const Range b = ridgeline::share(blocks, static_cast<int>(i), static_cast<int>(count));
    order.emplace_back(-std::accumulate(share.begin() + b.first, share.begin() + b.last, 0.0f), i);
  }
  std::sort(order.begin(), order.end());
  std::vector<Range> found;
  for (const auto& [_, i] : order) found.push_back(ridgeline::share(blocks, static_cast<int>(i), static_cast<int>(count)));
  return found;
}

// The n rows with the largest scores that the threads collected for one row of activations.
std::vector<int64_t> leaders(const Best* bests, int64_t rows, int64_t threads, int64_t row, int64_t k) {
  std::vector<std::pair<float, int32_t>> all;
  for (int64_t i = 0; i < threads; ++i) {
    const Best& best = bests[i * rows + row];
    for (int64_t j = 0; j < best.count; ++j) all.emplace_back(best.scores[j], best.ids[j]);
  }
  const int64_t n = std::min<int64_t>(k, static_cast<int64_t>(all.size()));
  std::partial_sort(all.begin(), all.begin() + n, all.end(), std::greater<>());
  std::vector<int64_t> found;
  for (int64_t i = 0; i < n; ++i) found.push_back(all[static_cast<size_t>(i)].second);
  return found;
}

}  // namespace

int64_t Engine::prune(const Linear& linear, const Input& in, const float* x, const TopQuery& query, bool* broken,
                      const TileSink& sink) {
  const SplitHead w = linear.matrix->planes();
  const Kernels& kernels = *isa.kernels;
  const int64_t rows = in.rows, tiles = w.tiles(), blocks = w.blocks(), ld = tiles * kTile, threads = team.size();
  const int64_t width = kStrip * kTile, most = std::clamp<int64_t>(tiles / (8 * threads), kStrip, kPassed) / kStrip * kStrip;
  const std::vector<int64_t> apart = touched_tiles(query, rows);
  wide_[0].need(static_cast<size_t>(rows * ld) * 4);
  tiles_.need(static_cast<size_t>(threads * rows * width) * 4);
  float* upper = wide_[0].as<float>();
  const std::unique_ptr<Best[]> bests(new Best[static_cast<size_t>(threads * rows)]);
  const std::unique_ptr<bool[]> bad(new bool[static_cast<size_t>(threads * rows)]());
  std::vector<float> leader_scores(static_cast<size_t>(rows * kMostTop));
  std::vector<int64_t> lines(static_cast<size_t>(threads));
  std::atomic<int64_t> passed{0}, refined{0};
  note_head({Kind::q8_split, w.rows, w.cols, w.high, w.scales}, rows, 1);
  team.run([&](int thread) {
    take(in, x, Precision::i8, thread);
    team.barrier(thread);
    const Acts acts{in.q, in.scale, in.sum, rows, in.stride};
    float* strip = tiles_.as<float>() + thread * rows * width;
    Best* best = bests.get() + thread * rows;
    int64_t& read = lines[static_cast<size_t>(thread)];
    const auto exact = [&](int64_t tile) {                       // rows x kTile scores to the strip
      multiply(linear, in, tile, tile + 1, strip - tile * kTile, kTile);
      read += kQuads * blocks;
    };
    std::vector<HeadFactors> factors;
    std::vector<Touched> touched;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t b = 0; b < blocks; ++b) factors.push_back(head_factors(acts, r, b));
      best[r].start(query.k[r], query.k[r] ? -kMost : kMost);
      touched.push_back(touched_of(query, r, false));
    }
    for (int64_t a; (a = passed.fetch_add(most, std::memory_order_relaxed)) < tiles;)
      for (int64_t t = a, end = std::min(tiles, a + most); t < end; t += kStrip) {
        const int64_t b = std::min(end, t + kStrip), first = t * kTile, n = std::min(w.rows, b * kTile) - first;
        kernels.head_bounds(w, acts, factors.data(), t, b, strip, width, upper, ld, bad.get() + thread * rows);
        for (int64_t r = 0; r < rows; ++r) {
          Touched& out = touched[static_cast<size_t>(r)];
          out.skip(first);
          Touched(out).take(upper + r * ld + first, first, n, nullptr);
          out.take(strip + r * width, first, n, nullptr);
          best[r].look(kernels, strip + r * width, n, first);
        }
      }
    team.barrier(thread);
    // Of each row: the candidates with the largest likely scores, and their exact ones. The k-th largest of any k exact scores
    // is at most the k-th largest of all.
    int64_t turn = 0;
    std::vector<int64_t> found;
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<int64_t> first = leaders(bests.get(), rows, threads, r, query.k[r]);
      found.push_back(static_cast<int64_t>(first.size()));
      for (size_t j = 0; j < first.size(); ++j) {
        if (turn++ % threads != thread) continue;
        exact(first[j] / kTile);
        leader_scores[static_cast<size_t>(r * kMostTop) + j] = strip[r * kTile + first[j] % kTile];
      }
    }
    team.barrier(thread);
    float bar[kHeadRows];
    for (int64_t r = 0; r < rows; ++r) {
      const float* first = leader_scores.data() + r * kMostTop;
      const int64_t n = found[static_cast<size_t>(r)];
      bar[r] = query.k[r] == 0 ? kMost : n < query.k[r] ? -kMost : *std::min_element(first, first + n);
    }
    const std::vector<Range> order = segments(factors, rows, blocks);
    std::vector<int32_t> quads(static_cast<size_t>(kRefined * kQuads));
    for (int64_t a; (a = refined.fetch_add(kRefined, std::memory_order_relaxed)) < tiles;) {
      const int64_t b = std::min(tiles, a + kRefined);
      int64_t count = kernels.head_doubtful(upper, ld, rows, bar, a, b, quads.data());
      for (size_t i = 0; i < order.size() && count; ++i) {
        read += count * (order[i].last - order[i].first);
        count = kernels.head_refine(w, acts, factors.data(), order[i].first, order[i].last, quads.data(), count, upper, ld,
                                    bar);
      }
      std::vector<int64_t> open(std::lower_bound(apart.begin(), apart.end(), a),
                                std::lower_bound(apart.begin(), apart.end(), b));
      for (int64_t i = 0; i < count; ++i) open.push_back(quads[static_cast<size_t>(i)] / kQuads);
      std::sort(open.begin(), open.end());
      open.erase(std::unique(open.begin(), open.end()), open.end());
      for (const int64_t tile : open) {
        exact(tile);
        sink(thread, tile, strip);
      }
    }
    expect(thread, pass_start_);
  });
  for (int64_t i = 0; i < threads * rows; ++i)
    broken[i % rows] |= bad[static_cast<size_t>(i)] || bests[static_cast<size_t>(i)].broken;
  // A line holds a block of four rows.
  return std::min(w.rows, (std::accumulate(lines.begin(), lines.end(), int64_t{0}) * kTile / kQuads + blocks - 1) / blocks);
}

}  // namespace ridgeline
