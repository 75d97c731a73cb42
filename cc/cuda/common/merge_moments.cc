#include "cuda/common/merge_moments.h"

#include <algorithm>

#include "core/conv_problem.h"

namespace jaxconv {
namespace {

// A single part needs no counter and waits for memory once.
constexpr int64_t kSlotsOfOnePart = 512;
constexpr int64_t kSlotsOfPart = 256;
constexpr int64_t kMaxParts = 32;

}  // namespace

int64_t MomentSlots::Parts() const {
  if (slots <= kSlotsOfOnePart) return 1;
  return std::min(kMaxParts, CeilDiv(slots, kSlotsOfPart));
}

int64_t MomentSlots::Bytes() const {
  if (slots == 0) return 0;
  return PartsAt() + Parts() * channels * int64_t{sizeof(ChannelSums)};
}

double MomentSlots::Microseconds(const Gpu& gpu) const {
  if (slots == 0) return 0;
  // The sums are written, then read from L2 or DRAM. Inside a program the kernel takes 3 us longer
  // than alone.
  return gpu.launch_us + 4.5 + 2 * static_cast<double>(PartsAt()) / gpu.dram_bytes_per_us;
}

void MomentSlots::Bind(void* workspace, EpilogueParams* params) const {
  params->moments = reinterpret_cast<ChannelSums*>(static_cast<char*>(workspace) + SumsAt());
  params->moment_counters = static_cast<int32_t>(SumsAt() / int64_t{sizeof(int32_t)});
}

}  // namespace jaxconv
