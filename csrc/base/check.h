// CHECK: a condition that only a defect in Paceline can break. Throws, never aborts.
#pragma once

#include <stdexcept>
#include <string>

#define CHECK(condition, message)                                                                                \
  do {                                                                                                           \
    if (!(condition)) throw std::logic_error(std::string("internal error: ") + (message) + " [" #condition "]"); \
  } while (0)
