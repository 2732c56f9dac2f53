// Passes over logits, avx2.
#include "vec256.h"

#include "sample_kernels.h"

namespace ridgeline {

const SampleKernels* avx2_sample() { return sample_table<Vec256>(divide_each); }

}  // namespace ridgeline
