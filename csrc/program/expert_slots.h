// The rows of a step sorted by the experts that they chose.
//
// A slot is one choice of one row. Slots of an expert lie side by side, in the order of their rows, so that the kernels for several rows
// run over each expert's slots as over any rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/range.h"

namespace paceline {

class ExpertSlots {
 public:
  // Takes all memory that steps of at most max_rows rows need.
  ExpertSlots(int max_rows, int num_experts, int num_chosen);

  // An expert that some row chose.
  struct Run {
    int expert;
    Range slots;
  };
  // Some of the units (pieces of the outputs) of an expert.
  struct Part {
    int expert;
    Range slots, units;
  };

  // `routing` [rows][stride]: num_chosen different ids of a row, as floats.
  void build(const float* routing, int stride, int rows);

  int num_experts() const { return num_experts_; }
  int num_chosen() const { return num_chosen_; }
  int max_rows() const { return max_rows_; }
  // [slots] the row of each.
  const int32_t* rows() const { return rows_.data(); }
  // [rows][num_chosen] the slots of each row.
  const int32_t* slots() const { return slots_.data(); }
  const std::vector<Run>& runs() const { return runs_; }

  // Calls visit(Part) with a thread's share of all units of all chosen experts, each of which has num_units. The shares of all threads make
  // up the whole.
  template <class Visit>
  void for_share(int thread, int num_threads, int num_units, Visit&& visit) const {
    int total = 0;
    for (const Run& run : runs_) total += num_units * unit_cost(run);
    const Range mine = Range{0, total}.part(thread, num_threads);
    int first = 0;
    for (const Run& run : runs_) {
      // Of two neighbouring shares one ends where the other begins.
      const auto cut = [&](int place) { return std::clamp((place - first) / unit_cost(run), 0, num_units); };
      const Range units{cut(mine.begin), cut(mine.end)};
      if (units.size() > 0) visit(Part{run.expert, run.slots, units});
      first += num_units * unit_cost(run);
    }
  }

 private:
  // In units of the arithmetic for one slot; reading the weights from memory costs about two of those.
  static int unit_cost(const Run& run) { return run.slots.size() + 2; }

  const int max_rows_, num_experts_, num_chosen_;
  int num_slots_ = 0;
  std::vector<int32_t> starts_;  // [experts + 1], while building
  std::vector<int32_t> rows_, slots_;
  std::vector<Run> runs_;
};

}  // namespace paceline
