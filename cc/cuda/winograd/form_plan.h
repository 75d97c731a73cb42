// What the plan functions of the forms share: the table's entry, the workspace, and the cost of the
// stages.
//
// A form's plan function gets a problem that the family takes and its geometry. It refuses what the
// form cannot do, says how many tiles a chunk has and which parts the workspace holds, and predicts
// the time. The predictions rank Winograd's own instances when a caller names the family or an
// alias, and nothing else: "auto" and "native" do not choose these instances. They were fitted on
// an H200 (docs/notes/winograd.md).
#ifndef JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_
#define JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

struct Instance;

using FormPlan = Status (*)(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                            double* microseconds);

// The plan column of a line of kernels.def.
struct Instance {
  FormPlan plan;
  int32_t m;
  int32_t axes;  // that are transformed: 2, or 1 (W)
  int32_t capability;
  int32_t tile_m, tile_n, ctas_per_sm;
};

// Chunks of tiles take at most this much of the workspace for V and M, so that they stay in an L2
// cache of 50 MB (H100, H200) beside U.
inline constexpr int64_t kChunkBytes = int64_t{32} << 20;

// Bytes of V and of M for one tile.
int64_t InputBytes(const LaunchParams& launch);
int64_t ProductBytes(const LaunchParams& launch);
int64_t FilterBytes(const LaunchParams& launch);  // of U

// Lays out the workspace: partial maxima (if scaled), U (unless it is prepared), and V and M of
// launch->chunk_tiles tiles where the form stores them. Each part is aligned to 256 bytes.
void PlaceWorkspace(bool has_v, bool has_m, LaunchParams* launch);

// Microseconds of a kernel that moves so many bytes through DRAM, launch included, at a share of a
// large copy's rate.
double MemoryMicroseconds(const Gpu& gpu, double bytes, double share = 0.8);

// The same of the kernels in front of the multiplication: the amax pass and the filter's transform.
double FilterMicroseconds(const LaunchParams& launch, const Gpu& gpu);
// Of the input's and the output's transform of all tiles, in launches of chunk_tiles tiles. `rate`:
// bytes of V and M that move in the time of a byte of DRAM.
double TransformMicroseconds(const LaunchParams& launch, const Gpu& gpu, double rate);

// Of the products of all tiles by batched GEMMs of chunk_tiles tiles, each of so many cycles. The
// time in which U, V and M move through memory hides in part: the root of the sum of squares fits.
double GemmMicroseconds(const LaunchParams& launch, const Gpu& gpu, double cycles, double rate);

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_FORM_PLAN_H_
