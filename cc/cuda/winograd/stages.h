// The kernels before and after the products, which all forms share. They are compiled for every
// tile and type, once for all GPUs (stages.cu) and once for sm_90a (stages_sm90.cu), where kernels
// overlap their neighbours in the stream. Plain functions; pointers are device pointers.
#ifndef JAXCONV_CUDA_WINOGRAD_STAGES_H_
#define JAXCONV_CUDA_WINOGRAD_STAGES_H_

#include <cstdint>

#include "core/status.h"
#include "cuda/common/kernel.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

// The addresses of a call's arrays. Arrays that the form does not store are undefined.
struct StagePointers {
  const void* input = nullptr;   // x, or dy
  const void* filter = nullptr;  // in the caller's layout
  void* output = nullptr;
  const void* u = nullptr;  // float16, in the workspace or in a prepared filter
  void* v = nullptr;        // float16
  void* m = nullptr;        // float32, or float16
  ScaleSource input_scale, filter_scale;
};
StagePointers Locate(const LaunchParams& launch, const Operands& operands);

// The products of one chunk: M = V U^T at every point.
struct Products {
  const Geometry& geometry;
  const void* v = nullptr;
  const void* u = nullptr;
  float* m = nullptr;                     // nullptr where M is float16
  void* half_m = nullptr;                 // M in float16, times
  float half_scale = 1.0f;                // a power of two
  ScaleSource input_scale, filter_scale;  // and the remainders of these scales (measured operands)
  int32_t points = 0;
  int32_t tiles = 0;                              // of the chunk
  int64_t v_point = 0, u_point = 0, m_point = 0;  // elements from a point to the next
};
// For a chunk of `tiles` tiles; points lie launch.chunk_tiles tiles apart.
Products ProductsOf(const LaunchParams& launch, const StagePointers& at, int32_t tiles);

// Computes the largest magnitudes of scaled operands, and U; with a prepared filter only the
// input's magnitude. For measured operands it clears the maxima and computes those of the filter.
template <bool kOverlaps = false>
Status LaunchFilterStage(const LaunchParams& launch, const StagePointers& at, void* stream);
// Computes V for the tiles from `first_tile` on.
template <bool kOverlaps = false>
Status LaunchInputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                        int32_t tiles, void* stream);
// Recomputes V and U, after both transforms, where constant scales did not suit the operands. For
// forms with one chunk and launch.ctas; does nothing unless launch.assumes().
Status LaunchRepairStage(const LaunchParams& launch, const StagePointers& at, void* stream);
// Computes the output from M.
template <bool kOverlaps = false>
Status LaunchOutputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                         int32_t tiles, void* stream);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_STAGES_H_
