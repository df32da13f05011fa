// sample_row: see sample.h for the contract. Included once per instruction set, after simd/vec.h.

#include "kernels/sample.h"

#include "kernels/sample_select-inl.h"

#include "kernels/sample_draw-inl.h"

namespace paceline::PL_ISA {
namespace {

inline bool list_fits(const int32_t* tokens, int start, int len, int available, int vocab) {
  if (start < 0 || len < 0 || start > available || len > available - start) return false;
  for (int i = start; i < start + len; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab) return false;
  }
  return true;
}

inline bool has_lists(const SampleRow& row) {
  return row.counts_len != 0 || row.bias_len != 0 || row.banned_len != 0 || row.mask >= 0;
}

inline bool lists_fit(const SampleRow& row, const SampleLists& lists, int vocab) {
  return list_fits(lists.count_tokens, row.counts_start, row.counts_len, lists.num_counts, vocab) &&
         list_fits(lists.bias_tokens, row.bias_start, row.bias_len, lists.num_biases, vocab) &&
         list_fits(lists.banned_tokens, row.banned_start, row.banned_len, lists.num_banned, vocab) &&
         row.mask < lists.num_masks;
}

// z of tokens whose bit is 0 becomes -inf. A word is 32 tokens: few of them hold both kinds.
inline void apply_mask(float* z, int vocab, const uint32_t* words) {
  for (int begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = *words++;
    if (word == ~0u) continue;
    const int count = vocab - begin < 32 ? vocab - begin : 32;
    for (int j = 0; j < count; ++j) z[begin + j] = (word >> j) & 1u ? z[begin + j] : kMinusInfinity;
  }
}

inline void apply_lists(float* z, int vocab, const SampleRow& row, const SampleLists& lists) {
  for (int i = row.bias_start; i < row.bias_start + row.bias_len; ++i) z[lists.bias_tokens[i]] += lists.bias_values[i];
  for (int i = row.banned_start; i < row.banned_start + row.banned_len; ++i) z[lists.banned_tokens[i]] = kMinusInfinity;
  if (row.mask >= 0) apply_mask(z, vocab, lists.mask_words + static_cast<size_t>(row.mask) * mask_words_of(vocab));
  for (int i = row.counts_start; i < row.counts_start + row.counts_len; ++i) {
    const int count = lists.count_values[i];
    float v = z[lists.count_tokens[i]];
    v = v > 0.0f ? v / row.repetition_penalty : v * row.repetition_penalty;
    v -= row.frequency_penalty * static_cast<float>(count);
    if (count > 0) v -= row.presence_penalty;
    z[lists.count_tokens[i]] = v;
  }
}

// Log-probability of `token` and the alternatives, of the logits x as given. `peak` is the largest of x.
inline void report(const float* x, int n, float peak, const SampleRow& row, SampleOut& out, float* block_max,
                   Candidates& space) {
  const double largest = static_cast<double>(peak);
  const double log_total = log_scalar(static_cast<double>(sum_exp(x, n, peak)));
  const auto logprob = [&](float v) { return static_cast<float>(static_cast<double>(v) - largest - log_total); };
  out.logprob = logprob(x[out.token]);
  if (row.num_logprobs == 0) return;
  const int k = row.num_logprobs < n ? row.num_logprobs : n;
  find_block_maxima(x, n, block_max);
  const Boundary at = find_top(x, n, block_max, k, space);
  collect(x, n, block_max, at, space);
  sort_few(space);
  for (int i = 0; i < k; ++i) {
    out.top_tokens[i] = space.id[i];
    out.top_logprobs[i] = logprob(space.z[i]);
  }
  out.num_top = k;
}

// Where z, the maxima of its blocks and candidates lie in the scratch.
struct SampleSpace {
  float* z;
  float* block_max;
  Candidates candidates;
};

inline SampleSpace space_in(float* scratch, int vocab) {
  const int padded = num_blocks(vocab) * kBlock;
  float* block_max = scratch + padded;
  float* candidates = block_max + (num_blocks(vocab) + 15) / 16 * 16;
  return {
      scratch, block_max, {candidates, reinterpret_cast<int32_t*>(candidates + padded), candidates + 2 * padded, 0}};
}

// The logits after bias, bans, mask and penalties: in space.z where there are any.
inline const float* listed_logits(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists,
                                  SampleSpace& space) {
  if (!has_lists(row)) return logits;
  __builtin_memcpy(space.z, logits, sizeof(float) * static_cast<size_t>(vocab));
  apply_lists(space.z, vocab, row, lists);
  return space.z;
}

// The token of temperature 0, or -1 when none is left.
inline int32_t likeliest(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists,
                         SampleSpace& space) {
  const Peak best = find_peak(listed_logits(logits, vocab, row, lists, space), vocab);
  return best.value - best.value == 0.0f ? best.id : -1;
}

// What a draw at a temperature above 0 chooses from; leaves z and the maxima of its blocks in the space.
inline Kept find_kept(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists,
                      SampleSpace& space) {
  const float* source = listed_logits(logits, vocab, row, lists, space);
  Kept kept{kNoBoundary, divide(source, vocab, row.temperature, space.z, space.block_max), kMinusInfinity};
  if (!kept.any()) return kept;
  kept.at = find_filters(space.z, vocab, space.block_max, kept.largest, row, space.candidates);
  if (row.min_p > 0.0f) kept.least = static_cast<float>(log_scalar(static_cast<double>(row.min_p)));
  return kept;
}

void sample_row(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists, SampleOut& out,
                float* scratch) {
  out.token = -1;
  out.logprob = kNaN;
  out.num_top = 0;
  const bool forced = row.forced >= 0;
  if (row.forced >= vocab || (!forced && has_lists(row) && !lists_fit(row, lists, vocab))) {
    out.status = kSampleBadToken;
    return;
  }
  const Peak peak = find_peak(logits, vocab);
  if (!peak.finite) {
    out.status = kSampleNotFinite;
    return;
  }
  SampleSpace space = space_in(scratch, vocab);
  if (forced) {
    out.token = row.forced;
  } else if (row.temperature == 0.0f) {
    out.token = has_lists(row) ? likeliest(logits, vocab, row, lists, space) : peak.id;
  } else {
    const Kept kept = find_kept(logits, vocab, row, lists, space);
    if (kept.any()) out.token = draw(space.z, vocab, space.block_max, kept, row);
  }
  if (out.token < 0) {
    out.status = kSampleNothingLeft;
    return;
  }
  out.status = kSampleOk;
  if (row.num_logprobs >= 0) report(logits, vocab, peak.value, row, out, space.block_max, space.candidates);
}

}  // namespace
}  // namespace paceline::PL_ISA
