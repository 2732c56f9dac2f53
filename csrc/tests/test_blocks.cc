// Engine over threads: products, an MLP and the pruned head give the same bits with any team, and write nowhere else.
// Exits non-zero on failure; to be built with AddressSanitizer and UndefinedBehaviorSanitizer, see CMakeLists.txt.
#include <algorithm>
#include <cstdio>
#include <cstring>
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

}  // namespace

int main() {
  for (const Isa& isa : available()) {
    test_mlp(isa);
    if (isa.kernels->head_bounds) test_head(isa);          // the others never split a matrix
    std::printf("%s: %d failures\n", isa.name, failures);
  }
  return failures != 0;
}
