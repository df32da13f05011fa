// Building a Program: buffers, weights and records.
#include <algorithm>
#include <cstring>

#include "base/as_size.h"
#include "base/check.h"
#include "program/activations.h"
#include "program/program.h"

namespace paceline {

Program::Program(const Kernels& kernels, int num_threads, const ProgramShape& shape, uint8_t* pages)
    : kernels_(kernels),
      shape_(shape),
      pool_(num_threads),
      own_pages_(pages == nullptr ? as_size(shape.num_pages) * shape.attention.page_bytes() : 0),
      kv_(pages == nullptr ? own_pages_.as<uint8_t>() : pages) {
  const AttentionShape& a = shape.attention;
  CHECK(a.head_dim % 16 == 0 && a.head_dim <= kMaxHeadDim, "head_dim must be a multiple of 16 up to 256");
  CHECK(a.num_heads % a.num_kv_heads == 0, "query heads divide over KV heads");
  scratch_floats_ = std::max(attention_scratch_floats(a), sample_scratch_floats(shape.num_logits));
  scratch_floats_ = (scratch_floats_ + 31) / 32 * 32;
  scratch_ = Region(scratch_floats_ * as_size(num_threads) * sizeof(float));
  sequence_of_row_.resize(as_size(shape.max_rows));
  Record begin{};
  begin.kind = Kind::begin;
  records_.push_back(begin);
}

int Program::add_rope(std::vector<double> inverse_frequencies, double factor) {
  const int head_dim = shape_.attention.head_dim;
  CHECK(inverse_frequencies.size() * 2 == as_size(head_dim), "one frequency a pair");
  const size_t bytes = as_size(shape_.max_rows) * as_size(head_dim) * sizeof(float);
  ropes_.push_back({std::move(inverse_frequencies), factor, Region(bytes), Region(bytes)});
  return static_cast<int>(ropes_.size()) - 1;
}

int Program::add_attention_plan(int window) {
  const AttentionShape& a = shape_.attention;
  attention_plans_.emplace_back(a, window, shape_.max_rows, shape_.context_length, pool_.size());
  // All plans have as many slots, and layers use them one after the other.
  const int slots = attention_plans_.back().num_slots();
  if (partials_.bytes() == 0)
    partials_ = Region(as_size(slots) * as_size(a.num_heads) * as_size(a.head_dim + 16) * sizeof(float));
  return num_attention_plans() - 1;
}

int Program::add_matrix(const Matrix& matrix) {
  matrices_.push_back(matrix);
  return static_cast<int>(matrices_.size()) - 1;
}

int Program::add_vector(const float* data, int size) {
  Region region(as_size(round_up(size, 32)) * sizeof(float));
  std::memcpy(region.as<float>(), data, as_size(size) * sizeof(float));
  vectors_.push_back(std::move(region));
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_buffer(int width, bool outputs, int per_row) {
  const int stride = round_up(width, 32);
  const int rows = (outputs ? shape_.max_outputs : shape_.max_rows) * per_row;
  buffers_.push_back({Region(as_size(rows) * as_size(stride) * sizeof(float)), stride, outputs, per_row, Region{}});
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_activations(int width, bool outputs, int per_row) {
  const int stride = round_up(width, 32);
  const int rows = (outputs ? shape_.max_outputs : shape_.max_rows) * per_row;
  const size_t bytes = as_size(pool_.size()) * activation_bytes(kPrivateRows, stride) + activation_bytes(rows, stride);
  activations_.push_back({Region(bytes), stride, rows, false, false, {}});
  return static_cast<int>(activations_.size()) - 1;
}

// A record writes that form with a scale for each 32 inputs, in their order.
void Program::made_plain(int activations) {
  if (activations < 0) return;
  activations_[as_size(activations)].per_token = false;
  activations_[as_size(activations)].order.clear();
}

void Program::check_input(const Matrix& m, int from_buffer, int from_activations) const {
  if (!m.quantised()) {
    CHECK(from_buffer >= 0, "float weights read floats");
    return;
  }
  CHECK(from_activations >= 0, "integer weights read an int8 form");
  const Quantised& form = activations_[as_size(from_activations)];
  CHECK(form.per_token == m.per_token(), "activations rounded as the weights ask");
  CHECK(m.order == nullptr ? form.order.empty()
                           : std::equal(form.order.begin(), form.order.end(), m.order, m.order + m.num_inputs),
        "activations in the order of the weights");
  CHECK(m.num_groups * m.group <= form.q_stride, "as many activations as inputs");
}

void Program::embed(int matrix, float scale, int buffer) {
  Record r{};
  r.kind = Kind::embed;
  r.weight = matrix;
  r.scale = scale;
  r.to = buffer;
  records_.push_back(r);
}

void Program::norm(int from, int weight, float eps, int size, int to_buffer, int to_activations) {
  made_plain(to_activations);
  Record r{};
  r.kind = Kind::norm;
  r.from = from;
  r.weight = weight;
  r.eps = eps;
  r.size = size;
  r.to = to_buffer;
  r.to_activations = to_activations;
  r.outputs = buffers_[as_size(from)].outputs;
  if (to_buffer >= 0 && to_activations >= 0) activations_[as_size(to_activations)].shared = true;
  records_.push_back(r);
}

void Program::norm_in_place(int buffer, int column, int weight, float eps, int size, bool joined) {
  CHECK(column % kTile == 0 && column + round_up(size, kTile) <= buffers_[as_size(buffer)].stride,
        "columns of the buffer");
  Record r{};
  r.kind = Kind::norm;
  r.from = r.to = buffer;
  r.column = column;
  r.weight = weight;
  r.eps = eps;
  r.size = size;
  r.joined = joined;
  r.outputs = buffers_[as_size(buffer)].outputs;
  records_.push_back(r);
}

void Program::norm_add(int from, int weight, float eps, int size, int residual, int to, int next_weight, float next_eps,
                       int to_buffer, int to_activations) {
  CHECK(to != residual && to != from && to_buffer != from && to_buffer != residual, "buffers that differ");
  CHECK(next_weight >= 0 ? to_buffer != to : to_buffer < 0 || to_buffer == to, "the sum in one buffer");
  made_plain(to_activations);
  Record r{};
  r.kind = Kind::norm_add;
  r.from = from;
  r.weight = weight;
  r.eps = eps;
  r.size = size;
  r.residual = residual;
  r.sum = to;
  r.weight2 = next_weight;
  r.eps2 = next_eps;
  r.to = to_buffer;
  r.to_activations = to_activations;
  r.outputs = buffers_[as_size(from)].outputs;
  if (to_buffer >= 0 && to_activations >= 0) activations_[as_size(to_activations)].shared = true;
  const auto makes_residual = [&](const Record& other) { return other.to == residual || other.sum == residual; };
  const auto maker = std::find_if(records_.rbegin(), records_.rend(), makes_residual);
  if (maker != records_.rend() && maker->kind == Kind::norm_add && maker->sum == residual)
    r.residual_maker = static_cast<int>(records_.rend() - maker) - 1;
  Buffer& sum = buffers_[as_size(to)];
  if (sum.copies.bytes() == 0)
    sum.copies = Region(as_size((pool_.size() - 1) * kPrivateRows) * as_size(sum.stride) * sizeof(float));
  records_.push_back(r);
}

void Program::quantise(int from, int size, int to_activations, bool per_token, std::vector<int32_t> order) {
  CHECK(order.empty() || static_cast<int>(order.size()) == size, "an input for each of the form");
  for (const int32_t input : order) CHECK(input >= 0 && input < size, "an input of the buffer");
  activations_[as_size(to_activations)].per_token = per_token;
  activations_[as_size(to_activations)].order = order;
  Record r{};
  r.kind = Kind::quantise;
  r.from = from;
  r.size = size;
  r.to_activations = to_activations;
  r.per_token = per_token;
  r.order = std::move(order);
  r.outputs = buffers_[as_size(from)].outputs;
  r.per_row = buffers_[as_size(from)].per_row;
  records_.push_back(std::move(r));
}

void Program::linear(std::vector<int> matrices, std::vector<int> columns, std::vector<int> biases, int from_buffer,
                     int from_activations, int to_buffer, bool accumulate, float scale, float softcap) {
  CHECK(matrices.size() == columns.size() && matrices.size() == biases.size(), "one column and one bias a part");
  Record r{};
  r.kind = Kind::linear;
  r.from = from_buffer;
  r.from_activations = from_activations;
  r.to = to_buffer;
  r.accumulate = accumulate;
  r.scale = scale;
  r.softcap = softcap;
  r.outputs = buffers_[as_size(to_buffer)].outputs;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Matrix& m = matrices_[as_size(matrices[i])];
    CHECK(columns[i] % kTile == 0 && columns[i] + m.num_tiles * kTile <= buffers_[as_size(to_buffer)].stride,
          "part fits its buffer");
    check_input(m, from_buffer, from_activations);
    r.parts.push_back({matrices[i], columns[i], biases[i]});
    r.tiles += m.num_tiles;
  }
  records_.push_back(std::move(r));
}

void Program::gate_up(Activation activation, int gate, int up, int from_buffer, int from_activations, int to_buffer,
                      int to_activations) {
  const Matrix& g = matrices_[as_size(gate)];
  const Matrix& u = matrices_[as_size(up)];
  CHECK(g.kind == u.kind && g.group == u.group && g.offset == u.offset && g.num_outputs == u.num_outputs,
        "gate and up are alike");
  check_input(g, from_buffer, from_activations);
  check_input(u, from_buffer, from_activations);
  made_plain(to_activations);
  Record r{};
  r.kind = Kind::gate_up;
  r.activation = activation;
  r.weight = gate;
  r.weight2 = up;
  r.from = from_buffer;
  r.from_activations = from_activations;
  r.to = to_buffer;
  r.to_activations = to_activations;
  r.tiles = g.num_tiles;
  if (to_activations >= 0) activations_[as_size(to_activations)].shared = true;
  records_.push_back(r);
}

void Program::glu(Activation activation, int from, int up_column, int size, int to_buffer, int to_activations) {
  made_plain(to_activations);
  Record r{};
  r.kind = Kind::glu;
  r.activation = activation;
  r.from = from;
  r.q_column = up_column;
  r.size = size;
  r.to = to_buffer;
  r.to_activations = to_activations;
  if (to_activations >= 0) activations_[as_size(to_activations)].shared = true;
  records_.push_back(r);
}

void Program::rope_write(int layer, int buffer, int q_column, int k_column, int v_column, int q_norm, int k_norm,
                         float eps, int rope, float query_scale) {
  CHECK(rope < static_cast<int>(ropes_.size()), "a rope of the program");
  Record r{};
  r.rope = rope;
  r.scale = query_scale;
  r.kind = Kind::rope_write;
  r.layer = layer;
  r.from = buffer;
  r.q_column = q_column;
  r.k_column = k_column;
  r.v_column = v_column;
  r.weight = q_norm;
  r.weight2 = k_norm;
  r.eps = eps;
  records_.push_back(r);
}

void Program::attention(int layer, int buffer, int out, int plan, float softcap, int sinks) {
  CHECK(plan >= 0 && plan < num_attention_plans(), "an attention plan of the program");
  Record r{};
  r.plan = plan;
  r.softcap = softcap;
  r.sinks = sinks;
  r.kind = Kind::attention;
  r.layer = layer;
  r.from = buffer;
  r.to = out;
  records_.push_back(r);
}

void Program::select(int from, int to) {
  Record r{};
  r.kind = Kind::select;
  r.from = from;
  r.to = to;
  r.outputs = true;
  records_.push_back(r);
}

void Program::sample(int logits) {
  const Buffer& buffer = buffers_[as_size(logits)];
  CHECK(buffer.outputs && buffer.stride >= shape_.num_logits, "a logit for every token that may be chosen");
  Record r{};
  r.kind = Kind::sample;
  r.from = logits;
  r.outputs = true;
  records_.push_back(r);
}

const char* Program::record_name(int record) const {
  static constexpr const char* kNames[] = {"begin",  "embed",       "norm",         "norm_add",   "quantise",
                                           "linear", "gate_up",     "glu",          "rope_write", "attention",
                                           "route",  "experts_glu", "experts_down", "select",     "sample"};
  return kNames[static_cast<size_t>(records_[as_size(record)].kind)];
}

size_t Program::workspace_bytes() const {
  size_t total = partials_.bytes() + scratch_.bytes() + expert_scratch_.bytes();
  for (const Rope& r : ropes_) total += r.cos.bytes() + r.sin.bytes();
  for (const Buffer& b : buffers_) total += b.data.bytes() + b.copies.bytes();
  for (const Quantised& q : activations_) total += q.data.bytes();
  for (const Region& v : vectors_) total += v.bytes();
  return total;
}

}  // namespace paceline
