#include "kernels/table.h"

#include <algorithm>

#include "base/cpu_features.h"

namespace paceline {

size_t attention_scratch_floats(const AttentionShape& shape) {
  const size_t rows = static_cast<size_t>(shape.group() > kQueryRows ? shape.group() : kQueryRows);
  const size_t d = static_cast<size_t>(shape.head_dim);
  const size_t unit = rows * (d + kSplitTokens + 2 * (d + 16));
  // A page as floats, or rows as 16-bit integers with two scales: what the formats of attention_products-inl.h need.
  return unit + std::max(kPageTokens * d, rows * (2 + (d + kSplitTokens) / 2));
}

const Kernels* kernels_for(std::string_view isa) {
#if defined(__x86_64__)
  const CpuFeatures cpu = detect_cpu();
#ifdef PL_EMULATE  // by name only: never the best choice
  if (isa == "avx512_vnni" && cpu.avx2) return kernels_avx512_vnni();
  if (isa == "avx2_vnni" && cpu.avx2) return kernels_avx2_vnni();
#endif
  if ((isa.empty() || isa == "avx512_vnni") && cpu.avx512_vnni) return kernels_avx512_vnni();
  if ((isa.empty() || isa == "avx2_vnni") && cpu.avx_vnni) return kernels_avx2_vnni();
  if ((isa.empty() || isa == "avx2") && cpu.avx2) return kernels_avx2();
#endif
  if (isa.empty() || isa == "scalar") return kernels_scalar();
  return nullptr;
}

}  // namespace paceline
