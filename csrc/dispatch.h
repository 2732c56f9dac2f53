// Which instruction set this process computes with: the best the machine has, chosen once, or one asked for by name.
#pragma once
#include <string>
#include <vector>

#include "api.h"
#include "attention.h"

namespace ridgeline {

struct Isa {
  const char* name;
  const Kernels* kernels;
  const AttentionKernels* attention;
};

// Best first; the last is "scalar" and always there.
std::vector<Isa> available();
// The named one; null if the machine lacks it or the name is unknown.
const Isa* find_isa(const std::string& name);

}  // namespace ridgeline
