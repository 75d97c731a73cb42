// The gather of an implicit GEMM, with two words for each pixel.
//
// For each gathered pixel a thread keeps its address at tap 0, and a mask with one bit per tap
// coordinate and axis that is set if the tap coordinate lies inside the source. A tap is inside if
// its bits on all (up to three) axes are set; otherwise the loader writes zeros.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_GATHER_PIXEL_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_GATHER_PIXEL_CUH_

#include <cstdint>

#include "core/implicit_gemm.h"

namespace jaxconv::igemm_wmma {

struct GatherPixel {
  int32_t pixel;  // of the gathered tensor's batch, at tap coordinates 0; may lie outside
  uint32_t taps;  // axis 0's bits lowest; bit 31 is never set
};
// The mask of a tap that does not exist; no pixel has this bit.
inline constexpr uint32_t kNoTap = 1u << 31;

// The tile of one CTA.
template <typename T>
struct GemmTile {
  int32_t rows;  // of the stride residue class
  int32_t m_first, n_first;
  int32_t k_begin, k_end;  // reduction indices of this slice
  const T* a;              // of this batch and group
  const T* b;
};

// One bit for each tap coordinate t for which src + t * src_per_t lies inside the source.
__device__ __forceinline__ uint32_t TapsInside(const GatherAxis& axis, int32_t src,
                                               int32_t tap_count) {
  if (axis.src_per_t == 1 || axis.src_per_t == -1) {  // an interval of t
    const int32_t first = axis.src_per_t == 1 ? -src : src - axis.src_extent + 1;
    const int32_t low = max(0, first), high = min(tap_count, first + axis.src_extent);
    return high > low ? ((2u << (high - low - 1)) - 1) << low : 0;
  }
  uint32_t taps = 0;
  for (int t = 0; t < tap_count; ++t) {
    if (axis.InSource(src + t * axis.src_per_t)) taps |= 1u << t;
  }
  return taps;
}

// Computes the GatherPixel of a destination row or pixel, and the pixel of the output (-1: none).
__device__ __forceinline__ GatherPixel LocatePixel(const ImplicitGemm& gemm,
                                                   const AxisPhase (&phase)[3], int32_t row,
                                                   int32_t rows, int32_t* dst) {
  GatherPixel result{0, 0};
  *dst = -1;
  if (row >= rows) return result;
  int32_t image, j[3], src[3];
  gemm.DecodeRow(phase, row, &image, j);
  int32_t first_bit = 0;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    src[a] = phase[a].src0 + j[a] * gemm.axis[a].src_per_j;
    result.taps |= TapsInside(gemm.axis[a], src[a], phase[a].tap_count) << first_bit;
    first_bit += phase[a].tap_count;
  }
  result.pixel = image * static_cast<int32_t>(gemm.SourceImage()) +
                 static_cast<int32_t>(gemm.SourcePixel(src[0], src[1], src[2]));
  *dst = image;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    *dst = *dst * gemm.axis[a].dst_extent + phase[a].phase + j[a] * gemm.axis[a].period;
  }
  return result;
}

// A reduction index of fprop or dgrad, or a row index of wgrad, as (tap, channel).
struct TapChannel {
  int32_t pixel;    // distance of the tap's pixel from tap 0's
  uint32_t taps;    // its bits
  int32_t channel;  // inside the group
  int32_t filter_tap;

  __device__ __forceinline__ static TapChannel Decode(const ImplicitGemm& gemm,
                                                      const AxisPhase (&phase)[3],
                                                      const FastDivmod& channels, int32_t index,
                                                      int32_t end) {
    TapChannel result{0, kNoTap, 0, 0};
    if (index >= end) return result;
    int32_t tap, t[3];
    channels.Divmod(index, &tap, &result.channel);
    gemm.DecodeTap(phase, tap, t);
    result.pixel = static_cast<int32_t>(gemm.SourcePixel(t[0] * gemm.axis[0].src_per_t,
                                                         t[1] * gemm.axis[1].src_per_t,
                                                         t[2] * gemm.axis[2].src_per_t));
    result.taps = (1u << t[0] | 1u << (phase[0].tap_count + t[1]) |
                   1u << (phase[0].tap_count + phase[1].tap_count + t[2]));
    result.filter_tap = gemm.TapIndex(phase[0].first_tap + t[0] * gemm.axis[0].tap_period,
                                      phase[1].first_tap + t[1] * gemm.axis[1].tap_period,
                                      phase[2].first_tap + t[2] * gemm.axis[2].tap_period);
    return result;
  }
};

// An entry of the table of taps in shared memory.
struct TapEntry {
  int32_t pixel;
  uint32_t taps;
  int32_t filter_tap;
  int32_t unused;
};

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_GATHER_PIXEL_CUH_
