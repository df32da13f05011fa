#include "kernels/pack_blocks.h"

namespace paceline {
namespace {

constexpr KindInfo kKinds[] = {
    {1, 4, {PackTargetKind::f32, 0, PackOffset::none}},      {1, 2, {PackTargetKind::f16, 0, PackOffset::none}},
    {1, 2, {PackTargetKind::bf16, 0, PackOffset::none}},     {32, 18, {PackTargetKind::u4, 32, PackOffset::none}},
    {32, 20, {PackTargetKind::u4, 32, PackOffset::min}},     {32, 22, {PackTargetKind::i8, 32, PackOffset::none}},
    {32, 24, {PackTargetKind::i8, 32, PackOffset::min}},     {32, 34, {PackTargetKind::i8, 32, PackOffset::none}},
    {256, 144, {PackTargetKind::u4, 32, PackOffset::min}},   {256, 176, {PackTargetKind::i8, 32, PackOffset::min}},
    {256, 210, {PackTargetKind::i8, 16, PackOffset::none}},  {32, 17, {PackTargetKind::e2m1, 32, PackOffset::none}},
    {64, 34, {PackTargetKind::u4, 64, PackOffset::none}},    {128, 66, {PackTargetKind::u4, 128, PackOffset::none}},
    {32, 19, {PackTargetKind::u4, 32, PackOffset::zero}},    {64, 35, {PackTargetKind::u4, 64, PackOffset::zero}},
    {128, 67, {PackTargetKind::u4, 128, PackOffset::zero}},  {64, 66, {PackTargetKind::i8, 64, PackOffset::none}},
    {128, 130, {PackTargetKind::i8, 128, PackOffset::none}}, {32, 35, {PackTargetKind::i8, 32, PackOffset::zero}},
    {64, 67, {PackTargetKind::i8, 64, PackOffset::zero}},    {128, 131, {PackTargetKind::i8, 128, PackOffset::zero}},
    {32, 36, {PackTargetKind::i8c, 32, PackOffset::none}},
};

float f32_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

float half_at(const uint8_t* block) { return f32_from_f16(load<uint16_t>(block)); }

void low_high_nibbles(const uint8_t* bytes, int count, int8_t* q) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(bytes[i] & 15);
  for (int i = 0; i < count; ++i) q[count + i] = static_cast<int8_t>(bytes[i] >> 4);
}

// Adds 16 to code i where bit i is set: 8 codes a word, since without variable vector shifts a bit at a time costs 4 times as much.
void add_fifth_bits(uint32_t bits, int8_t* q) {
  for (int part = 0; part < 4; ++part) {
    const uint64_t spread = (bits >> (8 * part) & 0xffu) * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t sixteens = (spread + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    uint64_t codes;
    std::memcpy(&codes, q + 8 * part, 8);
    codes |= sixteens;
    std::memcpy(q + 8 * part, &codes, 8);
  }
}

// Scales of Q4_K and Q5_K: d, dmin, then eight 6-bit scales and eight 6-bit minima in twelve bytes.
void k_scales(const uint8_t* block, Decoded& to) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* s = block + 4;
  for (int i = 0; i < 4; ++i) {
    to.scale[i] = d * static_cast<float>(s[i] & 63);
    to.scale[i + 4] = d * static_cast<float>((s[i + 8] & 15) | ((s[i] >> 2) & 48));
    to.minimum[i] = -(dmin * static_cast<float>(s[i + 4] & 63));
    to.minimum[i + 4] = -(dmin * static_cast<float>((s[i + 8] >> 4) | ((s[i + 4] >> 2) & 48)));
  }
}

void decode_q6_k(const uint8_t* block, Decoded& to) {
  const uint8_t *low = block, *high = block + 128;
  const float d = half_at(block + 208);
  for (int half = 0; half < 2; ++half, low += 64, high += 32) {
    int8_t* q = to.q + 128 * half;
    low_high_nibbles(low, 64, q);
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) {
        const int bits = (high[i] >> (2 * part)) & 3;
        q[32 * part + i] = static_cast<int8_t>((q[32 * part + i] | (bits << 4)) - 32);
      }
    }
  }
  for (int i = 0; i < 16; ++i) to.scale[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
}

// A byte e, then 32 codes of e2m1: w = half of what a code means, times 2^(e - 127). Doubled, what they mean are integers.
void decode_mxfp4(const uint8_t* block, Decoded& to) {
  constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  low_high_nibbles(block + 1, 16, to.q);
  for (int i = 0; i < 32; ++i) to.q[i] = kDoubled[to.q[i]];
  to.scale[0] = mxfp4_scale(block);
}

// Blocks of a quantised checkpoint (weights/quantized_matrix.py): w = scale * (q - z); q - z is exact, and the product of an f16 scale too.
void widen_quantized(PackSourceKind kind, const uint8_t* block, int64_t count, float* to) {
  const KindInfo& of = kind_info(kind);
  const bool four = of.native.kind == PackTargetKind::u4, has_zero = of.native.offset == PackOffset::zero;
  const int64_t header = quantized_header_bytes(kind);
  int8_t q[32];
  for (int64_t at = 0; at < count; at += of.weights, block += of.bytes) {
    const float scale = kind == PackSourceKind::q8c ? load<float>(block) : half_at(block);
    const int plain = four ? 8 : 0;
    const int zero = !has_zero ? plain : four ? block[2] : static_cast<int8_t>(block[2]);
    const uint8_t* codes = block + header;
    for (int64_t run = 0; run < of.weights; run += 32, codes += four ? 16 : 32) {
      if (four) {
        low_high_nibbles(codes, 16, q);
      } else {
        std::memcpy(q, codes, 32);
      }
      for (int i = 0; i < 32; ++i) to[at + run + i] = scale * static_cast<float>(q[i] - zero);
    }
  }
}

}  // namespace

const KindInfo& kind_info(PackSourceKind kind) { return kKinds[static_cast<size_t>(kind)]; }

float mxfp4_scale(const uint8_t* block) {
  const uint32_t e = block[0];  // 2^(e - 128) is no normal number for e < 2
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

void shift_codes(int8_t* q, int count, int by) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(q[i] + by);
}

void decode_block(PackSourceKind kind, const uint8_t* block, Decoded& to) {
  to.scale[0] = kind < PackSourceKind::q4_k ? half_at(block) : 0.0f;
  switch (kind) {
    case PackSourceKind::q4_0:
      low_high_nibbles(block + 2, 16, to.q);
      shift_codes(to.q, 32, -8);
      break;
    case PackSourceKind::q4_1:
      low_high_nibbles(block + 4, 16, to.q);
      to.minimum[0] = half_at(block + 2);
      break;
    case PackSourceKind::q5_0:
      low_high_nibbles(block + 6, 16, to.q);
      add_fifth_bits(load<uint32_t>(block + 2), to.q);
      shift_codes(to.q, 32, -16);
      break;
    case PackSourceKind::q5_1:
      low_high_nibbles(block + 8, 16, to.q);
      add_fifth_bits(load<uint32_t>(block + 4), to.q);
      to.minimum[0] = half_at(block + 2);
      break;
    case PackSourceKind::q8_0:
      std::memcpy(to.q, block + 2, 32);
      break;
    case PackSourceKind::q4_k:
      k_scales(block, to);
      for (int part = 0; part < 4; ++part) low_high_nibbles(block + 16 + 32 * part, 32, to.q + 64 * part);
      break;
    case PackSourceKind::q5_k:
      k_scales(block, to);
      for (int part = 0; part < 4; ++part) low_high_nibbles(block + 48 + 32 * part, 32, to.q + 64 * part);
      for (int part = 0; part < 8; ++part) {
        int8_t* q = to.q + 32 * part;
        for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(q[i] | (((block[16 + i] >> part) & 1) << 4));
      }
      break;
    case PackSourceKind::q6_k:
      decode_q6_k(block, to);
      break;
    case PackSourceKind::mxfp4:
      decode_mxfp4(block, to);
      break;
    default:
      break;
  }
}

int64_t quantized_header_bytes(PackSourceKind kind) {
  if (kind == PackSourceKind::q8c) return 4;
  return kind_info(kind).native.offset == PackOffset::zero ? 3 : 2;
}

void widen(PackSourceKind kind, const uint8_t* from, int64_t count, float* to) {
  const int64_t bytes = kind_info(kind).bytes, weights = kind_info(kind).weights;
  if (kind == PackSourceKind::f32) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
  } else if (kind == PackSourceKind::f16) {
    for (int64_t i = 0; i < count; ++i) to[i] = f32_from_f16(load<uint16_t>(from + 2 * i));
  } else if (kind == PackSourceKind::bf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = f32_from_bf16(load<uint16_t>(from + 2 * i));
  } else if (kind >= PackSourceKind::q4g64) {
    widen_quantized(kind, from, count, to);
  } else {
    const bool has_min = kind_info(kind).native.offset == PackOffset::min;
    const int64_t group = kind_info(kind).native.group;
    Decoded block;
    for (int64_t at = 0; at < count; at += weights, from += bytes) {
      decode_block(kind, from, block);
      for (int64_t g = 0; g < weights / group; ++g) {
        const float scale = block.scale[g], minimum = block.minimum[g];
        const int8_t* q = block.q + g * group;
        float* w = to + at + g * group;
        if (has_min) {
          for (int64_t i = 0; i < group; ++i) w[i] = scale * static_cast<float>(q[i]) + minimum;
        } else {
          for (int64_t i = 0; i < group; ++i) w[i] = scale * static_cast<float>(q[i]);
        }
      }
    }
  }
}

}  // namespace paceline
