// Shared by the forms' plan functions: the table's entry, the workspace, the cost of the stages.
//
// A form's plan function gets a problem that the family accepts, and its geometry. It refuses
// problems that the form cannot compute, sets the tiles of a chunk and the parts of the workspace,
// and predicts the time. The predictions only rank Winograd's instances when a caller names the
// family or an alias: "auto" and "native" do not choose them. They were fitted on an H200
// (docs/notes/winograd.md).
#ifndef JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

struct Instance;

using FormPlan = Status (*)(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                            TimeTerms* terms);

// What the plans know of a line of kernels.def.
struct Instance {
  FormPlan plan;
  int32_t m;
  int32_t axes;  // transformed axes: 2, or 1 (W)
  int32_t capability;
  int32_t tile_m, tile_n, ctas_per_sm;
};

// V and M of a chunk take at most this many bytes, so that they stay in a 50 MB L2 (H100, H200)
// together with U.
inline constexpr int64_t kChunkBytes = int64_t{32} << 20;

// Bytes of V and of M for one tile.
int64_t InputBytes(const LaunchParams& launch);
int64_t ProductBytes(const LaunchParams& launch);
int64_t FilterBytes(const LaunchParams& launch);  // of U

// Lays out the workspace: partial maxima (if scaled), U (unless prepared), V and M of
// launch->chunk_tiles tiles (if the form stores them). Each part is aligned to 256 bytes.
void PlaceWorkspace(bool has_v, bool has_m, LaunchParams* launch);

// Microseconds of a kernel around the products that moves `bytes` through DRAM,
// launch included.
double MemoryMicroseconds(const Gpu& gpu, double bytes);

// The same for the kernels before the products: the amax pass and the filter's transform.
double FilterMicroseconds(const LaunchParams& launch, const Gpu& gpu);
// Microseconds of the input and output transforms of all tiles, in launches of chunk_tiles tiles.
double TransformMicroseconds(const LaunchParams& launch, const Gpu& gpu);

// The terms of all kernels, with the products by batched GEMMs of chunk_tiles tiles of the given
// cycles each, which read U and V and write M.
TimeTerms TermsWithGemms(const LaunchParams& launch, const Gpu& gpu, double cycles);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_
