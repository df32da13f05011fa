// Activations to int8 in groups of 32: scale = max|x| / 127, q = round(x * (127 / max|x|)).
// Per element: 1 load, about 3 operations; 1 byte written plus 16 bytes a group.

namespace paceline::PL_ISA {
namespace {

// Groups whose largest magnitude is below this quantise to zero: 127 / max would overflow.
constexpr float kSmallestMagnitude = 1e-36f;

// Quantises group g of a row that holds the values a (first 16) and b.
inline void quantise_group(F32x16 a, F32x16 b, int g, int row, const Activations& out) {
  const int groups = out.q_stride / kActGroup;
  // As integers, magnitudes compare in the same order, and a NaN is the largest: it ends in the scale and so in the logits,
  // where the sampler reports it.
  const I32x16 magnitude = set1(static_cast<int32_t>(0x7fffffff));
  const float largest = from_bits_scalar(reduce_max(max(bits_of(a) & magnitude, bits_of(b) & magnitude)));
  const bool live = !(largest < kSmallestMagnitude);
  const F32x16 inverse = set1(live ? 127.0f / largest : 0.0f);
  const float scale = live ? largest / 127.0f : 0.0f;
  const I32x16 qa = round_to_i32(a * inverse);
  const I32x16 qb = round_to_i32(b * inverse);
  int8_t* q = out.q + static_cast<size_t>(row) * static_cast<size_t>(out.q_stride) + g * kActGroup;
  store_i8_saturated(q, qa);
  store_i8_saturated(q + 16, qb);
  const int32_t sum_a = reduce_add(qa);
  const int32_t sum_b = reduce_add(qb);
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(groups) + static_cast<size_t>(g);
  out.half_sum[2 * at] = sum_a;
  out.half_sum[2 * at + 1] = sum_b;
  out.scale[at] = scale;
  out.sum[at] = scale * static_cast<float>(sum_a + sum_b);
}

// x must be readable up to the next multiple of 32, padding zero.
void quantise(const float* x, int x_stride, int size, int row_begin, int row_end, const Activations& out) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* values = x + static_cast<size_t>(row) * static_cast<size_t>(x_stride);
    for (int g = 0; g * kActGroup < size; ++g)
      quantise_group(load(values + g * 32), load(values + g * 32 + 16), g, row, out);
  }
}

void norm(const float* x, int x_stride, const float* weight, int size, float eps, int row_begin, int row_end, float* y,
          int y_stride, const Activations& out, bool quantised) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* values = x + static_cast<size_t>(row) * static_cast<size_t>(x_stride);
    F32x16 squares = zero_f32();
    for (int i = 0; i < size; i += 16) {
      const F32x16 v = load(values + i);
      squares = fma(v, v, squares);
    }
    const F32x16 r = set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + eps));
    for (int g = 0; g * kActGroup < size; ++g) {
      const F32x16 a = load(values + g * 32) * r * load(weight + g * 32);
      const F32x16 b = load(values + g * 32 + 16) * r * load(weight + g * 32 + 16);
      if (quantised) quantise_group(a, b, g, row, out);
      if (y != nullptr) {
        float* to = y + static_cast<size_t>(row) * static_cast<size_t>(y_stride) + g * 32;
        store(to, a);
        store(to + 16, b);
      }
    }
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
