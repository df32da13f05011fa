#include "program/attention_plan.h"

#include <algorithm>
#include <limits>

#include "base/as_size.h"

namespace paceline {
namespace {

constexpr int kSplitPages = kSplitTokens / kPageTokens;
// Units that a thread takes if all cost the same: enough that threads end together although others use their cores too.
constexpr int kUnitsAThread = 16;
// What reading a split costs, in (token, head) pairs that could be computed meanwhile.
constexpr int kReadCost = 4;
// Partials that are written, read and folded apart in the time of one such pair over a split.
constexpr int kPartialsAPair = 16;
// Slots: 32 rows behind a common prefix may have 8,000 tokens of their own each.
constexpr int kSlots = 2048;

int divide_up(int n, int by) { return (n + by - 1) / by; }

// Room for one row of any length, beyond that for kSlots, but no more than a step can use.
int slots_for(int max_rows, int max_splits) {
  return std::max(max_splits, static_cast<int>(std::min(int64_t{kSlots}, int64_t{max_rows} * max_splits)));
}

const int32_t* pages_of(const StepInputs& step, int sequence) {
  return step.page_table + as_size(sequence) * as_size(step.page_table_stride);
}

// The splits that rows at positions first to last of a sequence see.
Range seen_splits(int window, int first, int last) {
  const int oldest = window > 0 ? std::max(0, first - window + 1) : 0;
  return {oldest / kSplitTokens, last / kSplitTokens + 1};
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, int window, int max_rows, int context_length, int num_threads)
    : shape_(shape),
      window_(window),
      max_rows_(max_rows),
      num_threads_(num_threads),
      rows_a_unit_(std::max(1, kQueryRows / shape.group())),
      num_slots_(slots_for(max_rows, divide_up(context_length, kSplitTokens))) {
  sequences_.reserve(as_size(max_rows));
  unit_rows_.reserve(as_size(max_rows));
  row_slots_.resize(as_size(max_rows));
  merges_.reserve(as_size(max_rows));
  // For each KV head at most max_rows units of single sequences and max_rows shared ones. Cutting into pieces adds less than four for each
  // unit_cost_, because a piece costs at least a quarter of that; twice as many, because a plan's cost counts a shared read once.
  // Where heads are taken apart there are fewer than num_threads before that.
  units_.reserve(2 * as_size(max_rows) * as_size(shape.num_kv_heads) + 8 * as_size(kUnitsAThread * num_threads) +
                 as_size(num_threads * shape.group()));
}

// A lone row with one KV head and less than a split would be the work of one thread. Keys are then read once for each part of the heads, so
// heads are taken apart only where even splits cannot keep all threads busy: with twice as many units as threads 330 keys of 256
// components took longer (35 against 25 us), as these threads share no cache.
void AttentionPlan::divide_heads() {
  int64_t units = 0;
  for (const Sequence& s : sequences_) units += int64_t{num_units(s.rows.size())} * s.splits.size();
  units = std::max<int64_t>(1, units * shape_.num_kv_heads);
  head_parts_ = static_cast<int>(std::clamp<int64_t>((num_threads_ + units - 1) / units, 1, shape_.group()));
}

void AttentionPlan::plan(const StepInputs& step) {
  order(step);
  divide_heads();
  int64_t cost = 0;
  for (const Sequence& s : sequences_)
    cost += int64_t{s.splits.end - s.shared_end} * kReadCost * num_units(s.rows.size()) +
            int64_t{s.splits.size()} * s.rows.size() * shape_.group();
  unit_cost_ = num_threads_ > 1 ? cost * shape_.num_kv_heads / (kUnitsAThread * num_threads_)
                                : std::numeric_limits<int64_t>::max();
  units_.clear();
  merges_.clear();
  used_slots_ = 0;
  shared_units_left_ = max_rows_;
  shared_splits_ = 0;
  const int count = static_cast<int>(sequences_.size());
  for (Range run{0, 1}; run.begin < count; run = {run.end, run.end + 1}) {
    while (run.end < count && sequences_[as_size(run.end)].shared_end > sequences_[as_size(run.end)].splits.begin)
      ++run.end;
    plan_run(step, run);
  }
}

void AttentionPlan::add_sequence(const StepInputs& step, int index) {
  const Range rows{step.row_starts[index], step.row_starts[index + 1]};
  if (rows.size() == 0) return;
  const int first = step.positions[rows.begin];
  const Range splits = seen_splits(window_, first, step.positions[rows.end - 1]);
  // Rows that fill most of a unit share what they read among themselves already.
  const bool few_rows = 2 * rows.size() <= rows_a_unit_;
  sequences_.push_back({index, rows, splits, few_rows ? first / kSplitTokens : splits.begin, splits.begin});
}

// Sequences, and with them their rows, such that those with the same first splits are neighbours.
void AttentionPlan::order(const StepInputs& step) {
  sequences_.clear();
  for (int s = 0; s < step.num_sequences; ++s) add_sequence(step, s);
  std::sort(sequences_.begin(), sequences_.end(), [&](const Sequence& a, const Sequence& b) {
    if (a.splits.begin != b.splits.begin) return a.splits.begin < b.splits.begin;
    const int32_t* pages = pages_of(step, a.index);
    const int32_t* others = pages_of(step, b.index);
    const Range shareable{a.splits.begin * kSplitPages, std::min(a.past_end, b.past_end) * kSplitPages};
    const auto [page, other] = std::mismatch(pages + shareable.begin, pages + shareable.end, others + shareable.begin);
    if (page != pages + shareable.end) return *page < *other;
    return a.past_end != b.past_end ? a.past_end < b.past_end : a.index < b.index;
  });
  for (size_t i = 1; i < sequences_.size(); ++i) {
    const Sequence& before = sequences_[i - 1];
    Sequence& s = sequences_[i];
    if (before.splits.begin != s.splits.begin) continue;
    const int32_t* pages = pages_of(step, s.index);
    const int end = std::min(before.past_end, s.past_end) * kSplitPages;
    const int32_t* differs = std::mismatch(pages + s.splits.begin * kSplitPages, pages + end,
                                           pages_of(step, before.index) + s.splits.begin * kSplitPages)
                                 .first;
    s.shared_end = static_cast<int>(differs - pages) / kSplitPages;
  }
  unit_rows_.clear();
  for (Sequence& s : sequences_) {
    const int begin = static_cast<int>(unit_rows_.size());
    for (int row = s.rows.begin; row < s.rows.end; ++row) unit_rows_.push_back(row);
    s.rows = {begin, begin + s.rows.size()};
  }
}

Range AttentionPlan::rows_of_run(Range run) const {
  return {sequences_[as_size(run.begin)].rows.begin, sequences_[as_size(run.end - 1)].rows.end};
}

// Where the splits that all sequences of a run share end.
int AttentionPlan::common_end(Range run) const {
  int end = sequences_[as_size(run.begin)].past_end;
  for (int i = run.begin + 1; i < run.end; ++i) end = std::min(end, sequences_[as_size(i)].shared_end);
  return end;
}

int AttentionPlan::num_units(int rows) const { return divide_up(rows, rows_a_unit_); }

int AttentionPlan::num_pieces(Range rows, Range splits) const {
  const int rows_of_unit = divide_up(rows.size(), num_units(rows.size()));
  const int64_t splits_a_piece = unit_cost_ / (kReadCost + rows_of_unit * shape_.group());
  return divide_up(splits.size(), static_cast<int>(std::clamp<int64_t>(splits_a_piece, 1, splits.size())));
}

// A run: sequences of the order each of which shares its first split with the one before it.
void AttentionPlan::plan_run(const StepInputs& step, Range run) {
  if (run.size() == 1) return plan_alone(step, sequences_[as_size(run.begin)]);
  const Range rows = rows_of_run(run);
  const Range common{sequences_[as_size(run.begin)].splits.begin, common_end(run)};
  const int first_piece_end = common.part(0, num_pieces(rows, common)).end;
  int64_t slots = 0, reads_saved = 0;
  for (int i = run.begin; i < run.end; ++i) {
    const Sequence& s = sequences_[as_size(i)];
    slots += int64_t{s.rows.size()} * (s.splits.end - first_piece_end + 1);
    if (i > run.begin) reads_saved += s.shared_end - common.begin;
  }
  const bool pays = reads_saved * kReadCost * kPartialsAPair >= slots * shape_.group();
  if (pays && slots <= num_slots_ - used_slots_ && take_shared_units(rows.size())) {
    for (int i = run.begin; i < run.end; ++i) {
      const Sequence& s = sequences_[as_size(i)];
      give_slots(s.rows, first_piece_end, s.splits.end);
    }
    return plan_shared(run, common.begin);
  }
  for (Range inner = inner_run(run, run.begin, common.end); inner.size() > 0;
       inner = inner_run(run, inner.end, common.end))
    plan_run(step, inner);
}

// The sequences of a run from `begin` on that share more than splits up to `end`; one alone if it does not.
Range AttentionPlan::inner_run(Range run, int begin, int end) const {
  Range inner{begin, std::min(begin + 1, run.end)};
  while (inner.end < run.end && sequences_[as_size(inner.end)].shared_end > end) ++inner.end;
  return inner;
}

void AttentionPlan::plan_alone(const StepInputs& step, const Sequence& sequence) {
  const int parts = num_units(sequence.rows.size());
  for (int i = 0; i < parts; ++i) {
    const Range rows = sequence.rows.part(i, parts);
    const Range splits = seen_splits(window_, step.positions[unit_rows_[as_size(rows.begin)]],
                                     step.positions[unit_rows_[as_size(rows.end - 1)]]);
    const int first_piece_end = splits.part(0, num_pieces(rows, splits)).end;
    const bool partial =
        first_piece_end < splits.end && rows.size() * (splits.end - first_piece_end + 1) <= num_slots_ - used_slots_;
    if (partial) give_slots(rows, first_piece_end, splits.end);
    add_units(sequence.index, rows, splits, partial ? UnitResult::folded : UnitResult::rows);
  }
}

// The splits from `from` on of a run: first those that all of it shares, then those of the runs within it that share more.
void AttentionPlan::plan_shared(Range run, int from) {
  const Sequence& first = sequences_[as_size(run.begin)];
  const int to = common_end(run);
  add_units(first.index, rows_of_run(run), {from, to},
            from == first.splits.begin ? UnitResult::folded : UnitResult::splits);
  shared_splits_ += (run.size() - 1) * (to - from);
  for (Range inner = inner_run(run, run.begin, to); inner.size() > 0; inner = inner_run(run, inner.end, to)) {
    if (inner.size() > 1 && take_shared_units(rows_of_run(inner).size())) {
      plan_shared(inner, to);
      continue;
    }
    for (int i = inner.begin; i < inner.end; ++i) {
      const Sequence& s = sequences_[as_size(i)];
      add_units(s.index, s.rows, {to, s.splits.end}, UnitResult::splits);
    }
  }
}

// False when units shared so far leave too little room for those of so many rows.
bool AttentionPlan::take_shared_units(int rows) {
  if (num_units(rows) > shared_units_left_) return false;
  shared_units_left_ -= num_units(rows);
  return true;
}

// The first piece, folded, takes the slot of its last split; every later split its own.
void AttentionPlan::give_slots(Range rows, int first_piece_end, int split_end) {
  const Range splits{first_piece_end - 1, split_end};
  for (int at = rows.begin; at < rows.end; ++at) {
    const int row = unit_rows_[as_size(at)];
    row_slots_[as_size(row)] = used_slots_ - splits.begin;
    merges_.push_back({row, splits});
    used_slots_ += splits.size();
  }
}

// Units over the same keys follow each other, so that all but the first find them in a cache.
void AttentionPlan::add_units(int sequence, Range rows, Range splits, UnitResult first_piece) {
  const int pieces = first_piece == UnitResult::rows ? 1 : num_pieces(rows, splits);
  const int parts = num_units(rows.size());
  for (int i = 0; i < pieces; ++i) {
    const Range piece = splits.part(i, pieces);
    const UnitResult result = i == 0 ? first_piece : UnitResult::splits;
    for (int head = 0; head < shape_.num_kv_heads; ++head)
      for (int j = 0; j < parts * head_parts_; ++j) {
        const Range unit = rows.part(j / head_parts_, parts);
        const Range heads = Range{0, shape_.group()}.part(j % head_parts_, head_parts_);
        units_.push_back(
            {sequence, unit.begin, unit.end, head, heads.begin, heads.end, piece.begin, piece.end, result});
      }
  }
}

}  // namespace paceline
