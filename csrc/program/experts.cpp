// Records of a mixture of experts: building and running them.
//
// The weights of all experts are one matrix whose rows are their outputs, one expert after the other, so an expert is an offset. A step reads
// those of the chosen ones only. Tables of slots (hidden values of each choice) are in the order of ExpertSlots.
#include <algorithm>
#include <cstring>

#include "base/as_size.h"
#include "base/check.h"
#include "program/activations.h"
#include "program/program.h"

namespace paceline {
namespace {

constexpr int kChunkRows = 32;  // slots whose inputs are gathered at once: the chunk that the kernels take

// Floats of a thread's products before they are combined or gated: half of a second-level cache of 1 MB.
constexpr size_t kProductFloats = 128 * 1024;

// Up to this many rows one thread chooses for all, which is cheaper than a barrier.
constexpr int kRowsOfOneThread = 4;

// Tiles [first, first + count) of one expert's part of a matrix.
Matrix tiles_of(const Matrix& m, int tiles_per_expert, int expert, int first, int count) {
  Matrix part = m;
  part.data += (as_size(expert) * as_size(tiles_per_expert) + as_size(first)) * m.tile_bytes;
  part.num_tiles = count;
  part.num_outputs = count * kTile;
  return part;
}

}  // namespace

int Program::add_slots(int num_experts, int num_chosen) {
  CHECK(num_chosen >= 1 && num_chosen <= kMaxChosen && num_chosen <= num_experts, "experts that a row chooses");
  slots_.emplace_back(shape_.max_rows, num_experts, num_chosen);
  return static_cast<int>(slots_.size()) - 1;
}

void Program::route(int logits, int slots, bool normalise, int to) {
  const ExpertSlots& s = slots_[as_size(slots)];
  CHECK(buffers_[as_size(logits)].stride >= s.num_experts(), "a logit for each expert");
  CHECK(buffers_[as_size(to)].stride >= 2 * s.num_chosen(), "an id and a weight for each choice");
  Record r{};
  r.kind = Kind::route;
  r.from = logits;
  r.slots = slots;
  r.normalise = normalise;
  r.to = to;
  records_.push_back(r);
}

int Program::tiles_per_expert(const Matrix& m, int slots) const {
  const int tiles = m.num_tiles / slots_[as_size(slots)].num_experts();
  CHECK(m.num_outputs == tiles * kTile * slots_[as_size(slots)].num_experts(), "whole tiles for each expert");
  return tiles;
}

void Program::experts_glu(int gate, int up, int gate_bias, int up_bias, int slots, Activation activation,
                          int from_buffer, int from_activations, int to_buffer, int to_activations) {
  const Matrix &g = matrices_[as_size(gate)], &u = matrices_[as_size(up)];
  CHECK(g.num_outputs == u.num_outputs && g.num_inputs == u.num_inputs, "gate and up have one shape");
  check_input(g, from_buffer, from_activations);
  check_input(u, from_buffer, from_activations);
  made_plain(to_activations);
  Record r{};
  r.kind = Kind::experts_glu;
  r.weight = gate;
  r.weight2 = up;
  r.bias = gate_bias;
  r.bias2 = up_bias;
  r.slots = slots;
  r.activation = activation;
  r.from = from_buffer;
  r.from_activations = from_activations;
  r.to = to_buffer;
  r.to_activations = to_activations;
  r.tiles = tiles_per_expert(g, slots);
  if (to_activations >= 0) activations_[as_size(to_activations)].shared = true;
  size_t gathered = 64;
  if (from_buffer >= 0)
    gathered += as_size(kChunkRows) * as_size(buffers_[as_size(from_buffer)].stride) * sizeof(float);
  if (from_activations >= 0) gathered += activation_bytes(kChunkRows, activations_[as_size(from_activations)].q_stride);
  // Gate and up of one unit of a chunk at least.
  need_expert_scratch(gathered, as_size(2 * kChunkRows * 2 * kTile));
  records_.push_back(r);
}

void Program::experts_down(int down, int bias, int slots, int routing, int from_buffer, int from_activations, int to,
                           bool accumulate) {
  const Matrix& m = matrices_[as_size(down)];
  check_input(m, from_buffer, from_activations);
  Record r{};
  r.kind = Kind::experts_down;
  r.weight = down;
  r.bias = bias;
  r.slots = slots;
  r.routing = routing;
  r.from = from_buffer;
  r.from_activations = from_activations;
  r.to = to;
  r.accumulate = accumulate;
  r.tiles = tiles_per_expert(m, slots);
  CHECK(r.tiles * kTile <= buffers_[as_size(to)].stride, "the outputs fit their buffer");
  // One tile of every slot at least.
  const ExpertSlots& s = slots_[as_size(slots)];
  need_expert_scratch(0, as_size(s.max_rows()) * as_size(s.num_chosen()) * kTile);
  records_.push_back(r);
}

void Program::need_expert_scratch(size_t gathered_bytes, size_t product_floats) {
  gathered_bytes_ = std::max(gathered_bytes_, (gathered_bytes + 63) / 64 * 64);
  product_floats_ = std::max({product_floats_, product_floats, kProductFloats});
  const size_t bytes = (gathered_bytes_ + product_floats_ * sizeof(float)) * as_size(pool_.size());
  if (bytes > expert_scratch_.bytes()) expert_scratch_ = Region(bytes);
}

float* Program::products(int thread) const { return expert_scratch_.as<float>() + as_size(thread) * product_floats_; }

uint8_t* Program::gathered(int thread) const {
  return reinterpret_cast<uint8_t*>(products(pool_.size())) + as_size(thread) * gathered_bytes_;
}

void Program::run_route(const Record& record, int thread) {
  ExpertSlots& slots = slots_[as_size(record.slots)];
  const Buffer &from = buffers_[as_size(record.from)], &to = buffers_[as_size(record.to)];
  const int rows = step_.num_rows;
  const bool alone = rows <= kRowsOfOneThread;
  const Range mine = alone ? Range{0, thread == 0 ? rows : 0} : Range{0, rows}.part(thread, pool_.size());
  kernels_.route(from.data.as<float>(), from.stride, slots.num_experts(), slots.num_chosen(), record.normalise,
                 mine.begin, mine.end, to.data.as<float>(), to.stride);
  if (!alone) pool_.barrier();
  if (thread == 0) slots.build(to.data.as<float>(), to.stride, rows);
  pool_.barrier();
}

// The inputs of slots [begin, end), one after the other: rows of `in` where they are neighbours, else copies.
Activations Program::inputs_of(const Activations& in, Range slots, const int32_t* rows, int thread) const {
  const int32_t* first = rows + slots.begin;
  const int count = slots.size();
  if (first[count - 1] - first[0] == count - 1) return activations_from(in, first[0]);
  uint8_t* at = gathered(thread);
  Activations to{};
  if (in.q != nullptr) {
    to = activations_at(at, kChunkRows, in.q_stride);
    at += activation_bytes(kChunkRows, in.q_stride);
  }
  float* x = nullptr;
  if (in.x != nullptr) {
    x = take_aligned<float>(at, as_size(kChunkRows) * as_size(in.x_stride) * sizeof(float));
    to.x = x;
    to.x_stride = in.x_stride;
  }
  gather_rows(in, first, count, to, x);
  return to;
}

void Program::run_experts_glu(const Record& record, int thread) {
  const ExpertSlots& slots = slots_[as_size(record.slots)];
  const Activations in = view(record.from_activations, record.from, step_.num_rows, thread);
  const Activations out = view(record.to_activations, -1, step_.num_rows * slots.num_chosen(), thread);
  slots.for_share(thread, pool_.size(), (record.tiles + 1) / 2, [&](const ExpertSlots::Part& part) {
    for (int slot = part.slots.begin; slot < part.slots.end; slot += kChunkRows) {
      const Range chunk{slot, std::min(slot + kChunkRows, part.slots.end)};
      const Activations rows = inputs_of(in, chunk, slots.rows(), thread);
      const int most = static_cast<int>(product_floats_ / as_size(2 * chunk.size() * 2 * kTile));
      for (int unit = part.units.begin; unit < part.units.end; unit += most)
        glu_units(record, part.expert, {unit, std::min(unit + most, part.units.end)}, rows, chunk, out,
                  products(thread));
    }
  });
}

// Those units (of 32 outputs) of an expert's gated product, for the slots of a chunk.
void Program::glu_units(const Record& record, int expert, Range units, const Activations& in, Range slots,
                        const Activations& out, float* products) {
  const int tile = 2 * units.begin, tiles = std::min(2 * units.end, record.tiles) - tile;
  const int stride = 2 * units.size() * kTile, half = stride * slots.size();
  if (tiles % 2 != 0)  // the last unit has one tile: what is written beside it is the product of zeros
    std::memset(products, 0, as_size(2 * half) * sizeof(float));
  const auto multiply = [&](int weight, int bias, float* to) {
    kernels_.linear(tiles_of(matrices_[as_size(weight)], record.tiles, expert, tile, tiles), in, slots.size(), 0, tiles,
                    {to, stride, expert_bias(bias, (expert * record.tiles + tile) * kTile), 1.0f, 0.0f, false});
  };
  multiply(record.weight, record.bias, products);
  multiply(record.weight2, record.bias2, products + half);
  float* y = nullptr;
  int y_stride = 0;
  if (record.to >= 0) {
    y_stride = buffers_[as_size(record.to)].stride;
    y = buffers_[as_size(record.to)].data.as<float>() + as_size(slots.begin) * as_size(y_stride) +
        as_size(units.begin) * kActGroup;
  }
  kernels_.glu(record.activation, products, products + half, stride, stride, 0, slots.size(), y, y_stride,
               activations_from(out, slots.begin, units.begin));
}

const float* Program::expert_bias(int bias, int column) const {
  return bias >= 0 ? vectors_[as_size(bias)].as<float>() + column : nullptr;
}

void Program::run_experts_down(const Record& record, int thread) {
  const ExpertSlots& slots = slots_[as_size(record.slots)];
  const Matrix& m = matrices_[as_size(record.weight)];
  const int num_slots = step_.num_rows * slots.num_chosen();
  const Activations in = view(record.from_activations, record.from, num_slots, thread);
  const Buffer &routing = buffers_[as_size(record.routing)], &to = buffers_[as_size(record.to)];
  // A thread has the same outputs of all experts, so that it can combine them without a barrier.
  const Range tiles = Range{0, record.tiles}.part(thread, pool_.size());
  const int most = static_cast<int>(product_floats_ / as_size(num_slots * kTile));
  float* y = products(thread);
  for (int tile = tiles.begin; tile < tiles.end; tile += most) {
    const int count = std::min(most, tiles.end - tile), columns = count * kTile;
    for (const ExpertSlots::Run& run : slots.runs())
      kernels_.linear(tiles_of(m, record.tiles, run.expert, tile, count), activations_from(in, run.slots.begin),
                      run.slots.size(), 0, count,
                      {y + as_size(run.slots.begin) * as_size(columns), columns,
                       expert_bias(record.bias, (run.expert * record.tiles + tile) * kTile), 1.0f, 0.0f, false});
    kernels_.combine(y, columns, slots.slots(), routing.data.as<float>() + slots.num_chosen(), routing.stride,
                     slots.num_chosen(), columns, step_.num_rows, to.data.as<float>() + tile * kTile, to.stride,
                     record.accumulate);
  }
}

void gather_rows(const Activations& from, const int32_t* rows, int count, const Activations& to, float* to_x) {
  const size_t groups = as_size(from.q_stride / kActGroup);
  for (int i = 0; i < count; ++i) {
    if (from.q != nullptr) {
      const Activations source = activations_from(from, rows[i]), target = activations_from(to, i);
      std::memcpy(target.q, source.q, as_size(from.q_stride));
      std::memcpy(target.scale, source.scale, groups * sizeof(float));
      std::memcpy(target.sum, source.sum, groups * sizeof(float));
      std::memcpy(target.total, source.total, groups * sizeof(float));
      std::memcpy(target.half_sum, source.half_sum, 2 * groups * sizeof(int32_t));
    }
    if (from.x != nullptr)
      std::memcpy(to_x + as_size(i) * as_size(to.x_stride), from.x + as_size(rows[i]) * as_size(from.x_stride),
                  as_size(from.x_stride) * sizeof(float));
  }
}

}  // namespace paceline
