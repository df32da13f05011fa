#include "base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace paceline {

CpuFeatures detect_cpu() {
  CpuFeatures features;
#if defined(__x86_64__)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool fma = c & (1u << 12), osxsave = c & (1u << 27), f16c = c & (1u << 29);
  if (!osxsave) return features;
  uint32_t xcr_low = 0, xcr_high = 0;
  __asm__("xgetbv" : "=a"(xcr_low), "=d"(xcr_high) : "c"(0));
  const bool saves_ymm = (xcr_low & 0x6) == 0x6;
  const bool saves_zmm = (xcr_low & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = fma && f16c && saves_ymm && (b & (1u << 5));
  const bool f = b & (1u << 16), dq = b & (1u << 17), bw = b & (1u << 30), vl = b & (1u << 31);
  const bool vnni = c & (1u << 11);
  features.avx512_vnni = features.avx2 && saves_zmm && f && dq && bw && vl && vnni;
  const uint32_t last_subleaf = a;
  if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
    features.avx_vnni = features.avx2 && (a & (1u << 4));
#endif
  return features;
}

}  // namespace paceline
