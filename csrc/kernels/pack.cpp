#include "kernels/pack.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/pack_blocks.h"

namespace paceline {
namespace {

constexpr int64_t kTile = kPackTile;
constexpr int64_t kChunk = kPackChunk;

uint16_t bf16_from_f32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
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
  const bool four = target.kind == PackTargetKind::u4 || target.kind == PackTargetKind::e2m1;
  return target.group * kTile / (four ? 2 : 1);
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

// MXFP4: codes as they are, scales as f16.
void move_mxfp4(const uint8_t* row, int64_t num_blocks, int64_t lane, uint8_t* tile) {
  for (int64_t b = 0; b < num_blocks; ++b, row += 17, tile += 256 + 32) {
    scatter_words<4>(row + 1, lane, tile);
    store(tile + 256 + lane * 2, f16_from_f32(mxfp4_scale(row)));
  }
}

void regroup_lane(PackSourceKind kind, const uint8_t* row, int64_t num_blocks, int64_t lane, uint8_t* tile) {
  const KindInfo& of = kind_info(kind);
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
      if (target.offset == PackOffset::min) store(tile + scale_at + 32 + lane * 2, f16_from_f32(block.minimum[g]));
    }
  }
}

// Blocks of quantised checkpoints: runs of 32 codes lie in the block as in the packed group. The scales of q8c stand behind all groups.
template <int kWords>
void move_quantized(PackSourceKind kind, const uint8_t* row, int64_t num_blocks, int64_t lane, uint8_t* tile) {
  const KindInfo& of = kind_info(kind);
  const int64_t header = quantized_header_bytes(kind), scale_at = code_bytes(of.native);
  const int64_t group_bytes = target_group_bytes(of.native);
  for (int64_t b = 0; b < num_blocks; ++b, row += of.bytes, tile += group_bytes) {
    for (int64_t run = 0; run < of.weights / 32; ++run) {
      scatter_words<kWords>(row + header + run * kWords * 4, lane, tile + run * kWords * 64);
    }
    if (kind == PackSourceKind::q8c) continue;
    store(tile + scale_at + lane * 2, load<uint16_t>(row));
    if (of.native.offset == PackOffset::zero) tile[scale_at + 2 * kTile + lane] = row[2];
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
  const int64_t num_blocks = count / kind_info(kind).weights;
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
    case PackSourceKind::mxfp4:
      return move_mxfp4(row, num_blocks, lane, tile);
    case PackSourceKind::q8_0:
      return move_lane<34, 1, 8>(row, num_blocks, lane, tile);
    default:
      if (kind < PackSourceKind::q4g64) return regroup_lane(kind, row, num_blocks, lane, tile);
      if (kind_info(kind).native.kind == PackTargetKind::u4)
        return move_quantized<4>(kind, row, num_blocks, lane, tile);
      return move_quantized<8>(kind, row, num_blocks, lane, tile);
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
  if (target.offset == PackOffset::min) store(group + code_bytes(target) + 32 + lane * 2, minimum);
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

// Floats of one lane to the columns that are theirs; `tile` is the whole tile.
void place_lane(PackSourceKind kind, const uint8_t* row, int64_t count, const PackTarget& target, int64_t lane,
                const int32_t* columns, uint8_t* tile) {
  float w[kChunk];
  widen(kind, row, count, w);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t at = columns[k];
    if (target.kind == PackTargetKind::f32) {
      store(tile + (at * kTile + lane) * 4, w[k]);
    } else if (target.kind == PackTargetKind::f16) {
      store(tile + (at * kTile + lane) * 2, f16_from_f32(w[k]));
    } else {
      store(tile + (at / 2 * kTile + lane) * 4 + at % 2 * 2, bf16_from_f32(w[k]));
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
  if (target.kind == PackTargetKind::i8c)
    return all_finite<uint32_t, 0x7f800000u, 0x00800000u>(tile + tile_bytes - 4 * kTile, kTile);
  bool finite = true;
  const int64_t group_bytes = target_group_bytes(target);
  const int64_t halves = target.offset == PackOffset::min ? 2 * kTile : kTile;
  for (int64_t at = code_bytes(target); at < tile_bytes; at += group_bytes) {
    finite &= all_finite<uint16_t, 0x7c00, 0x0400>(tile + at, halves);
  }
  return finite;
}

}  // namespace

int64_t source_block_weights(PackSourceKind kind) { return kind_info(kind).weights; }

int64_t source_block_bytes(PackSourceKind kind) { return kind_info(kind).bytes; }

PackTarget native_target(PackSourceKind kind) { return kind_info(kind).native; }

int64_t target_group_inputs(const PackTarget& target) {
  if (target.group != 0) return target.group;
  return target.kind == PackTargetKind::bf16 ? 2 : 1;
}

int64_t target_group_bytes(const PackTarget& target) {
  switch (target.kind) {
    case PackTargetKind::u4:
    case PackTargetKind::e2m1:
    case PackTargetKind::i8:
      if (target.offset == PackOffset::none) return code_bytes(target) + 2 * kTile;
      return code_bytes(target) + (target.offset == PackOffset::min ? 4 : 3) * kTile;
    case PackTargetKind::i8c:
      return code_bytes(target);
    case PackTargetKind::f16:
      return 2 * kTile;
    default:
      return 4 * kTile;
  }
}

int64_t target_tile_bytes(const PackTarget& target, int64_t num_inputs) {
  const int64_t inputs = target_group_inputs(target);
  const int64_t groups = (num_inputs + inputs - 1) / inputs;
  return groups * target_group_bytes(target) + (target.kind == PackTargetKind::i8c ? 4 * kTile : 0);
}

bool can_pack(PackSourceKind kind, const PackTarget& target) {
  if (target == native_target(kind)) return true;
  if (target.kind == PackTargetKind::u4) return target.group == 32 && target.offset == PackOffset::min;
  if (target.offset != PackOffset::none || target.kind == PackTargetKind::i8c || target.kind == PackTargetKind::e2m1)
    return false;
  if (target.kind == PackTargetKind::i8) return target.group == 32 || target.group == 16;
  return target.group == 0;
}

bool pack_tiles(const PackSource& source, const PackTarget& target, int64_t first_tile, int64_t end_tile,
                uint8_t* out) {
  const KindInfo& of = kind_info(source.kind);
  const int64_t row_bytes = source.num_inputs / of.weights * of.bytes;
  const int64_t tile_bytes = target_tile_bytes(target, source.num_inputs);
  const bool exact = target == of.native, placed = source.order != nullptr && target.group == 0;
  bool finite = true;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    uint8_t* tile = out + t * tile_bytes;
    const int64_t left = source.num_outputs - t * kTile, lanes = left < kTile ? left : kTile;
    if (lanes < kTile || placed) std::memset(tile, 0, static_cast<size_t>(tile_bytes));
    // A chunk of all lanes before the next chunk: what is written (8 to 16 KB) stays in the L1 cache until its lines are full.
    for (int64_t first = 0; first < source.num_inputs; first += kChunk) {
      const int64_t count = source.num_inputs - first < kChunk ? source.num_inputs - first : kChunk;
      uint8_t* to = tile + first / target_group_inputs(target) * target_group_bytes(target);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t r = t * kTile + lane;
        const int64_t source_row = source.permutation == nullptr ? r : source.permutation[r];
        const uint8_t* from = source.rows + source_row * row_bytes + first / of.weights * of.bytes;
        if (placed) {
          place_lane(source.kind, from, count, target, lane, source.order + first, tile);
        } else if (exact) {
          pack_lane_exact(source.kind, from, count, lane, to);
        } else {
          pack_lane_rounded(source.kind, from, count, target, lane, to);
        }
      }
    }
    if (target.kind == PackTargetKind::i8c) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t r = t * kTile + lane;
        const uint8_t* from = source.rows + (source.permutation == nullptr ? r : source.permutation[r]) * row_bytes;
        store(tile + tile_bytes - 4 * kTile + lane * 4, load<float>(from));
      }
    }
    finite &= tile_is_finite(target, tile, tile_bytes);
  }
  return finite;
}

}  // namespace paceline
