// Choosing tokens from logits: temperature, top-k, top-p, min-p and typical sampling, without sorting or copying a row.
#pragma once
#include <cstdint>
#include <string>

namespace ridgeline {

// What one row of logits is drawn by; ranges as in SamplingParams, temperature > 0.
struct SampleRow {
  float temperature;
  int64_t top_k;               // 0: off
  double top_p, min_p, typical_p;
  double u, again;             // in [0, 1): for the block of kSampleBlock tokens, and for the token in it
};

// A second number in [0, 1) that has nothing in common with the first (53 bits) but to be made from it: ridgeline.noise.again.
double again(double u);

// The candidates of one row, n of them, with ids that ascend.
struct Few {
  const int64_t* ids;
  const float* scores;
  int64_t n;
  bool cut;                    // these are what the row's top-k leaves
};

// A place among the candidates, by the rule of Engine::sample on a row where all other logits are -infinity; kNothing or
// kInfinite. In plain loops, since there are a hundred.
int64_t draw_few(const Few& from, const SampleRow& row);

constexpr int64_t kSampleBlock = 512;
constexpr int64_t kNothing = -1;       // all logits are -infinity, or one is NaN
constexpr int64_t kInfinite = -2;      // one is +infinity: left to the caller

struct SampleKernels {
  // The largest of n values; *odd becomes true at a NaN or +infinity.
  float (*peak)(const float* x, int64_t n, bool* odd);
  // Sum of w = exp((x - peak) * scale) over the values that are at least `least`; w of the others is 0. Where wanted,
  // out gets w and *moment the sum of w (x - peak) * scale. n of a few thousand at most: sums are fp32.
  float (*weigh)(const float* x, int64_t n, float peak, float scale, float least, float* out, float* moment);
  // out = -|t - center|, t = (x - peak) * scale, at least -100.
  void (*typical)(const float* x, int64_t n, float peak, float scale, float center, float* out);
  void (*range)(const float* key, int64_t n, float* low, float* high);
  // Sum of the weights whose keys are at least `bar`, in fp64 from sums of kSampleBlock.
  double (*above)(const float* key, const float* weight, int64_t n, float bar);
  // Keeps, in place and in order, the keys from `bar` on, or those below it, and their weights; returns how many. Up to 16
  // places behind the kept ones are overwritten.
  int64_t (*divide)(float* key, float* weight, int64_t n, float bar, bool upper);
};

const SampleKernels* scalar_sample();
const SampleKernels* avx2_sample();
const SampleKernels* avx512_sample();
const SampleKernels* sample_kernels(const std::string& isa);   // of the instruction set of that name

// Bytes that one thread needs to sample rows of `vocab` logits.
int64_t sample_scratch(int64_t vocab);

}  // namespace ridgeline
