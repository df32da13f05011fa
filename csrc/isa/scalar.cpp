// Every kernel, compiled for scalar.
#define PL_ISA scalar
#define PL_SIMD_SCALAR

#include "isa/kernels-inl.h"

namespace paceline {
const Kernels* kernels_scalar() { return &scalar::table; }
}  // namespace paceline
