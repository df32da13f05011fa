// What a mixture of experts needs beside the products of kernels/linear-inl.h: which experts a row chooses, and the sum of what they gave.

namespace paceline::PL_ISA {
namespace {

// Whether a comes before b among the largest. What is not a number comes first, so that it ends in the weights and is reported.
inline bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// Writes the ids of the num_chosen largest logits, the largest first, equal ones by their ids.
inline void choose_experts(const float* logits, int num_experts, int num_chosen, int* chosen) {
  int count = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    if (count == num_chosen && !is_larger(logits[expert], logits[chosen[count - 1]])) continue;
    int at = count < num_chosen ? count++ : count - 1;
    for (; at > 0 && is_larger(logits[expert], logits[chosen[at - 1]]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = expert;
  }
}

// Sum of e^(logits[i] - largest), 16 lanes at a time in order, then over the lanes.
inline float sum_of_exponentials(const float* logits, int count, float largest) {
  F32x16 sum = zero_f32();
  for (int i = 0; i < count; i += 16) {
    const F32x16 e = exp(load(logits + i) - set1(largest));
    sum = sum + select(first_lanes(count - i), e, zero_f32());
  }
  return reduce_add(sum);
}

// routing[row] = num_chosen ids, then their weights: e^(logit - largest) / sum, the sum over those chosen (`normalise`) or over all.
// Logits are readable up to the next multiple of 16. Per row about num_experts comparisons and num_experts / 16 exponentials.
void route(const float* logits, int stride, int num_experts, int num_chosen, bool normalise, int row_begin, int row_end,
           float* routing, int routing_stride) {
  for (int row = row_begin; row < row_end; ++row) {
    const float* l = logits + static_cast<size_t>(row) * static_cast<size_t>(stride);
    float* to = routing + static_cast<size_t>(row) * static_cast<size_t>(routing_stride);
    int chosen[kMaxChosen];
    alignas(64) float of_chosen[kMaxChosen];
    choose_experts(l, num_experts, num_chosen, chosen);
    for (int j = 0; j < kMaxChosen; ++j) of_chosen[j] = l[chosen[j < num_chosen ? j : 0]];
    const float largest = of_chosen[0];
    const float sum =
        normalise ? sum_of_exponentials(of_chosen, num_chosen, largest) : sum_of_exponentials(l, num_experts, largest);
    for (int j = 0; j < num_chosen; j += 16) {
      alignas(64) float weights[16];
      store(weights, exp(load(of_chosen + j) - set1(largest)) / set1(sum));
      for (int i = j; i < j + 16 && i < num_chosen; ++i) {
        to[i] = static_cast<float>(chosen[i]);
        to[num_chosen + i] = weights[i - j];
      }
    }
  }
}

// out[row] (+)= sum over j, in order, of weights[row][j] * y[slots[row][j]], for `columns` columns, a multiple of 16.
// Per element num_chosen loads and multiply-adds.
void combine(const float* y, int y_stride, const int32_t* slots, const float* weights, int weights_stride,
             int num_chosen, int columns, int rows, float* out, int out_stride, bool accumulate) {
  for (int row = 0; row < rows; ++row) {
    const int32_t* of_row = slots + static_cast<size_t>(row) * static_cast<size_t>(num_chosen);
    const float* w = weights + static_cast<size_t>(row) * static_cast<size_t>(weights_stride);
    float* to = out + static_cast<size_t>(row) * static_cast<size_t>(out_stride);
    for (int column = 0; column < columns; column += 16) {
      F32x16 sum = zero_f32();
      for (int j = 0; j < num_chosen; ++j)
        sum = fma(set1(w[j]), load(y + static_cast<size_t>(of_row[j]) * static_cast<size_t>(y_stride) + column), sum);
      if (accumulate) sum = load(to + column) + sum;
      store(to + column, sum);
    }
  }
}

}  // namespace
}  // namespace paceline::PL_ISA
