// A plan: everything about the execution of one problem by one kernel with a number of tasks that
// does not depend on the operands. Plans are immutable and shared between threads.
#ifndef JAXCONV_CPU_PLAN_H_
#define JAXCONV_CPU_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cpu/geometry.h"
#include "cpu/primitives.h"
#include "cpu/region_kernel.h"
#include "cpu/tasks.h"

namespace jaxconv::cpu {

enum class Family { kOnednn, kGemm, kDepthwise, kFewOutputs, kFewPixels, kSmallGroups };

struct KernelDesc {
  const char* name;
  Op op;
  DType dtype;  // of both operands; beside u8 images, filters are s8
  Family family;
  bool brgemm = true;  // of kOnednn: whether oneDNN may compute it by its brgemm kernels
};

// Where a task adds up its part of the weight gradient of one independent convolution.
struct Partial {
  int64_t batch = 0;
  int64_t offset = -1;  // in the workspace; -1: the result itself
};

struct Plan {
  ConvProblem problem;  // the caller's
  Family family = Family::kOnednn;
  Geometry geometry;
  int64_t slices = 1;                 // tasks
  DType compute_dtype = DType::kF32;  // of the operands that the kernel reads
  DType result_dtype = DType::kF32;   // of what it writes
  bool requantizes = false;           // the result is int32 sums, which the epilogue follows
  bool finishes = false;              // the result is float32 sums, which the epilogue follows
  bool copies = false;    // regions of 8-bit images are copied with their padding (copied_images.h)
  bool flips = false;     // the copies are u8, of s8 images
  Tasks tasks;            // not of kGemm and kFewPixels, whose tasks are ranges of input channels
  Primitives primitives;  // of kOnednn
  const RegionKernel* region_kernel = nullptr;  // of kFewOutputs and kSmallGroups
  std::vector<std::vector<Partial>> partials;   // of weight gradients, by task
  std::vector<int64_t> first_region;            // of each task, counted over all

  // Offsets in the workspace; -1: absent.
  int64_t lhs_offset = -1, rhs_offset = -1;  // operands converted to float32
  int64_t reversed_offset = -1;  // the filter with its taps in reverse order, or as packed by
                                 // region_kernel
  int64_t result_offset = -1;    // a result that differs from the output's type or order
  int64_t copy_offset = -1, copy_stride = 0;  // by task: a region of the images
  int64_t offsets_offset = -1;  // of every output channel, where the copies flip signs
  int64_t sums_offset = -1,
          sums_stride = 0;       // by task: a region's, where the epilogue follows them
  int64_t products_offset = -1;  // of kFewPixels, by task but for the first, sums_stride apart
  int64_t moments_offset = -1, moments_stride = 0;  // by region, in the order of the tasks
  int64_t unpack_offset = -1, unpack_stride = 0;    // wgrad, by task: in the primitive's own layout
  int64_t scratch_offset = -1, scratch_stride = 0;  // by task
  int64_t workspace_bytes = 0;                      // with room to align its start
};

// The family's kernel of regions; null where its tasks are computed otherwise.
const RegionKernel* RegionKernelOf(Family family);

// Fails, with the reason, where the kernel does not take the problem. `problem` is valid.
Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, int64_t slices, Plan* plan);

// Elements of a forward convolution's output that a region computes.
int64_t OutputElements(const Plan& plan, const Region& region);

// How many tasks, at most `threads`, pay.
int64_t ChooseSlices(const ConvProblem& problem, Family family, int64_t threads);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_PLAN_H_
