// What this machine can do, for the limits that benchmarks are measured against.
#pragma once

#include "kernels/table.h"

namespace paceline {

double measure_bandwidth(int num_threads);                          // GB/s read
double measure_int8_peak(const Kernels& kernels, int num_threads);  // GOPS

}  // namespace paceline
