// distribution_row: see sample.h for the contract. Included once per instruction set, after sample-inl.h.
//
// Weights exp(z - largest) are float32, as the filters' are; they are summed and divided in float64. With u = 2^-24, the difference is
// rounded by u |z - largest| of the weight and the exponential by 2 ulp, at most 4u; below -87.3 it is 0. So a weight is off by
// e = (|z - largest| + 4) u of itself, p by e and the mean of e under p, and a p below 2^-125 may be 0. The sum in float64 adds less than
// vocab 2^-53, which is below u.

namespace paceline::PL_ISA {
namespace {

SampleStatus distribution_row(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists, double* p,
                              float* scratch) {
  __builtin_memset(p, 0, sizeof(double) * static_cast<size_t>(vocab));
  if (has_lists(row) && !lists_fit(row, lists, vocab)) return kSampleBadToken;
  if (!find_peak(logits, vocab).finite) return kSampleNotFinite;
  SampleSpace space = space_in(scratch, vocab);
  if (row.temperature == 0.0f) {
    const int32_t token = likeliest(logits, vocab, row, lists, space);
    if (token < 0) return kSampleNothingLeft;
    p[token] = 1.0;
    return kSampleOk;
  }
  const Kept kept = find_kept(logits, vocab, row, lists, space);
  if (!kept.any()) return kSampleNothingLeft;
  // One sum a lane: the order of additions is that of the lanes on every instruction set.
  double sums[16] = {};
  for (int b = 0; b < num_blocks(vocab); ++b) {
    if (!kept.reaches(space.block_max[b])) continue;
    for (int i = b * kBlock; i < (b + 1) * kBlock && i < vocab; i += 16) {
      const F32x16 v = load(space.z + i);
      const I32x16 ids = iota() + set1(static_cast<int32_t>(i));
      float weights[16];
      store(weights, kept.choose(v, ids, exp(v - set1(kept.largest)), zero_f32()));
      const int count = vocab - i < 16 ? vocab - i : 16;
      for (int j = 0; j < count; ++j) {
        p[i + j] = static_cast<double>(weights[j]);
        sums[j] += static_cast<double>(weights[j]);
      }
    }
  }
  double total = 0.0;
  for (double sum : sums) total += sum;
  for (int b = 0; b < num_blocks(vocab); ++b) {
    if (!kept.reaches(space.block_max[b])) continue;
    const int end = (b + 1) * kBlock < vocab ? (b + 1) * kBlock : vocab;
    for (int i = b * kBlock; i < end; ++i) p[i] /= total;
  }
  return kSampleOk;
}

}  // namespace
}  // namespace paceline::PL_ISA
