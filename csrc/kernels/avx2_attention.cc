// Attention and small kernels for AVX2 with FMA and F16C: register tiles of 6 rows x 2 vectors.
#include "vec256.h"

#include "attention_run.h"
#include "small_kernels.h"

namespace ridgeline {

const AttentionKernels* avx2_attention() {
  using S = Vec256;
  static const AttentionKernels table{
      "avx2", false,
      rms_norm<S, false>, rms_norm<S, true>, layer_norm<S, false>, layer_norm<S, true>,
      rope<S>, hadamard<S>, act_mul<S>, store_kv<S>,
      part<S, false>, combine<S>, whole<S, false>};
  return &table;
}

}  // namespace ridgeline
