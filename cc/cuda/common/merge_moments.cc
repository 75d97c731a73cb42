#include "cuda/common/merge_moments.h"

#include <algorithm>

#include "core/conv_problem.h"

namespace jaxconv {
namespace {

// A single part waits for memory once. A portable cluster has up to 8 CTAs.
constexpr int64_t kSlotsOfOnePart = 512;
constexpr int64_t kSlotsOfPart = 256;
constexpr int64_t kMaxParts = 8;
// What the kernel takes beside its launch and its bytes inside a program, 3 us longer than alone.
// Measured.
constexpr double kMergeUs = 4.5;

}  // namespace

int64_t MomentSlots::Parts() const {
  if (slots <= kSlotsOfOnePart) return 1;
  return std::min(kMaxParts, CeilDiv(slots, kSlotsOfPart));
}

int64_t MomentSlots::Bytes() const { return slots * channels * int64_t{sizeof(ChannelSums)}; }

double MomentSlots::Microseconds(const Gpu& gpu) const {
  if (slots == 0) return 0;
  // The sums are written, then read from L2 or DRAM.
  return gpu.launch_us + kMergeUs + 2 * static_cast<double>(Bytes()) / gpu.dram_bytes_per_us;
}

void MomentSlots::Bind(void* workspace, EpilogueParams* params) const {
  params->moments = static_cast<ChannelSums*>(workspace);
}

}  // namespace jaxconv
