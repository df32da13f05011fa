// Running a Program: each thread walks the records; work is divided by rows, by tiles of outputs, or by attention units.
#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/as_size.h"
#include "base/check.h"
#include "program/activations.h"

namespace paceline {

void Program::begin_step(const StepInputs& inputs) {
  CHECK(inputs.num_rows >= 1 && inputs.num_rows <= shape_.max_rows, "rows of a step");
  CHECK(inputs.num_outputs >= 0 && inputs.num_outputs <= shape_.max_outputs, "outputs of a step");
  step_ = inputs;
  for (int i = 0; i < inputs.num_page_copies; ++i) {
    const size_t page_bytes = shape_.attention.page_bytes();
    std::memcpy(kv() + as_size(inputs.page_copies[2 * i + 1]) * page_bytes,
                kv() + as_size(inputs.page_copies[2 * i]) * page_bytes, page_bytes);
  }
  for (int s = 0; s < inputs.num_sequences; ++s)
    for (int row = inputs.row_starts[s]; row < inputs.row_starts[s + 1]; ++row) sequence_of_row_[as_size(row)] = s;
  for (AttentionPlan& plan : attention_plans_) plan.plan(step_);
}

void Program::fill_rope(const Rope& rope, int thread) const {
  const int d = shape_.attention.head_dim;
  const Range rows = Range{0, step_.num_rows}.part(thread, pool_.size());
  for (int row = rows.begin; row < rows.end; ++row) {
    float* cos = rope.cos.as<float>() + as_size(row) * as_size(d);
    float* sin = rope.sin.as<float>() + as_size(row) * as_size(d);
    for (int i = 0; i < d / 2; ++i) {
      const double frequency = rope.inverse_frequencies[as_size(i)];
      const double angle = static_cast<double>(step_.positions[row]) * frequency;
      const double factor = frequency == 0.0 ? 1.0 : rope.factor;
      const float c = static_cast<float>(std::cos(angle) * factor), s = static_cast<float>(std::sin(angle) * factor);
      cos[2 * i] = cos[2 * i + 1] = c;
      sin[2 * i] = -s;
      sin[2 * i + 1] = s;
    }
  }
}

bool Program::private_rows(const Record& record, int rows) const {
  return (record.kind == Kind::norm || record.kind == Kind::norm_add || record.kind == Kind::quantise) &&
         record.to_activations >= 0 && rows <= kPrivateRows && !activations_[as_size(record.to_activations)].shared;
}

Activations Program::view(int activations, int buffer, int rows, int thread) const {
  Activations v{};
  if (activations >= 0) {
    const Quantised& q = activations_[as_size(activations)];
    const bool shared = q.shared || rows > kPrivateRows;
    const size_t copy = activation_bytes(kPrivateRows, q.q_stride);
    uint8_t* at = q.data.as<uint8_t>() + as_size(shared ? pool_.size() : thread) * copy;
    v = activations_at(at, shared ? q.rows : kPrivateRows, q.q_stride);
  }
  if (buffer >= 0) {
    v.x = buffers_[as_size(buffer)].data.as<float>();
    v.x_stride = buffers_[as_size(buffer)].stride;
  }
  return v;
}

AttentionArgs Program::attention_args(const Record& record) const {
  AttentionArgs args{};
  const Buffer& qkv = buffers_[as_size(record.from)];
  args.shape = &shape_.attention;
  args.layer = record.layer;
  args.kv = kv();
  args.page_table = step_.page_table;
  args.page_table_stride = step_.page_table_stride;
  args.positions = step_.positions;
  args.q = qkv.data.as<float>() + record.q_column;
  args.k = qkv.data.as<float>() + record.k_column;
  args.v = qkv.data.as<float>() + record.v_column;
  args.qkv_stride = qkv.stride;
  if (record.to >= 0) {
    args.out = buffers_[as_size(record.to)].data.as<float>();
    args.out_stride = buffers_[as_size(record.to)].stride;
  }
  if (record.plan >= 0) {
    const AttentionPlan& plan = attention_plans_[as_size(record.plan)];
    args.window = plan.window();
    args.unit_rows = plan.unit_rows();
    args.row_slots = plan.row_slots();
  }
  args.softcap = record.softcap;
  args.sinks = record.sinks >= 0 ? vectors_[as_size(record.sinks)].as<float>() : nullptr;
  args.partials = partials_.as<float>();
  if (record.rope >= 0) {
    args.cos = ropes_[as_size(record.rope)].cos.as<float>();
    args.sin = ropes_[as_size(record.rope)].sin.as<float>();
  }
  args.query_scale = record.scale;
  args.q_norm = record.weight >= 0 ? vectors_[as_size(record.weight)].as<float>() : nullptr;
  args.k_norm = record.weight2 >= 0 ? vectors_[as_size(record.weight2)].as<float>() : nullptr;
  args.norm_eps = record.eps;
  return args;
}

void Program::run_attention(const Record& record, int thread) {
  const AttentionArgs args = attention_args(record);
  const AttentionPlan& plan = attention_plans_[as_size(record.plan)];
  // Units differ in cost, so threads take them one by one. Two counters take turns: while one is in use the other is reset.
  std::atomic<int>& next = record.layer % 2 == 0 ? next_unit_ : next_unit_after_;
  const std::vector<AttentionUnit>& units = plan.units();
  const int count = static_cast<int>(units.size());
  for (int i = next.fetch_add(1, std::memory_order_relaxed); i < count;
       i = next.fetch_add(1, std::memory_order_relaxed))
    kernels_.attention(args, units[as_size(i)], scratch(thread));
  const std::vector<AttentionMerge>& merges = plan.merges();
  if (!merges.empty()) {
    pool_.barrier();
    const int heads = shape_.attention.num_heads;
    const Range items = Range{0, static_cast<int>(merges.size()) * heads}.part(thread, pool_.size());
    for (int i = items.begin; i < items.end; ++i) {
      const AttentionMerge& merge = merges[as_size(i / heads)];
      kernels_.attention_merge(args, merge.row, i % heads, merge.splits.begin, merge.splits.end);
    }
  }
  pool_.barrier();
  if (thread == 0) next.store(0, std::memory_order_relaxed);
}

// A norm of `size` columns of a buffer from `column` on; in place where `to` is that buffer.
NormArgs Program::norm_args(int from, int column, int weight, int size, float eps, int to) const {
  const Buffer& source = buffers_[as_size(from)];
  NormArgs args{};
  args.x = source.data.as<float>() + column;
  args.x_stride = source.stride;
  args.weight = vectors_[as_size(weight)].as<float>();
  args.size = size;
  args.eps = eps;
  if (to >= 0) {
    args.y = buffers_[as_size(to)].data.as<float>() + (to == from ? column : 0);
    args.y_stride = buffers_[as_size(to)].stride;
  }
  return args;
}

// The sum goes to another buffer than the residual, so that threads which all work on the same rows may read the one while the first writes
// the other. The others write copies of their own, and the next such record reads those: no line of the residual stream goes from core to
// core. Whoever else reads the sum does so from the buffer, behind a later record's barrier.
void Program::run_norm_add(const Record& record, Range rows, bool alone, int thread) {
  const Buffer& sum = buffers_[as_size(record.sum)];
  const Buffer& residual = buffers_[as_size(record.residual)];
  const Activations out = view(record.to_activations, -1, rows_of(record), thread);
  const bool has_next = record.weight2 >= 0;
  NormArgs args = norm_args(record.from, 0, record.weight, record.size, record.eps, record.sum);
  args.residual = residual.data.as<float>();
  args.residual_stride = residual.stride;
  if (alone && thread != 0) {
    args.y = own_copy(sum, thread);
    const int maker = record.residual_maker;
    if (maker >= 0 && private_rows(records_[as_size(maker)], rows_of(record)))
      args.residual = own_copy(residual, thread);
  }
  kernels_.norm(args, rows.begin, rows.end, out, !has_next && record.to_activations >= 0);
  if (!has_next) return;
  NormArgs next = norm_args(record.sum, 0, record.weight2, record.size, record.eps2, record.to);
  next.x = args.y;
  next.x_stride = sum.stride;
  kernels_.norm(next, rows.begin, rows.end, out, record.to_activations >= 0);
}

// A row is its query heads and then its KV heads, as they lie in the product's buffer: a thread finds most of what it rotates in its own
// cache. A key and value count as two, because they go to a page.
void Program::run_rope_write(const Record& record, int thread) {
  const AttentionArgs args = attention_args(record);
  const int heads = shape_.attention.num_heads, kv_heads = shape_.attention.num_kv_heads;
  const int a_row = heads + 2 * kv_heads;
  const int own = step_.num_rows * a_row;
  const Range items = Range{0, own + step_.num_kv_writes * 2 * kv_heads}.part(thread, pool_.size());
  for (int i = items.begin; i < items.end; ++i) {
    const int row = i / a_row, at = i < own ? i % a_row : heads + i - own;
    if (i < own && at < heads)
      kernels_.rotate_query(args, row, at);
    else if ((at - heads) % 2 != 0)
      continue;
    else if (i < own)
      kernels_.key_value_write(args, sequence_of_row_[as_size(row)], row, (at - heads) / 2);
    else {
      const int32_t* write = step_.kv_writes + 2 * ((i - own) / (2 * kv_heads));
      kernels_.key_value_write(args, write[1], write[0], (i - own) / 2 % kv_heads);
    }
  }
}

void Program::run_record(const Record& record, int thread) {
  const int threads = pool_.size();
  const int rows = rows_of(record);
  const bool alone = private_rows(record, rows);
  const Range mine = alone ? Range{0, rows} : Range{0, rows}.part(thread, threads);
  const auto buffer = [&](int id) { return id >= 0 ? buffers_[as_size(id)].data.as<float>() : nullptr; };
  const auto stride = [&](int id) { return id >= 0 ? buffers_[as_size(id)].stride : 0; };
  switch (record.kind) {
    case Kind::begin:
      for (const Rope& rope : ropes_) fill_rope(rope, thread);
      return;  // the embedding's barrier follows
    case Kind::embed:
      kernels_.embed(matrices_[as_size(record.weight)], step_.tokens, mine.begin, mine.end, record.scale,
                     buffer(record.to), stride(record.to));
      break;
    case Kind::norm:
      kernels_.norm(norm_args(record.from, record.column, record.weight, record.size, record.eps, record.to),
                    mine.begin, mine.end, view(record.to_activations, -1, rows, thread), record.to_activations >= 0);
      break;
    case Kind::norm_add:
      run_norm_add(record, mine, alone, thread);
      break;
    case Kind::quantise:
      kernels_.quantise(buffer(record.from), stride(record.from), record.size, mine.begin, mine.end,
                        record.order.empty() ? nullptr : record.order.data(), record.per_token,
                        view(record.to_activations, -1, rows, thread));
      break;
    case Kind::linear: {
      const Activations in = view(record.from_activations, record.from, rows, thread);
      const Range tiles = Range{0, record.tiles}.part(thread, threads);
      int first = 0;
      for (const Part& part : record.parts) {
        const Matrix& m = matrices_[as_size(part.matrix)];
        const int begin = std::max(tiles.begin, first) - first, end = std::min(tiles.end, first + m.num_tiles) - first;
        first += m.num_tiles;
        if (begin >= end || rows == 0) continue;
        const LinearOut out{buffer(record.to) + part.column,
                            stride(record.to),
                            part.bias >= 0 ? vectors_[as_size(part.bias)].as<float>() : nullptr,
                            record.scale,
                            record.softcap,
                            record.accumulate};
        kernels_.linear(m, in, rows, begin, end, out);
      }
      break;
    }
    case Kind::gate_up: {
      const Range units = Range{0, (record.tiles + 1) / 2}.part(thread, threads);
      kernels_.gate_up(record.activation, matrices_[as_size(record.weight)], matrices_[as_size(record.weight2)],
                       view(record.from_activations, record.from, rows, thread), rows, units.begin, units.end,
                       buffer(record.to), stride(record.to), view(record.to_activations, -1, rows, thread));
      break;
    }
    case Kind::glu:
      kernels_.glu(record.activation, buffer(record.from), buffer(record.from) + record.q_column, stride(record.from),
                   record.size, mine.begin, mine.end, buffer(record.to), stride(record.to),
                   view(record.to_activations, -1, rows, thread));
      break;
    case Kind::rope_write:
      run_rope_write(record, thread);
      break;
    case Kind::attention:
      run_attention(record, thread);
      return;
    case Kind::route:
      run_route(record, thread);
      return;
    case Kind::experts_glu:
      run_experts_glu(record, thread);
      break;
    case Kind::experts_down:
      run_experts_down(record, thread);
      break;
    case Kind::select:
      for (int i = mine.begin; i < mine.end; ++i)
        std::memcpy(buffer(record.to) + as_size(i) * as_size(stride(record.to)),
                    buffer(record.from) + as_size(step_.logit_rows[i]) * as_size(stride(record.from)),
                    as_size(stride(record.to)) * sizeof(float));
      break;
    case Kind::sample:
      for (int i = mine.begin; i < mine.end; ++i)
        kernels_.sample_row(buffer(record.from) + as_size(i) * as_size(stride(record.from)), shape_.num_logits,
                            step_.sample_rows[i], step_.sample_lists, step_.sampled[i], scratch(thread));
      return;  // the pool's own barrier follows
  }
  if (!alone && !record.joined) pool_.barrier();
}

void Program::run_records(int begin, int end) {
  pool_.run([&](int thread) {
    for (int i = begin; i < end; ++i) run_record(records_[as_size(i)], thread);
  });
}

void Program::run(const StepInputs& inputs) {
  begin_step(inputs);
  run_records(0, num_records());
}

void Program::distributions(int logits, const OutputSamples& samples, const int32_t* outputs, int count, double* p,
                            uint32_t* status) {
  const Buffer& from = buffers_[as_size(logits)];
  const size_t num_logits = as_size(shape_.num_logits);
  pool_.run([&](int thread) {
    const Range mine = Range{0, count}.part(thread, pool_.size());
    for (int i = mine.begin; i < mine.end; ++i) {
      const size_t output = as_size(outputs[i]);
      status[i] =
          kernels_.distribution_row(from.data.as<float>() + output * as_size(from.stride), shape_.num_logits,
                                    samples.rows[output], samples.lists, p + as_size(i) * num_logits, scratch(thread));
    }
  });
}

void Program::dequantised(int activations, int rows, float* out) const {
  const Quantised& q = activations_[as_size(activations)];
  const Activations v = view(activations, -1, rows, 0);
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < q.q_stride; ++i) {
      const size_t at = as_size(row) * as_size(q.q_stride) + as_size(i);
      out[at] = static_cast<float>(v.q[at]) * v.scale[at / kActGroup];
    }
}

}  // namespace paceline
