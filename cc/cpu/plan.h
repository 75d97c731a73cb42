// A plan holds everything about the execution of a problem by a kernel, with a given number of
// tasks, that does not depend on the operands. Plans are immutable and shared between threads.
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
  DType dtype;  // of both operands; filters of u8 images are s8
  Family family;
  bool brgemm = true;  // kOnednn: whether oneDNN may use its brgemm kernels
};

// The destination of a task's part of the weight gradient of one independent convolution.
struct Partial {
  int64_t batch = 0;
  int64_t offset = -1;  // in the workspace; -1: the result
};

struct Plan {
  ConvProblem problem;  // the caller's
  Family family = Family::kOnednn;
  Geometry geometry;
  int64_t slices = 1;                 // tasks
  DType compute_dtype = DType::kF32;  // type of the operands that the kernel reads
  DType result_dtype = DType::kF32;   // type of its result
  bool requantizes = false;           // the kernel's result is int32 sums for the epilogue
  bool finishes = false;              // the kernel's result is float32 sums for the epilogue
  bool copies = false;    // regions of 8-bit images are copied with their padding (copied_images.h)
  bool flips = false;     // s8 images are copied as u8
  Tasks tasks;            // not for kGemm and kFewPixels, whose tasks are ranges of input channels
  Primitives primitives;  // for kOnednn
  const RegionKernel* region_kernel = nullptr;  // for kFewOutputs and kSmallGroups
  std::vector<std::vector<Partial>> partials;   // for weight gradients, by task
  std::vector<int64_t> first_region;            // of each task, counted over all tasks

  // Offsets in the workspace; -1: absent.
  int64_t lhs_offset = -1, rhs_offset = -1;  // operands converted to float32
  int64_t reversed_offset = -1;  // the filter with its taps in reverse order, or as packed by
                                 // region_kernel
  int64_t result_offset = -1;    // a result that differs from the output's type or order
  int64_t copy_offset = -1, copy_stride = 0;  // by task: a region of the images
  int64_t offsets_offset = -1;                // for every output channel, if the copies flip signs
  int64_t sums_offset = -1,
          sums_stride = 0;       // by task: a region's sums, if an epilogue follows
  int64_t products_offset = -1;  // kFewPixels: by task except the first, sums_stride apart
  int64_t moments_offset = -1, moments_stride = 0;  // by region, in the order of the tasks
  int64_t unpack_offset = -1, unpack_stride = 0;    // wgrad, by task: in the primitive's own layout
  int64_t scratch_offset = -1, scratch_stride = 0;  // by task
  int64_t workspace_bytes = 0;                      // with room to align its start
};

// The family's region kernel, or null.
const RegionKernel* RegionKernelOf(Family family);

// Fails, with the reason, if the kernel does not accept the problem. `problem` is valid.
Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, int64_t slices, Plan* plan);

// The output elements of a forward convolution in a region.
int64_t OutputElements(const Plan& plan, const Region& region);

// The number of tasks, at most `threads`, that pays.
int64_t ChooseSlices(const ConvProblem& problem, Family family, int64_t threads);

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_PLAN_H_
