// Numbers [begin, end), and their division into parts that differ by one at most.
#pragma once

#include <cstdint>

namespace paceline {

struct Range {
  int begin, end;
  int size() const { return end - begin; }
  Range part(int index, int num_parts) const {
    const auto cut = [&](int i) { return begin + static_cast<int>(static_cast<int64_t>(size()) * i / num_parts); };
    return {cut(index), cut(index + 1)};
  }
};

}  // namespace paceline
