// A page of keys and values of one layer and KV head: how a token is written, and how the formats read it.
//
//   f16, bf16, f32  keys as 2 blocks [head_dim][16 tokens], then values [32 tokens][head_dim]
//   int8            the scales as bf16, 32 of keys and 32 of values, then keys as 2 blocks [head_dim / 2][16 tokens][2] and values
//                   [16 pairs of tokens][head_dim][2]. x is about scale * code; each token's key has its own scale, and each value.
//
// Both inputs of a pair lie side by side in int8 because the product takes two inputs at a time. Scales come first because memory is read
// ahead forwards: behind the values, each page's were waited for twice.

namespace paceline::PL_ISA {
namespace {

inline uint8_t* head_page(const AttentionArgs& args, int32_t page, int kv_head) {
  const AttentionShape& s = *args.shape;
  return args.kv + static_cast<size_t>(page) * s.page_bytes() +
         (static_cast<size_t>(args.layer) * static_cast<size_t>(s.num_kv_heads) + static_cast<size_t>(kv_head)) *
             s.head_page_bytes();
}

// Parts of an int8 page: key scales, value scales, key codes, value codes.
inline const uint16_t* int8_scales(const uint8_t* page) { return reinterpret_cast<const uint16_t*>(page); }
inline const int8_t* int8_codes(const uint8_t* page) {
  return reinterpret_cast<const int8_t*>(page + 2 * kPageTokens * sizeof(uint16_t));
}

// The largest finite f16: a key or value beyond it is stored as this, so that f16 pages never hold an infinity. A NaN stays one: min and
// max give their second operand where either is NaN.
constexpr float kLargestF16 = 65504.0f;

inline void store_clamped_f16(uint16_t* to, F32x16 x) {
  store_f16(to, max(set1(-kLargestF16), min(set1(kLargestF16), x)));
}

// Writes one token's key and value, 16 values at a time by `round`.
template <class Element, class Round>
inline void store_float_token(uint8_t* page, int token, int head_dim, const float* key, const float* value,
                              Round round) {
  Element* keys = reinterpret_cast<Element*>(page);
  Element* key_lane = keys + (token / 16) * 16 * head_dim + token % 16;
  Element* value_row = keys + (kPageTokens + token) * head_dim;
  for (int i = 0; i < head_dim; i += 16) {
    Element lanes[16];
    round(lanes, load(key + i));
    for (int j = 0; j < 16; ++j) key_lane[(i + j) * 16] = lanes[j];
    round(value_row + i, load(value + i));
  }
}

// Bits of the largest magnitude of x [size]. As integers, magnitudes compare in the same order, infinity and NaN above all others.
inline int32_t largest_magnitude_bits(const float* x, int size) {
  const I32x16 magnitude = set1(static_cast<int32_t>(0x7fffffff));
  I32x16 largest = set1(0);
  for (int i = 0; i < size; i += 16) largest = max(largest, bits_of(load(x + i)) & magnitude);
  return reduce_max(largest);
}

// Vectors whose largest magnitude is below this are stored as zeros: their scale would be subnormal, and its inverse might overflow.
constexpr float kSmallestInt8Vector = 0x1p-119f;

// Rounds one vector to int8 codes; returns its scale, max|x| / 127, as bf16. The scale is rounded up so that no code passes 127. A vector
// that is not finite gets NaN for its scale, and so ends in the logits, where the sampler reports it.
inline uint16_t round_to_int8(const float* x, int size, int8_t* codes) {
  const int32_t bits = largest_magnitude_bits(x, size);
  const float largest = from_bits_scalar(bits);
  if (bits >= 0x7f800000 || largest < kSmallestInt8Vector) {
    std::memset(codes, 0, static_cast<size_t>(size));
    return bits >= 0x7f800000 ? 0x7fc0 : 0;
  }
  const float ratio = largest / 127.0f;
  uint32_t above;
  std::memcpy(&above, &ratio, 4);
  above = (above + 0xffff) & 0xffff0000;
  const F32x16 inverse = set1(1.0f / from_bits_scalar(static_cast<int32_t>(above)));
  for (int i = 0; i < size; i += 16) store_i8_saturated(codes + i, round_to_i32(load(x + i) * inverse));
  return static_cast<uint16_t>(above >> 16);
}

inline void store_int8_token(uint8_t* page, int token, int head_dim, const float* key, const float* value) {
  int8_t codes[kMaxHeadDim];
  uint16_t* scales = reinterpret_cast<uint16_t*>(page);
  int8_t* keys = reinterpret_cast<int8_t*>(scales + 2 * kPageTokens);
  int8_t* key_lane = keys + (token / 16) * 16 * head_dim + token % 16 * 2;
  int8_t* value_row = keys + kPageTokens * head_dim + token / 2 * 2 * head_dim + token % 2;
  scales[token] = round_to_int8(key, head_dim, codes);
  for (int i = 0; i < head_dim; ++i) key_lane[i / 2 * 32 + i % 2] = codes[i];
  scales[kPageTokens + token] = round_to_int8(value, head_dim, codes);
  for (int i = 0; i < head_dim; ++i) value_row[2 * i] = codes[i];
}

// Writes the key and value [head_dim] of a page's token.
inline void store_token(KVKind kind, uint8_t* page, int token, int head_dim, const float* key, const float* value) {
  switch (kind) {
    case KVKind::f16:
      return store_float_token<uint16_t>(page, token, head_dim, key, value, store_clamped_f16);
    case KVKind::bf16:
      return store_float_token<uint16_t>(page, token, head_dim, key, value, store_bf16);
    case KVKind::f32:
      return store_float_token<float>(page, token, head_dim, key, value, [](float* to, F32x16 x) { store(to, x); });
    case KVKind::int8:
      return store_int8_token(page, token, head_dim, key, value);
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
