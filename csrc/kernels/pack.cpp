#include "kernels/pack.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace paceline {
namespace {

static_assert(std::endian::native == std::endian::little, "files and packed matrices are little-endian");

constexpr int64_t kTile = kPackTile;
constexpr int64_t kChunk =
    256;  // inputs widened at a time: a whole number of every kind's blocks and of every target's groups

struct KindInfo {
  int64_t weights, bytes;  // of a block
  PackTarget native;
};

constexpr KindInfo kKinds[] = {
    {1, 4, {PackTargetKind::f32, 0, false}},     {1, 2, {PackTargetKind::f16, 0, false}},
    {1, 2, {PackTargetKind::bf16, 0, false}},    {32, 18, {PackTargetKind::u4, 32, false}},
    {32, 20, {PackTargetKind::u4, 32, true}},    {32, 22, {PackTargetKind::i8, 32, false}},
    {32, 24, {PackTargetKind::i8, 32, true}},    {32, 34, {PackTargetKind::i8, 32, false}},
    {256, 144, {PackTargetKind::u4, 32, true}},  {256, 176, {PackTargetKind::i8, 32, true}},
    {256, 210, {PackTargetKind::i8, 16, false}},
};

const KindInfo& info(PackSourceKind kind) { return kKinds[static_cast<size_t>(kind)]; }

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

float f32_from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t bf16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

// --- Blocks in the form of their file: w = scale * q + minimum, or scale * q where the kind has no minimum. ---

struct Decoded {
  int8_t q[kChunk];
  float scale[16];
  float minimum[16];
};

float half_at(const uint8_t* block) { return f32_from_f16(load<uint16_t>(block)); }

void low_high_nibbles(const uint8_t* bytes, int count, int8_t* q) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(bytes[i] & 15);
  for (int i = 0; i < count; ++i) q[count + i] = static_cast<int8_t>(bytes[i] >> 4);
}

void shift_codes(int8_t* q, int count, int by) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<int8_t>(q[i] + by);
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
    default:
      break;
  }
}

bool file_has_min(PackSourceKind kind) { return info(kind).native.has_min; }

// The first `count` <= kChunk inputs at `from` as f32.
void widen(PackSourceKind kind, const uint8_t* from, int64_t count, float* to) {
  const int64_t bytes = info(kind).bytes, weights = info(kind).weights;
  if (kind == PackSourceKind::f32) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
  } else if (kind == PackSourceKind::f16) {
    for (int64_t i = 0; i < count; ++i) to[i] = f32_from_f16(load<uint16_t>(from + 2 * i));
  } else if (kind == PackSourceKind::bf16) {
    for (int64_t i = 0; i < count; ++i) to[i] = f32_from_bf16(load<uint16_t>(from + 2 * i));
  } else {
    const bool has_min = file_has_min(kind);
    const int64_t group = info(kind).native.group;
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

// --- One lane of one packed group: `group` points at the first byte of the tile's group. ---

template <int kWords>
void scatter_words(const uint8_t* codes, int64_t lane, uint8_t* group) {
  for (int k = 0; k < kWords; ++k) store(group + k * 64 + lane * 4, load<uint32_t>(codes + 4 * k));
}

void store_u4(const int8_t* q, int64_t lane, uint8_t* group) {
  uint8_t codes[16];
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(q[i] | (q[i + 16] << 4));
  scatter_words<4>(codes, lane, group);
}

void store_i8(const int8_t* q, int64_t size, int64_t lane, uint8_t* group) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(q);
  if (size == 32) {
    scatter_words<8>(codes, lane, group);
  } else {
    scatter_words<4>(codes, lane, group);
  }
}

int64_t code_bytes(const PackTarget& target) {
  return target.group * kTile / (target.kind == PackTargetKind::u4 ? 2 : 1);
}

// --- The exact path ---

// Q4_0, Q4_1 and Q8_0: bytes of codes are already those of the packed word, scales are already f16.
template <int kBlockBytes, int kHalves, int kWords>
void move_lane(const uint8_t* row, int64_t num_blocks, int64_t lane, uint8_t* tile) {
  constexpr int64_t kGroupBytes = kWords * 64 + kHalves * 32;
  for (int64_t b = 0; b < num_blocks; ++b, row += kBlockBytes, tile += kGroupBytes) {
    scatter_words<kWords>(row + 2 * kHalves, lane, tile);
    for (int h = 0; h < kHalves; ++h) store(tile + kWords * 64 + h * 32 + lane * 2, load<uint16_t>(row + 2 * h));
  }
}

void regroup_lane(PackSourceKind kind, const uint8_t* row, int64_t num_blocks, int64_t lane, uint8_t* tile) {
  const KindInfo& of = info(kind);
  const PackTarget& target = of.native;
  const int64_t group_bytes = target_group_bytes(target), scale_at = code_bytes(target);
  Decoded block;
  for (int64_t b = 0; b < num_blocks; ++b, row += of.bytes) {
    decode_block(kind, row, block);
    if (kind == PackSourceKind::q5_k) {
      shift_codes(block.q, 256, -16);
      for (int g = 0; g < 8; ++g) block.minimum[g] = block.minimum[g] + 16.0f * block.scale[g];
    }
    for (int64_t g = 0; g < of.weights / target.group; ++g, tile += group_bytes) {
      const int8_t* q = block.q + g * target.group;
      if (target.kind == PackTargetKind::u4) {
        store_u4(q, lane, tile);
      } else {
        store_i8(q, target.group, lane, tile);
      }
      store(tile + scale_at + lane * 2, f16_from_f32(block.scale[g]));
      if (target.has_min) store(tile + scale_at + 32 + lane * 2, f16_from_f32(block.minimum[g]));
    }
  }
}

template <class T>
void copy_lane(const uint8_t* row, int64_t count, int64_t lane, uint8_t* tile) {
  constexpr int64_t kSize = sizeof(T);
  for (int64_t k = 0; k < count; ++k) store(tile + (k * kTile + lane) * kSize, load<T>(row + k * kSize));
}

// Two bf16 inputs are one word; an odd last one is paired with 0.
void copy_lane_bf16(const uint8_t* row, int64_t num_inputs, int64_t lane, uint8_t* tile) {
  copy_lane<uint32_t>(row, num_inputs / 2, lane, tile);
  if (num_inputs % 2 != 0) {
    const uint32_t last = load<uint16_t>(row + (num_inputs - 1) * 2);
    store(tile + (num_inputs / 2 * kTile + lane) * 4, last);
  }
}

// `count` inputs of one lane, from the bytes at `row` to those at `tile`.
void pack_lane_exact(PackSourceKind kind, const uint8_t* row, int64_t count, int64_t lane, uint8_t* tile) {
  const int64_t num_blocks = count / info(kind).weights;
  switch (kind) {
    case PackSourceKind::f32:
      return copy_lane<uint32_t>(row, count, lane, tile);
    case PackSourceKind::f16:
      return copy_lane<uint16_t>(row, count, lane, tile);
    case PackSourceKind::bf16:
      return copy_lane_bf16(row, count, lane, tile);
    case PackSourceKind::q4_0:
      return move_lane<18, 1, 4>(row, num_blocks, lane, tile);
    case PackSourceKind::q4_1:
      return move_lane<20, 2, 4>(row, num_blocks, lane, tile);
    case PackSourceKind::q8_0:
      return move_lane<34, 1, 8>(row, num_blocks, lane, tile);
    default:
      return regroup_lane(kind, row, num_blocks, lane, tile);
  }
}

// --- The rounding path ---

// rint for |value| < 2^22: adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the low bits.
int8_t round_code(float value) {
  constexpr float kMagic = 12582912.0f;
  return static_cast<int8_t>(std::bit_cast<int32_t>(value + kMagic) - std::bit_cast<int32_t>(kMagic));
}

bool usable(float scale) { return scale > 0.0f && std::bit_cast<uint32_t>(scale) < 0x7f800000u; }

// Bits of the largest |w|; 0x7f800000 or more when a weight is infinite or not a number.
template <int kGroup>
uint32_t largest_magnitude(const float* w) {
  uint32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(w[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

struct Range {
  float low, high;
};

// Smallest and largest of finite weights, compared as integers in the order of floats: an integer reduction runs in vector registers.
template <int kGroup>
Range range_of(const float* w) {
  const auto flip = [](int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };  // its own inverse
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int i = 0; i < kGroup; ++i) {
    const int32_t key = flip(std::bit_cast<int32_t>(w[i]));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return {std::bit_cast<float>(flip(low)), std::bit_cast<float>(flip(high))};
}

template <int kGroup>
void codes_of(const float* w, float minimum, float scale, float low, float high, int8_t* q) {
  for (int i = 0; i < kGroup; ++i) {
    float ratio = (w[i] - minimum) / scale;
    ratio = ratio < low ? low : ratio;
    ratio = ratio > high ? high : ratio;
    q[i] = round_code(ratio);
  }
}

// One group of a lane: kGroup weights, of which those past `count` repeat the last one and get code 0.
template <int kGroup>
void round_group(const PackTarget& target, const float* w, int64_t count, int64_t lane, uint8_t* group) {
  const bool four = target.kind == PackTargetKind::u4;
  const uint32_t largest = largest_magnitude<kGroup>(w);
  int8_t q[32] = {};
  uint16_t scale = 0x7e00, minimum = 0;
  if (largest < 0x7f800000u) {
    float span = std::bit_cast<float>(largest), least = 0.0f;
    if (four) {
      const Range range = range_of<kGroup>(w);
      minimum = f16_from_f32(range.low + 0.0f);  // + 0: the sign of a zero minimum must not depend on order
      least = f32_from_f16(minimum);
      span = range.high - least;
      span = span > 0.0f ? span : 0.0f;
    }
    scale = f16_from_f32(span / (four ? 15.0f : 127.0f));
    const float step = f32_from_f16(scale);
    if (usable(step)) codes_of<kGroup>(w, least, step, four ? 0.0f : -127.0f, four ? 15.0f : 127.0f, q);
    for (int64_t i = count; i < kGroup; ++i) q[i] = 0;
  }
  if (four) {
    store_u4(q, lane, group);
  } else {
    scatter_words<kGroup / 4>(reinterpret_cast<const uint8_t*>(q), lane, group);
  }
  store(group + code_bytes(target) + lane * 2, scale);
  if (target.has_min) store(group + code_bytes(target) + 32 + lane * 2, minimum);
}

template <int kGroup>
void round_groups(const PackTarget& target, float* w, int64_t count, int64_t lane, uint8_t* tile) {
  for (int64_t i = count; i % kGroup != 0; ++i) w[i] = w[count - 1];
  for (int64_t i = 0; i < count; i += kGroup, tile += target_group_bytes(target)) {
    round_group<kGroup>(target, w + i, count - i < kGroup ? count - i : kGroup, lane, tile);
  }
}

void pack_lane_rounded(PackSourceKind kind, const uint8_t* row, int64_t count, const PackTarget& target, int64_t lane,
                       uint8_t* tile) {
  float w[kChunk];
  uint16_t halves[kChunk];
  widen(kind, row, count, w);
  switch (target.kind) {
    case PackTargetKind::f32:
      copy_lane<uint32_t>(reinterpret_cast<const uint8_t*>(w), count, lane, tile);
      break;
    case PackTargetKind::f16:
      for (int64_t i = 0; i < count; ++i) halves[i] = f16_from_f32(w[i]);
      copy_lane<uint16_t>(reinterpret_cast<const uint8_t*>(halves), count, lane, tile);
      break;
    case PackTargetKind::bf16:
      for (int64_t i = 0; i < count; ++i) halves[i] = bf16_from_f32(w[i]);
      copy_lane_bf16(reinterpret_cast<const uint8_t*>(halves), count, lane, tile);
      break;
    default:
      if (target.group == 16) {
        round_groups<16>(target, w, count, lane, tile);
      } else {
        round_groups<32>(target, w, count, lane, tile);
      }
  }
}

// --- What was written ---

template <class T, T kExponent, T kLowest>
bool all_finite(const uint8_t* values, int64_t count) {
  T seen = 0;  // a full exponent carries into the sign's place
  for (int64_t i = 0; i < count; ++i) {
    seen = static_cast<T>(seen | ((load<T>(values + i * static_cast<int64_t>(sizeof(T))) & kExponent) + kLowest));
  }
  return (seen >> (8 * sizeof(T) - 1)) == 0;
}

bool tile_is_finite(const PackTarget& target, const uint8_t* tile, int64_t tile_bytes) {
  if (target.kind == PackTargetKind::f32) return all_finite<uint32_t, 0x7f800000u, 0x00800000u>(tile, tile_bytes / 4);
  if (target.kind == PackTargetKind::bf16) return all_finite<uint16_t, 0x7f80, 0x0080>(tile, tile_bytes / 2);
  if (target.kind == PackTargetKind::f16) return all_finite<uint16_t, 0x7c00, 0x0400>(tile, tile_bytes / 2);
  bool finite = true;
  const int64_t group_bytes = target_group_bytes(target), halves = target.has_min ? 2 * kTile : kTile;
  for (int64_t at = code_bytes(target); at < tile_bytes; at += group_bytes) {
    finite &= all_finite<uint16_t, 0x7c00, 0x0400>(tile + at, halves);
  }
  return finite;
}

}  // namespace

uint16_t f16_from_f32(float value) {
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

float f32_from_f16(uint16_t bits) {
  const uint32_t sign = (static_cast<uint32_t>(bits) & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const uint32_t special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);  // infinity and NaN
  const uint32_t normal = (magnitude << 13) + 0x38000000u + (special & 0x38000000u);
  const uint32_t small = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t is_small =
      0u - static_cast<uint32_t>(magnitude < 0x400u);  // a mask, not a branch: loops run in vector registers
  return std::bit_cast<float>(sign | (small & is_small) | (normal & ~is_small));
}

int64_t source_block_weights(PackSourceKind kind) { return info(kind).weights; }

int64_t source_block_bytes(PackSourceKind kind) { return info(kind).bytes; }

PackTarget native_target(PackSourceKind kind) { return info(kind).native; }

int64_t target_group_inputs(const PackTarget& target) {
  if (target.group != 0) return target.group;
  return target.kind == PackTargetKind::bf16 ? 2 : 1;
}

int64_t target_group_bytes(const PackTarget& target) {
  switch (target.kind) {
    case PackTargetKind::u4:
    case PackTargetKind::i8:
      return code_bytes(target) + (target.has_min ? 4 : 2) * kTile;
    case PackTargetKind::f16:
      return 2 * kTile;
    default:
      return 4 * kTile;
  }
}

int64_t target_tile_bytes(const PackTarget& target, int64_t num_inputs) {
  const int64_t inputs = target_group_inputs(target);
  return (num_inputs + inputs - 1) / inputs * target_group_bytes(target);
}

bool can_pack(PackSourceKind kind, const PackTarget& target) {
  if (target == native_target(kind)) return true;
  if (target.kind == PackTargetKind::u4) return target.group == 32 && target.has_min;
  if (target.kind == PackTargetKind::i8) return (target.group == 32 || target.group == 16) && !target.has_min;
  return target.group == 0 && !target.has_min;
}

bool pack_tiles(const PackSource& source, const PackTarget& target, int64_t first_tile, int64_t end_tile,
                uint8_t* out) {
  const KindInfo& of = info(source.kind);
  const int64_t row_bytes = source.num_inputs / of.weights * of.bytes;
  const int64_t tile_bytes = target_tile_bytes(target, source.num_inputs);
  const bool exact = target == of.native;
  bool finite = true;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    uint8_t* tile = out + t * tile_bytes;
    const int64_t left = source.num_outputs - t * kTile, lanes = left < kTile ? left : kTile;
    if (lanes < kTile) std::memset(tile, 0, static_cast<size_t>(tile_bytes));
    // A chunk of all lanes before the next chunk: what is written (8 to 16 KB) stays in the L1 cache until its lines are full.
    for (int64_t first = 0; first < source.num_inputs; first += kChunk) {
      const int64_t count = source.num_inputs - first < kChunk ? source.num_inputs - first : kChunk;
      uint8_t* to = tile + first / target_group_inputs(target) * target_group_bytes(target);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t r = t * kTile + lane;
        const int64_t source_row = source.permutation == nullptr ? r : source.permutation[r];
        const uint8_t* from = source.rows + source_row * row_bytes + first / of.weights * of.bytes;
        if (exact) {
          pack_lane_exact(source.kind, from, count, lane, to);
        } else {
          pack_lane_rounded(source.kind, from, count, target, lane, to);
        }
      }
    }
    finite &= tile_is_finite(target, tile, tile_bytes);
  }
  return finite;
}

}  // namespace paceline
