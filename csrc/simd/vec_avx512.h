// The vectors of simd/vec.h, which includes this file and states the contract. One 512-bit register.

namespace paceline::PL_ISA {
namespace {

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
inline I32x16 widen_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I32x16 widen_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_u16(uint16_t* p, I32x16 a) {  // low halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline void store_i8_saturated(int8_t* p, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
inline I32x16 max(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline F32x16 swap_pairs(F32x16 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }  // lane i takes lane i^1

}  // namespace
}  // namespace paceline::PL_ISA
