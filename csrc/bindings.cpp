// The Python module paceline._native: the program, hardware probes, and the bindings of packing and sampling.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "bound_program.h"
#include "program/hardware_probe.h"

using namespace nb::literals;

namespace paceline {

void bind_pack(nb::module_& m);
void bind_sample(nb::module_& m);

namespace {

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
