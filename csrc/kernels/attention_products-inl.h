// The two products of attention, queries times keys and softmax numerators times values, for each KV format.
//
// Both are out[row][16 lanes] = sum over i of a[row][i] * b[i][16 lanes]: scores have keys as lanes, outputs have components. Floating-point
// formats sum in f32, i in order. int8 sums integers: queries and numerators are rounded to 16 bits with one scale a row, so a sum is exact
// in any order and is turned into a float once.

namespace paceline::PL_ISA {
namespace {

// What a product is made of: elements of b, factors of a, the sum, and how many inputs one step takes.
template <class Stored>
struct FloatTerms {
  using Element = Stored;
  using Factor = float;
  using Sum = F32x16;
  static constexpr int kInputs = 1;
  static inline Sum zero() { return zero_f32(); }
  static inline F32x16 spread(const Factor* a) { return set1(*a); }
  static inline Sum add(F32x16 b, F32x16 a, Sum sum) { return fma(b, a, sum); }
};
struct F16Terms : FloatTerms<uint16_t> {
  static inline F32x16 get(const uint16_t* p) { return load_f16(p); }
};
struct BF16Terms : FloatTerms<uint16_t> {
  static inline F32x16 get(const uint16_t* p) { return load_bf16(p); }
};
struct F32Terms : FloatTerms<float> {
  static inline F32x16 get(const float* p) { return load(p); }
};
struct Int8Terms {
  using Element = int8_t;
  using Factor = int16_t;
  using Sum = I32x16;
  static constexpr int kInputs = 2;
  static inline Sum zero() { return set1(0); }
  static inline I16x32 get(const int8_t* p) { return load_i8(p); }
  static inline I16x32 spread(const Factor* a) { return set1_pair(a); }
  static inline Sum add(I16x32 b, I16x32 a, Sum sum) { return add_products(b, a, sum); }
};

// Query rows that share one pass over keys or values, and up to how many rows such a pass takes two blocks of 16 lanes: enough independent
// chains of multiply-adds to hide their latency, few enough for the registers.
#if defined(PL_SIMD_AVX512)
constexpr int kBlockRows = 12;
constexpr int kRowsOfTwoBlocks = 12;
#elif defined(PL_SIMD_AVX2)
constexpr int kBlockRows = 6;
constexpr int kRowsOfTwoBlocks = 2;
#else
constexpr int kBlockRows = 4;
constexpr int kRowsOfTwoBlocks = 0;
#endif

// A processor reads ahead within a run of addresses, but not from one page to the next, which lies elsewhere, and memory is what decoding
// waits for: while a page is scored, the next one is asked for, a line for each step over 16 keys. That is all of an f16 page.
constexpr int kLineBytes = 64;

// Where a product's b lies: step i of block t is at b + t * block + i * step.
struct Strides {
  int step, block;
};

// out[m][16 t + lane] = (what is there or 0) + sum over steps of a[m] * b. Strides of a and out are elements a row. Asks for a line of
// memory at `ahead` a step and block, unless it is null.
template <class Terms, int M, int T, class Out>
[[gnu::noinline]] void product(const typename Terms::Factor* a, int a_stride, const typename Terms::Element* b,
                               Strides strides, int steps, bool resume, Out* out, int out_stride,
                               const uint8_t* ahead) {
  typename Terms::Sum acc[M][T];
  unroll<M>([&](auto m) PL_INLINE {
    unroll<T>([&](auto t) PL_INLINE { acc[m][t] = resume ? load(out + m * out_stride + t * 16) : Terms::zero(); });
  });
  for (int i = 0; i < steps; ++i) {
    if (ahead != nullptr) unroll<T>([&](auto t) PL_INLINE { __builtin_prefetch(ahead + (i * T + t) * kLineBytes); });
    decltype(Terms::get(b)) v[T];
    unroll<T>([&](auto t) PL_INLINE { v[t] = Terms::get(b + t * strides.block + i * strides.step); });
    unroll<M>([&](auto m) PL_INLINE {
      const auto x = Terms::spread(a + m * a_stride + i * Terms::kInputs);
      unroll<T>([&](auto t) PL_INLINE { acc[m][t] = Terms::add(v[t], x, acc[m][t]); });
    });
  }
  unroll<M>([&](auto m)
                PL_INLINE { unroll<T>([&](auto t) PL_INLINE { store(out + m * out_stride + t * 16, acc[m][t]); }); });
}

// The product for any number of rows and blocks; `ahead` is memory to ask for meanwhile, or null.
template <class Terms, class Out>
inline void products(int rows, int blocks, const typename Terms::Factor* a, int a_stride,
                     const typename Terms::Element* b, Strides strides, int steps, bool resume, Out* out,
                     int out_stride, const uint8_t* ahead) {
  for_blocks_of<kBlockRows>(0, rows, [&]<int M>(int row) {
    const auto* left = a + row * a_stride;
    Out* to = out + row * out_stride;
    int block = 0;
    const auto ahead_of = [&](int t) {
      return row == 0 && ahead != nullptr ? ahead + t * steps * kLineBytes : nullptr;
    };
    if constexpr (M <= kRowsOfTwoBlocks)
      for (; block + 2 <= blocks; block += 2)
        product<Terms, M, 2>(left, a_stride, b + block * strides.block, strides, steps, resume, to + block * 16,
                             out_stride, ahead_of(block));
    for (; block < blocks; ++block)
      product<Terms, M, 1>(left, a_stride, b + block * strides.block, strides, steps, resume, to + block * 16,
                           out_stride, ahead_of(block));
  });
}

// One unit's query rows against pages of a floating-point format. All three formats of rows below are [num_rows][stride].
template <class Terms>
class FloatPages {
  using Element = typename Terms::Element;

 public:
  // q [num_rows][head_dim]; scratch: of attention_scratch_floats.
  FloatPages(int num_rows, int head_dim, const float* q, float* scratch)
      : num_rows_(num_rows), head_dim_(head_dim), q_(q), page_f32_(scratch) {}

  // Scores of a page's first `blocks` * 16 keys; `ahead` is the page that is read next, or null.
  void scores(const uint8_t* page, int blocks, float* out, int stride, const uint8_t* ahead) const {
    const Strides keys{16, 16 * head_dim_};
    const Element* b = reinterpret_cast<const Element*>(page);
    if (const float* expanded = expand(b, blocks * 16))
      products<F32Terms>(num_rows_, blocks, q_, head_dim_, expanded, keys, head_dim_, false, out, stride, ahead);
    else
      products<Terms>(num_rows_, blocks, q_, head_dim_, b, keys, head_dim_, false, out, stride, ahead);
  }

  // Numerators are used as they are.
  void round_numerators(int, float*, const uint8_t* const*, int, int, int) const {}

  // out = or += numerators times the values of a page's first `count` tokens, which are the split's `first`.. ones.
  void values(const uint8_t* page, int first, int count, const float* numerators, int stride, float* out,
              int out_stride) const {
    const Strides rows{head_dim_, 16};
    const Element* b = reinterpret_cast<const Element*>(page) + kPageTokens * head_dim_;
    if (const float* expanded = expand(b, count))
      products<F32Terms>(num_rows_, head_dim_ / 16, numerators + first, stride, expanded, rows, count, first > 0, out,
                         out_stride, nullptr);
    else
      products<Terms>(num_rows_, head_dim_ / 16, numerators + first, stride, b, rows, count, first > 0, out, out_stride,
                      nullptr);
  }

  void finish_values(float*, int) const {}

 private:
  // Many rows repay turning a page into floats once; the values are the same either way. Null where it is read as it is.
  const float* expand(const Element* from, int tokens) const {
    if (sizeof(Element) == sizeof(float) || num_rows_ <= kBlockRows) return nullptr;
    for (int i = 0; i < tokens * head_dim_; i += 16) store(page_f32_ + i, Terms::get(from + i));
    return page_f32_;
  }

  int num_rows_, head_dim_;
  const float* q_;
  float* page_f32_;
};

// Rows whose largest magnitude is below this are rounded to zeros: the inverse of their scale would overflow.
constexpr float kSmallestInt16Row = 0x1p-108f;

// Rounds x [size] to 16 bits; returns the scale, max|x| / 32767. A NaN ends in the scale.
inline float round_to_int16(const float* x, int size, int16_t* codes) {
  const float largest = from_bits_scalar(largest_magnitude_bits(x, size));
  const bool live = !(largest < kSmallestInt16Row);
  const F32x16 inverse = set1(live ? 32767.0f / largest : 0.0f);
  for (int i = 0; i < size; i += 16) store_i16_saturated(codes + i, round_to_i32(load(x + i) * inverse));
  return live ? largest / 32767.0f : 0.0f;
}

// The same over int8 pages. No sum can overflow: a score is at most 256 * 128 * 32768 = 2^30, the values of a split half of that.
class Int8Pages {
 public:
  Int8Pages(int num_rows, int head_dim, const float* q, float* scratch) : num_rows_(num_rows), head_dim_(head_dim) {
    q_scale_ = scratch;
    numerator_scale_ = q_scale_ + num_rows;
    q_ = reinterpret_cast<int16_t*>(numerator_scale_ + num_rows);
    numerators_ = q_ + num_rows * head_dim;
    for (int r = 0; r < num_rows; ++r) q_scale_[r] = round_to_int16(q + r * head_dim, head_dim, q_ + r * head_dim);
  }

  void scores(const uint8_t* page, int blocks, float* out, int stride, const uint8_t* ahead) const {
    int32_t* sums = reinterpret_cast<int32_t*>(out);
    products<Int8Terms>(num_rows_, blocks, q_, head_dim_, int8_codes(page), {32, 16 * head_dim_}, head_dim_ / 2, false,
                        sums, stride, ahead);
    const uint16_t* scales = int8_scales(page);
    for (int i = 0; i < 16 * blocks; i += 16) {
      const F32x16 scale = load_bf16(scales + i);
      for (int r = 0; r < num_rows_; ++r)
        store(out + r * stride + i, to_f32(load(sums + r * stride + i)) * (set1(q_scale_[r]) * scale));
    }
  }

  // Multiplies row r's numerators [padded] of a split with the scales of its values and rounds them. What lies outside [begin, end) is
  // nobody's or another row's: its scale may be anything.
  void round_numerators(int r, float* numerators, const uint8_t* const* pages, int begin, int end, int padded) const {
    for (int i = 0; i < padded; i += 16) {
      const uint16_t* scales = int8_scales(pages[i / kPageTokens]) + kPageTokens + i % kPageTokens;
      F32x16 v = load(numerators + i) * load_bf16(scales);
      if (i + 16 > end) v = select(first_lanes(end - i), v, zero_f32());
      if (i < begin) v = select(first_lanes(begin - i), zero_f32(), v);
      store(numerators + i, v);
    }
    numerator_scale_[r] = round_to_int16(numerators, padded, numerators_ + r * kSplitTokens);
  }

  void values(const uint8_t* page, int first, int count, const float*, int, float* out, int out_stride) const {
    const int8_t* b = int8_codes(page) + kPageTokens * head_dim_;
    products<Int8Terms>(num_rows_, head_dim_ / 16, numerators_ + first, kSplitTokens, b, {2 * head_dim_, 32},
                        (count + 1) / 2, first > 0, reinterpret_cast<int32_t*>(out), out_stride, nullptr);
  }

  // Turns a row's sums over a whole split into values.
  void finish_values(float* out, int r) const {
    for (int i = 0; i < head_dim_; i += 16)
      store(out + i, to_f32(load(reinterpret_cast<const int32_t*>(out) + i)) * set1(numerator_scale_[r]));
  }

 private:
  int num_rows_, head_dim_;
  float* q_scale_;          // [num_rows]
  float* numerator_scale_;  // [num_rows]
  int16_t* q_;              // [num_rows][head_dim]
  int16_t* numerators_;     // [num_rows][kSplitTokens]
};

}  // namespace
}  // namespace paceline::PL_ISA
