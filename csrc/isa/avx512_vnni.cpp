// Every kernel, compiled for avx512_vnni.
#define PL_ISA avx512_vnni
#define PL_SIMD_AVX512

#include "isa/kernels-inl.h"

namespace paceline {
const Kernels* kernels_avx512_vnni() { return &avx512_vnni::table; }
}  // namespace paceline
