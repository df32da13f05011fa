// Counts that are int, for pointers and sizes. Not for code that is compiled for an instruction set: it has external linkage.
#pragma once

#include <cstddef>

namespace paceline {

inline size_t as_size(int n) { return static_cast<size_t>(n); }

}  // namespace paceline
