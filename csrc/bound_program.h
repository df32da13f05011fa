// A Program as Python sees it: arrays are checked and kept alive, names become kinds.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "program/program.h"

namespace nb = nanobind;

namespace paceline {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline const Kernels& require_kernels(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  if (kernels == nullptr) throw std::invalid_argument("this processor does not run the instruction set '" + isa + "'");
  return *kernels;
}

inline WeightKind weight_kind(const std::string& name) {
  if (name == "u4") return WeightKind::u4;
  if (name == "e2m1") return WeightKind::e2m1;
  if (name == "i8") return WeightKind::i8;
  if (name == "i8c") return WeightKind::i8c;
  if (name == "bf16") return WeightKind::bf16;
  if (name == "f16") return WeightKind::f16;
  if (name == "f32") return WeightKind::f32;
  throw std::invalid_argument("unknown packed kind '" + name + "'");
}

inline WeightOffset weight_offset(const std::string& name) {
  if (name == "none") return WeightOffset::none;
  if (name == "min") return WeightOffset::min;
  if (name == "zero") return WeightOffset::zero;
  throw std::invalid_argument("unknown offset '" + name + "'");
}

inline constexpr const char* kKVKindNames[] = {"f16", "bf16", "f32", "int8"};  // in the order of KVKind

inline KVKind kv_kind_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kKVKindNames); ++i)
    if (name == kKVKindNames[i]) return static_cast<KVKind>(i);
  throw std::invalid_argument("unknown KV format '" + name + "'");
}

inline Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "swiglu_oai") return Activation::swiglu_oai;
  throw std::invalid_argument("unknown activation '" + name + "'");
}

// A Program with what one step needs to cross the language border: references to the weights' arrays and the sampler's results.
struct BoundProgram {
  Program program;
  std::vector<nb::object> owners;  // of weights, and the program whose pages this one uses
  std::vector<SampleOut> sampled;
  StepInputs step{};

  BoundProgram(const std::string& isa, int num_threads, const ProgramShape& shape, const nb::object& pages_of)
      : program(require_kernels(isa), num_threads, shape, pages_in(pages_of, shape)),
        sampled(static_cast<size_t>(shape.max_outputs)) {
    if (!pages_of.is_none()) owners.push_back(pages_of);
  }

  // The pool of another program, or null for None.
  static uint8_t* pages_in(const nb::object& pages_of, const ProgramShape& shape) {
    if (pages_of.is_none()) return nullptr;
    const Program& other = nb::cast<BoundProgram&>(pages_of).program;
    const AttentionShape &mine = shape.attention, &theirs = other.shape().attention;
    if (mine.num_layers != theirs.num_layers || mine.num_kv_heads != theirs.num_kv_heads ||
        mine.head_dim != theirs.head_dim || mine.kind != theirs.kind || shape.num_pages != other.shape().num_pages)
      throw std::invalid_argument("pages_of: its pages have another shape");
    return other.kv();
  }

  int add_matrix(nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, const std::string& kind,
                 int group, const std::string& offset, int num_outputs, int num_inputs, size_t tile_bytes,
                 int num_groups, const std::optional<Array<int32_t>>& order) {
    const int tiles = (num_outputs + kTile - 1) / kTile;
    if (data.size() < static_cast<size_t>(tiles) * tile_bytes)
      throw std::invalid_argument("packed matrix is shorter than its shape");
    if (order) {
      check_length("order", order->shape(0), static_cast<size_t>(num_inputs));
      owners.push_back(nb::cast(*order));
    }
    owners.push_back(nb::cast(data));
    return program.add_matrix({data.data(), weight_kind(kind), group, weight_offset(offset), num_outputs, num_inputs,
                               tiles, num_groups, tile_bytes, order ? order->data() : nullptr});
  }

  void set_step(const Array<int32_t>& tokens, const Array<int32_t>& positions, const Array<int32_t>& row_starts,
                const Table<int32_t>& page_table, const Array<int32_t>& logit_rows, const Table<int32_t>& page_copies,
                const Table<int32_t>& kv_writes, const Array<uint8_t>& sample_rows, const Array<int32_t>& count_tokens,
                const Array<int32_t>& count_values, const Array<int32_t>& bias_tokens, const Array<float>& bias_values,
                const Array<int32_t>& banned_tokens, const Table<uint32_t>& mask_words,
                const OutTable<int32_t>& top_tokens, const OutTable<float>& top_logprobs) {
    const auto count = [](size_t n) { return static_cast<int32_t>(n); };
    const size_t outputs = logit_rows.shape(0);
    StepInputs next{};
    next.num_rows = count(tokens.shape(0));
    next.num_sequences = count(row_starts.shape(0)) - 1;
    next.num_outputs = count(outputs);
    next.tokens = tokens.data();
    next.positions = positions.data();
    next.row_starts = row_starts.data();
    next.page_table = page_table.data();
    next.page_table_stride = count(page_table.shape(1));
    next.logit_rows = logit_rows.data();
    next.page_copies = page_copies.data();
    next.num_page_copies = count(page_copies.shape(0));
    next.kv_writes = kv_writes.data();
    next.num_kv_writes = count(kv_writes.shape(0));
    next.sample_rows = reinterpret_cast<const SampleRow*>(sample_rows.data());
    next.sample_lists = lists_of(count_tokens, count_values, bias_tokens, bias_values, banned_tokens, mask_words);
    next.sampled = sampled.data();
    check_length("positions", positions.shape(0), tokens.shape(0));
    check_length("sample_rows bytes", sample_rows.shape(0), outputs * sizeof(SampleRow));
    check_length("columns of page_copies", page_copies.shape(1), 2);
    check_length("columns of kv_writes", kv_writes.shape(1), 2);
    check_length("top_tokens rows", top_tokens.shape(0), outputs);
    check_length("top_logprobs rows", top_logprobs.shape(0), outputs);
    check_length("top_logprobs columns", top_logprobs.shape(1), top_tokens.shape(1));
    if (row_starts.shape(0) < 2) throw std::invalid_argument("step: row_starts has a length below 2");
    check_length("page_table rows", page_table.shape(0), row_starts.shape(0) - 1);
    check_ids(next);
    const size_t k = top_tokens.shape(1);
    for (size_t i = 0; i < outputs; ++i)
      if (next.sample_rows[i].num_logprobs > static_cast<int32_t>(k))
        throw std::invalid_argument("no room for the logprobs asked for");
    step = next;  // nothing is refused any more: until here the step before stays as it was
    for (size_t i = 0; i < outputs; ++i) {
      sampled[i].top_tokens = k > 0 ? top_tokens.data() + i * k : nullptr;
      sampled[i].top_logprobs = k > 0 ? top_logprobs.data() + i * k : nullptr;
    }
  }

  SampleLists lists_of(const Array<int32_t>& count_tokens, const Array<int32_t>& count_values,
                       const Array<int32_t>& bias_tokens, const Array<float>& bias_values,
                       const Array<int32_t>& banned_tokens, const Table<uint32_t>& mask_words) const {
    check_length("count_values", count_values.shape(0), count_tokens.shape(0));
    check_length("bias_values", bias_values.shape(0), bias_tokens.shape(0));
    if (mask_words.shape(0) > 0)
      check_length("words of a mask", mask_words.shape(1), mask_words_of(program.shape().num_logits));
    return {count_tokens.data(),
            count_values.data(),
            bias_tokens.data(),
            bias_values.data(),
            banned_tokens.data(),
            mask_words.data(),
            static_cast<int32_t>(count_tokens.shape(0)),
            static_cast<int32_t>(bias_tokens.shape(0)),
            static_cast<int32_t>(banned_tokens.shape(0)),
            static_cast<int32_t>(mask_words.shape(0))};
  }

  static void check_length(const char* what, size_t length, size_t expected) {
    if (length != expected)
      throw std::invalid_argument(std::string("step: ") + what + " has length " + std::to_string(length) +
                                  ", expected " + std::to_string(expected));
  }

  // Ids that would make a kernel read or write outside its memory; everything else is only a wrong answer.
  void check_ids(const StepInputs& next) const {
    const ProgramShape& shape = program.shape();
    const auto fail = [](const char* what) { throw std::invalid_argument(std::string("step: ") + what); };
    if (next.num_rows < 1 || next.num_rows > shape.max_rows) fail("number of rows");
    if (next.num_outputs > shape.max_outputs) fail("number of outputs");
    if (next.row_starts[0] != 0 || next.row_starts[next.num_sequences] != next.num_rows) fail("rows of the sequences");
    for (int s = 0; s < next.num_sequences; ++s)
      if (next.row_starts[s] > next.row_starts[s + 1] || next.row_starts[s + 1] > next.num_rows)
        fail("rows of a sequence");
    for (int s = 0; s < next.num_sequences; ++s) {
      const int begin = next.row_starts[s], end = next.row_starts[s + 1];
      for (int row = begin; row < end; ++row) {
        if (next.tokens[row] < 0 || next.tokens[row] >= shape.vocab_size) fail("token outside the vocabulary");
        if (next.positions[row] < 0 || next.positions[row] >= shape.context_length)
          fail("position outside the context");
        if (row > begin && next.positions[row] != next.positions[row - 1] + 1)
          fail("positions of a sequence are consecutive");
      }
      if (begin == end) continue;
      const int pages = next.positions[end - 1] / kPageTokens + 1;
      if (pages > next.page_table_stride) fail("page table too short");
      for (int j = 0; j < pages; ++j) {
        const int32_t page = next.page_table[s * next.page_table_stride + j];
        if (page < 0 || page >= shape.num_pages) fail("page outside the pool");
      }
    }
    for (int i = 0; i < next.num_outputs; ++i)
      if (next.logit_rows[i] < 0 || next.logit_rows[i] >= next.num_rows) fail("logit row outside the step");
    for (int i = 0; i < 2 * next.num_page_copies; ++i)
      if (next.page_copies[i] < 0 || next.page_copies[i] >= shape.num_pages) fail("page copy outside the pool");
    for (int i = 0; i < next.num_page_copies; ++i)
      if (next.page_copies[2 * i] == next.page_copies[2 * i + 1]) fail("page copy onto itself");
    for (int i = 0; i < next.num_kv_writes; ++i) {
      const int32_t row = next.kv_writes[2 * i], sequence = next.kv_writes[2 * i + 1];
      if (row < 0 || row >= next.num_rows) fail("row of a KV write outside the step");
      if (sequence < 0 || sequence >= next.num_sequences) fail("sequence of a KV write outside the step");
      // All tables are as wide as that of the row's own sequence, which has the position.
      const int32_t page = next.page_table[sequence * next.page_table_stride + next.positions[row] / kPageTokens];
      if (page < 0 || page >= shape.num_pages) fail("page of a KV write outside the pool");
    }
  }

  // Outputs of the last step that ran, whose logits are in a buffer of outputs.
  void distributions(int logits, const Array<int32_t>& outputs, const Array<uint8_t>& sample_rows,
                     const Array<int32_t>& count_tokens, const Array<int32_t>& count_values,
                     const Array<int32_t>& bias_tokens, const Array<float>& bias_values,
                     const Array<int32_t>& banned_tokens, const Table<uint32_t>& mask_words, const OutTable<double>& p,
                     const OutArray<uint32_t>& status) {
    const size_t count = outputs.shape(0);
    const OutputSamples samples{
        reinterpret_cast<const SampleRow*>(sample_rows.data()),
        lists_of(count_tokens, count_values, bias_tokens, bias_values, banned_tokens, mask_words)};
    check_length("sample_rows bytes", sample_rows.shape(0), static_cast<size_t>(step.num_outputs) * sizeof(SampleRow));
    check_length("rows of p", p.shape(0), count);
    check_length("columns of p", p.shape(1), static_cast<size_t>(program.shape().num_logits));
    check_length("status", status.shape(0), count);
    for (size_t i = 0; i < count; ++i)
      if (outputs.data()[i] < 0 || outputs.data()[i] >= step.num_outputs)
        throw std::invalid_argument("step: there is no output " + std::to_string(outputs.data()[i]));
    nb::gil_scoped_release release;
    program.distributions(logits, samples, outputs.data(), static_cast<int>(count), p.data(), status.data());
  }

  // Of the layers that share most: those with a window see fewer splits.
  int shared_splits() const {
    int most = 0;
    for (int i = 0; i < program.num_attention_plans(); ++i)
      most = std::max(most, program.attention_plan(i).shared_splits());
    return most;
  }

  void results(const OutArray<int32_t>& tokens, const OutArray<uint32_t>& status,
               const OutArray<float>& logprobs) const {
    const size_t outputs = static_cast<size_t>(step.num_outputs);
    if (tokens.size() < outputs || status.size() < outputs || logprobs.size() < outputs)
      throw std::invalid_argument("results: arrays have a length below the outputs of the step");
    for (size_t i = 0; i < outputs; ++i) {
      tokens.data()[i] = sampled[i].token;
      status.data()[i] = sampled[i].status;
      logprobs.data()[i] = sampled[i].logprob;
    }
  }
};

}  // namespace paceline
