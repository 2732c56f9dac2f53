// Passes over logits, one float at a time.
#include "vec1.h"

#include "sample_kernels.h"

namespace ridgeline {

const SampleKernels* scalar_sample() { return sample_table<Vec1>(divide_each); }

}  // namespace ridgeline
