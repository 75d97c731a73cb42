// A kernel instance from the view of selection and the FFI handlers: its line in the family's
// kernels.def, the family's plan for a problem, and the buffers of a launch.
//
// Selection and planning are plain C++ without CUDA, so they run and are tested on machines without
// a toolkit. A separate table (cuda/launch_table.h) launches device code.
#ifndef JAXCONV_CUDA_COMMON_KERNEL_H_
#define JAXCONV_CUDA_COMMON_KERNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"
#include "cuda/common/predicted_time.h"

namespace jaxconv {

struct KernelDesc;

// A family's decisions for a problem and an instance. A plan is immutable: a launch copies the
// parameter block to the stack and sets pointers and tensor maps there.
struct Plan {
  // The instance whose device code runs: usually the planned one; for a filter stored as krsc, the
  // instance of the other operation (KernelOp in core/implicit_gemm.h).
  const KernelDesc* kernel = nullptr;
  int64_t slices = 1;  // split-K slices, or CTAs of a cluster
  int64_t workspace_bytes = 0;
  double microseconds = 0;  // predicted for all kernels of the call
  // The terms of that time and their line of the calibration; without a name in families that have
  // none.
  TimeTerms terms;
  FormTime form;
  // The family's parameter block.
  std::shared_ptr<const void> params;

  template <class Params>
  const Params& As() const {
    return *static_cast<const Params*>(params.get());
  }
};

// Device pointers of one launch: lhs and rhs in the order of the operation's arguments, (x, w),
// (dy, w) or (x, dy). An absent operand is null.
struct Operands {
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  const float* scale = nullptr;     // one for each output channel, or for each image and channel
  const int32_t* offset = nullptr;  // one for each output channel
  const float* bias = nullptr;      // one for each output channel
  const void* residual = nullptr;   // of the output's shape and type
  const float* residual_scale = nullptr;  // one
  void* out = nullptr;
  void* pre = nullptr;          // the output before its activation
  float* statistics = nullptr;  // mean and sum of squared deviations of each output channel
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// Makes the plan, or refuses with a reason for the user. slices 0: the plan chooses; otherwise
// exactly this many, or an error if the instance does not support it.
using PlanFunction = Status (*)(const KernelDesc& kernel, const ConvProblem& problem,
                                const Gpu& gpu, int64_t slices, Plan* plan);

// Enqueues the work on a cudaStream_t without allocation or synchronisation, so it can be captured.
// CheckOperands has accepted the buffers.
using LaunchFunction = Status (*)(const Plan& plan, const Operands& operands, void* stream);

// The SM cycles that an epilogue adds to a plain kernel for each output, in addition to the traffic
// of its operands (docs/notes/igemm_wgmma.md).
struct EpilogueCost {
  // SM cycles of scale and bias in a loop over outputs. Fitted to fused layers of igemm_wgmma.
  static constexpr double kLoopCycles = 0.2;
  // The same, or the two sums of statistics, in straight lines of code or behind other work. Fitted
  // to fused layers of igemm_wgmma, depthwise and few_channels.
  static constexpr double kStraightCycles = 0.09;
  double terms = kLoopCycles;  // scale and bias, and a second result
  // The same without a second result and with a clamp as activation (none, relu, relu6).
  double clamps = kLoopCycles;
  double residual = 0;  // in addition to the terms
  // The same for silu; others in proportion (epilogue_cost.cc).
  double activation = kLoopCycles;
  // Scale, bias and silu or hard_swish without a second result or residual, where the form has
  // separate code for them; 0: it has none.
  double swish = 0;
  // Whether it takes issue slots of the warps that multiply; otherwise it overlaps as stores do.
  bool of_products = false;
  // Whether the family's plan counts it with its stores; otherwise AddEpilogue does.
  bool in_plan = false;
};

struct KernelDesc {
  // <op>_<family>_<operand dtype>_<variant>: registry key, test id, HLO attribute and the name in a
  // profiler.
  const char* name = "";
  const char* family = "";
  Op op = Op::kFprop;
  DType dtype = DType::kF32;  // of both operands
  int min_cc = 80;            // 10 * major + minor
  int max_cc = 1000;          // for instructions of one architecture
  PlanFunction plan = nullptr;
  // The family's own description of the instance: its entry in the family's table.
  const void* instance = nullptr;
  // A name for a subset of the family's instances; it selects among them as the family's name
  // selects among all. May be empty.
  const char* alias = "";
  // Algorithms "auto" and "native" do not choose it, because its error exceeds that of the direct
  // kernels.
  bool on_request = false;
  EpilogueCost epilogue_cost = {};
  // Compiled with FusedEpilogue: accepts only problems with an epilogue.
  bool fused = false;
  // Its fused form computes the statistics of results without further epilogue.
  bool statistics = false;
  // Multiplies float32 operands as three TF32 products, as accurate as float32 (split_tf32.cuh). It
  // accepts every precision; "auto", "native" and families choose it only above "default", because
  // one TF32 product is faster.
  bool three_tf32 = false;
};

// The form of an instance compiled with FusedEpilogue.
KernelDesc FusedKernel(const KernelDesc& kernel, const char* name);

// The common conditions of the families with float operands: the instance's operation; operands of
// its type; an output of that type or float32; a filter stored as rsck or krsc; channels-last
// activations; precision "default" if float32 operands are multiplied in one TF32 product. A fused
// instance needs an epilogue, an output of the operands' type and a filter stored as rsck; other
// instances accept no epilogue. `tf32`: the family multiplies float32 in TF32.
Status CheckTypes(const KernelDesc& kernel, const ConvProblem& problem, bool tf32);

// The common conditions of the families with 8-bit operands: fprop, x of the instance's type, s8 w
// in packed rows.
Status CheckInt8Types(const KernelDesc& kernel, const ConvProblem& problem);

// The least traffic of a convolution with 8-bit operands in bytes: for one output (written, its
// residual read); and in all, with the activations and the packed filter.
double Int8OutputBytes(const ConvProblem& problem);
double Int8Bytes(const ConvProblem& problem);

// Refuses several slices for a kernel without split-K.
Status RequireOneSlice(int64_t slices);

// A refusal: "expected <expected>, got <got>".
Status Refuse(const std::string& expected, const std::string& got);
Status Refuse(const std::string& expected, int64_t got);
// A refusal: "<what> <bytes> bytes of shared memory, the GPU has <as many>".
Status RefuseSharedBytes(const std::string& what, int64_t bytes, const Gpu& gpu);

// Checks that the workspace exists and that every buffer is aligned for 16-byte accesses. XLA
// aligns buffers to 64 bytes or more.
Status CheckOperands(const Plan& plan, const Operands& operands);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_KERNEL_H_
