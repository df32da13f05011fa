// Every kernel, compiled for avx2.
#define PL_ISA avx2
#define PL_SIMD_AVX2

#include "isa/kernels-inl.h"

namespace paceline {
const Kernels* kernels_avx2() { return &avx2::table; }
}  // namespace paceline
