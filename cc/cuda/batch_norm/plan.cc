#include "cuda/batch_norm/plan.h"

#include <algorithm>
#include <string>

namespace jaxconv {
namespace {

// CTAs of one sum: two to an SM of an H200. Of several segments four times as many, so that the
// last ones to run are few among them.
constexpr int64_t kCtas = 264, kCtasOfSegments = 4 * kCtas;
// The fewest rows that each thread adds.
constexpr int64_t kLeastRows = 8;
// Of a grid along y, and along x.
constexpr int64_t kMaxParts = 65535, kMaxSlices = (int64_t{1} << 31) - 1;

}  // namespace

ChannelThreads::ChannelThreads(int64_t channels) {
  const int64_t vectors = std::max<int64_t>(channels / kChannelsOfThread, 1);
  lanes = static_cast<int>(std::min<int64_t>(vectors, kMaxLanes));
  steps = kPassThreads / lanes;
  slices = (vectors + lanes - 1) / lanes;
}

int64_t PartsOfRows(int64_t segments, int64_t rows, int64_t channels) {
  const ChannelThreads threads(channels);
  const int64_t ctas = segments == 1 ? kCtas : kCtasOfSegments;
  const int64_t most = rows / (kLeastRows * threads.steps);
  return std::max<int64_t>(1, std::min(ctas / (threads.slices * segments), most));
}

int64_t RowsOfMoments(int bytes, int64_t channels) {
  const int rows =
      bytes == 4 ? kRowsInFlight<4 * kChannelsOfThread> : kRowsInFlight<2 * kChannelsOfThread>;
  return rows * int64_t{ChannelThreads(channels).steps};
}

Status CheckCut(int64_t segments, int64_t rows, int64_t channels, int64_t parts) {
  if (channels < kChannelsOfThread || channels % kChannelsOfThread != 0) {
    return Status::Unimplemented("expected a multiple of 8 channels, got " +
                                 std::to_string(channels));
  }
  if (rows < 1 || segments < 1 || parts < 1 || parts > kMaxParts ||
      ChannelThreads(channels).slices * segments > kMaxSlices) {
    return Status::Unimplemented("expected rows in 1 to 65535 parts, got " + std::to_string(rows) +
                                 " rows in " + std::to_string(parts) + " parts of " +
                                 std::to_string(segments) + " segments");
  }
  return {};
}

Status CheckAligned(std::initializer_list<const void*> arrays) {
  for (const void* array : arrays) {
    if (reinterpret_cast<uintptr_t>(array) % 16 != 0) {
      return Status::Unimplemented("an array does not lie on a multiple of 16 bytes");
    }
  }
  return {};
}

}  // namespace jaxconv
