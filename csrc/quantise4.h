// Four bits for float weights.
#pragma once
#include <cstdint>

namespace ridgeline {

// 32 values x -> codes u = q + 8 (q from -8 to 7) and the fp16 scale s, of either sign, for x ~ s q. A search: the largest
// magnitude is laid at 6.4 to 8.8 steps on either side of zero, the scale fitted to what each of these rounds to, and the
// one with the least squared error kept. Values that are not finite give the scale NaN. Deterministic on every machine.
uint16_t quantise4(const float* x, uint8_t* u);

}  // namespace ridgeline
