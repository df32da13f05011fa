// Turns the rows of a checkpoint's tensor into the tiled layout that the matmul kernels read (documented in weights/packed.py).
//
// Layout of the source: rows follow each other, row r starts at rows + r * row_bytes and holds num_inputs / block blocks of its kind
// (GGUF's block layouts, or those of weights/quantized_matrix.py); no alignment is assumed. Layout of the result: tiles of 16 outputs, each padded with zero bytes to 16 rows and
// to whole groups of inputs; the bytes of tile t start at out + t * tile_bytes(target, num_inputs); no alignment is assumed.
//
// Two paths, chosen by the pair of kind and target:
//   exact  the target is the kind's own packed format (native_target): codes and f16 scales are moved, not recomputed; only products of a
//          k-quant's two scales, and MXFP4's powers of two below 2^-24, are rounded to f16.
//   round  otherwise: a row is widened to f32 (bit for bit GGUF's reference dequantisation) and rounded to nearest, ties to even: bf16, f16,
//          int8 (scale = absmax / 127) or int4 (between the group's extremes); scales are rounded to f16 before codes are computed.
//
// Cost: every source byte is read once and every result byte written once; the exact path of Q4_0, Q4_1 and Q8_0 is a transposition of
// 4-byte words (about half an operation a byte). Plain C++ without intrinsics: no instruction set has to be chosen, results have the same
// bits everywhere (float operations are single and ordered; build without contraction). No allocation, no exceptions; tiles are independent,
// so threads may share a matrix by tile ranges.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

inline constexpr int64_t kPackTile = 16;

// The last eleven are those of quantised checkpoints: 4 or 8 bits, inputs a scale, z where blocks have a zero point; q8c one scale an output.
enum class PackSourceKind : uint8_t {
  f32,
  f16,
  bf16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q4_k,
  q5_k,
  q6_k,
  mxfp4,
  q4g64,
  q4g128,
  q4g32z,
  q4g64z,
  q4g128z,
  q8g64,
  q8g128,
  q8g32z,
  q8g64z,
  q8g128z,
  q8c
};

enum class PackTargetKind : uint8_t { u4, e2m1, i8, i8c, bf16, f16, f32 };

enum class PackOffset : uint8_t { none, min, zero };

// A packed format; group is 0 for the float kinds and 32 for i8c.
struct PackTarget {
  PackTargetKind kind;
  int32_t group;
  PackOffset offset;

  bool operator==(const PackTarget&) const = default;
};

// A matrix in its file. permutation is null or int32[num_outputs]: row r of the result is row permutation[r] of the source. order is null
// or int32[num_inputs], a permutation: column j of the source is input order[j] of the layer. Float targets get their columns put back;
// others keep them, and their readers bring activations into that order.
struct PackSource {
  PackSourceKind kind;
  const uint8_t* rows;
  int64_t num_outputs;
  int64_t num_inputs;
  const int32_t* permutation;
  const int32_t* order;
};

// Weights and bytes in one block of a kind (1 weight for the float kinds).
int64_t source_block_weights(PackSourceKind kind);
int64_t source_block_bytes(PackSourceKind kind);

// The packed format that holds a kind without rounding its codes.
PackTarget native_target(PackSourceKind kind);

// Inputs in one group of the target (2 for bf16, 1 for f16 and f32), bytes of one tile's group, and of one tile (of i8c with its scales).
int64_t target_group_inputs(const PackTarget& target);
int64_t target_group_bytes(const PackTarget& target);
int64_t target_tile_bytes(const PackTarget& target, int64_t num_inputs);

// Whether pack_tiles can produce the target from the kind: the native target, a float kind, i8 without offsets or
// u4 with minima.
bool can_pack(PackSourceKind kind, const PackTarget& target);

// Writes tiles [first_tile, end_tile) of the matrix whose tile 0 is at out. Requires can_pack. Returns false when some scale, minimum or
// float weight that it wrote is infinite or not a number (the file is corrupt, or a weight is too large for f16).
bool pack_tiles(const PackSource& source, const PackTarget& target, int64_t first_tile, int64_t end_tile, uint8_t* out);

}  // namespace paceline
