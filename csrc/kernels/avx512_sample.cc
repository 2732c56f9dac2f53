// Passes over logits, avx512.
#include "vec512.h"

#include "sample_kernels.h"

namespace ridgeline {

const SampleKernels* avx512_sample() { return sample_table<Vec512>(); }

}  // namespace ridgeline
