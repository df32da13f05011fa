// Activations to int8 in groups of 32, or whole rows: scale = max|x| / 127, q = round(x * (127 / max|x|)).
// Per element: 1 load (2 for whole rows), about 3 operations; 1 byte written plus 20 bytes a group.

namespace paceline::PL_ISA {
namespace {

// Groups whose largest magnitude is below this quantise to zero: 127 / max would overflow.
constexpr float kSmallestMagnitude = 1e-36f;

// Magnitudes as integers: they compare in the same order, and a NaN is the largest. It ends in the scale and so in the logits, where the
// sampler reports it.
inline I32x16 magnitudes(F32x16 a, F32x16 b) {
  const I32x16 magnitude = set1(static_cast<int32_t>(0x7fffffff));
  return max(bits_of(a) & magnitude, bits_of(b) & magnitude);
}

struct Rounding {
  float scale, inverse;
};

inline Rounding rounding_of(I32x16 largest_magnitudes) {
  const float largest = from_bits_scalar(reduce_max(largest_magnitudes));
  const bool live = !(largest < kSmallestMagnitude);
  return {live ? largest / 127.0f : 0.0f, live ? 127.0f / largest : 0.0f};
}

// Writes group g of a row that holds the values a (first 16) and b; returns the sum of its q.
inline int32_t round_group(F32x16 a, F32x16 b, const Rounding& rounding, int g, int row, const Activations& out) {
  const int groups = out.q_stride / kActGroup;
  const F32x16 inverse = set1(rounding.inverse);
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
  out.scale[at] = rounding.scale;
  out.total[at] = static_cast<float>(sum_a + sum_b);
  out.sum[at] = rounding.scale * out.total[at];
  return sum_a + sum_b;
}

// Quantises group g of a row that holds the values a (first 16) and b.
inline void quantise_group(F32x16 a, F32x16 b, int g, int row, const Activations& out) {
  round_group(a, b, rounding_of(magnitudes(a, b)), g, row, out);
}

// Calls visit(g, a, b) with each group of a row's values, or of values[order[i]]; past `size` they are zero.
template <class Visit>
inline void for_groups(const float* values, int size, const int32_t* order, Visit&& visit) {
  for (int g = 0; g * kActGroup < size; ++g) {
    const int first = g * kActGroup;
    if (order == nullptr) {
      visit(g, load(values + first), load(values + first + 16));
      continue;
    }
    float gathered[kActGroup] = {};
    for (int i = 0; i < kActGroup && first + i < size; ++i) gathered[i] = values[order[first + i]];
    visit(g, load(gathered), load(gathered + 16));
  }
}

// x must be readable up to the next multiple of 32, padding zero.
void quantise(const float* x, int x_stride, int size, int row_begin, int row_end, const int32_t* order, bool per_token,
              const Activations& out) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* values = x + static_cast<size_t>(row) * static_cast<size_t>(x_stride);
    if (!per_token) {
      for_groups(values, size, order, [&](int g, F32x16 a, F32x16 b) { quantise_group(a, b, g, row, out); });
      continue;
    }
    I32x16 largest = set1(0);
    for_groups(values, size, nullptr, [&](int, F32x16 a, F32x16 b) { largest = max(largest, magnitudes(a, b)); });
    const Rounding rounding = rounding_of(largest);
    int32_t total = 0;
    for_groups(values, size, order,
               [&](int g, F32x16 a, F32x16 b) { total += round_group(a, b, rounding, g, row, out); });
    const size_t groups = static_cast<size_t>(out.q_stride / kActGroup);
    for (size_t at = static_cast<size_t>(row) * groups; at < static_cast<size_t>(row + 1) * groups; ++at) {
      out.total[at] = static_cast<float>(total);  // at most 132,104 inputs (weights/packed.py) times 127: below 2^24
      out.sum[at] = rounding.scale * out.total[at];
    }
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
