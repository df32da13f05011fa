// What one step is given.
#pragma once

#include <cstdint>

#include "kernels/sample.h"

namespace paceline {

struct StepInputs {
  int32_t num_rows, num_sequences, num_outputs;
  const int32_t* tokens;      // [rows]
  const int32_t* positions;   // [rows]
  const int32_t* row_starts;  // [sequences + 1]
  const int32_t* page_table;  // [sequences][page_table_stride]
  int32_t page_table_stride;
  const int32_t* logit_rows;   // [outputs]
  const int32_t* page_copies;  // [copies][2] source, destination
  int32_t num_page_copies;
  const int32_t* kv_writes;  // [writes][2] row, sequence: the row's keys and values go to that sequence's pages too
  int32_t num_kv_writes;
  const SampleRow* sample_rows;  // [outputs]
  SampleLists sample_lists;
  SampleOut* sampled;  // [outputs]
};

}  // namespace paceline
