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

inline void apply_lists(float* z, const SampleRow& row, const SampleLists& lists) {
  for (int i = row.bias_start; i < row.bias_start + row.bias_len; ++i) z[lists.bias_tokens[i]] += lists.bias_values[i];
  for (int i = row.banned_start; i < row.banned_start + row.banned_len; ++i) z[lists.banned_tokens[i]] = kMinusInfinity;
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

void sample_row(const float* logits, int vocab, const SampleRow& row, const SampleLists& lists, SampleOut& out,
                float* scratch) {
  out.token = -1;
  out.logprob = kNaN;
  out.num_top = 0;
  const bool forced = row.forced >= 0;
  const bool listed = !forced && (row.counts_len != 0 || row.bias_len != 0 || row.banned_len != 0);
  if (row.forced >= vocab ||
      (listed && !(list_fits(lists.count_tokens, row.counts_start, row.counts_len, lists.num_counts, vocab) &&
                   list_fits(lists.bias_tokens, row.bias_start, row.bias_len, lists.num_biases, vocab) &&
                   list_fits(lists.banned_tokens, row.banned_start, row.banned_len, lists.num_banned, vocab)))) {
    out.status = kSampleBadToken;
    return;
  }
  const Peak peak = find_peak(logits, vocab);
  if (!peak.finite) {
    out.status = kSampleNotFinite;
    return;
  }
  const int padded = num_blocks(vocab) * kBlock;
  float* z = scratch;
  float* block_max = z + padded;
  float* candidates = block_max + (num_blocks(vocab) + 15) / 16 * 16;
  Candidates space{candidates, reinterpret_cast<int32_t*>(candidates + padded), candidates + 2 * padded, 0};

  if (forced) {
    out.token = row.forced;
  } else if (!listed && row.temperature == 0.0f) {
    out.token = peak.id;
  } else {
    const float* source = logits;
    if (listed) {
      __builtin_memcpy(z, logits, sizeof(float) * static_cast<size_t>(vocab));
      apply_lists(z, row, lists);
      source = z;
    }
    if (row.temperature == 0.0f) {
      const Peak best = find_peak(z, vocab);
      if (best.value - best.value == 0.0f) out.token = best.id;
    } else {
      const float largest = divide(source, vocab, row.temperature, z, block_max);
      if (largest - largest == 0.0f) {
        const Boundary at = find_filters(z, vocab, block_max, largest, row, space);
        const float least =
            row.min_p > 0.0f ? static_cast<float>(log_scalar(static_cast<double>(row.min_p))) : kMinusInfinity;
        out.token = draw(z, vocab, block_max, at, largest, least, row);
      }
    }
    if (out.token < 0) {
      out.status = kSampleNothingLeft;
      return;
    }
  }
  out.status = kSampleOk;
  if (row.num_logprobs >= 0) report(logits, vocab, peak.value, row, out, block_max, space);
}

}  // namespace
}  // namespace paceline::PL_ISA
