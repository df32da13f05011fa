// Rows of the packed embedding matrix as floats: a row is one lane of its tile, so 4 bytes of every 64 are read.

namespace paceline::PL_ISA {
namespace {

inline float half_at(const uint8_t* p, int index) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p + 2 * index, 2);
  return lane(load_f16(lanes), 0);
}

// The four bytes of codes of input i of a run and lane l lie with those of the inputs beside it.
inline uint8_t code_at(const uint8_t* run, int i, int l) { return run[i / 4 * 64 + l * 4 + i % 4]; }

// The scale, zero point and minimum of a lane's group of an integer kind: w = scale * (q - zero) + minimum.
struct LaneGroup {
  float scale, minimum;
  int zero;
};

inline LaneGroup lane_group(const Matrix& w, const uint8_t* group, const uint8_t* tile, int l) {
  if (w.per_token()) {
    float scale;
    std::memcpy(&scale, tile + w.tile_bytes - kTile * sizeof(float) + static_cast<size_t>(l) * sizeof(float), 4);
    return {scale, 0.0f, 0};
  }
  const bool four = w.four_bits();
  const uint8_t* scales = group + w.code_bytes();
  const uint8_t* offsets = scales + 2 * kTile;
  switch (w.offset) {
    case WeightOffset::min:
      return {half_at(scales, l), half_at(offsets, l), 0};
    case WeightOffset::zero:
      return {half_at(scales, l), 0.0f, four ? offsets[l] : static_cast<int8_t>(offsets[l])};
    case WeightOffset::none:
      break;
  }
  return {half_at(scales, l), 0.0f, w.kind == WeightKind::e2m1 ? kE2M1Zero : four ? 8 : 0};
}

// Writes the weights of one output of a packed matrix, in the layer's order. to[num_inputs]
inline void unpack_row(const Matrix& w, int output, float* to) {
  const uint8_t* tile = w.data + static_cast<size_t>(output / kTile) * w.tile_bytes;
  const int l = output % kTile;
  const size_t group_bytes = w.group_bytes();
  for (int g = 0; g < w.num_groups; ++g) {
    const uint8_t* p = tile + static_cast<size_t>(g) * group_bytes;
    switch (w.kind) {
      case WeightKind::u4:
      case WeightKind::e2m1:
      case WeightKind::i8:
      case WeightKind::i8c: {
        const LaneGroup of = lane_group(w, p, tile, l);
        for (int i = 0; i < w.group && g * w.group + i < w.num_inputs; ++i) {
          int q;
          if (w.four_bits()) {
            const uint8_t byte = code_at(p + i / 32 * 256, i % 16, l);
            q = i % 32 < 16 ? byte & 15 : byte >> 4;
            if (w.kind == WeightKind::e2m1) q = kE2M1[q];
          } else {
            q = static_cast<int8_t>(code_at(p, i, l));
          }
          const int at = g * w.group + i;
          to[w.order == nullptr ? at : w.order[at]] = of.scale * static_cast<float>(q - of.zero) + of.minimum;
        }
        break;
      }
      case WeightKind::bf16: {
        uint32_t pair;
        std::memcpy(&pair, p + 4 * l, 4);
        const uint32_t even = pair << 16, odd = pair & 0xffff0000u;
        std::memcpy(to + 2 * g, &even, 4);
        if (2 * g + 1 < w.num_inputs) std::memcpy(to + 2 * g + 1, &odd, 4);
        break;
      }
      case WeightKind::f16:
        to[g] = half_at(p, l);
        break;
      case WeightKind::f32:
        std::memcpy(to + g, p + 4 * l, 4);
        break;
    }
  }
}

void embed(const Matrix& w, const int32_t* tokens, int row_begin, int row_end, float scale, float* out, int stride) {
  for (int row = row_begin; row < row_end; ++row) {
    float* to = out + static_cast<size_t>(row) * static_cast<size_t>(stride);
    unpack_row(w, tokens[row], to);
    for (int i = 0; i < w.num_inputs; ++i) to[i] *= scale;
    for (int i = w.num_inputs; i < stride; ++i) to[i] = 0.0f;
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
