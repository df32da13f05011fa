// i8c for many rows where no instruction multiplies bytes exactly: 16-bit factors, widened once.
//
// On plain AVX2 |w| times sign(w) * a costs three instructions on the two multiplier ports for 32 products (vpsignb, vpmaddubsw, vpmaddwd);
// vpmaddwd on 16-bit factors two. The sums are the same int32, so which of both computed them shows in no bit. Rows are widened once a
// chunk, weights of a tile once a chunk: 6 instructions for 32 weights, spread over up to 32 rows.
//
// A block is kWideInputs inputs of a tile, 16 KB of 16-bit weights: half of the first-level cache. Sums of a block are added to int32 sums
// in memory, one load and store for each 512 inputs. Lanes are kept in the order 0 1 4 5 2 3 6 7 of each half of a tile, as the widening
// leaves them, until the sums are turned to floats.

namespace paceline::PL_ISA {
namespace {

#if defined(PL_SIMD_AVX2) && !defined(PL_AVX_VNNI)
constexpr int kWideInputs = 512;
constexpr int kWideActs = 64 * 1024;  // 16-bit activations of a chunk of rows: 128 KB, in the second-level cache
constexpr int kWideRows = 8;          // fewer rows do not pay for widening the weights

// Rows [begin, begin + rows) as 16-bit integers: to[rows][in.q_stride].
inline void widen_rows(const Activations& in, int begin, int rows, int16_t* to) {
  const int8_t* q = in.q + static_cast<size_t>(begin) * static_cast<size_t>(in.q_stride);
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(in.q_stride);
  for (size_t i = 0; i < count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i))));
}

// `runs` runs of a tile: to[runs * 16][2][16], two inputs side by side, for each half of the tile.
inline void widen_block(const uint8_t* w, int runs, int16_t* to) {
  for (int kb = 0; kb < runs * 8; ++kb, w += 64, to += 64)
    unroll<2>([&](auto half) PL_INLINE {
      const __m128i* p = reinterpret_cast<const __m128i*>(w + half * 32);
      const __m256 low = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)));
      const __m256 high = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1)));
      const __m256i first = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
      const __m256i second = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + half * 16), first);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 + half * 16), second);
    });
}

// sums[m] += a block of widened weights times M rows of widened activations.
template <int M>
[[gnu::noinline]] void add_wide(const int16_t* w, const int16_t* a, int a_stride, int pairs, int32_t* sums) {
  I32x16 sum[M];
  unroll<M>([&](auto m) PL_INLINE { sum[m] = load(sums + m * 16); });
#pragma GCC unroll 2
  for (int pair = 0; pair < pairs; ++pair, w += 32, a += 2) {
    const __m256i w_a = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i w_b = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 16));
    unroll<M>([&](auto m) PL_INLINE {
      const __m256i x = _mm256_set1_epi32(load_pair(a + m * a_stride));
      sum[m].a = _mm256_add_epi32(sum[m].a, _mm256_madd_epi16(w_a, x));
      sum[m].b = _mm256_add_epi32(sum[m].b, _mm256_madd_epi16(w_b, x));
    });
  }
  unroll<M>([&](auto m) PL_INLINE { store(sums + m * 16, sum[m]); });
}

// to[rows][16] = tile times rows [begin, begin + rows), which stand widened in `acts`.
inline void channel_tile(const Matrix& w, int tile, const int16_t* acts, const Activations& in, int begin, int rows,
                         float* to) {
  alignas(64) int16_t block[kWideInputs * kTile];
  alignas(64) int32_t sums[kRowChunk * kTile] = {};
  const uint8_t* p = w.data + static_cast<size_t>(tile) * w.tile_bytes;
  for (int first = 0; first < w.num_groups; first += kWideInputs / kActGroup) {
    const int left = w.num_groups - first, runs = left < kWideInputs / kActGroup ? left : kWideInputs / kActGroup;
    widen_block(p + static_cast<size_t>(first) * I8C::kRunBytes, runs, block);
    for_row_blocks(0, rows, [&]<int M>(int row) {
      add_wide<M>(block, acts + static_cast<size_t>(row) * static_cast<size_t>(in.q_stride) + first * kActGroup,
                  in.q_stride, runs * 16, sums + row * kTile);
    });
  }
  const F32x16 scale = load(reinterpret_cast<const float*>(p + static_cast<size_t>(w.num_groups) * I8C::kRunBytes));
  const size_t groups = static_cast<size_t>(in.q_stride / kActGroup);
  for (int row = 0; row < rows; ++row) {
    const I32x16 mixed = load(sums + row * kTile);
    const I32x16 sum = {_mm256_permute4x64_epi64(mixed.a, 0xd8), _mm256_permute4x64_epi64(mixed.b, 0xd8)};
    store(to + row * kTile, to_f32(sum) * (scale * set1(in.scale[static_cast<size_t>(begin + row) * groups])));
  }
}

// Rows of a chunk for that many inputs; 0 where the plain kernel is to be used.
inline int wide_chunk(const Matrix& w, const Activations& in, int rows) {
  if (w.kind != WeightKind::i8c || rows < kWideRows) return 0;
  const int fit = kWideActs / in.q_stride;
  return fit < kWideRows ? 0 : fit < kRowChunk ? fit : kRowChunk;
}
#else
constexpr int kWideActs = 1;
inline void widen_rows(const Activations&, int, int, int16_t*) {}
inline void channel_tile(const Matrix&, int, const int16_t*, const Activations&, int, int, float*) {}
inline int wide_chunk(const Matrix&, const Activations&, int) { return 0; }
#endif

// linear for many rows of i8c; see there. Rows are taken `chunk` at a time.
void linear_wide(const Matrix& w, const Activations& in, int rows, int chunk, int tile_begin, int tile_end,
                 const LinearOut& to) {
  alignas(64) int16_t acts[kWideActs];
  alignas(64) float product[kRowChunk * kTile];
  for (int begin = 0; begin < rows; begin += chunk) {
    const int count = begin + chunk < rows ? chunk : rows - begin;
    widen_rows(in, begin, count, acts);
    for (int tile = tile_begin; tile < tile_end; ++tile) {
      channel_tile(w, tile, acts, in, begin, count, product);
      for (int row = 0; row < count; ++row) store_outputs(load(product + row * kTile), begin + row, tile, to);
    }
  }
}

// gate_up for many rows of i8c.
void gate_up_wide(Activation activation, const Matrix& gate, const Matrix& up, const Activations& in, int rows,
                  int chunk, int unit_begin, int unit_end, float* y, int y_stride, const Activations& out) {
  alignas(64) int16_t acts[kWideActs];
  alignas(64) float product[2][2][kRowChunk * kTile];  // gate and up, two tiles
  for (int begin = 0; begin < rows; begin += chunk) {
    const int count = begin + chunk < rows ? chunk : rows - begin;
    widen_rows(in, begin, count, acts);
    for (int unit = unit_begin; unit < unit_end; ++unit) {
      const int tiles = 2 * unit + 1 < gate.num_tiles ? 2 : 1;
      for (int t = 0; t < tiles; ++t) {
        channel_tile(gate, 2 * unit + t, acts, in, begin, count, product[0][t]);
        channel_tile(up, 2 * unit + t, acts, in, begin, count, product[1][t]);
      }
      for (int row = 0; row < count; ++row) {
        const auto hidden = [&](int t) {
          const int at = row * kTile;
          return t < tiles ? glu(activation, load(product[0][t] + at), load(product[1][t] + at)) : zero_f32();
        };
        store_unit(hidden(0), hidden(1), unit, begin + row, y, y_stride, out);
      }
    }
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
