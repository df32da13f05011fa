// `paceline._native.sample`: the sampling kernel of one instruction set over rows of logits, for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/sample.h"
#include "kernels/table.h"

namespace nb = nanobind;

namespace paceline {
namespace {

template <typename T, size_t Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

void check(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

// rows is the SAMPLE_ROW array [R] viewed as bytes; outputs [R] or [R, k] are written, unused alternatives as -1 and NaN.
void sample(const std::string& isa, Array<const float, 2> logits, Array<const uint8_t, 1> rows,
            Array<const int32_t, 1> count_tokens, Array<const int32_t, 1> count_values,
            Array<const int32_t, 1> bias_tokens, Array<const float, 1> bias_values,
            Array<const int32_t, 1> banned_tokens, Array<const uint32_t, 2> mask_words, Array<int32_t, 1> tokens,
            Array<float, 1> logprobs, Array<int32_t, 2> top_tokens, Array<float, 2> top_logprobs,
            Array<uint32_t, 1> status) {
  const Kernels* kernels = kernels_for(isa);
  check(kernels != nullptr, "this instruction set is unknown or does not run here");
  const size_t count = logits.shape(0), vocab = logits.shape(1), width = top_tokens.shape(1);
  check(vocab >= 1 && vocab < static_cast<size_t>(std::numeric_limits<int32_t>::max()), "logits must be [rows, vocab]");
  check(rows.shape(0) == count * sizeof(SampleRow), "rows must hold one SAMPLE_ROW for each row of logits");
  check(tokens.shape(0) == count && logprobs.shape(0) == count && status.shape(0) == count, "one output for each row");
  check(top_tokens.shape(0) == count && top_logprobs.shape(0) == count && top_logprobs.shape(1) == width,
        "alternatives [rows, k]");
  check(count_values.shape(0) == count_tokens.shape(0) && bias_values.shape(0) == bias_tokens.shape(0),
        "lists of equal length");
  check(mask_words.shape(0) == 0 || mask_words.shape(1) == mask_words_of(static_cast<int>(vocab)),
        "a mask has one bit for each token");
  const SampleLists lists{count_tokens.data(),
                          count_values.data(),
                          bias_tokens.data(),
                          bias_values.data(),
                          banned_tokens.data(),
                          mask_words.data(),
                          static_cast<int32_t>(count_tokens.shape(0)),
                          static_cast<int32_t>(bias_tokens.shape(0)),
                          static_cast<int32_t>(banned_tokens.shape(0)),
                          static_cast<int32_t>(mask_words.shape(0))};
  std::vector<SampleRow> records(count);
  if (count > 0) std::memcpy(records.data(), rows.data(), count * sizeof(SampleRow));
  for (const SampleRow& row : records) {
    check(row.num_logprobs <= static_cast<int64_t>(width), "top_tokens is narrower than num_logprobs");
  }
  nb::gil_scoped_release release;
  const auto scratch = std::make_unique_for_overwrite<float[]>(sample_scratch_floats(static_cast<int>(vocab)));
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < width; ++j) {
      top_tokens.data()[i * width + j] = -1;
      top_logprobs.data()[i * width + j] = std::numeric_limits<float>::quiet_NaN();
    }
    SampleOut out{};
    out.top_tokens = top_tokens.data() + i * width;
    out.top_logprobs = top_logprobs.data() + i * width;
    kernels->sample_row(logits.data() + i * vocab, static_cast<int>(vocab), records[i], lists, out, scratch.get());
    tokens.data()[i] = out.token;
    logprobs.data()[i] = out.logprob;
    status.data()[i] = out.status;
  }
}

// Name -> offset of each field of SampleRow, and "size", to be compared with SAMPLE_ROW.
nb::dict sample_row_layout() {
  nb::dict layout;
#define FIELD(name) layout[#name] = offsetof(SampleRow, name)
  FIELD(seed);
  FIELD(position);
  FIELD(temperature);
  FIELD(top_p);
  FIELD(min_p);
  FIELD(repetition_penalty);
  FIELD(presence_penalty);
  FIELD(frequency_penalty);
  FIELD(top_k);
  FIELD(num_logprobs);
  FIELD(forced);
  FIELD(counts_start);
  FIELD(counts_len);
  FIELD(bias_start);
  FIELD(bias_len);
  FIELD(banned_start);
  FIELD(banned_len);
  FIELD(mask);
#undef FIELD
  layout["size"] = sizeof(SampleRow);
  return layout;
}

}  // namespace

void bind_sample(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "sample", &sample, "isa"_a, "logits"_a, "rows"_a, "count_tokens"_a, "count_values"_a, "bias_tokens"_a,
      "bias_values"_a, "banned_tokens"_a, "mask_words"_a, "tokens"_a, "logprobs"_a, "top_tokens"_a, "top_logprobs"_a,
      "status"_a,
      "Chooses a token for each row of logits with the kernel of instruction set `isa`; writes the last five arrays.");
  m.def("sample_row_layout", &sample_row_layout, "Offsets of the fields of a sampling record, and its size.");
}

}  // namespace paceline
