// How fast this processor multiplies int8 on registers: the u4 product of one cached tile with kRows rows, nothing else.

namespace paceline::PL_ISA {
namespace {

[[gnu::flatten]] double int8_peak(int64_t iterations) {
  alignas(64) uint8_t weights[256];
  alignas(64) int8_t acts[kRows * kActGroup];
  for (int i = 0; i < 256; ++i) weights[i] = static_cast<uint8_t>(i);
  for (int i = 0; i < kRows * kActGroup; ++i) acts[i] = static_cast<int8_t>(i % 127);
  I32x16 total[kRows];
  unroll<kRows>([&](auto m) PL_INLINE { total[m] = set1(0); });
  for (int64_t n = 0; n < iterations; ++n) {
    I32x16 dot[kRows];
    // The compiler must not hoist the product out of the loop.
    __asm__ volatile("" : : "r"(weights), "r"(acts) : "memory");
    dot_four<false>(weights, acts, kActGroup, dot);
    unroll<kRows>([&](auto m) PL_INLINE { total[m] = total[m] + dot[m]; });
  }
  int32_t sink = 0;
  unroll<kRows>([&](auto m) PL_INLINE { sink += reduce_add(total[m]); });
  __asm__ volatile("" : : "r"(sink));
  return 2.0 * static_cast<double>(iterations) * kRows * kActGroup * kTile;
}

}  // namespace
}  // namespace paceline::PL_ISA
