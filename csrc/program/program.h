// One pass of a model as a flat array of records, replayed by a few threads.
//
// Built once from Python (executors/native.py lowers the graph); nothing is allocated during a step. Per-step inputs are the patch points
// in StepInputs. Every thread walks the same array; a record says how its work is divided and whether a barrier follows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "kernels/table.h"
#include "program/attention_plan.h"
#include "program/expert_slots.h"
#include "program/step.h"

namespace paceline {

// Memory that the kernel gives page by page when it is first touched; huge pages where it can.
class Region {
 public:
  Region() = default;
  explicit Region(size_t bytes);  // zeros
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

struct ProgramShape {
  int32_t max_rows, max_outputs;
  int32_t vocab_size, num_logits;  // tokens that it reads, and those that it chooses from: fewer of a trimmed head
  int32_t num_pages, context_length;
  AttentionShape attention;
};

class Program {
 public:
  // `pages`: the pool of another program with pages of the same shape, which must outlive this one and not run at the same time; null for
  // a pool of its own.
  Program(const Kernels& kernels, int num_threads, const ProgramShape& shape, uint8_t* pages = nullptr);

  // ---- building; ids are handed out in order ----
  int add_matrix(const Matrix& matrix);
  int add_vector(const float* data, int size);  // copied, padded with zeros to a multiple of 32
  // f32 [max_rows or max_outputs][width rounded up to 32]; with `per_row` so many slots for each row of a step.
  int add_buffer(int width, bool outputs, int per_row = 1);
  int add_activations(int width, bool outputs, int per_row = 1);  // the quantised form of such a buffer
  int add_slots(int num_experts, int num_chosen);                 // of a mixture of experts; its layers may share them
  // Radians a position for each pair of a head [head_dim / 2], 0 for pairs that stay as they are; cosines and sines of the others are
  // multiplied with `factor`.
  int add_rope(std::vector<double> inverse_frequencies, double factor);
  int add_attention_plan(int window);  // how a step's attention is divided where rows see so many positions; 0 for all

  void embed(int matrix, float scale, int buffer);
  // Of the columns [column, column + size). With `in_place` the norm is written there, and no barrier follows with `joined`: the next
  // record works on the same rows and other columns.
  void norm(int from, int weight, float eps, int size, int to_buffer, int to_activations);
  void norm_in_place(int buffer, int column, int weight, float eps, int size, bool joined);
  // to = residual + norm(from), all different buffers. Then, in the same record, what reads that sum at once: its norm where next_weight is
  // not -1, else the sum itself; as floats in to_buffer (`to`, where the sum itself is read so), as int8 in to_activations, -1 where not.
  void norm_add(int from, int weight, float eps, int size, int residual, int to, int next_weight, float next_eps,
                int to_buffer, int to_activations);
  // With `per_token` one scale a row instead of one for each 32 inputs; where `order` is not empty, input i of the form is order[i] of the
  // buffer. Other records make the plain form only.
  void quantise(int from, int size, int to_activations, bool per_token = false, std::vector<int32_t> order = {});
  // `bias` per part or -1; `columns` where each part's outputs start. `from_buffer` / `from_activations` -1 where not needed. `scale` and
  // `softcap` as in LinearOut.
  void linear(std::vector<int> matrices, std::vector<int> columns, std::vector<int> biases, int from_buffer,
              int from_activations, int to_buffer, bool accumulate, float scale, float softcap);
  void gate_up(Activation activation, int gate, int up, int from_buffer, int from_activations, int to_buffer,
               int to_activations);
  void glu(Activation activation, int from, int up_column, int size, int to_buffer, int to_activations);
  // `rope` of add_rope, or -1 where heads do not rotate.
  void rope_write(int layer, int buffer, int q_column, int k_column, int v_column, int q_norm, int k_norm, float eps,
                  int rope, float query_scale);
  // `softcap` 0 and `sinks` -1 where there are none.
  void attention(int layer, int buffer, int out, int plan, float softcap, int sinks);
  // Which experts each row chooses and with what weights, to `to` [rows][2 * num_chosen] and into the slots.
  void route(int logits, int slots, bool normalise, int to);
  // Weights of all experts are one matrix, of which each has the same number of whole tiles; biases (or -1) lie likewise. The targets of
  // experts_glu and the sources of experts_down have num_chosen slots for each row.
  void experts_glu(int gate, int up, int gate_bias, int up_bias, int slots, Activation activation, int from_buffer,
                   int from_activations, int to_buffer, int to_activations);
  void experts_down(int down, int bias, int slots, int routing, int from_buffer, int from_activations, int to,
                    bool accumulate);
  void select(int from, int to);
  void sample(int logits);

  // ---- running ----
  void run(const StepInputs& inputs);
  // Debugging: records [begin, end) of a step that begin_step has set up.
  void begin_step(const StepInputs& inputs);
  void run_records(int begin, int end);
  // Between steps: the distributions p [count][num_logits] and SampleStatus [count] of outputs of the last step, whose logits are in that
  // buffer. p is all zeros where the status is not kSampleOk.
  void distributions(int logits, const OutputSamples& samples, const int32_t* outputs, int count, double* p,
                     uint32_t* status);

  int num_records() const { return static_cast<int>(records_.size()); }
  const char* record_name(int record) const;
  float* buffer(int id) const { return buffers_[static_cast<size_t>(id)].data.as<float>(); }
  int buffer_stride(int id) const { return buffers_[static_cast<size_t>(id)].stride; }
  // Activations of a buffer as floats, for debugging: scale * q.
  void dequantised(int activations, int rows, float* out) const;
  int activations_stride(int id) const { return activations_[static_cast<size_t>(id)].q_stride; }
  uint8_t* kv() const { return kv_; }
  const ProgramShape& shape() const { return shape_; }
  const Kernels& kernels() const { return kernels_; }
  int num_threads() const { return pool_.size(); }
  size_t workspace_bytes() const;
  const AttentionPlan& attention_plan(int id) const { return attention_plans_.at(static_cast<size_t>(id)); }
  int num_attention_plans() const { return static_cast<int>(attention_plans_.size()); }

 private:
  enum class Kind : uint8_t {
    begin,
    embed,
    norm,
    norm_add,
    quantise,
    linear,
    gate_up,
    glu,
    rope_write,
    attention,
    route,
    experts_glu,
    experts_down,
    select,
    sample
  };

  struct Part {
    int matrix, column, bias;
  };
  struct Record {
    Kind kind;
    int layer = 0;
    int from = -1, from_activations = -1, to = -1, to_activations = -1;
    int weight = -1, weight2 = -1;                        // a vector or a matrix
    int column = 0;                                       // of `from` where it begins
    int residual = -1, sum = -1;                          // buffers of norm_add
    int residual_maker = -1;                              // the norm_add that made the residual
    int bias = -1, bias2 = -1, slots = -1, routing = -1;  // of experts
    bool normalise = false;
    int size = 0;
    float eps = 0.0f, eps2 = 0.0f;
    float scale = 1.0f, softcap = 0.0f;
    Activation activation = Activation::silu;
    bool accumulate = false;
    bool joined = false;  // no barrier follows
    int rope = -1, plan = -1, sinks = -1;
    bool per_token = false;
    std::vector<int32_t> order{};  // of a quantise record
    bool outputs = false;          // works on the rows of outputs instead of those of the step
    int per_row = 1;               // or on so many slots for each row
    int q_column = 0, k_column = 0, v_column = 0;
    std::vector<Part> parts{};
    int tiles = 0;
  };
  struct Rope {
    std::vector<double> inverse_frequencies;  // [head_dim / 2]; 0 where a pair does not rotate
    double factor;
    Region cos, sin;  // [max_rows][head_dim], of the step
  };
  struct Buffer {
    Region data;
    int stride;
    bool outputs;
    int per_row;
    Region
        copies{};  // [threads - 1][kPrivateRows][stride] of the threads after the first, where they make sums for themselves
  };
  struct Quantised {
    Region data;  // for each thread a private copy of kPrivateRows rows, then the shared rows
    int q_stride;
    int rows;
    bool shared;     // some producer divides its work over the threads, so private copies are never used
    bool per_token;  // while building: how the latest record makes it
    std::vector<int32_t> order;
  };

  // Up to this many rows every thread quantises all rows for itself, which is cheaper than a barrier.
  static constexpr int kPrivateRows = 2;

  void check_input(const Matrix& matrix, int from_buffer, int from_activations) const;
  void made_plain(int activations);
  void run_record(const Record& record, int thread);
  bool private_rows(const Record& record, int rows) const;
  Activations view(int activations, int buffer, int rows, int thread) const;
  float* own_copy(const Buffer& buffer, int thread) const {
    const int row = (thread - 1) * kPrivateRows;
    return buffer.copies.as<float>() + static_cast<size_t>(row) * static_cast<size_t>(buffer.stride);
  }
  void fill_rope(const Rope& rope, int thread) const;
  void run_norm_add(const Record& record, Range rows, bool alone, int thread);
  void run_rope_write(const Record& record, int thread);
  NormArgs norm_args(int from, int column, int weight, int size, float eps, int to) const;
  float* scratch(int thread) const { return scratch_.as<float>() + static_cast<size_t>(thread) * scratch_floats_; }
  void run_attention(const Record& record, int thread);
  AttentionArgs attention_args(const Record& record) const;
  int rows_of(const Record& record) const {
    return record.outputs ? step_.num_outputs : step_.num_rows * record.per_row;
  }
  int tiles_per_expert(const Matrix& matrix, int slots) const;
  void need_expert_scratch(size_t gathered_bytes, size_t product_floats);
  float* products(int thread) const;
  uint8_t* gathered(int thread) const;
  const float* expert_bias(int bias, int column) const;
  Activations inputs_of(const Activations& in, Range slots, const int32_t* rows, int thread) const;
  void run_route(const Record& record, int thread);
  void run_experts_glu(const Record& record, int thread);
  void glu_units(const Record& record, int expert, Range units, const Activations& in, Range slots,
                 const Activations& out, float* products);
  void run_experts_down(const Record& record, int thread);

  const Kernels& kernels_;
  const ProgramShape shape_;
  ThreadPool pool_;
  std::vector<Matrix> matrices_;
  std::vector<Region> vectors_;
  std::vector<Buffer> buffers_;
  std::vector<Quantised> activations_;
  std::vector<Record> records_;
  std::vector<Rope> ropes_;
  std::vector<AttentionPlan> attention_plans_;
  Region own_pages_, partials_, scratch_;
  uint8_t* const kv_;          // own_pages_, or the pool of another program
  size_t scratch_floats_ = 0;  // per thread
  std::vector<ExpertSlots> slots_;
  Region expert_scratch_;  // products of every thread, then gathered inputs of every thread
  size_t product_floats_ = 0, gathered_bytes_ = 0;
  StepInputs step_{};
  std::vector<int32_t> sequence_of_row_;  // [rows]
  alignas(64) std::atomic<int> next_unit_{0};
  alignas(64) std::atomic<int> next_unit_after_{0};
};

}  // namespace paceline
