// What a kernel takes and the table of kernels that each instruction set fills in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/sample.h"

namespace paceline {

constexpr int kTile = 16;        // outputs that share a tile: the lanes of a vector
constexpr int kActGroup = 32;    // activations that share a scale
constexpr int kPageTokens = 32;  // tokens in a KV page
constexpr int kSplitTokens =
    128;  // keys that one partial softmax covers; a fixed size, so results never depend on how work is split
constexpr int kMaxHeadDim = 256;
constexpr int kMaxChosen = 32;  // experts that a row chooses at most; a multiple of 16
constexpr int kQueryRows = 32;  // (token, head) pairs of one KV head that share the keys they read

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

enum class WeightKind : int32_t { u4, e2m1, i8, i8c, bf16, f16, f32 };
enum class WeightOffset : int32_t { none, min, zero };
enum class KVKind : int32_t { f16, bf16, f32, int8 };
enum class Activation : uint8_t { silu, gelu_tanh, swiglu_oai };  // of a gated network; glu-inl.h has the formulas

// Twice what a code of e2m1 means, and 12 more: unsigned, as products of bytes want one factor.
constexpr int kE2M1Zero = 12;
alignas(16) constexpr uint8_t kE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A packed matrix; the layout is documented in src/paceline/weights/packed.py.
struct Matrix {
  const uint8_t* data;
  WeightKind kind;
  int32_t group;  // inputs per scale; 32 for i8c, 0 for float kinds
  WeightOffset offset;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t num_tiles;
  int32_t num_groups;  // groups of a tile along the inputs (float kinds: inputs, bf16: pairs of inputs)
  size_t tile_bytes;
  const int32_t* order;  // null, or [num_inputs]: column j is input order[j] of the layer
  bool four_bits() const { return kind == WeightKind::u4 || kind == WeightKind::e2m1; }
  bool quantised() const { return four_bits() || kind == WeightKind::i8 || kind == WeightKind::i8c; }
  bool per_token() const { return kind == WeightKind::i8c; }
  size_t code_bytes() const {  // of a group
    return static_cast<size_t>(four_bits() ? group / 2 : group) * kTile;
  }
  size_t group_bytes() const {
    const size_t scales = per_token() ? kTile * sizeof(float) : 0;
    return (tile_bytes - scales) / static_cast<size_t>(num_groups);
  }
};

// Rows of activations: x = scale * q in groups of 32 for integer weights, plain floats for float weights. Strides are elements per row.
// Where a whole row has one scale (weights of i8c), every group's scale is that, and its sums are those of the row but for half_sum.
struct Activations {
  int8_t* q;          // [rows][q_stride], q_stride a multiple of 32, padding zero
  float* scale;       // [rows][q_stride / 32]
  float* sum;         // [rows][q_stride / 32] scale * (sum of the group's q)
  float* total;       // [rows][q_stride / 32] sum of the group's q, exact
  int32_t* half_sum;  // [rows][q_stride / 16] sum of q over each half group
  int32_t q_stride;
  const float* x;  // [rows][x_stride] f32; null when only the quantised form exists
  int32_t x_stride;
};

struct LinearOut {
  float* out;  // [rows][stride], column 0 of the matrix's outputs; written in whole tiles
  int32_t stride;
  const float* bias;  // [16 * tiles] or null
  float scale;        // y = (W x + bias) * scale
  float softcap;      // then y = softcap * tanh(y / softcap), unless it is 0
  bool accumulate;    // then out += y instead of out = y
};

struct NormArgs {
  const float* x;  // [rows][x_stride]
  int32_t x_stride;
  const float* weight;  // [size], padding to a multiple of 32 zero
  int32_t size;
  float eps;
  const float* residual;  // [rows][residual_stride] what the norm is added to; or null
  int32_t residual_stride;
  float* y;  // [rows][y_stride], or null; x where it is done in place. Written in whole vectors of 16.
  int32_t y_stride;
};

struct AttentionShape {
  int32_t num_heads, num_kv_heads, head_dim, num_layers;
  KVKind kind;
  // Bytes of a page of one layer and one KV head; kv_page-inl.h has the layout. The same as src/paceline/kv/layout.py.
  size_t head_page_bytes() const {
    const size_t values = static_cast<size_t>(2 * kPageTokens) * static_cast<size_t>(head_dim);
    if (kind == KVKind::int8) return values + 2 * kPageTokens * sizeof(uint16_t);
    return values * (kind == KVKind::f32 ? sizeof(float) : sizeof(uint16_t));
  }
  size_t page_bytes() const {
    return head_page_bytes() * static_cast<size_t>(num_kv_heads) * static_cast<size_t>(num_layers);
  }
  int group() const { return num_heads / num_kv_heads; }
};

// What a unit leaves: finished rows; or partials (values, maximum, sum) for the merge, one of all its splits in the slot of the last, or
// one of each split.
enum class UnitResult : uint8_t { rows, folded, splits };

// One piece of attention: rows unit_rows[row_begin, row_end), query heads [head_begin, head_end) of one KV head's group, splits [split_begin,
// split_end), whose pages are those of the sequence. Rows of other sequences name the same pages there and are past the last of these keys;
// a window may hide the first.
struct AttentionUnit {
  int32_t sequence, row_begin, row_end, kv_head, head_begin, head_end, split_begin, split_end;
  UnitResult result;
  int num_heads() const { return head_end - head_begin; }
};

struct AttentionArgs {
  const AttentionShape* shape;
  int32_t layer;
  uint8_t* kv;                // pool; page p starts at p * page_bytes
  const int32_t* page_table;  // [sequences][page_table_stride]
  int32_t page_table_stride;
  const int32_t* positions;  // [rows]
  int32_t window;            // latest positions seen, the own one included; 0 = all
  float softcap;             // score = softcap * tanh(score / softcap); 0 = as it is
  const float* sinks;        // [heads] or null: softmax has one more term exp(sink) in its denominator
  float* q;                  // [rows][qkv_stride]; rotated and scaled in place by rotate_query
  const float* k;            // same stride
  const float* v;
  int32_t qkv_stride;
  float* out;  // [rows][out_stride], heads side by side
  int32_t out_stride;
  const int32_t* unit_rows;  // rows that units name by their place here
  float* partials;           // [slots][heads][head_dim + 16]: values, maximum, sum
  const int32_t* row_slots;  // [rows]: split s of a row is in slot row_slots[row] + s
  const float* cos;          // [rows][head_dim], each pair's cosine twice; null: no rotation
  const float* sin;          // [rows][head_dim], each pair's sine, negative then positive
  float query_scale;         // what rotated queries are multiplied with
  const float* q_norm;       // [head_dim] or null: RMS norm of each head before the rotation
  const float* k_norm;
  float norm_eps;
};

size_t attention_scratch_floats(const AttentionShape& shape);

struct Kernels {
  const char* isa;
  // out[row] = row of the embedding matrix times scale. stride a multiple of 32; padding is written as zero.
  void (*embed)(const Matrix&, const int32_t* tokens, int row_begin, int row_end, float scale, float* out, int stride);
  // y = (residual +) x * rsqrt(mean(x^2) + eps) * weight, to `y` when not null and, with quantise, to `out`.
  void (*norm)(const NormArgs&, int row_begin, int row_end, const Activations& out, bool quantise);
  // x[order[i]] where order is not null; with per_token one scale a row.
  void (*quantise)(const float* x, int x_stride, int size, int row_begin, int row_end, const int32_t* order,
                   bool per_token, const Activations& out);
  void (*linear)(const Matrix&, const Activations& in, int rows, int tile_begin, int tile_end, const LinearOut&);
  // The gated product of W_gate x and W_up x for outputs [32 * unit_begin, 32 * unit_end): to `out` quantised, or to `y` [rows][y_stride]
  // when not null.
  void (*gate_up)(Activation, const Matrix& gate, const Matrix& up, const Activations& in, int rows, int unit_begin,
                  int unit_end, float* y, int y_stride, const Activations& out);
  // The same product when gate and up lie side by side as floats: `gate` and `up` share a stride.
  void (*glu)(Activation, const float* gate, const float* up, int stride, int size, int row_begin, int row_end,
              float* y, int y_stride, const Activations& out);
  // Per row the num_chosen largest logits as ids, then their softmax weights, over those chosen with `normalise`.
  void (*route)(const float* logits, int stride, int num_experts, int num_chosen, bool normalise, int row_begin,
                int row_end, float* routing, int routing_stride);
  // out (+)= sum over j of weights[row][j] * y[slots[row][j]], in that order; `columns` a multiple of 16.
  void (*combine)(const float* y, int y_stride, const int32_t* slots, const float* weights, int weights_stride,
                  int num_chosen, int columns, int rows, float* out, int out_stride, bool accumulate);
  // Norms, rotates and scales one query head of a row in place.
  void (*rotate_query)(const AttentionArgs&, int row, int head);
  // Norms and rotates a row's key of one KV head and stores it with the value in the page that a sequence has at the row's position. The
  // sequence may be another than the row's own: no bit depends on which.
  void (*key_value_write)(const AttentionArgs&, int sequence, int row, int kv_head);
  void (*attention)(const AttentionArgs&, const AttentionUnit&, float* scratch);
  void (*attention_merge)(const AttentionArgs&, int row, int head, int split_begin, int split_end);
  void (*sample_row)(const float* logits, int vocab, const SampleRow&, const SampleLists&, SampleOut&, float* scratch);
  SampleStatus (*distribution_row)(const float* logits, int vocab, const SampleRow&, const SampleLists&, double* p,
                                   float* scratch);
  // Integer multiply-accumulates of the matrix kernel's innermost instruction, on registers: operations done (2 per multiply-add).
  double (*int8_peak)(int64_t iterations);
};

const Kernels* kernels_scalar();
const Kernels* kernels_avx2();
const Kernels* kernels_avx2_vnni();
const Kernels* kernels_avx512_vnni();

// The table of that name, or the best one that this processor runs when the name is empty. Null when unknown or not runnable here.
const Kernels* kernels_for(std::string_view isa);

}  // namespace paceline
