// Vectors of 16 pairs of 16-bit integers: what an exact integer product of two wide factors is made of. Included by simd/vec.h's users after
// it, under the same contract: every operation is exact, so every instruction set gives the same bits.

namespace paceline::PL_ISA {
namespace {

// The two 16-bit integers at p, which need no alignment.
inline int32_t load_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return pair;
}

#if defined(PL_SIMD_AVX512)

struct I16x32 {
  __m512i v;
};
inline I16x32 load_i8(const int8_t* p) {  // 32 of them, widened
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline I16x32 set1_pair(const int16_t* p) { return {_mm512_set1_epi32(load_pair(p))}; }
// Lane i of the sum takes both products of pair i. Sums that stay below 2^31 are exact.
inline I32x16 add_products(I16x32 a, I16x32 b, I32x16 sum) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }
inline void store_i16_saturated(int16_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(a.v));
}

#elif defined(PL_SIMD_AVX2)

struct I16x32 {
  __m256i a, b;
};
inline I16x32 load_i8(const int8_t* p) {  // 32 of them, widened
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline I16x32 set1_pair(const int16_t* p) {
  const __m256i pair = _mm256_set1_epi32(load_pair(p));
  return {pair, pair};
}
// Lane i of the sum takes both products of pair i. Sums that stay below 2^31 are exact. AVX-VNNI's vpdpwssd would be one instruction, but
// waits 5 cycles for the sum where vpaddd waits 1, and a lone request has only 6 sums to wait for.
inline I32x16 add_products(I16x32 x, I16x32 y, I32x16 sum) {
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
inline void store_i16_saturated(int16_t* p, I32x16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

#else

struct I16x32 {
  int16_t v[32];
};
inline I16x32 load_i8(const int8_t* p) {  // 32 of them, widened
  I16x32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i];
  return r;
}
inline I16x32 set1_pair(const int16_t* p) {
  I16x32 r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i % 2];
  return r;
}
// Lane i of the sum takes both products of pair i. Sums that stay below 2^31 are exact.
inline I32x16 add_products(I16x32 a, I16x32 b, I32x16 sum) {
  for (int i = 0; i < 16; ++i) sum.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return sum;
}
inline void store_i16_saturated(int16_t* p, I32x16 a) {
  for (int i = 0; i < 16; ++i)
    p[i] = static_cast<int16_t>(a.v[i] > INT16_MAX ? INT16_MAX : a.v[i] < INT16_MIN ? INT16_MIN : a.v[i]);
}

#endif

}  // namespace
}  // namespace paceline::PL_ISA
