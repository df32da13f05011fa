#include <sys/mman.h>

#include <new>
#include <utility>

#include "program/program.h"

namespace paceline {
namespace {

constexpr size_t kHugeFrom = size_t{64} << 20;

}  // namespace

Region::Region(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  // A refusal only costs speed. Small regions would be resident beyond what they need.
  if (bytes >= kHugeFrom) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace paceline
