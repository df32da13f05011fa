// The records over kernels/product-inl.h and kernels/channel-inl.h: which rows and tiles are multiplied in which order, and what becomes
// of the products.

namespace paceline::PL_ISA {
namespace {

template <class Format>
void linear_of(const Matrix& w, const Activations& in, int rows, int tile_begin, int tile_end, const LinearOut& to) {
  int tile = tile_begin;
  if constexpr (Format::kRunBytes <= 64) {  // float formats: a lone row would wait for one chain of
                                            // multiply-adds
    if (rows == 1)
      for (; tile + 4 <= tile_end; tile += 4) linear_block<Format, 4, 1>(w, in, 0, tile, to);
  }
  for_row_chunks(rows, [&](int begin, int end) {
    for (int t = tile; t < tile_end; ++t)
      for_row_blocks(begin, end, [&]<int M>(int row) { linear_block<Format, 1, M>(w, in, row, t, to); });
  });
}

// Calls visit.operator()<Format>() with the type that reads the matrix.
template <class Visit>
inline void with_format(const Matrix& w, Visit&& visit) {
  constexpr WeightOffset none = WeightOffset::none, min = WeightOffset::min, zero = WeightOffset::zero;
  const bool one_run = w.group <= kActGroup;
  switch (w.kind) {
    case WeightKind::u4:
      if (w.offset == min) return visit.template operator()<U4<1, min>>();
      if (w.offset == zero)
        return one_run ? visit.template operator()<U4<1, zero>>() : visit.template operator()<U4<0, zero>>();
      return one_run ? visit.template operator()<U4<1, none>>() : visit.template operator()<U4<0, none>>();
    case WeightKind::e2m1:
      return visit.template operator()<E2M1>();
    case WeightKind::i8:
      if (w.group == 16) return visit.template operator()<I8<16, 1, none>>();
      if (w.offset == min) return visit.template operator()<I8<32, 1, min>>();
      if (w.offset == zero)
        return one_run ? visit.template operator()<I8<32, 1, zero>>() : visit.template operator()<I8<32, 0, zero>>();
      return one_run ? visit.template operator()<I8<32, 1, none>>() : visit.template operator()<I8<32, 0, none>>();
    case WeightKind::i8c:
      return visit.template operator()<I8C>();
    case WeightKind::bf16:
      return visit.template operator()<BF16>();
    case WeightKind::f16:
      return visit.template operator()<F16>();
    case WeightKind::f32:
      return visit.template operator()<F32>();
  }
}

void linear(const Matrix& w, const Activations& in, int rows, int tile_begin, int tile_end, const LinearOut& to) {
  if (const int chunk = wide_chunk(w, in, rows); chunk != 0)
    return linear_wide(w, in, rows, chunk, tile_begin, tile_end, to);
  with_format(w, [&]<class Format>() { linear_of<Format>(w, in, rows, tile_begin, tile_end, to); });
}

// One unit: 32 outputs of the gated product, that is two tiles of each matrix; outputs past the end are zero.
template <class Gate, class Up>
void gate_up_of(Activation activation, const Matrix& gate, const Matrix& up, const Activations& in, int rows,
                int unit_begin, int unit_end, float* y, int y_stride, const Activations& out) {
  for_row_chunks(rows, [&](int begin, int end) {
    for (int unit = unit_begin; unit < unit_end; ++unit) {
      for_row_blocks(begin, end, [&]<int M>(int row) {
        F32x16 h[2][M];
        for (int t = 0; t < 2; ++t) {
          const int tile = 2 * unit + t;
          if (tile >= gate.num_tiles) {
            unroll<M>([&](auto m) PL_INLINE { h[t][m] = zero_f32(); });
            continue;
          }
          F32x16 g[1][M], u[1][M];
          multiply<Gate>(gate, tile, in, row, g);
          multiply<Up>(up, tile, in, row, u);
          unroll<M>([&](auto m) PL_INLINE { h[t][m] = glu(activation, g[0][m], u[0][m]); });
        }
        unroll<M>([&](auto m) PL_INLINE { store_unit(h[0][m], h[1][m], unit, row + m, y, y_stride, out); });
      });
    }
  });
}

// The gated product for rows [row_begin, row_end); `size` values, readable up to the next multiple of 32.
void gated(Activation activation, const float* gate, const float* up, int stride, int size, int row_begin, int row_end,
           float* y, int y_stride, const Activations& out) {
  for (int row = row_begin; row < row_end; ++row) {
    const size_t from = static_cast<size_t>(row) * static_cast<size_t>(stride);
    for (int i = 0; i < size; i += 32) {
      const F32x16 a = glu(activation, load(gate + from + i), load(up + from + i));
      const F32x16 b = glu(activation, load(gate + from + i + 16), load(up + from + i + 16));
      store_unit(a, b, i / 32, row, y, y_stride, out);
    }
  }
}

void gate_up(Activation activation, const Matrix& gate, const Matrix& up, const Activations& in, int rows,
             int unit_begin, int unit_end, float* y, int y_stride, const Activations& out) {
  if (const int chunk = wide_chunk(gate, in, rows); chunk != 0)
    return gate_up_wide(activation, gate, up, in, rows, chunk, unit_begin, unit_end, y, y_stride, out);
  with_format(gate, [&]<class Gate>() {
    // Different kinds for gate and up would multiply the number of instantiations; the lowering keeps such a pair apart.
    gate_up_of<Gate, Gate>(activation, gate, up, in, rows, unit_begin, unit_end, y, y_stride, out);
  });
}

}  // namespace
}  // namespace paceline::PL_ISA
