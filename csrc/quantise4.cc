#include "quantise4.h"

#include <bit>
#include <cmath>

#include "packed.h"

// The search is compiled for wider vectors too and chosen at load; sanitizers do not get along with the choice. Sums are kept
// in lanes of sixteen, so that every version gives the same bits.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
#define RIDGELINE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RIDGELINE_CLONES
#endif

namespace ridgeline {
namespace {

constexpr int kWidth = 32, kLanes = 16;
constexpr float kMagic = 0x1.8p23f;      // adding it rounds to the nearest even integer, in the low bits of the sum

struct Fit {
  float dot, square;                     // sum of x q, sum of q q: the scale is dot / square, the error falls by dot^2 / square
};

inline float total(float (&lane)[kLanes]) {
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] += lane[i + n];
  return lane[0];
}

inline Fit fit(const float* x, float inverse) {
  float dot[kLanes] = {}, square[kLanes] = {};
  for (int h = 0; h < kWidth; h += kLanes)
    for (int i = 0; i < kLanes; ++i) {
      float q = x[h + i] * inverse;
      q = q < -8.0f ? -8.0f : q;
      q = q > 7.0f ? 7.0f : q;
      q = q + kMagic - kMagic;
      dot[i] += x[h + i] * q;
      square[i] += q * q;
    }
  return {total(dot), total(square)};
}

RIDGELINE_CLONES float search(const float* x, float top) {
  float best = 0, gain = -1;
  for (int step = 0; step < 26; ++step) {
    const float wide = 6.4f + 0.2f * static_cast<float>(step / 2);
    const Fit f = fit(x, (step % 2 ? wide : -wide) / top);
    if (f.square > 0 && f.dot * f.dot > gain * f.square) gain = f.dot * f.dot / f.square, best = f.dot / f.square;
  }
  if (best != 0) {
    const Fit again = fit(x, 1.0f / best);
    if (again.square > 0 && again.dot != 0) best = again.dot / again.square;
  }
  return best;
}

}  // namespace

uint16_t quantise4(const float* x, uint8_t* u) {
  float top = 0;
  bool finite = true;
  for (int i = 0; i < kWidth; ++i) {
    finite = finite && std::fabs(x[i]) <= 3.402823466e38f;
    top = std::fabs(x[i]) > std::fabs(top) ? x[i] : top;
  }
  for (int i = 0; i < kWidth; ++i) u[i] = 8;
  if (!finite) return 0x7e00;
  if (std::fabs(top) < 0x1p-60f) return 0;          // far below what fp16 holds; squares would vanish
  const uint16_t half = float_to_half(search(x, top));
  const float scale = half_to_float(half);
  if (scale == 0 || !std::isfinite(scale)) return half;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kWidth; ++i) {
    float q = x[i] * inverse;
    q = q < -8.0f ? -8.0f : q;
    q = q > 7.0f ? 7.0f : q;
    u[i] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(q)) + 8);
  }
  return half;
}

}  // namespace ridgeline
