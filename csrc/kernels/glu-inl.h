// The gated product of two numbers, 16 at a time: activation(gate) * up.
//
//   silu        g / (1 + exp(-g)) * u
//   gelu_tanh   g / (1 + exp(-2 t)) * u, t = sqrt(2/pi) (g + 0.044715 g^3): the same number as 0.5 g (1 + tanh t), without the
//               cancellation in 1 + tanh t (Hendrycks, Gimpel 2016, 1606.08415, section 2)
//   swiglu_oai  g / (1 + exp(-1.702 g)) * (u + 1) with g at most 7 and u within 7 of 0 (gpt-oss)

namespace paceline::PL_ISA {
namespace {

// x / (1 + exp(-z)). exp takes at most 88; beyond 87 the quotient is below 1e-37 |x| and the clamp keeps it a tiny number.
inline F32x16 times_sigmoid(F32x16 x, F32x16 z) { return x / (set1(1.0f) + exp(min(negate(z), set1(87.0f)))); }

inline F32x16 gelu_tanh(F32x16 x) {
  constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548163f;  // 2 sqrt(2/pi), and 0.044715 times that
  return times_sigmoid(x, x * fma(x * x, set1(kCubic), set1(kLinear)));
}

inline F32x16 swiglu_oai(F32x16 gate, F32x16 up) {
  constexpr float kLimit = 7.0f, kSlope = 1.702f;
  const F32x16 g = min(set1(kLimit), gate);  // in this order a NaN stays one
  const F32x16 u = max(set1(-kLimit), min(set1(kLimit), up));
  return times_sigmoid(g, g * set1(kSlope)) * (u + set1(1.0f));
}

// Apart, so that loops over formats and rows do not hold a copy each.
[[gnu::noinline]] F32x16 glu_without_silu(Activation activation, F32x16 gate, F32x16 up) {
  return activation == Activation::gelu_tanh ? gelu_tanh(gate) * up : swiglu_oai(gate, up);
}

inline F32x16 glu(Activation activation, F32x16 gate, F32x16 up) {
  return activation == Activation::silu ? silu(gate) * up : glu_without_silu(activation, gate, up);
}

}  // namespace
}  // namespace paceline::PL_ISA
