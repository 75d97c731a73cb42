// A kernel instance as selection and the FFI handlers see it: a row of a family's kernels.def, the
// plan that the family makes for a problem, and the buffers of one launch.
//
// Selection and planning are plain C++ without CUDA, so that they run, and are tested, on machines
// without a toolkit. What launches device code is a separate table (cuda/launch_table.h).
#ifndef JAXCONV_CUDA_COMMON_KERNEL_H_
#define JAXCONV_CUDA_COMMON_KERNEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

struct KernelDesc;

// What a family decides once for a problem and an instance. It is immutable once made: a launch
// copies the parameter block to the stack and sets pointers and tensor maps there.
struct Plan {
  // Whose device code runs: usually the planned instance; of a filter stored as krsc the instance
  // of the other operation (KernelOp in core/implicit_gemm.h).
  const KernelDesc* kernel = nullptr;
  int64_t slices = 1;  // split-K slices, or CTAs of a cluster
  int64_t workspace_bytes = 0;
  double microseconds = 0;  // predicted, of all kernels of the call
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

// Makes the plan, or refuses with a reason for the user. slices 0: as many as suit the GPU; else
// exactly so many, or an error where the instance cannot be cut so.
using PlanFunction = Status (*)(const KernelDesc& kernel, const ConvProblem& problem,
                                const Gpu& gpu, int64_t slices, Plan* plan);

// Enqueues the work on a cudaStream_t: no allocation, no synchronisation, fit for stream capture.
// The buffers were checked (CheckOperands).
using LaunchFunction = Status (*)(const Plan& plan, const Operands& operands, void* stream);

// What an epilogue adds to the time of a plain kernel and of the bytes of its operands: nanoseconds
// of an SM for an output, measured on an H200 (docs/notes/igemm_wgmma.md).
struct EpilogueCost {
  double terms = 0.1;  // scale and bias, and a second result
  // The same where no second result is written and the activation clamps (none, relu, relu6).
  double clamps = 0.1;
  double residual = 0.03;    // beside the terms
  double activation = 0.15;  // silu; others in proportion (cuda/select.cc)
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
  // A name for some of a family's instances, which selects among them as the family's name does
  // among all; empty where there is none.
  const char* alias = "";
  // Algorithms "auto" and "native" do not choose it: its error is above the direct kernels'.
  bool on_request = false;
  EpilogueCost epilogue_cost = {};
  // Compiled with FusedEpilogue: takes problems with an epilogue, and only those.
  bool fused = false;
  // Its fused form gives the statistics of plain sums.
  bool statistics = false;
  // Multiplies float32 operands as three TF32 products, as accurate as float32 (split_tf32.cuh):
  // takes every precision. "auto", "native" and families take it above "default" only, because one
  // TF32 product is faster.
  bool three_tf32 = false;
};

// The form of an instance that is compiled with FusedEpilogue.
KernelDesc FusedKernel(const KernelDesc& kernel, const char* name);

// What every family of float operands asks of a problem before its own conditions: the operation,
// operands of the instance's type, an output of that type or float32, a filter stored as rsck or
// krsc, channels-last activations, and for float32 operands that are multiplied in one TF32 product
// precision "default". Of a fused instance an epilogue, an output of the operands' type and a
// filter stored as rsck; of any other no epilogue. `tf32`: the family multiplies float32 in TF32.
Status CheckTypes(const KernelDesc& kernel, const ConvProblem& problem, bool tf32);

// What every family of 8-bit operands asks: fprop, x of the instance's type, w of s8 in packed
// rows.
Status CheckInt8Types(const KernelDesc& kernel, const ConvProblem& problem);

// What a convolution of 8-bit operands moves at least, in bytes: for one output, which is written
// and whose residual is read; and in all, with the activations and the packed filter.
double Int8OutputBytes(const ConvProblem& problem);
double Int8Bytes(const ConvProblem& problem);

// Refuses a number of slices that is asked of a kernel without split-K.
Status RequireOneSlice(int64_t slices);

// A refusal: "expected <expected>, got <got>".
Status Refuse(const std::string& expected, const std::string& got);
Status Refuse(const std::string& expected, int64_t got);
// A refusal: "<what> <bytes> bytes of shared memory, the GPU has <as many>".
Status RefuseSharedBytes(const std::string& what, int64_t bytes, const Gpu& gpu);

// Whether the workspace is there and every buffer is aligned for 16-byte accesses. XLA aligns
// buffers to 64 bytes or more.
Status CheckOperands(const Plan& plan, const Operands& operands);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_KERNEL_H_
