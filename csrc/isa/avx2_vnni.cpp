// Every kernel, compiled for avx2_vnni.
#define PL_ISA avx2_vnni
#define PL_SIMD_AVX2
#define PL_AVX_VNNI

#include "isa/kernels-inl.h"

namespace paceline {
const Kernels* kernels_avx2_vnni() { return &avx2_vnni::table; }
}  // namespace paceline
