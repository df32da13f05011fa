// Blocks of a checkpoint's tensors: their sizes, what they are packed into, and the numbers in them. The inner half of kernels/pack.h, which
// states layouts and cost.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/pack.h"

namespace paceline {

static_assert(std::endian::native == std::endian::little, "files and packed matrices are little-endian");

inline constexpr int64_t kPackChunk =
    256;  // inputs widened at a time: a whole number of every kind's blocks and of every target's groups

struct KindInfo {
  int64_t weights, bytes;  // of a block
  PackTarget native;
};

const KindInfo& kind_info(PackSourceKind kind);

// Numbers at any address.
template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Bits of the nearest f16 (ties to even, subnormals kept, a NaN gives 0x7e00).
inline uint16_t f16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude >= 0x38800000u) {                                              // a normal f16
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude <= 0x33000000u) return static_cast<uint16_t>(sign);  // 2^-25, the tie with zero, and less
  const uint32_t shift = 126u - (magnitude >> 23);                   // subnormal: units of 2^-24
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t floor = significand >> shift, rest = significand & ((1u << shift) - 1u), half = 1u << (shift - 1u);
  const uint32_t up = (rest > half || (rest == half && (floor & 1u) != 0)) ? 1u : 0u;
  return static_cast<uint16_t>(sign | (floor + up));
}

// Exact.
inline float f32_from_f16(uint16_t bits) {
  const uint32_t sign = (static_cast<uint32_t>(bits) & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const uint32_t special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);  // infinity and NaN
  const uint32_t normal = (magnitude << 13) + 0x38000000u + (special & 0x38000000u);
  const uint32_t small = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t is_small =
      0u - static_cast<uint32_t>(magnitude < 0x400u);  // a mask, not a branch: loops run in vector registers
  return std::bit_cast<float>(sign | (small & is_small) | (normal & ~is_small));
}

// A block of one of GGUF's integer kinds as its file means it: w = scale * q + minimum, or scale * q where the kind has no minimum.
struct Decoded {
  int8_t q[kPackChunk];
  float scale[16];
  float minimum[16];
};

void decode_block(PackSourceKind kind, const uint8_t* block, Decoded& to);

// What twice the values of an MXFP4 block are to be multiplied with.
float mxfp4_scale(const uint8_t* block);

// q[i] += by.
void shift_codes(int8_t* q, int count, int by);

// Bytes in front of the codes of a quantised checkpoint's block.
int64_t quantized_header_bytes(PackSourceKind kind);

// The first `count` <= kPackChunk inputs at `from`, whole blocks, as f32.
void widen(PackSourceKind kind, const uint8_t* from, int64_t count, float* to);

}  // namespace paceline
