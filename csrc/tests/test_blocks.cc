// Engine over threads: products, an MLP and the head's best rows give the same bits with any team, and write nowhere else;
// tokens drawn from logits are those of plain loops.
// Exits non-zero on failure; to be built with AddressSanitizer and UndefinedBehaviorSanitizer, see CMakeLists.txt.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "../blocks.h"
#include "../kernels/head.h"
#include "../pack.h"

using namespace ridgeline;

namespace {

int failures = 0;
void check(bool good, const char* isa, const char* what, int threads) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s, %d threads: %s\n", isa, threads, what);
}

std::vector<float> noise(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& a : x) a = normal(random);
  return x;
}

// Random weights quantised to q8_0; split: as two planes of nibbles.
std::shared_ptr<Matrix> matrix(int64_t rows, int64_t cols, unsigned seed, bool split = false) {
  const std::vector<float> w = noise(rows * cols, seed);
  const int64_t tiles = (rows + kTile - 1) / kTile, bytes = tile_quants(Kind::q8_0, cols);
  auto m = std::make_shared<Matrix>();
  m->kind = Kind::q8_0, m->rows = rows, m->cols = cols;
  m->quants = Buffer(static_cast<size_t>(tiles * bytes));
  m->scales = Buffer(static_cast<size_t>(tiles * tile_scales(Kind::q8_0, cols)));
  quantise_tiles(Kind::f32, Kind::q8_0, reinterpret_cast<const uint8_t*>(w.data()), cols * 4, rows, cols, 0, tiles, m->quants.data(),
                 m->scales.data());
  if (!split) return m;
  Buffer high(static_cast<size_t>(tiles * bytes / 2));
  m->low = Buffer(static_cast<size_t>(tiles * bytes / 2));
  for (int64_t t = 0; t < tiles; ++t)
    split_tile(m->quants.data() + t * bytes, bytes, high.data() + t * bytes / 2, m->low.data() + t * bytes / 2);
  m->quants = std::move(high);
  return m;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) { return !std::memcmp(a.data(), b.data(), a.size() * 4); }

void test_mlp(const Isa& isa) {
  const int64_t hidden = 96, wide = 200;
  for (const Precision precision : {Precision::i8, Precision::f32}) {
    const MlpBlock block{{Norm::rms, std::vector<float>(hidden, 1.1f), {}, 1e-6f}, {},
                         {matrix(wide, hidden, 1), {}, precision}, {matrix(wide, hidden, 2), noise(wide, 8), precision},
                         {matrix(hidden, wide, 3), {}, precision}, Act::silu};
    const std::vector<float> x = noise(37 * hidden, 4);
    std::vector<float> expected = x;
    Engine(isa, 1).run(block, expected.data(), 37);
    check(!same(expected, x), isa.name, "an MLP does something", 1);
    for (const int threads : {1, 2, 3, 7}) {
      Engine engine(isa, threads);
      for (const int64_t rows : {1, 2, 5, 16, 37}) {
        std::vector<float> y(x.begin(), x.begin() + rows * hidden);
        engine.run(block, y.data(), rows);
        check(!std::memcmp(y.data(), expected.data(), y.size() * 4), isa.name, "the same bits of an MLP", threads);
      }
    }
  }
}

void test_head(const Isa& isa) {
  for (const int64_t rows : {1, 17, 1003})
    for (const int64_t cols : {32, 640}) {
      const Linear plain{matrix(rows, cols, 5), {}, Precision::i8}, split{matrix(rows, cols, 5, true), {}, Precision::i8};
      const int64_t most = kHeadRows;
      std::vector<float> x = noise(most * cols, 6);
      std::fill_n(x.begin(), cols, 0.0f);                    // every score equal: the first row wins
      std::vector<float> scores(static_cast<size_t>(most * rows)), again(scores.size());
      Engine(isa, 1).run(plain, x.data(), most, scores.data(), rows);
      for (const int threads : {1, 2, 5}) {
        Engine engine(isa, threads);
        engine.run(split, x.data(), most, again.data(), rows);
        check(same(again, scores), isa.name, "products of a split matrix", threads);
        for (int64_t m = 1; m <= most; ++m) {
          std::vector<int64_t> tokens(static_cast<size_t>(m));
          engine.greedy(split, x.data(), m, tokens.data());
          for (int64_t r = 0; r < m; ++r) {
            const float* row = scores.data() + r * rows;
            const int64_t best = std::max_element(row, row + rows) - row;
            check(tokens[static_cast<size_t>(r)] == best, isa.name, "the most likely row", threads);
          }
        }
      }
    }
}

// Bounds from the high plane hold the exact scores, and the low plane, in any parts, narrows them down to these.
void test_planes(const Isa& isa) {
  const Kernels& k = *isa.kernels;
  for (const int64_t rows : {1, 17, 203})
    for (const int64_t cols : {17, 32, 96, 640})
      for (int64_t m = 1; m <= kHeadRows; ++m) {
        const auto head = matrix(rows, cols, 5, true);
        const SplitHead w = head->planes();
        const int64_t blocks = w.blocks(), stride = blocks * kBlock, ld = w.tiles() * kTile;
        const auto floats = [&](int64_t n) { return std::vector<float>(static_cast<size_t>(m * n), -7.0f); };
        std::vector<int8_t> q(static_cast<size_t>(m * stride));
        std::vector<float> scale = floats(blocks), exact = floats(ld), likely = floats(ld), upper = floats(ld);
        const std::vector<float> x = noise(m * cols, 9);
        std::vector<int32_t> sum(static_cast<size_t>(2 * m * blocks)), quads(static_cast<size_t>(kQuads * w.tiles()));
        for (int64_t r = 0; r < m; ++r)
          k.quantise(x.data() + r * cols, cols, q.data() + r * stride, scale.data() + r * blocks, sum.data() + 2 * r * blocks);
        const Acts acts{q.data(), scale.data(), sum.data(), m, stride};
        k.gemm(head->view(), acts, 0, w.tiles(), exact.data(), ld);
        std::vector<HeadFactors> factors;
        std::vector<float> bar;
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t b = 0; b < blocks; ++b) factors.push_back(head_factors(acts, r, b));
          bar.push_back(*std::max_element(exact.data() + r * ld, exact.data() + r * ld + rows));
        }
        bool broken[kHeadRows] = {}, good = true;
        k.head_bounds(w, acts, factors.data(), 0, w.tiles(), likely.data(), ld, upper.data(), ld, broken);
        const std::vector<float> first = upper;
        const auto holds = [&](int64_t r, int64_t i) {
          const size_t at = static_cast<size_t>(r * ld + i);
          return upper[at] >= exact[at];
        };
        for (int64_t r = 0; r < m; ++r)
          for (int64_t i = 0; i < ld; ++i)
            good &= !broken[r] && (i < rows ? holds(r, i) : std::isinf(upper[static_cast<size_t>(r * ld + i)]));
        check(good, isa.name, "bounds hold the exact scores", 1);
        // The best row is never lost, and a bar below all keeps every quad that exists.
        int64_t count = k.head_doubtful(upper.data(), ld, m, bar.data(), 0, w.tiles(), quads.data());
        check(count > 0 && std::is_sorted(quads.begin(), quads.begin() + count), isa.name, "doubtful quads", 1);
        std::fill(bar.begin(), bar.end(), -std::numeric_limits<float>::max());
        count = k.head_doubtful(upper.data(), ld, m, bar.data(), 0, w.tiles(), quads.data());
        check(count == (rows / kTile) * kQuads + std::min<int64_t>(rows % kTile, kQuads), isa.name, "quads with rows", 1);
        for (int64_t b = blocks; b > 0 && count; b -= std::min<int64_t>(b, 3))
          count = k.head_refine(w, acts, factors.data(), std::max<int64_t>(0, b - 3), b, quads.data(), count, upper.data(), ld,
                                bar.data());
        for (int64_t r = 0; r < m; ++r)
          for (int64_t i = 0; i < rows; ++i) {
            const size_t at = static_cast<size_t>(r * ld + i);
            const float bound = first[at] - likely[at];
            good &= holds(r, i) && upper[at] - exact[at] <= 0.004f * bound;
          }
        check(good, isa.name, "refined bounds are the exact scores", 1);
        std::fill(bar.begin(), bar.end(), std::numeric_limits<float>::max());
        const int64_t left = k.head_refine(w, acts, factors.data(), 0, 0, quads.data(), count, upper.data(), ld, bar.data());
        check(count > 0 && left == 0, isa.name, "quads below the bar are dropped", 1);
      }
}

// The k best and the scores of touched rows, pruned and whole, against plain loops over the products.
void test_top(const Isa& isa) {
  const int64_t most = 6, capacity = 128;
  for (const int64_t rows : {1, 17, 1003})
    for (const bool halves : {false, true}) {
      if (halves && !isa.kernels->head_bounds) continue;
      const int64_t cols = 96;
      const Linear linear{matrix(rows, cols, 5, halves), {}, Precision::i8};
      const std::vector<float> x = noise(most * cols, 7);
      std::vector<float> scores(static_cast<size_t>(most * rows));
      Engine(isa, 1).run(linear, x.data(), most, scores.data(), rows);
      for (const int threads : {1, 2, 5})
        for (int64_t m = 1; m <= most; ++m)
          for (const int64_t step : {int64_t{1}, int64_t{3}, rows + 1}) {       // every row touched, every third, none
            std::vector<int64_t> k, offsets{0}, touched;
            for (int64_t r = 0; r < m; ++r) {
              k.push_back((13 * r + m) % (kMostTop + 1));
              for (int64_t t = r; t < rows && step <= rows; t += step) touched.push_back(t);
              offsets.push_back(static_cast<int64_t>(touched.size()));
            }
            std::vector<float> apart(touched.size()), values(static_cast<size_t>(m * capacity));
            std::vector<int64_t> ids(values.size()), counts(static_cast<size_t>(m));
            const TopQuery query{k.data(), offsets.data(), touched.data(), apart.data(), capacity, ids.data(), values.data(),
                                 counts.data(), halves};
            Engine(isa, threads).top(linear, x.data(), m, query);
            bool good = true;
            for (int64_t r = 0; r < m; ++r) {
              const float* row = scores.data() + r * rows;
              std::vector<float> rest;
              const auto apart_of = [&](int64_t t) { return step <= rows && t >= r && (t - r) % step == 0; };
              for (int64_t t = 0; t < rows; ++t)
                if (!apart_of(t)) rest.push_back(row[t]);
              std::sort(rest.begin(), rest.end(), std::greater<>());
              const size_t n = std::min(rest.size(), static_cast<size_t>(k[static_cast<size_t>(r)]));
              int64_t at = 0;
              for (int64_t t = 0; t < rows; ++t)
                if (n && !apart_of(t) && row[t] >= rest[n - 1]) {
                  const size_t place = static_cast<size_t>(r * capacity + at++);
                  good &= ids[place] == t && values[place] == row[t];
                }
              good &= counts[static_cast<size_t>(r)] == at;
              for (int64_t i = offsets[static_cast<size_t>(r)]; i < offsets[static_cast<size_t>(r) + 1]; ++i)
                good &= apart[static_cast<size_t>(i)] == row[touched[static_cast<size_t>(i)]];
            }
            check(good, isa.name, "the best rows", threads);
          }
    }
}

// The token that a row's numbers pick, by sorting it and in fp64.
int64_t picked(const std::vector<float>& x, const SampleRow& row) {
  const size_t n = x.size();
  const float peak = *std::max_element(x.begin(), x.end());
  std::vector<double> w(n);
  for (size_t i = 0; i < n; ++i) w[i] = std::exp(static_cast<double>(x[i] - peak) / static_cast<double>(row.temperature));
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  const size_t k = row.top_k ? std::min(n, static_cast<size_t>(row.top_k)) : n;
  for (size_t i = k; i < n; ++i) w[order[i]] = 0;
  const double goal = row.top_p * std::accumulate(w.begin(), w.end(), 0.0);
  double sum = 0;
  for (const size_t i : order) {
    if (row.top_p < 1 && sum >= goal) w[i] = 0;
    sum += w[i];
  }
  const auto above = [&](size_t first, size_t last, size_t step, double u) {       // which group of `step` weights
    const double target = u * std::accumulate(w.begin() + static_cast<int64_t>(first), w.begin() + static_cast<int64_t>(last), 0.0);
    double upto = 0;
    for (size_t i = first; i < last; ++i)
      if ((upto += w[i]) > target) return i / step;
    return last - 1;
  };
  const size_t block = above(0, n, kSampleBlock, row.u), first = block * kSampleBlock;
  return static_cast<int64_t>(above(first, std::min(n, first + kSampleBlock), 1, row.again));
}

void test_sample(const Isa& isa) {
  const SampleRow settings[] = {{1, 0, 1, 0, 1, 0, 0}, {0.7f, 0, 0.8, 0, 1, 0, 0}, {1, 2, 1, 0, 1, 0, 0}, {1.5f, 70, 0.6, 0, 1, 0, 0}};
  for (const int64_t vocab : {1, 2, 31, 513, 1500}) {
    int wrong = 0;
    for (const SampleRow& setting : settings)
      for (int turn = 0; turn < 40; ++turn) {
        SampleRow row = setting;
        row.u = 0.025 * turn, row.again = std::fmod(0.618 * turn, 1.0);
        std::vector<float> x = noise(vocab, static_cast<unsigned>(turn));
        for (float& a : x) a *= 3;
        int64_t token = -5;
        Engine(isa, 1).sample(x.data(), 1, vocab, &row, &token);
        wrong += token != picked(x, row);
      }
    check(wrong <= 1, isa.name, "tokens drawn from logits", 1);        // rounding decides where two tokens meet
    std::vector<float> x(static_cast<size_t>(2 * vocab), -1.0f);
    x[0] = -std::numeric_limits<float>::infinity(), x[static_cast<size_t>(vocab)] = std::nanf("");
    const SampleRow typical[] = {{1, 0, 0.9, 0.1, 0.9, 0.5, 0.5}, {1, 0, 0.9, 0.1, 0.9, 0.5, 0.5}};
    int64_t tokens[2];
    Engine(isa, 2).sample(x.data(), 2, vocab, typical, tokens);
    check((vocab > 1 ? tokens[0] > 0 && tokens[0] < vocab : tokens[0] == kNothing) && tokens[1] == kNothing, isa.name,
          "masked tokens are never drawn", 2);
  }
}

}  // namespace

int main() {
  for (const Isa& isa : available()) {
    test_mlp(isa);
    test_top(isa);
    test_sample(isa);
    if (isa.kernels->head_bounds) {                        // the others never split a matrix
      test_head(isa);
      test_planes(isa);
    }
    std::printf("%s: %d failures\n", isa.name, failures);
  }
  return failures != 0;
}
