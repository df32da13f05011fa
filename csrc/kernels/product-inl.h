// y = W x for 1..n rows: one body whose result for a row never depends on how many rows there are.
//
// Lanes are outputs; runs of 32 inputs (16 of i8 in groups of 16) are taken in order. Per run and row: an exact int32 dot product, then
//   acc = fma(dot, weight scale * activation scale, acc)      and, with minima,      acc = fma(min, activation scale * sum(q), acc).
// Zero points, and the 8 of u4 without an offset (12 of e2m1), are taken off the dot product: dot - z * sum(q), by one fma that is exact, since |dot|
// and |z * sum(q)| are at most 255 * 32 * 127 < 2^20, their difference is below 2^21, and a float holds integers to 2^24. So groups of 64
// and 128 do the arithmetic of groups of 32 whose scales are equal, to the bit.
// i8c: the sum of all inputs is one int32, and y = sum * (weight scale * activation scale).
// A tile's weights are read once for kRows rows; further rows find them in the first-level cache. Bytes per weight are those of the
// packed format; operations per weight and row on AVX2 about 1/8 instruction (u4).

namespace paceline::PL_ISA {
namespace {

// Integer formats: a group is kRuns runs of kRunBytes codes (0: as many as the matrix says), then kScaleBytes of scales and offsets.
// accumulate(codes, scales, run, ...) adds one run, the run-th of the tile.

// The constants of offsets: for u4 unsigned, for i8 signed zero points.
inline F32x16 zero_points(const uint8_t* p, bool is_signed) {
  return to_f32(is_signed ? widen_i8(reinterpret_cast<const int8_t*>(p)) : widen_u8(p));
}

constexpr size_t offset_bytes(WeightOffset offset) {
  return offset == WeightOffset::min ? 32 : offset == WeightOffset::zero ? 16 : 0;
}

template <int kRunsOf, WeightOffset kOffset, bool kIsE2M1 = false>
struct U4 {
  static constexpr int kRuns = kRunsOf;
  static constexpr size_t kRunBytes = 256;
  static constexpr float kPlainZero = kIsE2M1 ? static_cast<float>(kE2M1Zero) : 8.0f;
  static constexpr size_t kScaleBytes = 32 + offset_bytes(kOffset);
  template <int M>
  [[gnu::always_inline]] static inline void accumulate(const uint8_t* p, const uint8_t* scales, int g,
                                                       const Activations& in, int row, F32x16 (&acc)[M]) {
    const int groups = in.q_stride / kActGroup;
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(groups) + static_cast<size_t>(g);
    I32x16 dot[M];
    dot_four<kIsE2M1>(p, in.q + static_cast<size_t>(row) * static_cast<size_t>(in.q_stride) + g * kActGroup,
                      in.q_stride, dot);
    const F32x16 scale = load_f16(reinterpret_cast<const uint16_t*>(scales));
    const float* act_scale = in.scale + at;
    if constexpr (kOffset == WeightOffset::min) {
      const F32x16 minimum = load_f16(reinterpret_cast<const uint16_t*>(scales + 32));
      const float* act_sum = in.sum + at;
      unroll<M>([&](auto m) PL_INLINE {
        acc[m] = fma(to_f32(dot[m]), scale * set1(act_scale[m * groups]), acc[m]);
        acc[m] = fma(minimum, set1(act_sum[m * groups]), acc[m]);
      });
    } else {
      const F32x16 zero = kOffset == WeightOffset::zero ? zero_points(scales + 32, false) : set1(kPlainZero);
      const float* total = in.total + at;
      unroll<M>([&](auto m) PL_INLINE {
        const F32x16 centred = fnma(zero, set1(total[m * groups]), to_f32(dot[m]));
        acc[m] = fma(centred, scale * set1(act_scale[m * groups]), acc[m]);
      });
    }
  }
};

using E2M1 = U4<1, WeightOffset::none, true>;

template <int kGroup, int kRunsOf,
          WeightOffset kOffset>  // kGroup: inputs of a run, 32 or 16
struct I8 {
  static constexpr int kRuns = kRunsOf;
  static constexpr size_t kRunBytes = static_cast<size_t>(kGroup) * kTile;
  static constexpr size_t kScaleBytes = 32 + offset_bytes(kOffset);
  template <int M>
  [[gnu::always_inline]] static inline void accumulate(const uint8_t* p, const uint8_t* scales, int g,
                                                       const Activations& in, int row, F32x16 (&acc)[M]) {
    static_assert(kGroup == 32 || kOffset == WeightOffset::none, "sums are kept per 32 activations");
    const int groups = in.q_stride / kActGroup;
    const int halves = 2 * groups;
    const int act_group = g * kGroup / kActGroup;
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(groups) + static_cast<size_t>(act_group);
    const int32_t* half = in.half_sum + static_cast<size_t>(row) * static_cast<size_t>(halves) + g * kGroup / 16;
    I32x16 dot[M];
    dot_i8<M, kGroup>(p, in.q + static_cast<size_t>(row) * static_cast<size_t>(in.q_stride) + g * kGroup, in.q_stride,
                      half, halves, dot);
    const F32x16 scale = load_f16(reinterpret_cast<const uint16_t*>(scales));
    const float* act_scale = in.scale + at;
    if constexpr (kOffset == WeightOffset::zero) {
      const F32x16 zero = zero_points(scales + 32, true);
      const float* total = in.total + at;
      unroll<M>([&](auto m) PL_INLINE {
        const F32x16 centred = fnma(zero, set1(total[m * groups]), to_f32(dot[m]));
        acc[m] = fma(centred, scale * set1(act_scale[m * groups]), acc[m]);
      });
      return;
    }
    unroll<M>([&](auto m) PL_INLINE { acc[m] = fma(to_f32(dot[m]), scale * set1(act_scale[m * groups]), acc[m]); });
    if constexpr (kOffset == WeightOffset::min) {
      const F32x16 minimum = load_f16(reinterpret_cast<const uint16_t*>(scales + 32));
      unroll<M>([&](auto m)
                    PL_INLINE { acc[m] = fma(minimum, set1(in.sum[at + static_cast<size_t>(m * groups)]), acc[m]); });
    }
  }
};

// One scale an output. No groups: `tile` is the whole product.
struct I8C {
  static constexpr int kRuns = 1;
  static constexpr size_t kRunBytes = 512;
  static constexpr size_t kScaleBytes = 0;
  template <int M>
  [[gnu::always_inline]] static inline void multiply(const uint8_t* p, int runs, const Activations& in, int row,
                                                     F32x16 (&out)[M]) {
    const int groups = in.q_stride / kActGroup;
    const size_t at = static_cast<size_t>(row) * static_cast<size_t>(groups);
    const int8_t* q = in.q + static_cast<size_t>(row) * static_cast<size_t>(in.q_stride);
    I32x16 sum[M];
    unroll<M>([&](auto m) PL_INLINE { sum[m] = set1(channel_start(in.total[at + static_cast<size_t>(m * groups)])); });
    for (int run = 0; run < runs; ++run)
      add_i8<M>(p + static_cast<size_t>(run) * kRunBytes, q + run * kActGroup, in.q_stride, sum);
    const F32x16 scale = load(reinterpret_cast<const float*>(p + static_cast<size_t>(runs) * kRunBytes));
    unroll<M>([&](auto m) PL_INLINE {
      out[m] = to_f32(sum[m]) * (scale * set1(in.scale[at + static_cast<size_t>(m * groups)]));
    });
  }
};

struct BF16 {
  static constexpr int kRuns = 1;
  static constexpr size_t kRunBytes = 64;  // inputs 2g (low halves) and 2g+1 (high halves)
  static constexpr size_t kScaleBytes = 0;
  template <int M>
  [[gnu::always_inline]] static inline void accumulate(const uint8_t* p, const uint8_t*, int g, const Activations& in,
                                                       int row, F32x16 (&acc)[M]) {
    const I32x16 pair = load(reinterpret_cast<const int32_t*>(p));
    const F32x16 even = from_bits(shift_left<16>(pair));
    const F32x16 odd = from_bits(pair & set1(static_cast<int32_t>(0xffff0000u)));
    const float* x = in.x + static_cast<size_t>(row) * static_cast<size_t>(in.x_stride) + 2 * g;
    unroll<M>([&](auto m) PL_INLINE { acc[m] = fma(even, set1(x[m * in.x_stride]), acc[m]); });
    unroll<M>([&](auto m) PL_INLINE { acc[m] = fma(odd, set1(x[m * in.x_stride + 1]), acc[m]); });
  }
};

struct F16 {
  static constexpr int kRuns = 1;
  static constexpr size_t kRunBytes = 32;
  static constexpr size_t kScaleBytes = 0;
  template <int M>
  [[gnu::always_inline]] static inline void accumulate(const uint8_t* p, const uint8_t*, int g, const Activations& in,
                                                       int row, F32x16 (&acc)[M]) {
    const F32x16 w = load_f16(reinterpret_cast<const uint16_t*>(p));
    const float* x = in.x + static_cast<size_t>(row) * static_cast<size_t>(in.x_stride) + g;
    unroll<M>([&](auto m) PL_INLINE { acc[m] = fma(w, set1(x[m * in.x_stride]), acc[m]); });
  }
};

struct F32 {
  static constexpr int kRuns = 1;
  static constexpr size_t kRunBytes = 64;
  static constexpr size_t kScaleBytes = 0;
  template <int M>
  [[gnu::always_inline]] static inline void accumulate(const uint8_t* p, const uint8_t*, int g, const Activations& in,
                                                       int row, F32x16 (&acc)[M]) {
    const F32x16 w = load(reinterpret_cast<const float*>(p));
    const float* x = in.x + static_cast<size_t>(row) * static_cast<size_t>(in.x_stride) + g;
    unroll<M>([&](auto m) PL_INLINE { acc[m] = fma(w, set1(x[m * in.x_stride]), acc[m]); });
  }
};

// out[t][m] = tile t times row m, for T neighbouring tiles: several tiles at once give a single row of float weights enough independent
// chains.
template <class Format, int T, int M>
[[gnu::noinline]] void multiply_tiles(const uint8_t* tile, size_t tile_bytes, int num_groups, int runs,
                                      const Activations& in, int row, F32x16 (&out)[T][M]) {
  if constexpr (std::is_same_v<Format, I8C>) {
    static_assert(T == 1);
    I8C::multiply<M>(tile, num_groups, in, row, out[0]);
    return;
  } else {
    F32x16 acc[T][M];  // not `out`: what a reference may alias is stored after every group
    unroll<T>([&](auto t) PL_INLINE { unroll<M>([&](auto m) { acc[t][m] = zero_f32(); }); });
    // On 16 registers the integer sums of a run need them all; keep the float sums in memory meanwhile, which is one load and one store a
    // run, rather than let the compiler choose what to spill in the innermost loop.
    constexpr bool kInMemory = kRows == 4 && M > 2 && Format::kRunBytes > 64;
    if constexpr (Format::kRuns == 1) {
      constexpr size_t kGroupBytes = Format::kRunBytes + Format::kScaleBytes;
      for (int g = 0; g < num_groups; ++g)
        unroll<T>([&](auto t) PL_INLINE {
          const uint8_t* p = tile + static_cast<size_t>(t) * tile_bytes + static_cast<size_t>(g) * kGroupBytes;
          Format::template accumulate<M>(p, p + Format::kRunBytes, g, in, row, acc[t]);
          if constexpr (kInMemory) __asm__ volatile("" : "+m"(acc[t]));
        });
    } else {
      static_assert(T == 1);
      const size_t group_bytes = static_cast<size_t>(runs) * Format::kRunBytes + Format::kScaleBytes;
      for (int group = 0, g = 0; group < num_groups; ++group, tile += group_bytes)
        for (int run = 0; run < runs; ++run, ++g) {
          Format::template accumulate<M>(tile + static_cast<size_t>(run) * Format::kRunBytes,
                                         tile + group_bytes - Format::kScaleBytes, g, in, row, acc[0]);
          if constexpr (kInMemory) __asm__ volatile("" : "+m"(acc[0]));
        }
    }
    unroll<T>([&](auto t) PL_INLINE { unroll<M>([&](auto m) { out[t][m] = acc[t][m]; }); });
  }
}

template <class Format, int T, int M>
inline void multiply(const Matrix& w, int tile, const Activations& in, int row, F32x16 (&out)[T][M]) {
  multiply_tiles<Format, T, M>(w.data + static_cast<size_t>(tile) * w.tile_bytes, w.tile_bytes, w.num_groups,
                               w.group / kActGroup, in, row, out);
}

// Writes 16 outputs of a row.
[[gnu::always_inline]] inline void store_outputs(F32x16 y, int row, int tile, const LinearOut& to) {
  const int column = tile * kTile;
  float* out = to.out + static_cast<size_t>(row) * static_cast<size_t>(to.stride) + column;
  if (to.bias != nullptr) y = y + load(to.bias + column);
  y = y * set1(to.scale);
  if (to.softcap != 0.0f) y = soft_capped(y, set1(to.softcap));
  if (to.accumulate) y = load(out) + y;
  store(out, y);
}

template <class Format, int T, int M>
inline void linear_block(const Matrix& w, const Activations& in, int row, int tile, const LinearOut& to) {
  F32x16 acc[T][M];
  multiply<Format>(w, tile, in, row, acc);
  unroll<T>([&](auto t)
                PL_INLINE { unroll<M>([&](auto m) PL_INLINE { store_outputs(acc[t][m], row + m, tile + t, to); }); });
}

// Rows are taken in chunks whose activations stay in the second-level cache while all tiles pass over them.
constexpr int kRowChunk = 32;

// Calls block.operator()<M>(row) over the rows: as many blocks of kRows as fit, then one smaller.
template <int M, class Block>
inline void last_rows(int row, int left, Block&& block) {
  if constexpr (M > 0) {
    if (left == M)
      block.template operator()<M>(row);
    else
      last_rows<M - 1>(row, left, block);
  }
}
template <int kSize, class Block>
inline void for_blocks_of(int begin, int end, Block&& block) {
  int row = begin;
  for (; row + kSize <= end; row += kSize) block.template operator()<kSize>(row);
  last_rows<kSize - 1>(row, end - row, block);
}
template <class Block>
inline void for_row_blocks(int begin, int end, Block&& block) {
  for_blocks_of<kRows>(begin, end, block);
}
template <class Chunk>
inline void for_row_chunks(int rows, Chunk&& chunk) {
  for (int row = 0; row < rows; row += kRowChunk) chunk(row, row + kRowChunk < rows ? row + kRowChunk : rows);
}

// Writes 32 outputs of a gated product of a row.
[[gnu::always_inline]] inline void store_unit(F32x16 a, F32x16 b, int unit, int row, float* y, int y_stride,
                                              const Activations& out) {
  if (y != nullptr) {
    float* to = y + static_cast<size_t>(row) * static_cast<size_t>(y_stride) + unit * 32;
    store(to, a);
    store(to + 16, b);
  }
  if (out.q != nullptr) quantise_group(a, b, unit, row, out);
}

}  // namespace
}  // namespace paceline::PL_ISA
