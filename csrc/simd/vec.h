// Vectors of 16 lanes, one implementation for each instruction set, with identical results on all of them.
//
// Included once per instruction set, inside a translation unit that defines PL_ISA (the namespace) and one of PL_SIMD_SCALAR,
// PL_SIMD_AVX2, PL_SIMD_AVX512. Everything lives in an anonymous namespace inside paceline::PL_ISA, so the linker can never hand one
// machine's code to another. Contract: every operation is either exact or correctly rounded (IEEE single, round to nearest even), fused
// multiply-add is explicit, and reductions use one fixed tree; so any code written over these types gives the same bits everywhere.
#ifndef PL_ISA
#error "include simd/vec.h from csrc/isa/*.cpp"
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(PL_SIMD_AVX2) || defined(PL_SIMD_AVX512)
#ifdef PL_EMULATE
#include "simd/emulated.h"
#else
#include <immintrin.h>
#endif
#endif

namespace paceline::PL_ISA {
namespace {

// For lambdas: without it GCC outlines the larger ones, and what they capture goes through memory.
#define PL_INLINE __attribute__((always_inline))

// f(0), f(1), ... f(N-1) with constant arguments. Arrays of vectors that are indexed by a loop counter stay in memory with GCC 12, whatever
// the loop's unrolling; indexed by these constants they live in registers.
template <int... I, class Function>
[[gnu::always_inline]] inline void unroll_sequence(std::integer_sequence<int, I...>, Function&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class Function>
[[gnu::always_inline]] inline void unroll(Function&& f) {
  unroll_sequence(std::make_integer_sequence<int, N>{}, f);
}

}  // namespace
}  // namespace paceline::PL_ISA

#if defined(PL_SIMD_AVX512)
#include "simd/vec_avx512.h"
#elif defined(PL_SIMD_AVX2)
#include "simd/vec_avx2.h"
#elif defined(PL_SIMD_SCALAR)
#include "simd/vec_scalar.h"
#else
#error "define PL_SIMD_SCALAR, PL_SIMD_AVX2 or PL_SIMD_AVX512"
#endif

namespace paceline::PL_ISA {
namespace {

// ---- composed of the operations above: one definition for every instruction set ----

inline F32x16 abs(F32x16 a) { return from_bits(bits_of(a) & set1(static_cast<int32_t>(0x7fffffff))); }
inline F32x16 negate(F32x16 a) { return from_bits(bits_of(a) ^ set1(INT32_MIN)); }

// Round to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, F32x16 a) {
  const I32x16 u = bits_of(a);
  const I32x16 rounded = u + set1(0x7fff) + (shift_right<16>(u) & set1(1));
  const I32x16 quiet = u | set1(0x400000);
  store_u16(p, shift_right<16>(select(a == a, rounded, quiet)));
}

inline float lane(F32x16 a, int i) {
  float f[16];
  store(f, a);
  return f[i];
}

// Sum of the lanes by the tree (i, i+8), (i, i+4), (i, i+2), (i, i+1); largest lane by the same tree.
#ifdef PL_SIMD_SCALAR
template <class Combine>
inline float reduce_tree(F32x16 a, Combine combine) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = combine(a.v[i], a.v[i + half]);
  return a.v[0];
}
inline float reduce_add(F32x16 a) {
  return reduce_tree(a, [](float x, float y) { return x + y; });
}
inline float reduce_max(F32x16 a) {
  return reduce_tree(a, [](float x, float y) { return x > y ? x : y; });
}
#else
#ifdef PL_SIMD_AVX512
inline __m256 low_half(F32x16 x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(F32x16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
inline __m256 low_half(F32x16 x) { return x.a; }
inline __m256 high_half(F32x16 x) { return x.b; }
#endif
inline float reduce_add(F32x16 x) {
  const __m256 y = _mm256_add_ps(low_half(x), high_half(x));
  const __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}
inline float reduce_max(F32x16 x) {
  const __m256 y = _mm256_max_ps(low_half(x), high_half(x));
  const __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  const __m128 w = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}
#endif
#ifdef PL_SIMD_SCALAR
inline int32_t reduce_add(I32x16 a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a.v[i];
  return sum;
}
#else
inline int32_t reduce_add(I32x16 x) {
#ifdef PL_SIMD_AVX512
  const __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
#else
  const __m256i y = _mm256_add_epi32(x.a, x.b);
#endif
  const __m128i z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  const __m128i w = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(w, _mm_shuffle_epi32(w, 0xb1)));
}
#endif

#ifdef PL_SIMD_SCALAR
inline int32_t reduce_max(I32x16 a) {
  int32_t largest = a.v[0];
  for (int i = 1; i < 16; ++i) largest = largest > a.v[i] ? largest : a.v[i];
  return largest;
}
#else
inline int32_t reduce_max(I32x16 x) {
#ifdef PL_SIMD_AVX512
  const __m256i y = _mm256_max_epi32(_mm512_castsi512_si256(x.v), _mm512_extracti64x4_epi64(x.v, 1));
#else
  const __m256i y = _mm256_max_epi32(x.a, x.b);
#endif
  const __m128i z = _mm_max_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  const __m128i w = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(w, _mm_shuffle_epi32(w, 0xb1)));
}
#endif

inline float from_bits_scalar(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Lane i is i.
inline I32x16 iota() {
  constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(kLanes);
}
// Lanes below count.
inline Mask16 first_lanes(int count) { return set1(static_cast<int32_t>(count)) > iota(); }

// e^x, within 2 ulp; exactly 0 below -87.3 (so also for -inf), x must not exceed 88. Cody-Waite reduction, Taylor to degree 7.
inline F32x16 exp(F32x16 x) {
  const Mask16 live = x > set1(-87.3f);
  const F32x16 clamped = max(x, set1(-87.3f));
  const I32x16 n = round_to_i32(clamped * set1(1.44269504f));
  const F32x16 nf = to_f32(n);
  F32x16 r = fnma(nf, set1(0.693145752f), clamped);
  r = fnma(nf, set1(1.42860677e-6f), r);
  F32x16 p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const F32x16 scale = from_bits(shift_left<23>(n + set1(127)));
  return select(live, p * scale, zero_f32());
}

// Natural logarithm of positive normal x, within 3 ulp. x = m * 2^e with m in [sqrt(1/2), sqrt(2)), log m by atanh series in
// s = (m-1)/(m+1).
inline F32x16 log(F32x16 x) {
  const I32x16 u = bits_of(x);
  const I32x16 shifted = u - set1(0x3f3504f3);
  const I32x16 e = shift_right<23>(shifted + set1(static_cast<int32_t>(127u << 23))) - set1(127);
  const F32x16 m = from_bits(u - shift_left<23>(e));
  const F32x16 ef = to_f32(e);
  const F32x16 s = (m - set1(1.0f)) / (m + set1(1.0f));
  const F32x16 z = s * s;
  F32x16 p = set1(2.0f / 11.0f);
  p = fma(p, z, set1(2.0f / 9.0f));
  p = fma(p, z, set1(2.0f / 7.0f));
  p = fma(p, z, set1(2.0f / 5.0f));
  p = fma(p, z, set1(2.0f / 3.0f));
  const F32x16 tail = fma(ef, set1(1.42860677e-6f), p * z * s);
  return fma(ef, set1(0.693145752f), fma(set1(2.0f), s, tail));
}

// tanh x, within 2 ulp. From E = e^(2|x|) - 1, which is 2^n (e^r - 1) + (2^n - 1), tanh |x| = E / (E + 2): no cancellation at small x, where n
// is 0 and E has the relative error of e^r - 1. From 9.02 on it is 1 in f32, so larger x are taken for 10.
inline F32x16 tanh(F32x16 x) {
  const I32x16 sign = bits_of(x) & set1(INT32_MIN);
  const F32x16 twice = min(set1(20.0f), abs(x) + abs(x));  // in this order a NaN stays one
  const I32x16 n = round_to_i32(twice * set1(1.44269504f));
  const F32x16 nf = to_f32(n);
  F32x16 r = fnma(nf, set1(0.693145752f), twice);
  r = fnma(nf, set1(1.42860677e-6f), r);
  F32x16 p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p * r, r, r);
  const F32x16 scale = from_bits(shift_left<23>(n + set1(127)));
  const F32x16 e = fma(scale, p, scale - set1(1.0f));
  return from_bits(bits_of(e / (e + set1(2.0f))) | sign);
}

// cap * tanh(x / cap).
inline F32x16 soft_capped(F32x16 x, F32x16 cap) { return cap * tanh(x / cap); }

inline F32x16 silu(F32x16 x) {
  // For x < -87.3 exp(-x) would exceed its range; silu is below 1e-36 there and the clamp keeps it a tiny negative number.
  const F32x16 e = exp(min(negate(x), set1(87.0f)));
  return x / (set1(1.0f) + e);
}

}  // namespace
}  // namespace paceline::PL_ISA
