#include "program/expert_slots.h"

#include <algorithm>

namespace paceline {

ExpertSlots::ExpertSlots(int max_rows, int num_experts, int num_chosen)
    : max_rows_(max_rows),
      num_experts_(num_experts),
      num_chosen_(num_chosen),
      starts_(static_cast<size_t>(num_experts) + 1),
      rows_(static_cast<size_t>(max_rows) * static_cast<size_t>(num_chosen)),
      slots_(rows_.size()) {
  runs_.reserve(static_cast<size_t>(num_experts));
}

// A counting sort: stable, so slots of an expert are in the order of their rows.
void ExpertSlots::build(const float* routing, int stride, int rows) {
  const auto expert_of = [&](int row, int j) {
    return static_cast<size_t>(
        routing[static_cast<size_t>(row) * static_cast<size_t>(stride) + static_cast<size_t>(j)]);
  };
  num_slots_ = rows * num_chosen_;
  std::fill(starts_.begin(), starts_.end(), 0);
  for (int row = 0; row < rows; ++row)
    for (int j = 0; j < num_chosen_; ++j) ++starts_[expert_of(row, j) + 1];
  runs_.clear();
  for (int expert = 0; expert < num_experts_; ++expert) {
    const size_t e = static_cast<size_t>(expert);
    if (starts_[e + 1] > 0) runs_.push_back({expert, {starts_[e], starts_[e] + starts_[e + 1]}});
    starts_[e + 1] += starts_[e];
  }
  size_t choice = 0;
  for (int row = 0; row < rows; ++row)
    for (int j = 0; j < num_chosen_; ++j, ++choice) {
      const int32_t slot = starts_[expert_of(row, j)]++;
      slots_[choice] = slot;
      rows_[static_cast<size_t>(slot)] = row;
    }
}

}  // namespace paceline
