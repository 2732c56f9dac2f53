#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "blocks.h"

namespace ridgeline {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();

// One thread's sampling of one row.
struct Sampler {
  const SampleKernels& kernels;
  const Kernels& products;
  const float* x;
  int64_t vocab;
  float *key, *weight;         // vocab each, and 16 behind
  int32_t* ids;                // the same
  double* sums;                // one a block
  float* tops;                 // the largest of each block
  float peak = 0, scale = 0, least = -kMost;

  int64_t blocks() const { return (vocab + kSampleBlock - 1) / kSampleBlock; }
  int64_t length(int64_t block) const { return std::min(kSampleBlock, vocab - block * kSampleBlock); }

  // Weights of n values in pieces whose fp32 sums are good; returns their sum.
  double weigh(const float* from, int64_t n, float* out, double* moment) const {
    double total = 0, first = 0;
    for (int64_t i = 0; i < n; i += kSampleBlock) {
      float part = 0;
      const int64_t count = std::min(kSampleBlock, n - i);
      total += kernels.weigh(from + i, count, peak, scale, least, out ? out + i : nullptr, moment ? &part : nullptr);
      first += part;
    }
    if (moment) *moment = first;
    return total;
  }

  int64_t collect(float bar) {
    bool broken = false;
    return products.collect(x, vocab, 0, bar, key, ids, &broken);
  }

  // The largest key such that the weights of all keys from it on sum to `goal` at least; the smallest if none does.
  // Halves the range of the keys rather than sorting them: each pass leaves about half of those of the pass before.
  float cut(int64_t n, double goal) {
    double over = 0;
    for (;;) {
      float low, high;
      kernels.range(key, n, &low, &high);
      if (low == high) return low;
      float middle = low + (high - low) / 2;
      if (!(middle > low)) middle = high;
      const double mass = kernels.above(key, weight, n, middle);
      const bool upper = over + mass >= goal;
      if (!upper) over += mass;
      n = kernels.divide(key, weight, n, middle, upper);
    }
  }

  void top_k(int64_t k) {
    // At least k values reach the k-th largest of the blocks' largest ones: what is below is not even looked at.
    float bar = -kMost;
    if (k <= blocks()) {
      std::copy(tops, tops + blocks(), key);
      std::nth_element(key, key + k - 1, key + blocks(), std::greater<>());
      bar = std::max(bar, key[k - 1]);
    }
    const int64_t n = collect(bar);
    if (n <= k) {
      least = bar;
      return;
    }
    std::fill_n(weight, n, 1.0f);
    least = cut(n, static_cast<double>(k));
  }

  void top_p(double p) {
    const double total = weigh(x, vocab, nullptr, nullptr);
    // What is below this bar cannot be in the nucleus: all tokens at the bar together would not fill what lies outside.
    const double bar = peak + std::log((1 - p) * total / (2 * static_cast<double>(vocab))) / scale;
    const int64_t n = collect(std::max(least, static_cast<float>(std::max(bar, static_cast<double>(-kMost)))));
    weigh(key, n, weight, nullptr);
    least = std::max(least, cut(n, p * total));
  }

  // Sets `weight` to the weights of what is left, and `key` to their typicality, of which those from the returned one on
  // stay. Meister et al.: "Locally typical sampling", 2022: a token's surprise is log sum w - t, the entropy
  // log sum w - sum w t / sum w.
  float typical_p(double p) {
    double moment = 0;
    const double total = weigh(x, vocab, weight, &moment);
    const float center = static_cast<float>(moment / total);
    kernels.typical(x, vocab, peak, scale, center, key);
    const float bar = cut(vocab, p * total);
    kernels.typical(x, vocab, peak, scale, center, key);
    weigh(x, vocab, weight, nullptr);
    return bar;
  }

  int64_t run(const SampleRow& row) {
    bool odd = false;
    peak = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < blocks(); ++b) {
      tops[b] = kernels.peak(x + b * kSampleBlock, length(b), &odd);
      peak = std::max(peak, tops[b]);
    }
    if (odd) return std::any_of(x, x + vocab, [](float v) { return std::isnan(v); }) ? kNothing : kInfinite;
    if (!(peak >= -kMost)) return kNothing;
    scale = std::min(1.0f / row.temperature, kMost);
    if (row.top_k > 0 && row.top_k < vocab) top_k(row.top_k);
    if (row.top_p < 1) top_p(row.top_p);
    if (row.min_p > 0) {
      const double bar = peak + std::log(row.min_p) / scale;
      if (bar > least) least = static_cast<float>(bar);
    }
    const bool typical = row.typical_p < 1;
    const float bar = typical ? typical_p(row.typical_p) : 0.0f;
    double total = 0;
    for (int64_t b = 0; b < blocks(); ++b) {
      const int64_t first = b * kSampleBlock;
      sums[b] = typical ? kernels.above(key + first, weight + first, length(b), bar)
                        : static_cast<double>(kernels.weigh(x + first, length(b), peak, scale, least, nullptr, nullptr));
      total += sums[b];
    }
    const int64_t block = first_above(sums, blocks(), row.u * total), first = block * kSampleBlock;
    if (!typical) kernels.weigh(x + first, length(block), peak, scale, least, weight + first, nullptr);
    for (int64_t i = first; typical && i < first + length(block); ++i)
      if (key[i] < bar) weight[i] = 0;
    double inside = 0;
    for (int64_t i = 0; i < length(block); ++i) inside += static_cast<double>(weight[first + i]);
    return first + first_above(weight + first, length(block), row.again * inside);
  }

  // The first place of positive weight whose running sum exceeds the target; if rounding leaves none, the last positive.
  template <class T> static int64_t first_above(const T* w, int64_t n, double target) {
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += static_cast<double>(w[i]);
      if (!(w[i] > 0)) continue;
      last = i;
      if (sum > target) break;
    }
    return last;
  }
};

}  // namespace

const SampleKernels* sample_kernels(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_sample();
  if (isa == "avx2") return avx2_sample();
#endif
  return scalar_sample();
}

int64_t sample_scratch(int64_t vocab) { return (vocab + 64) / 16 * 16 * 12 + (vocab / kSampleBlock + 8) * 12; }

void Engine::sample(const float* logits, int64_t rows, int64_t vocab, const SampleRow* asked, int64_t* tokens) {
  trace.begin(-1, rows);
  const int64_t threads = team.size(), bytes = (sample_scratch(vocab) + 63) / 64 * 64, places = (vocab + 64) / 16 * 16;
  tiles_.need(static_cast<size_t>(threads * bytes));
  const SampleKernels& kernels = *sample_kernels(isa.name);
  team.run([&](int thread) {
    float* own = reinterpret_cast<float*>(tiles_.data() + thread * bytes);
    double* sums = reinterpret_cast<double*>(own + 3 * places);
    for (int64_t r = thread; r < rows; r += threads) {
      Sampler sampler{kernels, *isa.kernels, logits + r * vocab, vocab, own, own + places,
                      reinterpret_cast<int32_t*>(own + 2 * places), sums,
                      reinterpret_cast<float*>(sums + vocab / kSampleBlock + 8)};
      tokens[r] = sampler.run(asked[r]);
    }
  });
  trace.end(Part::sample);
}

}  // namespace ridgeline
