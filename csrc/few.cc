// Drawing from a row's few candidates: what a head finds for top-k without writing logits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "sample.h"

namespace ridgeline {
namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

// SplitMix64's finaliser for one counter; see src/ridgeline/noise.py.
uint64_t mix(uint64_t z, uint64_t counter) {
  z = (z ^ counter) + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Probabilities of x, the largest of which need not be 0; returns the logarithm of the sum of exponentials.
float softmax(const std::vector<float>& x, std::vector<float>& p) {
  const float top = *std::max_element(x.begin(), x.end());
  double total = 0;
  for (size_t i = 0; i < x.size(); ++i) total += p[i] = std::exp(x[i] - top);
  for (float& v : p) v = static_cast<float>(v / total);
  return top + static_cast<float>(std::log(total));
}

// The score at which the probability of the best-scored reaches `mass`; the least one where none does.
float reached(const std::vector<float>& score, const std::vector<float>& p, double mass, std::vector<size_t>& order) {
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return score[a] > score[b]; });
  double sum = 0;
  for (size_t i : order)
    if ((sum += p[i]) >= mass) return score[i];
  return score[order.back()];
}

// The first place of positive weight whose running sum exceeds the share u of all; if rounding leaves none, the last positive.
template <class Taken>
size_t first_above(const std::vector<float>& w, double u, Taken taken) {
  double total = 0, sum = 0;
  for (size_t i = 0; i < w.size(); ++i) total += taken(i) ? w[i] : 0;
  size_t last = 0;
  for (size_t i = 0; i < w.size(); ++i) {
    if (!taken(i) || !(w[i] > 0)) continue;
    sum += w[i], last = i;
    if (sum > u * total) break;
  }
  return last;
}

}  // namespace

double again(double u) {
  uint64_t z = mix(0, static_cast<uint64_t>(u * 0x1p53));
  for (int i = 0; i < 3; ++i) z = mix(z, 0);
  return static_cast<double>(z >> 11) * 0x1p-53;
}

int64_t draw_few(const Few& from, const SampleRow& row) {
  const size_t n = static_cast<size_t>(from.n);
  float peak = kOut;
  for (size_t i = 0; i < n; ++i) {
    if (std::isnan(from.scores[i])) return kNothing;
    peak = std::max(peak, from.scores[i]);
  }
  if (peak == std::numeric_limits<float>::infinity()) return kInfinite;
  if (peak == kOut) return kNothing;
  std::vector<float> x(n), p(n), score(n);
  std::vector<size_t> order(n);
  for (size_t i = 0; i < n; ++i) x[i] = (from.scores[i] - peak) / row.temperature;
  const auto keep = [&](const float* by, float least) {
    for (size_t i = 0; i < n; ++i)
      if (by[i] < least) x[i] = kOut;
  };
  if (!from.cut && row.top_k > 0 && static_cast<size_t>(row.top_k) < n) {
    score.assign(from.scores, from.scores + n);
    std::nth_element(score.begin(), score.begin() + (row.top_k - 1), score.end(), std::greater<>());
    keep(from.scores, score[static_cast<size_t>(row.top_k - 1)]);
  }
  if (row.top_p < 1) {
    softmax(x, p);
    const std::vector<float> before = x;
    keep(before.data(), reached(before, p, row.top_p, order));
  }
  if (row.min_p > 0) {
    const std::vector<float> before = x;
    keep(before.data(), static_cast<float>(std::log(row.min_p)));
  }
  if (row.typical_p < 1) {
    const float sum = softmax(x, p);
    double entropy = 0;
    for (size_t i = 0; i < n; ++i) entropy += p[i] > 0 ? -p[i] * std::log(p[i]) : 0;
    for (size_t i = 0; i < n; ++i) score[i] = -std::fabs(x[i] - sum + static_cast<float>(entropy));
    keep(score.data(), reached(score, p, row.typical_p, order));
  }
  softmax(x, p);
  const size_t first = first_above(p, row.u, [](size_t) { return true; });
  const int64_t block = from.ids[first] / kSampleBlock;
  return static_cast<int64_t>(first_above(p, row.again, [&](size_t i) { return from.ids[i] / kSampleBlock == block; }));
}

}  // namespace ridgeline
