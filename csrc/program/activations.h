// Where the arrays of Activations lie in memory, and some of their rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"

namespace paceline {

template <class T>
T* take_aligned(uint8_t*& at, size_t bytes) {
  at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64;
  T* p = reinterpret_cast<T*>(at);
  at += bytes;
  return p;
}

// Bytes of one row's int8 form: q, scale, sum, total, half sums.
inline size_t activation_row_bytes(int q_stride) {
  return static_cast<size_t>(q_stride) + static_cast<size_t>(q_stride / kActGroup) * (4 + 4 + 4 + 8);
}
// Bytes of that many rows, each array on a cache line wherever the memory begins.
inline size_t activation_bytes(int rows, int q_stride) {
  return static_cast<size_t>(rows) * activation_row_bytes(q_stride) + 6 * 64;
}

// The int8 form of so many rows in `activation_bytes` bytes at `at`.
inline Activations activations_at(uint8_t* at, int rows, int q_stride) {
  const size_t groups = static_cast<size_t>(rows) * static_cast<size_t>(q_stride / kActGroup);
  Activations v{};
  v.q_stride = q_stride;
  v.q = take_aligned<int8_t>(at, static_cast<size_t>(rows) * static_cast<size_t>(q_stride));
  v.scale = take_aligned<float>(at, groups * 4);
  v.sum = take_aligned<float>(at, groups * 4);
  v.total = take_aligned<float>(at, groups * 4);
  v.half_sum = take_aligned<int32_t>(at, groups * 8);
  return v;
}

// Rows from `row` on, of which group `group` is the first: only for writing, or where all of a row's groups are read.
inline Activations activations_from(Activations v, int row, int group = 0) {
  const ptrdiff_t at = static_cast<ptrdiff_t>(row) * (v.q_stride / kActGroup) + group;
  if (v.q != nullptr) {
    v.q += static_cast<ptrdiff_t>(row) * v.q_stride + group * kActGroup;
    v.scale += at;
    v.sum += at;
    v.total += at;
    v.half_sum += 2 * at;
  }
  if (v.x != nullptr) v.x += static_cast<ptrdiff_t>(row) * v.x_stride + group * kActGroup;
  return v;
}

// `to` row i = `from` row rows[i], in whatever forms `from` has.
void gather_rows(const Activations& from, const int32_t* rows, int count, const Activations& to, float* to_x);

}  // namespace paceline
