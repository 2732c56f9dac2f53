#include "dispatch.h"

namespace ridgeline {

std::vector<Isa> available() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // What -march=icelake-server lets the compiler use; BF16 is checked where it is used.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512ifma"))
    found.push_back({"avx512", avx512_kernels(), avx512_attention()});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back({"avx2", avx2_kernels(), avx2_attention()});
#endif
  found.push_back({"scalar", scalar_kernels(), scalar_attention()});
  return found;
}

const Isa* find_isa(const std::string& name) {
  static const std::vector<Isa> all = available();
  for (const Isa& isa : all)
    if (name == isa.name) return &isa;
  return nullptr;
}

}  // namespace ridgeline
