#include "cuda/common/merge_moments.h"

#include <algorithm>

#include "core/conv_problem.h"

namespace jaxconv {
namespace {

constexpr int64_t kSlotsOfPart = 128;
constexpr int64_t kMaxParts = 64;
constexpr int kSums = 3;

}  // namespace

int64_t MomentSlots::Parts() const { return std::min(kMaxParts, CeilDiv(slots, kSlotsOfPart)); }

int64_t MomentSlots::Bytes() const {
  if (slots == 0) return 0;
  return PartsAt() + Parts() * channels * kSums * int64_t{sizeof(double)};
}

double MomentSlots::Microseconds(const Gpu& gpu) const {
  if (slots == 0) return 0;
  // Written, and read again from L2 or DRAM.
  return gpu.launch_us + 1.5 + 2 * static_cast<double>(RowsAt()) / gpu.dram_bytes_per_us;
}

void MomentSlots::Bind(void* workspace, EpilogueParams* params) const {
  char* const first = static_cast<char*>(workspace);
  params->moments = reinterpret_cast<float*>(first);
  params->moment_rows = reinterpret_cast<int32_t*>(first + RowsAt());
  params->moment_counters = static_cast<int32_t>(Counters());
}

}  // namespace jaxconv
