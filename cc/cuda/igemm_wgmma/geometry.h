// How igemm_wgmma divides a problem: tiles, k-blocks, and the boxes that TMA loads.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_GEOMETRY_H_
#define JAXCONV_CUDA_IGEMM_WGMMA_GEOMETRY_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/igemm_wgmma/params.h"

namespace jaxconv::igemm_wgmma {

// Properties of a form that the plan uses.
enum Trait : uint32_t {
  kPingpong = 1,        // one consumer warpgroup stores while the other multiplies
  kSwapAb = 2,          // the filter is A, the pixels are B
  kFilterRow = 4,       // one load of activations serves all taps of a filter row
  kPointwise = 8,       // 1x1 filters only
  kCluster = 16,        // slices are the CTAs of a cluster, without a workspace
  kC48 = 64,            // at most 48 channels are reduced
  kPatches = 32,        // dgrad of windows that do not overlap: columns are elements of a patch
  kThreeTf32 = 128,     // float32 operands as three TF32 products (common/split_tf32.cuh)
  kMmaSync = 256,       // wgrad in TF32 by mma.sync
  kTransposesDy = 512,  // wgrad in TF32 by wgmma, with dy transposed in shared memory
};

// One entry of kernels.def.
struct Instance {
  uint32_t traits;
  int64_t tile_m, tile_n;
  int64_t stationary_k_blocks = 0;  // of the filter, in shared memory, loaded once by each CTA

  bool Is(Trait trait) const { return (traits & trait) != 0; }
  bool WeightStationary() const { return stationary_k_blocks > 0; }
};

inline constexpr int64_t kC48Channels = 48;  // of kC48, at most

// Channels of a k-block, 128 bytes; wgrad: output pixels.
inline int64_t KBlockElements(DType dtype) { return 128 / ByteWidth(dtype); }
// Pixels of a k-block of wgrad filter-row.
inline int64_t WgradRowPixels(DType dtype) {
  return dtype == DType::kF32 ? kTf32WgradRowPixels : kWgradRowPixels;
}

inline constexpr int64_t kMaxSlices = 512;  // of split-K

// wgmma takes TF32 K-major only: fprop reads the filter transposed.
bool TransposesFilter(const ConvProblem& problem);

// Whether a kernel splits the filter ahead for 3xTF32 (filter_split.h).
bool SplitsFilter(const Instance& instance, const ConvProblem& problem);

struct Geometry {
  LaunchParams launch;      // of one slice
  int64_t tiles = 0;        // of one slice
  int64_t k_blocks = 0;     // loads of the longest reduction
  double average_taps = 0;  // 128 bytes of the reduction each, over residue classes
  double taps_per_load = 1;
  double taps_per_stage = 1;  // wgrad filter-row: 128-byte parts of a stage
};

// kPatches: turns the dgrad of windows that do not overlap into a pointwise dgrad. The windows have
// rows only (columns are folded into the channels). A pixel of dy times the filter is a whole patch
// of dx.
Status PatchesAsPixels(const ConvProblem& problem, ConvProblem* pixels);
// Sets the parameters to store the results of that problem as patches of `problem`.
void StorePatches(const ConvProblem& problem, LaunchParams* launch);

// Refuses with a reason for the user.
Status MakeGeometry(const Instance& instance, const ConvProblem& problem, Geometry* geometry);

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_GEOMETRY_H_
