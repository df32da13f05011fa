// The Python module paceline._native: the program and its step, hardware probes, and the bindings of packing and sampling.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "program/hardware_probe.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_pack(nb::module_& m);
void bind_sample(nb::module_& m);

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutArray = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using OutTable = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const Kernels& require_kernels(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  if (kernels == nullptr) throw std::invalid_argument("this processor does not run the instruction set '" + isa + "'");
  return *kernels;
}

WeightKind weight_kind(const std::string& name) {
  if (name == "u4") return WeightKind::u4;
  if (name == "e2m1") return WeightKind::e2m1;
  if (name == "i8") return WeightKind::i8;
  if (name == "i8c") return WeightKind::i8c;
  if (name == "bf16") return WeightKind::bf16;
  if (name == "f16") return WeightKind::f16;
  if (name == "f32") return WeightKind::f32;
  throw std::invalid_argument("unknown packed kind '" + name + "'");
}

WeightOffset weight_offset(const std::string& name) {
  if (name == "none") return WeightOffset::none;
  if (name == "min") return WeightOffset::min;
  if (name == "zero") return WeightOffset::zero;
  throw std::invalid_argument("unknown offset '" + name + "'");
}

constexpr const char* kKVKindNames[] = {"f16", "bf16", "f32", "int8"};  // in the order of KVKind

KVKind kv_kind_of(const std::string& name) {
  for (size_t i = 0; i < std::size(kKVKindNames); ++i)
    if (name == kKVKindNames[i]) return static_cast<KVKind>(i);
  throw std::invalid_argument("unknown KV format '" + name + "'");
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

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "swiglu_oai") return Activation::swiglu_oai;
  throw std::invalid_argument("unknown activation '" + name + "'");
}

nb::list attention_units(const AttentionPlan& plan) {
  constexpr const char* kResults[] = {"rows", "folded", "splits"};
  nb::list units;
  for (const AttentionUnit& u : plan.units()) {
    nb::list rows;
    for (int i = u.row_begin; i < u.row_end; ++i) rows.append(plan.unit_rows()[i]);
    units.append(nb::make_tuple(rows, u.sequence, u.kv_head, u.head_begin, u.head_end, u.split_begin, u.split_end,
                                kResults[static_cast<size_t>(u.result)]));
  }
  return units;
}

nb::list attention_merges(const AttentionPlan& plan) {
  nb::list merges;
  for (const AttentionMerge& m : plan.merges())
    merges.append(nb::make_tuple(m.row, plan.row_slots()[m.row] + m.splits.begin, m.splits.begin, m.splits.end));
  return merges;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Paceline's native kernels and their executor.";
  bind_pack(m);
  bind_sample(m);

  m.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const char* isa : {"scalar", "avx2", "avx2_vnni", "avx512_vnni"})
          if (kernels_for(isa) != nullptr) names.emplace_back(isa);
        return names;
      },
      "Instruction sets that this processor runs, in rising order of preference.");
  m.def("best_isa", [] { return std::string(kernels_for("")->isa); });
  m.def("measure_bandwidth", &measure_bandwidth, "num_threads"_a, nb::call_guard<nb::gil_scoped_release>(),
        "GB/s at which that many threads read memory, the best of several passes over 256 MB.");
  m.def(
      "measure_int8_peak",
      [](const std::string& isa, int num_threads) {
        const Kernels& kernels = require_kernels(isa);
        nb::gil_scoped_release release;
        return measure_int8_peak(kernels, num_threads);
      },
      "isa"_a, "num_threads"_a, "Int8 GOPS (2 a multiply-add) of the matrix kernel's inner product on registers.");

  nb::class_<BoundProgram>(m, "Program")
      .def(
          "__init__",
          [](BoundProgram* self, const std::string& isa, int num_threads, int max_rows, int max_outputs, int vocab_size,
             int num_pages, int context_length, int num_heads, int num_kv_heads, int head_dim, int num_layers,
             const std::string& kv_kind, const nb::object& pages_of, std::optional<int> num_logits) {
            const AttentionShape attention{num_heads, num_kv_heads, head_dim, num_layers, kv_kind_of(kv_kind)};
            new (self) BoundProgram(isa, num_threads,
                                    {max_rows, max_outputs, vocab_size, num_logits.value_or(vocab_size), num_pages,
                                     context_length, attention},
                                    pages_of);
          },
          "isa"_a, "num_threads"_a, "max_rows"_a, "max_outputs"_a, "vocab_size"_a, "num_pages"_a, "context_length"_a,
          "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "num_layers"_a, "kv_kind"_a, "pages_of"_a.none() = nb::none(),
          "num_logits"_a.none() = nb::none())
      .def("add_matrix", &BoundProgram::add_matrix, "data"_a, "kind"_a, "group"_a, "offset"_a, "num_outputs"_a,
           "num_inputs"_a, "tile_bytes"_a, "num_groups"_a, "order"_a.none() = nb::none())
      .def("add_vector",
           [](BoundProgram& self, const Array<float>& data) {
             return self.program.add_vector(data.data(), static_cast<int>(data.size()));
           })
      .def(
          "add_buffer",
          [](BoundProgram& self, int width, bool outputs, int per_row) {
            return self.program.add_buffer(width, outputs, per_row);
          },
          "width"_a, "outputs"_a = false, "per_row"_a = 1)
      .def(
          "add_activations",
          [](BoundProgram& self, int width, bool outputs, int per_row) {
            return self.program.add_activations(width, outputs, per_row);
          },
          "width"_a, "outputs"_a = false, "per_row"_a = 1)
      .def(
          "add_slots",
          [](BoundProgram& self, int num_experts, int num_chosen) {
            return self.program.add_slots(num_experts, num_chosen);
          },
          "num_experts"_a, "num_chosen"_a)
      .def(
          "add_rope",
          [](BoundProgram& self, std::vector<double> inverse_frequencies, double factor) {
            return self.program.add_rope(std::move(inverse_frequencies), factor);
          },
          "inverse_frequencies"_a, "factor"_a = 1.0)
      .def(
          "add_attention_plan", [](BoundProgram& self, int window) { return self.program.add_attention_plan(window); },
          "window"_a = 0)
      .def(
          "embed", [](BoundProgram& self, int matrix, int to, float scale) { self.program.embed(matrix, scale, to); },
          "matrix"_a, "to"_a, "scale"_a = 1.0f)
      .def("norm", [](BoundProgram& self, int from, int weight, float eps, int size, int to_buffer,
                      int to_activations) { self.program.norm(from, weight, eps, size, to_buffer, to_activations); })
      .def("norm_in_place", [](BoundProgram& self, int buffer, int column, int weight, float eps, int size,
                               bool joined) { self.program.norm_in_place(buffer, column, weight, eps, size, joined); })
      .def("norm_add",
           [](BoundProgram& self, int from, int weight, float eps, int size, int residual, int to, int next_weight,
              float next_eps, int to_buffer, int to_activations) {
             self.program.norm_add(from, weight, eps, size, residual, to, next_weight, next_eps, to_buffer,
                                   to_activations);
           })
      .def(
          "quantise",
          [](BoundProgram& self, int from, int size, int to, bool per_token, std::vector<int32_t> order) {
            self.program.quantise(from, size, to, per_token, std::move(order));
          },
          "from_"_a, "size"_a, "to"_a, "per_token"_a = false, "order"_a = std::vector<int32_t>{})
      .def(
          "linear",
          [](BoundProgram& self, std::vector<int> matrices, std::vector<int> columns, std::vector<int> biases,
             int from_buffer, int from_activations, int to, bool accumulate, float scale, float softcap) {
            self.program.linear(std::move(matrices), std::move(columns), std::move(biases), from_buffer,
                                from_activations, to, accumulate, scale, softcap);
          },
          "matrices"_a, "columns"_a, "biases"_a, "from_buffer"_a, "from_activations"_a, "to"_a, "accumulate"_a,
          "scale"_a = 1.0f, "softcap"_a = 0.0f)
      .def("gate_up",
           [](BoundProgram& self, const std::string& activation, int gate, int up, int from_buffer,
              int from_activations, int to_buffer, int to_activations) {
             self.program.gate_up(activation_of(activation), gate, up, from_buffer, from_activations, to_buffer,
                                  to_activations);
           })
      .def("glu",
           [](BoundProgram& self, const std::string& activation, int from, int up_column, int size, int to_buffer,
              int to_activations) {
             self.program.glu(activation_of(activation), from, up_column, size, to_buffer, to_activations);
           })
      .def("rope_write",
           [](BoundProgram& self, int layer, int buffer, int q_column, int k_column, int v_column, int q_norm,
              int k_norm, float eps, int rope, float query_scale) {
             self.program.rope_write(layer, buffer, q_column, k_column, v_column, q_norm, k_norm, eps, rope,
                                     query_scale);
           })
      .def(
          "attention",
          [](BoundProgram& self, int layer, int buffer, int out, int plan, float softcap, int sinks) {
            self.program.attention(layer, buffer, out, plan, softcap, sinks);
          },
          "layer"_a, "buffer"_a, "out"_a, "plan"_a, "softcap"_a = 0.0f, "sinks"_a = -1)
      .def(
          "route",
          [](BoundProgram& self, int logits, int slots, bool normalise, int to) {
            self.program.route(logits, slots, normalise, to);
          },
          "logits"_a, "slots"_a, "normalise"_a, "to"_a)
      .def(
          "experts_glu",
          [](BoundProgram& self, int gate, int up, int gate_bias, int up_bias, int slots, const std::string& activation,
             int from_buffer, int from_activations, int to_buffer, int to_activations) {
            self.program.experts_glu(gate, up, gate_bias, up_bias, slots, activation_of(activation), from_buffer,
                                     from_activations, to_buffer, to_activations);
          },
          "gate"_a, "up"_a, "gate_bias"_a, "up_bias"_a, "slots"_a, "activation"_a, "from_buffer"_a,
          "from_activations"_a, "to_buffer"_a, "to_activations"_a)
      .def(
          "experts_down",
          [](BoundProgram& self, int down, int bias, int slots, int routing, int from_buffer, int from_activations,
             int to, bool accumulate) {
            self.program.experts_down(down, bias, slots, routing, from_buffer, from_activations, to, accumulate);
          },
          "down"_a, "bias"_a, "slots"_a, "routing"_a, "from_buffer"_a, "from_activations"_a, "to"_a, "accumulate"_a)
      .def("select", [](BoundProgram& self, int from, int to) { self.program.select(from, to); })
      .def("sample", [](BoundProgram& self, int logits) { self.program.sample(logits); })
      .def("set_step", &BoundProgram::set_step)
      .def(
          "run", [](BoundProgram& self) { self.program.run(self.step); }, nb::call_guard<nb::gil_scoped_release>(),
          "Runs the step that set_step described; its arrays must still be alive.")
      .def("begin_step", [](BoundProgram& self) { self.program.begin_step(self.step); })
      .def("run_records", [](BoundProgram& self, int begin, int end) { self.program.run_records(begin, end); })
      .def("results", &BoundProgram::results)
      .def("distributions", &BoundProgram::distributions,
           "The distributions that outputs of the last step are drawn from; the GIL is released.")
      .def_prop_ro("num_records", [](const BoundProgram& self) { return self.program.num_records(); })
      .def("record_name",
           [](const BoundProgram& self, int record) { return std::string(self.program.record_name(record)); })
      .def("buffer_stride", [](const BoundProgram& self, int id) { return self.program.buffer_stride(id); })
      .def(
          "buffer",
          [](BoundProgram& self, int id, int rows) {
            const size_t shape[2] = {static_cast<size_t>(rows), static_cast<size_t>(self.program.buffer_stride(id))};
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(self.program.buffer(id), 2, shape, nb::find(&self));
          },
          nb::rv_policy::reference_internal, "A view [rows, stride] of a buffer, valid while the program lives.")
      .def("dequantised",
           [](const BoundProgram& self, int activations, int rows) {
             const size_t stride = static_cast<size_t>(self.program.activations_stride(activations));
             auto* values = new float[static_cast<size_t>(rows) * stride];
             self.program.dequantised(activations, rows, values);
             nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
             const size_t shape[2] = {static_cast<size_t>(rows), stride};
             return nb::ndarray<nb::numpy, float, nb::ndim<2>>(values, 2, shape, owner);
           })
      .def(
          "kv",
          [](BoundProgram& self) {
            const size_t shape[2] = {static_cast<size_t>(self.program.shape().num_pages),
                                     self.program.shape().attention.page_bytes()};
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(self.program.kv(), 2, shape, nb::find(&self));
          },
          nb::rv_policy::reference_internal, "The KV pool [pages, bytes of a page].")
      .def(
          "attention_units",
          [](const BoundProgram& self, int plan) { return attention_units(self.program.attention_plan(plan)); },
          "plan"_a = 0,
          "Debugging: (rows, sequence, KV head, first head of its group, end head, first split, end split, result) of "
          "the "
          "units of the step.")
      .def(
          "attention_merges",
          [](const BoundProgram& self, int plan) { return attention_merges(self.program.attention_plan(plan)); },
          "plan"_a = 0, "Debugging: (row, first slot, first split, end split) of the rows of the step that are merged.")
      .def_prop_ro("attention_slots",
                   [](const BoundProgram& self) { return self.program.attention_plan(0).num_slots(); })
      .def_prop_ro("shared_splits", &BoundProgram::shared_splits)
      .def_prop_ro("workspace_bytes", [](const BoundProgram& self) { return self.program.workspace_bytes(); })
      .def_prop_ro("num_pages", [](const BoundProgram& self) { return self.program.shape().num_pages; })
      .def_prop_ro("max_rows", [](const BoundProgram& self) { return self.program.shape().max_rows; })
      .def_prop_ro("max_outputs", [](const BoundProgram& self) { return self.program.shape().max_outputs; })
      .def_prop_ro("isa", [](const BoundProgram& self) { return std::string(self.program.kernels().isa); })
      .def_prop_ro("kv_kind",
                   [](const BoundProgram& self) {
                     return std::string(kKVKindNames[static_cast<size_t>(self.program.shape().attention.kind)]);
                   })
      .def_prop_ro("num_threads", [](const BoundProgram& self) { return self.program.num_threads(); });
}

}  // namespace paceline
