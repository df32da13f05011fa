// Instructions that this machine lacks, over AVX2, so that the kernels for AVX-512 and AVX-VNNI can be tested, though not timed, without
// such a processor: cmake -DPACELINE_EMULATE=ON. AVX-512 by SIMDe (the package libsimde-dev); what SIMDe 0.7.4 lacks is defined here.
#pragma once

#ifdef PL_SIMD_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

inline __m256 paceline_half(simde__m512 x, int half) {
  simde__m512_private p = simde__m512_to_private(x);
  return p.m256[half];
}
inline simde__m512 paceline_join(__m256 low, __m256 high) {
  simde__m512_private p;
  p.m256[0] = low;
  p.m256[1] = high;
  return simde__m512_from_private(p);
}
inline simde__m512i paceline_join_i(__m256i low, __m256i high) {
  simde__m512i_private p;
  p.m256i[0] = low;
  p.m256i[1] = high;
  return simde__m512i_from_private(p);
}

#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(x) \
  paceline_join_i(_mm256_cvtps_epi32(paceline_half(x, 0)), _mm256_cvtps_epi32(paceline_half(x, 1)))
#undef _mm512_cvtepi32_ps
inline simde__m512 paceline_cvtepi32_ps(simde__m512i x) {
  simde__m512i_private p = simde__m512i_to_private(x);
  return paceline_join(_mm256_cvtepi32_ps(p.m256i[0]), _mm256_cvtepi32_ps(p.m256i[1]));
}
#define _mm512_cvtepi32_ps(x) paceline_cvtepi32_ps(x)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(x) \
  paceline_join(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)))
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) \
  _mm256_set_m128i(_mm256_cvtps_ph(paceline_half(x, 1), rounding), _mm256_cvtps_ph(paceline_half(x, 0), rounding))
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(x)                                    \
  paceline_join_i(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), \
                  _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1)))
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(x) paceline_join_i(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(x) paceline_join_i(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))
#undef _mm512_cvtepi32_epi16
inline __m256i paceline_cvtepi32_epi16(simde__m512i x) {
  simde__m512i_private p = simde__m512i_to_private(x);
  const __m256i low = _mm256_set1_epi32(0xffff);
  return _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256(p.m256i[0], low), _mm256_and_si256(p.m256i[1], low)), 0xd8);
}
#define _mm512_cvtepi32_epi16(x) paceline_cvtepi32_epi16(x)
#undef _mm512_permute_ps
#define _mm512_permute_ps(x, order) \
  paceline_join(_mm256_permute_ps(paceline_half(x, 0), order), _mm256_permute_ps(paceline_half(x, 1), order))
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, half) paceline_half(x, half)

#else

#include <immintrin.h>

// Four products of unsigned and signed bytes into each 32-bit lane, exact: bytes are widened to 16 bits first.
inline __m256i paceline_dpbusd(__m256i sum, __m256i u, __m256i s) {
  const __m256i even_u = _mm256_and_si256(u, _mm256_set1_epi16(0xff)), odd_u = _mm256_srli_epi16(u, 8);
  const __m256i even_s = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8), odd_s = _mm256_srai_epi16(s, 8);
  const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even_u, even_s), _mm256_madd_epi16(odd_u, odd_s));
  return _mm256_add_epi32(sum, products);
}
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32(sum, u, s) paceline_dpbusd(sum, u, s)
#endif
