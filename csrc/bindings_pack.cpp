// Bindings of the weight packer.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>

#include "kernels/pack.h"

namespace nb = nanobind;

namespace paceline {
namespace {

using Source = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Permutation = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Destination = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Below this many result bytes a thread, starting the thread costs more than it saves.
constexpr int64_t kBytesPerThread = 256 * 1024;

PackSourceKind source_kind(const std::string& name) {
  static constexpr std::pair<const char*, PackSourceKind> kNames[] = {
      {"F32", PackSourceKind::f32},         {"F16", PackSourceKind::f16},       {"BF16", PackSourceKind::bf16},
      {"Q4_0", PackSourceKind::q4_0},       {"Q4_1", PackSourceKind::q4_1},     {"Q5_0", PackSourceKind::q5_0},
      {"Q5_1", PackSourceKind::q5_1},       {"Q8_0", PackSourceKind::q8_0},     {"Q4_K", PackSourceKind::q4_k},
      {"Q5_K", PackSourceKind::q5_k},       {"Q6_K", PackSourceKind::q6_k},     {"Q4G64", PackSourceKind::q4g64},
      {"Q4G128", PackSourceKind::q4g128},   {"Q4G32Z", PackSourceKind::q4g32z}, {"Q4G64Z", PackSourceKind::q4g64z},
      {"Q4G128Z", PackSourceKind::q4g128z}, {"Q8G64", PackSourceKind::q8g64},   {"Q8G128", PackSourceKind::q8g128},
      {"Q8G32Z", PackSourceKind::q8g32z},   {"Q8G64Z", PackSourceKind::q8g64z}, {"Q8G128Z", PackSourceKind::q8g128z},
      {"Q8C", PackSourceKind::q8c},         {"MXFP4", PackSourceKind::mxfp4},
  };
  for (const auto& [known, kind] : kNames) {
    if (name == known) return kind;
  }
  throw std::invalid_argument("pack_matrix: unknown source kind " + name);
}

PackTargetKind target_kind(const std::string& name) {
  static constexpr std::pair<const char*, PackTargetKind> kNames[] = {
      {"u4", PackTargetKind::u4},   {"e2m1", PackTargetKind::e2m1}, {"i8", PackTargetKind::i8},
      {"i8c", PackTargetKind::i8c}, {"bf16", PackTargetKind::bf16}, {"f16", PackTargetKind::f16},
      {"f32", PackTargetKind::f32},
  };
  for (const auto& [known, kind] : kNames) {
    if (name == known) return kind;
  }
  throw std::invalid_argument("pack_matrix: unknown target kind " + name);
}

PackOffset offset_kind(const std::string& name) {
  static constexpr std::pair<const char*, PackOffset> kNames[] = {
      {"none", PackOffset::none}, {"min", PackOffset::min}, {"zero", PackOffset::zero}};
  for (const auto& [known, kind] : kNames) {
    if (name == known) return kind;
  }
  throw std::invalid_argument("pack_matrix: unknown offset " + name);
}

void require(bool condition, const std::string& problem) {
  if (!condition) throw std::invalid_argument("pack_matrix: " + problem);
}

void require_size(const char* what, size_t size, int64_t expected) {
  require(size == static_cast<size_t>(expected),
          std::string(what) + " has " + std::to_string(size) + " elements, expected " + std::to_string(expected));
}

bool pack_on_threads(const PackSource& source, const PackTarget& target, uint8_t* out, int64_t num_threads) {
  const int64_t tiles = (source.num_outputs + kPackTile - 1) / kPackTile;
  const int64_t bytes = tiles * target_tile_bytes(target, source.num_inputs);
  const int64_t parts = std::clamp<int64_t>(std::min(num_threads, bytes / kBytesPerThread), 1, tiles);
  std::vector<char> finite(static_cast<size_t>(parts), 1);
  const auto part = [&](int64_t p) {
    finite[static_cast<size_t>(p)] = pack_tiles(source, target, tiles * p / parts, tiles * (p + 1) / parts, out);
  };
  {
    std::vector<std::jthread> threads;
    for (int64_t p = 1; p < parts; ++p) threads.emplace_back(part, p);
    part(0);
  }
  return std::all_of(finite.begin(), finite.end(), [](char each) { return each != 0; });
}

bool pack_matrix(const Source& data, const std::string& kind, int64_t num_outputs, int64_t num_inputs,
                 const std::optional<Permutation>& permutation, const std::optional<Permutation>& order,
                 const std::string& to_kind, int32_t group, const std::string& offset, const Destination& out,
                 int64_t num_threads) {
  const PackSource source{source_kind(kind),
                          data.data(),
                          num_outputs,
                          num_inputs,
                          permutation ? permutation->data() : nullptr,
                          order ? order->data() : nullptr};
  const PackTarget target{target_kind(to_kind), group, offset_kind(offset)};
  const int64_t block = source_block_weights(source.kind);
  require(num_outputs > 0 && num_inputs > 0 && num_threads > 0, "outputs, inputs and threads must be positive");
  require(num_inputs % block == 0, std::to_string(num_inputs) + " inputs are not whole blocks of " + kind);
  require(can_pack(source.kind, target),
          "cannot turn " + kind + " into " + to_kind + " of group " + std::to_string(group));
  require_size("data", data.size(), num_outputs * (num_inputs / block) * source_block_bytes(source.kind));
  require_size("out", out.size(), (num_outputs + kPackTile - 1) / kPackTile * target_tile_bytes(target, num_inputs));
  if (permutation) {
    require_size("permutation", permutation->size(), num_outputs);
    const bool inside = std::all_of(source.permutation, source.permutation + num_outputs,
                                    [&](int32_t row) { return row >= 0 && row < num_outputs; });
    require(inside, "permutation names a row outside the matrix");
  }
  if (order) {
    require_size("order", order->size(), num_inputs);
    std::vector<char> seen(static_cast<size_t>(num_inputs), 0);
    for (int64_t i = 0; i < num_inputs; ++i) {
      const int32_t column = source.order[i];
      require(column >= 0 && column < num_inputs && !std::exchange(seen[static_cast<size_t>(column)], 1),
              "order is no permutation of the inputs");
    }
  }
  nb::gil_scoped_release release;
  return pack_on_threads(source, target, out.data(), num_threads);
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("pack_matrix", &pack_matrix, nb::arg("data").noconvert(), nb::arg("kind"), nb::arg("num_outputs"),
        nb::arg("num_inputs"), nb::arg("permutation").none(), nb::arg("order").none(), nb::arg("target_kind"),
        nb::arg("group"), nb::arg("offset"), nb::arg("out").noconvert(), nb::arg("num_threads"),
        "Writes the packed form of a tensor's rows to out (u8, whole tiles). Returns False when a scale, minimum or "
        "float weight in it is "
        "not finite. Raises ValueError when sizes, kinds, permutation or order do not fit.");
}

}  // namespace paceline
