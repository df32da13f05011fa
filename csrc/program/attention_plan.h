// How the attention of a step is divided: into units that threads take one by one, such that keys and values that several sequences have
// in common are read once for all of them.
//
// Sequences that continue one prefix name the same pages at the start of their page tables. Ordered by those, they form a tree whose
// inner nodes are splits that a run of neighbours shares; a node becomes units over the rows of its whole run. What such a unit finds is
// left as partials that are folded left to right afterwards, so no bit depends on what was shared. By the same mechanism the splits of a
// row are cut into pieces where whole rows would leave threads without work, and where even these are few, query heads that read the same
// keys are taken apart. What a step shares must repay its partials: two rows that share one split of thirty are read apart.
//
// What is shared may be written in the same step: by rows of a sequence that has only come so far, and for the branches of a tree of tokens
// by rows of an earlier branch (StepInputs::kv_writes). Three things make that right. All writes of a layer lie before the barrier that
// its attention starts from. Splits are shared where two tables name the same pages, so it does not matter who filled them. And both have
// their rows past these splits, so that none of their keys is ahead of a row: past_end bounds who reads, not who writes. Nor need a
// sequence's first row be the first token of it that the step computes. What a branch has before its own rows, in pages of its own, it
// reads like any prefix.
#pragma once

#include <cstdint>
#include <vector>

#include "base/range.h"
#include "kernels/table.h"
#include "program/step.h"

namespace paceline {

// A row whose partials, one in each slot of these splits, are still to be folded.
struct AttentionMerge {
  int32_t row;
  Range splits;
};

class AttentionPlan {
 public:
  // Takes all memory that steps of at most max_rows rows need. `window`: latest positions that a row sees, its own included; 0 for all.
  AttentionPlan(const AttentionShape& shape, int window, int max_rows, int context_length, int num_threads);

  void plan(const StepInputs& step);

  int window() const { return window_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  const std::vector<AttentionMerge>& merges() const { return merges_; }
  const int32_t* unit_rows() const { return unit_rows_.data(); }
  // [rows] slot of the partials (of all heads) of a row's split 0; that of split s is s further. Only for rows in merges().
  const int32_t* row_slots() const { return row_slots_.data(); }
  // Slots that there are. A step that could use more shares less: slower, never wrong.
  int num_slots() const { return num_slots_; }
  // Splits that the last step did not read again for another sequence: (sequences - 1) x splits over all that is shared.
  int shared_splits() const { return shared_splits_; }

 private:
  struct Sequence {
    int index;
    Range rows;      // of unit_rows_
    Range splits;    // that some row of it sees
    int past_end;    // splits [splits.begin, past_end) may be shared: they lie before its first row
    int shared_end;  // splits [splits.begin, shared_end) are those of the sequence before it in the order
  };

  void divide_heads();
  void add_sequence(const StepInputs& step, int index);
  void order(const StepInputs& step);
  Range rows_of_run(Range run) const;
  int common_end(Range run) const;
  Range inner_run(Range run, int begin, int end) const;
  int num_units(int rows) const;
  int num_pieces(Range rows, Range splits) const;
  void plan_run(const StepInputs& step, Range run);
  void plan_alone(const StepInputs& step, const Sequence& sequence);
  void plan_shared(Range run, int from);
  bool take_shared_units(int rows);
  void give_slots(Range rows, int first_piece_end, int split_end);
  void add_units(int sequence, Range rows, Range splits, UnitResult first_piece);

  const AttentionShape shape_;
  const int window_, max_rows_, num_threads_, rows_a_unit_, num_slots_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> unit_rows_;  // the step's rows in the order of sequences_
  std::vector<int32_t> row_slots_;
  std::vector<AttentionUnit> units_;
  std::vector<AttentionMerge> merges_;
  int head_parts_ = 1;     // that the query heads of a KV head are taken in
  int64_t unit_cost_ = 0;  // what one unit should cost
  int used_slots_ = 0, shared_units_left_ = 0, shared_splits_ = 0;
};

}  // namespace paceline
