// The vectors of simd/vec.h, which includes this file and states the contract. Two 256-bit registers.

namespace paceline::PL_ISA {
namespace {

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
inline I32x16 widen_u8(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline I32x16 widen_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
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

}  // namespace
}  // namespace paceline::PL_ISA
