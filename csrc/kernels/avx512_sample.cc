// Passes over logits, avx512.
#include "vec512.h"

#include "sample_kernels.h"

namespace ridgeline {

namespace {

int64_t divide(float* key, float* weight, int64_t n, float bar, bool upper) {
  const __m512 limit = _mm512_set1_ps(bar);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 real = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 k = _mm512_maskz_loadu_ps(real, key + i), w = _mm512_maskz_loadu_ps(real, weight + i);
    const __mmask16 high = _mm512_cmp_ps_mask(k, limit, _CMP_GE_OQ);
    const __mmask16 keep = real & (upper ? high : static_cast<__mmask16>(~high));
    _mm512_storeu_ps(key + kept, _mm512_maskz_compress_ps(keep, k));
    _mm512_storeu_ps(weight + kept, _mm512_maskz_compress_ps(keep, w));
    kept += __builtin_popcount(keep);
  }
  return kept;
}

}  // namespace

const SampleKernels* avx512_sample() { return sample_table<Vec512>(divide); }

}  // namespace ridgeline
