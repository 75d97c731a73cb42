// The kernels in front of the products and behind them, which all forms share: they are compiled
// once, for every tile and type: for all GPUs (stages.cu) and, of kernels that overlap their
// neighbours in the stream, for sm_90a (stages_sm90.cu). Plain functions; pointers are the
// device's.
#ifndef JAXCONV_CUDA_WINOGRAD_STAGES_H_
#define JAXCONV_CUDA_WINOGRAD_STAGES_H_

#include <cstdint>

#include "core/status.h"
#include "cuda/common/kernel.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

// Where the parts of a call lie. Those that the form does not store are not to be used.
struct StagePointers {
  const void* input = nullptr;   // x, or dy
  const void* filter = nullptr;  // as the caller stores it
  void* output = nullptr;
  const void* u = nullptr;  // float16, of the workspace or of a prepared filter
  void* v = nullptr;        // float16
  void* m = nullptr;        // float32, or float16
  ScaleSource input_scale, filter_scale;
};
StagePointers Locate(const LaunchParams& launch, const Operands& operands);

// One chunk's products to be made: M = V U^T at every point.
struct Products {
  const Geometry& geometry;
  const void* v = nullptr;
  const void* u = nullptr;
  float* m = nullptr;                     // nullptr where M is float16
  void* half_m = nullptr;                 // M in float16, times
  float half_scale = 1.0f;                // a power of two
  ScaleSource input_scale, filter_scale;  // and what these left to it, of measured operands
  int32_t points = 0;
  int32_t tiles = 0;                              // of the chunk
  int64_t v_point = 0, u_point = 0, m_point = 0;  // elements from a point to the next
};
// Of a chunk of `tiles` tiles: the points lie launch.chunk_tiles tiles apart.
Products ProductsOf(const LaunchParams& launch, const StagePointers& at, int32_t tiles);

// The largest magnitudes of both operands (if they are scaled), and U; of a prepared filter only
// the input's. Of measured operands the slots of the maxima are cleared, and the filter's are
// taken.
template <bool kOverlaps = false>
Status LaunchFilterStage(const LaunchParams& launch, const StagePointers& at, void* stream);
// V of the tiles from `first_tile` on.
template <bool kOverlaps = false>
Status LaunchInputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                        int32_t tiles, void* stream);
// V and U once more, behind both, where constant scales did not suit the operands. Of forms with
// one chunk and launch.ctas; does nothing unless launch.assumes().
Status LaunchRepairStage(const LaunchParams& launch, const StagePointers& at, void* stream);
// The output from M.
template <bool kOverlaps = false>
Status LaunchOutputStage(const LaunchParams& launch, const StagePointers& at, int32_t first_tile,
                         int32_t tiles, void* stream);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_STAGES_H_
