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

#if defined(PL_SIMD_AVX512)

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
struct Mask16 {
  __mmask16 v;
};

inline F32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Mask16 operator>(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask16 operator>=(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask16 operator==(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) { return {_mm512_mask_mov_ps(no.v, m.v, yes.v)}; }

inline I32x16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I32x16 operator^(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
inline I32x16 shift_left(I32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline I32x16 shift_right(I32x16 a) {  // logical
  return {_mm512_srli_epi32(a.v, N)};
}
inline Mask16 operator>(I32x16 a, I32x16 b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }
inline I32x16 select(Mask16 m, I32x16 yes, I32x16 no) { return {_mm512_mask_mov_epi32(no.v, m.v, yes.v)}; }
inline I32x16 round_to_i32(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 to_f32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32x16 bits_of(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
inline F32x16 from_bits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline uint32_t bitmask(Mask16 m) { return m.v; }
// The even 32-bit lanes of a and b multiplied, unsigned, each 64-bit product in a pair of lanes.
inline I32x16 mul_even_u32(I32x16 a, I32x16 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
// Odd lanes moved to the even ones below them, odd ones zero.
inline I32x16 odd_to_even(I32x16 a) { return {_mm512_srli_epi64(a.v, 32)}; }
// Even lanes moved to the odd ones above them, even ones zero.
inline I32x16 even_to_odd(I32x16 a) { return {_mm512_slli_epi64(a.v, 32)}; }

inline F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
}
inline void store_u16(uint16_t* p, I32x16 a) {  // low halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline void store_i8_saturated(int8_t* p, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
inline I32x16 max(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline F32x16 swap_pairs(F32x16 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }  // lane i takes lane i^1

#elif defined(PL_SIMD_AVX2)

struct F32x16 {
  __m256 a, b;
};
struct I32x16 {
  __m256i a, b;
};
struct Mask16 {
  __m256 a, b;
};

inline F32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F32x16 operator+(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32x16 operator-(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32x16 operator*(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32x16 operator/(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F32x16 fnma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline F32x16 max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32x16 min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Mask16 operator>(F32x16 x, F32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)};
}
inline Mask16 operator>=(F32x16 x, F32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)};
}
inline Mask16 operator==(F32x16 x, F32x16 y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}

inline I32x16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32x16 load(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, I32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline I32x16 operator+(I32x16 x, I32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32x16 operator-(I32x16 x, I32x16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I32x16 operator&(I32x16 x, I32x16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I32x16 operator|(I32x16 x, I32x16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I32x16 operator^(I32x16 x, I32x16 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
inline I32x16 shift_left(I32x16 x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline I32x16 shift_right(I32x16 x) {  // logical
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
inline Mask16 operator>(I32x16 x, I32x16 y) {
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b))};
}
inline I32x16 select(Mask16 m, I32x16 yes, I32x16 no) {
  return {_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(no.a), _mm256_castsi256_ps(yes.a), m.a)),
          _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(no.b), _mm256_castsi256_ps(yes.b), m.b))};
}
inline I32x16 round_to_i32(F32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32x16 to_f32(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32x16 bits_of(F32x16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F32x16 from_bits(I32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline uint32_t bitmask(Mask16 m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | (static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8);
}

// The even 32-bit lanes of a and b multiplied, unsigned, each 64-bit product in a pair of lanes.
inline I32x16 mul_even_u32(I32x16 x, I32x16 y) { return {_mm256_mul_epu32(x.a, y.a), _mm256_mul_epu32(x.b, y.b)}; }
// Odd lanes moved to the even ones below them, odd ones zero.
inline I32x16 odd_to_even(I32x16 x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
// Even lanes moved to the odd ones above them, even ones zero.
inline I32x16 even_to_odd(I32x16 x) { return {_mm256_slli_epi64(x.a, 32), _mm256_slli_epi64(x.b, 32)}; }

inline F32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_f16(uint16_t* p, F32x16 x) {
  constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, kRound));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, kRound));
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
inline void store_u16(uint16_t* p, I32x16 x) {  // low halves
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_i8_saturated(int8_t* p, I32x16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline I32x16 max(I32x16 x, I32x16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline F32x16 swap_pairs(F32x16 x) {
  return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
}  // lane i takes lane i^1

#elif defined(PL_SIMD_SCALAR)

struct F32x16 {
  float v[16];
};
struct I32x16 {
  int32_t v[16];
};
struct Mask16 {
  uint32_t v;
};

#define PL_EACH for (int i = 0; i < 16; ++i)
inline uint32_t as_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline F32x16 set1(float x) {
  F32x16 r;
  PL_EACH r.v[i] = x;
  return r;
}
inline F32x16 zero_f32() { return set1(0.0f); }
inline F32x16 load(const float* p) {
  F32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, 64); }
inline F32x16 operator+(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] += b.v[i];
  return a;
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] -= b.v[i];
  return a;
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] *= b.v[i];
  return a;
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] /= b.v[i];
  return a;
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  PL_EACH a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  PL_EACH a.v[i] = std::fma(-a.v[i], b.v[i], c.v[i]);
  return a;
}
// Like MAXPS and MINPS: the second operand when either is NaN or both are zeros.
inline F32x16 max(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 min(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
#define PL_COMPARE(T, OP)                                        \
  inline Mask16 operator OP(T a, T b) {                          \
    Mask16 m{0};                                                 \
    PL_EACH m.v |= static_cast<uint32_t>(a.v[i] OP b.v[i]) << i; \
    return m;                                                    \
  }
PL_COMPARE(F32x16, >)
PL_COMPARE(F32x16, >=)
PL_COMPARE(F32x16, ==)
PL_COMPARE(I32x16, >)
#undef PL_COMPARE
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  PL_EACH no.v[i] = (m.v >> i) & 1u ? yes.v[i] : no.v[i];
  return no;
}
inline I32x16 set1(int32_t x) {
  I32x16 r;
  PL_EACH r.v[i] = x;
  return r;
}
inline I32x16 load(const int32_t* p) {
  I32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(int32_t* p, I32x16 a) { std::memcpy(p, a.v, 64); }
#define PL_BITWISE(OP)                                                                                     \
  inline I32x16 operator OP(I32x16 a, I32x16 b) {                                                          \
    PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) OP static_cast<uint32_t>(b.v[i])); \
    return a;                                                                                              \
  }
PL_BITWISE(+)
PL_BITWISE(-)
PL_BITWISE(&)
PL_BITWISE(|)
PL_BITWISE(^)
#undef PL_BITWISE
template <int N>
inline I32x16 shift_left(I32x16 a) {
  PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
  return a;
}
template <int N>
inline I32x16 shift_right(I32x16 a) {  // logical
  PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N);
  return a;
}
inline I32x16 select(Mask16 m, I32x16 yes, I32x16 no) {
  PL_EACH no.v[i] = (m.v >> i) & 1u ? yes.v[i] : no.v[i];
  return no;
}
inline I32x16 round_to_i32(F32x16 a) {
  I32x16 r;
  PL_EACH {
    // Out of range gives INT32_MIN, as CVTPS2DQ does.
    const float x = std::nearbyintf(a.v[i]);
    r.v[i] = x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN;
  }
  return r;
}
inline F32x16 to_f32(I32x16 a) {
  F32x16 r;
  PL_EACH r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
inline I32x16 bits_of(F32x16 a) {
  I32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline F32x16 from_bits(I32x16 a) {
  F32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline uint32_t bitmask(Mask16 m) { return m.v; }
// The even 32-bit lanes of a and b multiplied, unsigned, each 64-bit product in a pair of lanes.
inline I32x16 mul_even_u32(I32x16 a, I32x16 b) {
  for (int i = 0; i < 16; i += 2) {
    const uint64_t p = static_cast<uint64_t>(static_cast<uint32_t>(a.v[i])) * static_cast<uint32_t>(b.v[i]);
    a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p));
    a.v[i + 1] = static_cast<int32_t>(static_cast<uint32_t>(p >> 32));
  }
  return a;
}
// Odd lanes moved to the even ones below them, odd ones zero.
inline I32x16 odd_to_even(I32x16 a) {
  for (int i = 0; i < 16; i += 2) {
    a.v[i] = a.v[i + 1];
    a.v[i + 1] = 0;
  }
  return a;
}
// Even lanes moved to the odd ones above them, even ones zero.
inline I32x16 even_to_odd(I32x16 a) {
  for (int i = 0; i < 16; i += 2) {
    a.v[i + 1] = a.v[i];
    a.v[i] = 0;
  }
  return a;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u)
    return as_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | (rest > 0x7c00u ? 0x400000u : 0u));
  if (rest < 0x400u) return as_float(sign | as_bits(static_cast<float>(rest) * 0x1p-24f));
  return as_float(sign | ((rest << 13) + 0x38000000u));
}
inline uint16_t f32_to_f16(float x) {
  const uint32_t u = as_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
  if (mag >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (mag < 0x38800000u) {  // subnormal: let the adder round to a multiple of 2^-24
    const float shifted = as_float(mag) + 0.5f;
    return static_cast<uint16_t>(sign | (as_bits(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
}
inline F32x16 load_f16(const uint16_t* p) {
  F32x16 r;
  PL_EACH r.v[i] = f16_to_f32(p[i]);
  return r;
}
inline void store_f16(uint16_t* p, F32x16 a) { PL_EACH p[i] = f32_to_f16(a.v[i]); }
inline F32x16 load_bf16(const uint16_t* p) {
  F32x16 r;
  PL_EACH r.v[i] = as_float(static_cast<uint32_t>(p[i]) << 16);
  return r;
}
inline void store_u16(uint16_t* p, I32x16 a) { PL_EACH p[i] = static_cast<uint16_t>(a.v[i]); }
inline void store_i8_saturated(int8_t* p, I32x16 a) {
  PL_EACH p[i] = static_cast<int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
inline I32x16 max(I32x16 a, I32x16 b) {
  PL_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 swap_pairs(F32x16 a) {  // lane i takes lane i^1
  F32x16 r;
  PL_EACH r.v[i] = a.v[i ^ 1];
  return r;
}
#undef PL_EACH

#else
#error "define PL_SIMD_SCALAR, PL_SIMD_AVX2 or PL_SIMD_AVX512"
#endif

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

inline F32x16 silu(F32x16 x) {
  // For x < -87.3 exp(-x) would exceed its range; silu is below 1e-36 there and the clamp keeps it a tiny negative number.
  const F32x16 e = exp(min(negate(x), set1(87.0f)));
  return x / (set1(1.0f) + e);
}

}  // namespace
}  // namespace paceline::PL_ISA
