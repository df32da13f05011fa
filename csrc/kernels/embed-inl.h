// Rows of the packed embedding matrix as floats: a row is one lane of its tile, so 4 bytes of every 64 are read.

namespace paceline::PL_ISA {
namespace {

inline float half_at(const uint8_t* p, int index) {
  uint16_t lanes[16] = {};
  std::memcpy(lanes, p + 2 * index, 2);
  return lane(load_f16(lanes), 0);
}

// Writes the weights of one output of a packed matrix. to[num_inputs]
inline void unpack_row(const Matrix& w, int output, float* to) {
  const uint8_t* tile = w.data + static_cast<size_t>(output / kTile) * w.tile_bytes;
  const int l = output % kTile;
  const size_t group_bytes = w.tile_bytes / static_cast<size_t>(w.num_groups);
  for (int g = 0; g < w.num_groups; ++g) {
    const uint8_t* p = tile + static_cast<size_t>(g) * group_bytes;
    switch (w.kind) {
      case WeightKind::u4: {
        const float scale = half_at(p + 256, l);
        const float minimum = w.has_min ? half_at(p + 288, l) : -8.0f * scale;
        for (int i = 0; i < 16 && g * 32 + i < w.num_inputs; ++i)
          to[g * 32 + i] = scale * static_cast<float>(p[i / 4 * 64 + l * 4 + i % 4] & 15) + minimum;
        for (int i = 0; i < 16 && g * 32 + 16 + i < w.num_inputs; ++i)
          to[g * 32 + 16 + i] = scale * static_cast<float>(p[i / 4 * 64 + l * 4 + i % 4] >> 4) + minimum;
        break;
      }
      case WeightKind::i8: {
        const float scale = half_at(p + w.group * kTile, l);
        const float minimum = w.has_min ? half_at(p + w.group * kTile + 32, l) : 0.0f;
        for (int i = 0; i < w.group && g * w.group + i < w.num_inputs; ++i)
          to[g * w.group + i] =
              scale * static_cast<float>(static_cast<int8_t>(p[i / 4 * 64 + l * 4 + i % 4])) + minimum;
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

void embed(const Matrix& w, const int32_t* tokens, int row_begin, int row_end, float* out, int stride) {
  for (int row = row_begin; row < row_end; ++row) {
    float* to = out + static_cast<size_t>(row) * static_cast<size_t>(stride);
    unpack_row(w, tokens[row], to);
    for (int i = w.num_inputs; i < stride; ++i) to[i] = 0.0f;
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
