// RMS norm of rows: y = (residual +) x / sqrt(mean(x^2) + eps) * weight, as floats, int8 or both.
// Per element: 3 loads (4 with a residual), about 5 operations besides rounding.

namespace paceline::PL_ISA {
namespace {

// 1 / sqrt(mean(x^2) + eps) of x [size], which is read up to the next multiple of 16: 16 sums of squares, then their tree.
inline F32x16 inverse_rms(const float* x, int size, float eps) {
  F32x16 squares = zero_f32();
  for (int i = 0; i < size; i += 16) {
    const F32x16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  return set1(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + eps));
}

void norm(const NormArgs& args, int row_begin, int row_end, const Activations& out, bool quantised) {
  for (int row = row_begin; row < row_end; ++row) {
    const auto at = [&](auto* base, int stride) {
      return base == nullptr ? nullptr : base + static_cast<size_t>(row) * static_cast<size_t>(stride);
    };
    const float* x = at(args.x, args.x_stride);
    const float* residual = at(args.residual, args.residual_stride);
    float* y = at(args.y, args.y_stride);
    const F32x16 r = inverse_rms(x, args.size, args.eps);
    const auto value = [&](int i) {  // past the end zero: a neighbour's values may follow there
      if (i >= args.size) return zero_f32();
      const F32x16 normed = load(x + i) * r * load(args.weight + i);
      return residual == nullptr ? normed : load(residual + i) + normed;
    };
    for (int i = 0; i < args.size; i += kActGroup) {
      const F32x16 a = value(i), b = value(i + 16);
      if (quantised) quantise_group(a, b, i / kActGroup, row, out);
      if (y == nullptr) continue;
      store(y + i, a);
      if (i + 16 < args.size) store(y + i + 16, b);
    }
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
