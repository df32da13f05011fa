// What this processor can run.
#pragma once

namespace paceline {

struct CpuFeatures {
  bool avx2 = false;         // AVX2, FMA and F16C, with the operating system's consent
  bool avx_vnni = false;     // AVX-VNNI (256-bit) on top of avx2
  bool avx512_vnni = false;  // AVX-512 F, BW, VL, DQ, VNNI on top of avx2
};

CpuFeatures detect_cpu();

}  // namespace paceline
