// Exact integer dot products of one tile's group with M rows of activations: the only code besides csrc/simd that names instructions.
//
// dot[m][lane] = sum over the group's inputs of weight[lane] * activation[m], an int32 that cannot overflow (32 * 128 * 127 < 2^31), so
// every instruction set gives the same value:
//   AVX-512 VNNI, AVX-VNNI  vpdpbusd, unsigned weight times signed activation; signed weights are offset by 128 and the offset's share,
//                           128 * sum(activations), is subtracted as the accumulator's start.
//   AVX2                    u4: vpmaddubsw summed in 16 bits (a lane's total is at most 8 * 2 * 15 * 127 = 30,480 < 2^15), widened once a
//                           group; e2m1, whose weights go to 24, twice (4 * 2 * 24 * 127 = 24,384). i8: |w| times sign(w) * a, at most 2 * 128 * 127 = 32,512 per pair, widened each time.
//
// dot_four reads codes of four bits: the weight is the code, or kE2M1[code], looked up by a byte shuffle.
//
// add_i8 adds such sums of whole rows up, without the offset's share: wrapping, so that only the end result must fit. It does for up to
// 132,104 inputs (128 * 127 * 132,104 < 2^31), and the packer refuses more.

namespace paceline::PL_ISA {
namespace {

#if defined(PL_SIMD_SCALAR)
constexpr int kRows = 4;  // rows that share one pass over a tile

template <bool kIsE2M1, int M>
[[gnu::always_inline]] inline void dot_four(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&dot)[M]) {
  for (int m = 0; m < M; ++m) {
    for (int lane = 0; lane < 16; ++lane) {
      int32_t sum = 0;
      for (int kb = 0; kb < 4; ++kb)
        for (int j = 0; j < 4; ++j) {
          const uint8_t byte = w[kb * 64 + lane * 4 + j];
          const int low = kIsE2M1 ? kE2M1[byte & 15] : byte & 15, high = kIsE2M1 ? kE2M1[byte >> 4] : byte >> 4;
          sum += low * a[m * a_stride + kb * 4 + j] + high * a[m * a_stride + 16 + kb * 4 + j];
        }
      dot[m].v[lane] = sum;
    }
  }
}

template <int M, int G>
[[gnu::always_inline]] inline void dot_i8(const uint8_t* w, const int8_t* a, int a_stride, const int32_t*, int,
                                          I32x16 (&dot)[M]) {
  const int8_t* q = reinterpret_cast<const int8_t*>(w);
  for (int m = 0; m < M; ++m) {
    for (int lane = 0; lane < 16; ++lane) {
      int32_t sum = 0;
      for (int kb = 0; kb < G / 4; ++kb)
        for (int j = 0; j < 4; ++j) sum += q[kb * 64 + lane * 4 + j] * a[m * a_stride + kb * 4 + j];
      dot[m].v[lane] = sum;
    }
  }
}

// What add_i8 must start from, given the sum of a row's activations.
inline int32_t channel_start(float) { return 0; }

template <int M>
[[gnu::always_inline]] inline void add_i8(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&sum)[M]) {
  const int8_t* q = reinterpret_cast<const int8_t*>(w);
  for (int m = 0; m < M; ++m)
    for (int lane = 0; lane < 16; ++lane)
      for (int i = 0; i < 32; ++i) sum[m].v[lane] += q[i / 4 * 64 + lane * 4 + i % 4] * a[m * a_stride + i];
}

#else

inline int32_t load_i32(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

#if defined(PL_SIMD_AVX512)
constexpr int kRows = 8;

template <bool kIsE2M1>
[[gnu::always_inline]] inline __m512i weights_of(__m512i codes) {
  if constexpr (!kIsE2M1) return codes;
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2M1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}

template <bool kIsE2M1, int M>
[[gnu::always_inline]] inline void dot_four(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&dot)[M]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i low[4], high[4];
  unroll<4>([&](auto kb) PL_INLINE {
    const __m512i raw = _mm512_loadu_si512(w + kb * 64);
    low[kb] = weights_of<kIsE2M1>(_mm512_and_si512(raw, nibble));
    high[kb] = weights_of<kIsE2M1>(_mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble));
  });
  unroll<M>([&](auto m) PL_INLINE {
    const int8_t* row = a + m * a_stride;
    __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();  // two chains hide the latency
    unroll<4>([&](auto kb) PL_INLINE {
      even = _mm512_dpbusd_epi32(even, low[kb], _mm512_set1_epi32(load_i32(row + kb * 4)));
      odd = _mm512_dpbusd_epi32(odd, high[kb], _mm512_set1_epi32(load_i32(row + 16 + kb * 4)));
    });
    dot[m].v = _mm512_add_epi32(even, odd);
  });
}

template <int M, int G>
[[gnu::always_inline]] inline void dot_i8(const uint8_t* w, const int8_t* a, int a_stride, const int32_t* half_sum,
                                          int sum_stride, I32x16 (&dot)[M]) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i q[G / 4];
  unroll<G / 4>([&](auto kb) PL_INLINE { q[kb] = _mm512_xor_si512(_mm512_loadu_si512(w + kb * 64), offset); });
  unroll<M>([&](auto m) PL_INLINE {
    const int8_t* row = a + m * a_stride;
    const int32_t* sums = half_sum + m * sum_stride;
    const int32_t total = G == 32 ? sums[0] + sums[1] : sums[0];
    __m512i even = _mm512_set1_epi32(-128 * total), odd = _mm512_setzero_si512();
    unroll<G / 8>([&](auto pair) PL_INLINE {
      constexpr int kb = 2 * pair;
      even = _mm512_dpbusd_epi32(even, q[kb], _mm512_set1_epi32(load_i32(row + kb * 4)));
      odd = _mm512_dpbusd_epi32(odd, q[kb + 1], _mm512_set1_epi32(load_i32(row + kb * 4 + 4)));
    });
    dot[m].v = _mm512_add_epi32(even, odd);
  });
}

inline int32_t channel_start(float total) { return -128 * static_cast<int32_t>(total); }

template <int M>
[[gnu::always_inline]] inline void add_i8(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&sum)[M]) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
  unroll<8>([&](auto kb) PL_INLINE {
    const __m512i q = _mm512_xor_si512(_mm512_loadu_si512(w + kb * 64), offset);
    unroll<M>([&](auto m) PL_INLINE {
      sum[m].v = _mm512_dpbusd_epi32(sum[m].v, q, _mm512_set1_epi32(load_i32(a + m * a_stride + kb * 4)));
    });
  });
}

#else  // 256 bits: a tile is two registers
constexpr int kRows = 4;

inline __m256i load_256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <bool kIsE2M1>
[[gnu::always_inline]] inline __m256i low_weights(__m256i bytes) {
  const __m256i codes = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  if constexpr (!kIsE2M1) return codes;
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2M1));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

template <bool kIsE2M1>
[[gnu::always_inline]] inline __m256i high_weights(__m256i bytes) {
  return low_weights<kIsE2M1>(_mm256_srli_epi16(bytes, 4));
}

#if defined(PL_AVX_VNNI)
template <bool kIsE2M1, int M>
[[gnu::always_inline]] inline void dot_four(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&dot)[M]) {
  unroll<M>([&](auto m) PL_INLINE { dot[m] = set1(0); });
#pragma GCC unroll 1
  for (int kb = 0; kb < 4; ++kb) {
    const __m256i raw_a = load_256(w + kb * 64), raw_b = load_256(w + kb * 64 + 32);
    const __m256i low_a = low_weights<kIsE2M1>(raw_a), low_b = low_weights<kIsE2M1>(raw_b);
    const __m256i high_a = high_weights<kIsE2M1>(raw_a), high_b = high_weights<kIsE2M1>(raw_b);
    unroll<M>([&](auto m) PL_INLINE {
      const __m256i x = _mm256_set1_epi32(load_i32(a + m * a_stride + kb * 4));
      const __m256i y = _mm256_set1_epi32(load_i32(a + m * a_stride + 16 + kb * 4));
      dot[m].a = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(dot[m].a, low_a, x), high_a, y);
      dot[m].b = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(dot[m].b, low_b, x), high_b, y);
    });
  }
}

template <int M, int G>
[[gnu::always_inline]] inline void dot_i8(const uint8_t* w, const int8_t* a, int a_stride, const int32_t* half_sum,
                                          int sum_stride, I32x16 (&dot)[M]) {
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
  unroll<M>([&](auto m) PL_INLINE {
    const int32_t* sums = half_sum + m * sum_stride;
    dot[m] = set1(-128 * (G == 32 ? sums[0] + sums[1] : sums[0]));
  });
#pragma GCC unroll 1
  for (int kb = 0; kb < G / 4; ++kb) {
    const __m256i q_a = _mm256_xor_si256(load_256(w + kb * 64), offset);
    const __m256i q_b = _mm256_xor_si256(load_256(w + kb * 64 + 32), offset);
    unroll<M>([&](auto m) PL_INLINE {
      const __m256i x = _mm256_set1_epi32(load_i32(a + m * a_stride + kb * 4));
      dot[m].a = _mm256_dpbusd_avx_epi32(dot[m].a, q_a, x);
      dot[m].b = _mm256_dpbusd_avx_epi32(dot[m].b, q_b, x);
    });
  }
}

inline int32_t channel_start(float total) { return -128 * static_cast<int32_t>(total); }

template <int M>
[[gnu::always_inline]] inline void add_i8(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&sum)[M]) {
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 1
  for (int kb = 0; kb < 8; ++kb) {
    const __m256i q_a = _mm256_xor_si256(load_256(w + kb * 64), offset);
    const __m256i q_b = _mm256_xor_si256(load_256(w + kb * 64 + 32), offset);
    unroll<M>([&](auto m) PL_INLINE {
      const __m256i x = _mm256_set1_epi32(load_i32(a + m * a_stride + kb * 4));
      sum[m].a = _mm256_dpbusd_avx_epi32(sum[m].a, q_a, x);
      sum[m].b = _mm256_dpbusd_avx_epi32(sum[m].b, q_b, x);
    });
  }
}
#else
// Makes the compiler finish these sums before it starts the next: GCC 12 otherwise moves products ahead of the sums they belong to, and
// with 8 sums in 16 registers each one that waits is stored and loaded again.
inline void keep_order(__m256i& a, __m256i& b) { __asm__ volatile("" : "+x"(a), "+x"(b)); }

// sum[m] += (unsigned weights) * (4 activations of row m), for both halves of the tile; the first time sum[m] =.
template <bool kFirst, int M>
[[gnu::always_inline]] inline void add_pairs(__m256i w_a, __m256i w_b, const int8_t* a, int a_stride,
                                             __m256i (&sum_a)[M], __m256i (&sum_b)[M]) {
  unroll<M>([&](auto m) PL_INLINE {
    const __m256i x = _mm256_set1_epi32(load_i32(a + m * a_stride));
    const __m256i pair_a = _mm256_maddubs_epi16(w_a, x), pair_b = _mm256_maddubs_epi16(w_b, x);
    sum_a[m] = kFirst ? pair_a : _mm256_add_epi16(sum_a[m], pair_a);
    sum_b[m] = kFirst ? pair_b : _mm256_add_epi16(sum_b[m], pair_b);
    keep_order(sum_a[m], sum_b[m]);
  });
}

template <bool kIsE2M1, int M>
[[gnu::always_inline]] inline void dot_four(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&dot)[M]) {
  constexpr int kParts = kIsE2M1 ? 2 : 1, kPart = 4 / kParts;  // what 16 bits hold the sum of
  const __m256i ones = _mm256_set1_epi16(1);
  unroll<kParts>([&](auto part) PL_INLINE {
    __m256i sum_a[M], sum_b[M];
    // Low nibbles first, then high: beside 8 sums there are registers for one pair of weights.
    unroll<kPart>([&](auto i) PL_INLINE {
      constexpr int kb = kPart * part + i;
      const uint8_t* p = w + kb * 64;
      add_pairs<i == 0>(low_weights<kIsE2M1>(load_256(p)), low_weights<kIsE2M1>(load_256(p + 32)), a + kb * 4, a_stride,
                        sum_a, sum_b);
      add_pairs<false>(high_weights<kIsE2M1>(load_256(p)), high_weights<kIsE2M1>(load_256(p + 32)), a + 16 + kb * 4,
                       a_stride, sum_a, sum_b);
    });
    unroll<M>([&](auto m) PL_INLINE {
      const I32x16 sum = {_mm256_madd_epi16(sum_a[m], ones), _mm256_madd_epi16(sum_b[m], ones)};
      dot[m] = part == 0 ? sum : I32x16{_mm256_add_epi32(dot[m].a, sum.a), _mm256_add_epi32(dot[m].b, sum.b)};
    });
  });
}

inline int32_t channel_start(float) { return 0; }

template <int M, int G = 32>
[[gnu::always_inline]] inline void add_i8(const uint8_t* w, const int8_t* a, int a_stride, I32x16 (&dot)[M]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 1
  for (int kb = 0; kb < G / 4; ++kb) {
    const __m256i q_a = load_256(w + kb * 64), q_b = load_256(w + kb * 64 + 32);
    const __m256i abs_a = _mm256_abs_epi8(q_a), abs_b = _mm256_abs_epi8(q_b);
    unroll<M>([&](auto m) PL_INLINE {
      const __m256i x = _mm256_set1_epi32(load_i32(a + m * a_stride + kb * 4));
      const __m256i pair_a = _mm256_maddubs_epi16(abs_a, _mm256_sign_epi8(x, q_a));
      const __m256i pair_b = _mm256_maddubs_epi16(abs_b, _mm256_sign_epi8(x, q_b));
      dot[m].a = _mm256_add_epi32(dot[m].a, _mm256_madd_epi16(pair_a, ones));
      dot[m].b = _mm256_add_epi32(dot[m].b, _mm256_madd_epi16(pair_b, ones));
      keep_order(dot[m].a, dot[m].b);
    });
  }
}

template <int M, int G>
[[gnu::always_inline]] inline void dot_i8(const uint8_t* w, const int8_t* a, int a_stride, const int32_t*, int,
                                          I32x16 (&dot)[M]) {
  unroll<M>([&](auto m) PL_INLINE { dot[m] = set1(0); });
  add_i8<M, G>(w, a, a_stride, dot);
}
#endif
#endif
#endif

}  // namespace
}  // namespace paceline::PL_ISA
