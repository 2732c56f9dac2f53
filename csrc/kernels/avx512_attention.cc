// Attention and small kernels for AVX-512 (F, BW, DQ, VL): register tiles of 6 rows x 4 vectors.
#include "vec512.h"

#include "attention_run.h"
#include "small_kernels.h"

namespace ridgeline {

namespace {
template <bool Dot> const AttentionKernels* table_with() {
  using S = Vec512;
  static const AttentionKernels table{
      Dot ? "avx512-bf16" : "avx512", Dot,
      rms_norm<S, false>, rms_norm<S, true>, layer_norm<S, false>, layer_norm<S, true>,
      rope<S>, hadamard<S>, act_mul<S>, store_kv<S>,
      part<S, Dot>, combine<S>, whole<S, Dot>};
  return &table;
}
}  // namespace

const AttentionKernels* avx512_attention() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? table_with<true>() :
      table_with<false>();
}

}  // namespace ridgeline
