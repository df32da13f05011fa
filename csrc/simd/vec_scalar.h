// The vectors of simd/vec.h, which includes this file and states the contract. An array and loops: the definition of what the others do.

namespace paceline::PL_ISA {
namespace {

struct F32x16 {
  float v[16];
};
struct I32x16 {
  int32_t v[16];
};
struct Mask16 {
  uint32_t v;
};

#define PL_EACH for (int i = 0; i < 16; ++i)
inline uint32_t as_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline F32x16 set1(float x) {
  F32x16 r;
  PL_EACH r.v[i] = x;
  return r;
}
inline F32x16 zero_f32() { return set1(0.0f); }
inline F32x16 load(const float* p) {
  F32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, 64); }
inline F32x16 operator+(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] += b.v[i];
  return a;
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] -= b.v[i];
  return a;
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] *= b.v[i];
  return a;
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] /= b.v[i];
  return a;
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  PL_EACH a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return a;
}
inline F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  PL_EACH a.v[i] = std::fma(-a.v[i], b.v[i], c.v[i]);
  return a;
}
// Like MAXPS and MINPS: the second operand when either is NaN or both are zeros.
inline F32x16 max(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 min(F32x16 a, F32x16 b) {
  PL_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
#define PL_COMPARE(T, OP)                                        \
  inline Mask16 operator OP(T a, T b) {                          \
    Mask16 m{0};                                                 \
    PL_EACH m.v |= static_cast<uint32_t>(a.v[i] OP b.v[i]) << i; \
    return m;                                                    \
  }
PL_COMPARE(F32x16, >)
PL_COMPARE(F32x16, >=)
PL_COMPARE(F32x16, ==)
PL_COMPARE(I32x16, >)
#undef PL_COMPARE
inline F32x16 select(Mask16 m, F32x16 yes, F32x16 no) {
  PL_EACH no.v[i] = (m.v >> i) & 1u ? yes.v[i] : no.v[i];
  return no;
}
inline I32x16 set1(int32_t x) {
  I32x16 r;
  PL_EACH r.v[i] = x;
  return r;
}
inline I32x16 load(const int32_t* p) {
  I32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(int32_t* p, I32x16 a) { std::memcpy(p, a.v, 64); }
#define PL_BITWISE(OP)                                                                                     \
  inline I32x16 operator OP(I32x16 a, I32x16 b) {                                                          \
    PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) OP static_cast<uint32_t>(b.v[i])); \
    return a;                                                                                              \
  }
PL_BITWISE(+)
PL_BITWISE(-)
PL_BITWISE(&)
PL_BITWISE(|)
PL_BITWISE(^)
#undef PL_BITWISE
template <int N>
inline I32x16 shift_left(I32x16 a) {
  PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N);
  return a;
}
template <int N>
inline I32x16 shift_right(I32x16 a) {  // logical
  PL_EACH a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N);
  return a;
}
inline I32x16 select(Mask16 m, I32x16 yes, I32x16 no) {
  PL_EACH no.v[i] = (m.v >> i) & 1u ? yes.v[i] : no.v[i];
  return no;
}
inline I32x16 round_to_i32(F32x16 a) {
  I32x16 r;
  PL_EACH {
    // Out of range gives INT32_MIN, as CVTPS2DQ does.
    const float x = std::nearbyintf(a.v[i]);
    r.v[i] = x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN;
  }
  return r;
}
inline F32x16 to_f32(I32x16 a) {
  F32x16 r;
  PL_EACH r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
inline I32x16 bits_of(F32x16 a) {
  I32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline F32x16 from_bits(I32x16 a) {
  F32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline uint32_t bitmask(Mask16 m) { return m.v; }
// The even 32-bit lanes of a and b multiplied, unsigned, each 64-bit product in a pair of lanes.
inline I32x16 mul_even_u32(I32x16 a, I32x16 b) {
  for (int i = 0; i < 16; i += 2) {
    const uint64_t p = static_cast<uint64_t>(static_cast<uint32_t>(a.v[i])) * static_cast<uint32_t>(b.v[i]);
    a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p));
    a.v[i + 1] = static_cast<int32_t>(static_cast<uint32_t>(p >> 32));
  }
  return a;
}
// Odd lanes moved to the even ones below them, odd ones zero.
inline I32x16 odd_to_even(I32x16 a) {
  for (int i = 0; i < 16; i += 2) {
    a.v[i] = a.v[i + 1];
    a.v[i + 1] = 0;
  }
  return a;
}
// Even lanes moved to the odd ones above them, even ones zero.
inline I32x16 even_to_odd(I32x16 a) {
  for (int i = 0; i < 16; i += 2) {
    a.v[i + 1] = a.v[i];
    a.v[i] = 0;
  }
  return a;
}

inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00u)
    return as_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | (rest > 0x7c00u ? 0x400000u : 0u));
  if (rest < 0x400u) return as_float(sign | as_bits(static_cast<float>(rest) * 0x1p-24f));
  return as_float(sign | ((rest << 13) + 0x38000000u));
}
inline uint16_t f32_to_f16(float x) {
  const uint32_t u = as_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
  if (mag >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (mag < 0x38800000u) {  // subnormal: let the adder round to a multiple of 2^-24
    const float shifted = as_float(mag) + 0.5f;
    return static_cast<uint16_t>(sign | (as_bits(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
}
inline F32x16 load_f16(const uint16_t* p) {
  F32x16 r;
  PL_EACH r.v[i] = f16_to_f32(p[i]);
  return r;
}
inline void store_f16(uint16_t* p, F32x16 a) { PL_EACH p[i] = f32_to_f16(a.v[i]); }
inline F32x16 load_bf16(const uint16_t* p) {
  F32x16 r;
  PL_EACH r.v[i] = as_float(static_cast<uint32_t>(p[i]) << 16);
  return r;
}
inline I32x16 widen_u8(const uint8_t* p) {
  I32x16 r;
  PL_EACH r.v[i] = p[i];
  return r;
}
inline I32x16 widen_i8(const int8_t* p) {
  I32x16 r;
  PL_EACH r.v[i] = p[i];
  return r;
}
inline void store_u16(uint16_t* p, I32x16 a) { PL_EACH p[i] = static_cast<uint16_t>(a.v[i]); }
inline void store_i8_saturated(int8_t* p, I32x16 a) {
  PL_EACH p[i] = static_cast<int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
inline I32x16 max(I32x16 a, I32x16 b) {
  PL_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 swap_pairs(F32x16 a) {  // lane i takes lane i^1
  F32x16 r;
  PL_EACH r.v[i] = a.v[i ^ 1];
  return r;
}
#undef PL_EACH

}  // namespace
}  // namespace paceline::PL_ISA
