// Choosing the token of one output: from logits to token, log-probability and the most likely alternatives.
//
// The definition is src/paceline/sampling/{distribution,draw}.py; this header mirrors the records of sampling/rows.py.
//
// Order: bias, bans, mask, repetition, frequency and presence penalty, temperature, top_k, top_p, min_p; the token is the argmax of z + G over
// what is kept, G Gumbel noise from Philox4x32-10(key = seed, counter = (id / 4, position, 0, 0))[id % 4]. Everything that is reported
// comes from the logits as they were given. Ties go to the lower id.
//
// Cost per token of the vocabulary: greedy reads 4 bytes and takes about 2 operations; the log-probability reads 4 more and takes an
// exponential; temperature writes 4 bytes and, for blocks of 64 that hold a token that can win, a quarter of a Philox block and two
// logarithms. Filters never sort the vocabulary: maxima of blocks bound what can be kept, and bins over the logits find the boundary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

struct SampleRow {
  uint64_t seed;
  uint32_t position;
  float temperature;  // 0 = argmax
  float top_p;        // 1 = off
  float min_p;        // 0 = off
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t top_k;         // 0 = off
  int32_t num_logprobs;  // alternatives; -1 = not even the token's own
  int32_t forced;        // token taken whatever the logits say; -1 = none
  int32_t counts_start, counts_len;
  int32_t bias_start, bias_len;
  int32_t banned_start, banned_len;
  int32_t mask;  // which of the step's masks says what may be drawn; -1 = anything
};
static_assert(sizeof(SampleRow) == 80 && alignof(SampleRow) == 8);
static_assert(offsetof(SampleRow, position) == 8 && offsetof(SampleRow, top_k) == 36);
static_assert(offsetof(SampleRow, forced) == 44 && offsetof(SampleRow, mask) == 72);

// The flat arrays that a step's rows address by (start, len), and how many entries each holds.
struct SampleLists {
  const int32_t* count_tokens;  // ids in prompt or output, each once a row
  const int32_t* count_values;  // times each is in the output
  const int32_t* bias_tokens;
  const float* bias_values;
  const int32_t* banned_tokens;
  const uint32_t*
      mask_words;  // [masks][mask_words_of(vocab)]; bit id % 32 of word id / 32 is set where a token may be drawn
  int32_t num_counts, num_biases, num_banned, num_masks;
};

static constexpr size_t mask_words_of(int vocab) { return (static_cast<size_t>(vocab) + 31) / 32; }

enum SampleStatus : uint32_t {
  kSampleOk = 0,
  kSampleNotFinite = 1,    // a logit is NaN or infinite
  kSampleNothingLeft = 2,  // every token is banned or masked
  kSampleBadToken =
      3,  // a listed or forced id lies outside the vocabulary, or a list or mask outside the step's arrays
};

// Written by sample_row. The caller points top_tokens and top_logprobs at num_logprobs entries each (null when there are none).
// On any status but kSampleOk: token -1, logprob NaN, num_top 0. Entries from num_top on are not written.
struct SampleOut {
  int32_t token;
  uint32_t status;  // SampleStatus
  float logprob;    // NaN when num_logprobs is -1
  int32_t num_top;  // min(num_logprobs, vocab)
  int32_t* top_tokens;
  float* top_logprobs;  // descending
};

// How the tokens of a step's outputs are chosen.
struct OutputSamples {
  const SampleRow* rows;  // [outputs]
  SampleLists lists;
};

// Floats of scratch for a vocabulary: z, maxima of blocks of 64, and up to `vocab` candidates of (z, id, weight). No alignment needed;
// all of it is written only when a filter keeps nearly everything.
static constexpr size_t sample_scratch_floats(int vocab) {
  const size_t blocks = (static_cast<size_t>(vocab) + 63) / 64;
  return blocks * 64 * 4 + (blocks + 15) / 16 * 16;
}

// In each instruction set's namespace:
//   void sample_row(const float* logits, int vocab, const SampleRow&, const SampleLists&, SampleOut&, float* scratch);
//   SampleStatus distribution_row(const float* logits, int vocab, const SampleRow&, const SampleLists&, double* p, float* scratch);
// vocab >= 1; logits [vocab], no padding read; same bits on every instruction set.
//
// distribution_row writes p [vocab], the distribution that sample_row draws from: its filters, so just the tokens that can be drawn, but
// for one whose weight is exactly 0. One token at temperature 0. A forced token is ignored. On any status but kSampleOk p is all zeros.

}  // namespace paceline
