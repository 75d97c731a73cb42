#include "cuda/common/padded_channels.h"

#include <memory>
#include <string>
#include <utility>

namespace jaxconv {
namespace {

// Elements in 16 bytes (the instances' copy width) and in a 32-byte sector. TMA loads rows of whole
// sectors 1.5 times as fast as others, so padding goes up to whole sectors.
constexpr int64_t kVector = 8;
constexpr int64_t kSector = 16;
constexpr int64_t kAlignment = 1024;
// The limit of the padded copies, without the instance's own workspace: element indices have 32
// bits.
constexpr int64_t kMaxBytes = int64_t{1} << 29;
// The time of copies with unaligned rows relative to aligned ones. Measured on an H200.
constexpr double kUnalignedCopies = 2;

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

int64_t PaddedChannels(int64_t channels) {
  return channels % kVector == 0 ? channels : RoundUp(channels, kSector);
}

ConvProblem PaddedProblem(const ConvProblem& problem) {
  ConvProblem padded = problem;
  padded.c = PaddedChannels(problem.c);
  padded.k = PaddedChannels(problem.k);
  return padded;
}

// A tensor and its padded copy: blocks of rows by columns.
struct Tensor {
  int64_t elements, padded_elements;
  int64_t rows, padded_rows;
  int64_t columns, padded_columns;

  bool Copied() const { return elements != padded_elements; }
  int64_t WorkspaceBytes() const { return Copied() ? RoundUp(padded_elements * 2, kAlignment) : 0; }
  double TrafficBytes() const {
    return Copied() ? 2.0 * static_cast<double>(elements + padded_elements) : 0;
  }
  PitchedCopy Pad() const {
    if (!Copied()) return {};
    return {padded_elements, static_cast<int32_t>(rows), static_cast<int32_t>(columns),
            FastDivmod(padded_rows), FastDivmod(padded_columns)};
  }
  PitchedCopy Unpad() const {
    if (!Copied()) return {};
    return {elements, static_cast<int32_t>(padded_rows), static_cast<int32_t>(padded_columns),
            FastDivmod(rows), FastDivmod(columns)};
  }
};

Status PlanPadded(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                  int64_t slices, Plan* plan) {
  const auto& inner = *static_cast<const KernelDesc*>(kernel.instance);
  if (problem.c % kVector == 0 && problem.k % kVector == 0) {
    return Status::Unimplemented("C and K are multiples of 8: nothing to pad");
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (problem.groups != 1) return Status::Unimplemented("pads the channels of one group only");
  for (DType dtype : {problem.x_dtype, problem.w_dtype, problem.y_dtype}) {
    if (ByteWidth(dtype) != 2) {
      return Status::Unimplemented(std::string("pads tensors of 16 bits, got ") + Name(dtype));
    }
  }
  const ConvProblem padded = PaddedProblem(problem);
  const Tensor x{problem.x_elements(), padded.x_elements(), 1, 1, problem.c, padded.c};
  const Tensor w{
      problem.w_elements(), padded.w_elements(), problem.c, padded.c, problem.k, padded.k};
  const Tensor y{problem.y_elements(), padded.y_elements(), 1, 1, problem.k, padded.k};
  const Tensor& lhs = problem.op == Op::kDgrad ? y : x;
  const Tensor& rhs = problem.op == Op::kWgrad ? y : w;
  const Tensor& out = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  const int64_t bytes = lhs.WorkspaceBytes() + rhs.WorkspaceBytes() + out.WorkspaceBytes();
  if (bytes > kMaxBytes) {
    return Status::Unimplemented("padded copies take " + std::to_string(bytes) +
                                 " bytes, expected at most " + std::to_string(kMaxBytes));
  }
  auto params = std::make_shared<PaddedParams>();
  JAXCONV_RETURN_IF_ERROR(inner.plan(inner, padded, gpu, slices, &params->inner));
  params->lhs = lhs.Pad();
  params->rhs = rhs.Pad();
  params->out = out.Unpad();
  params->rhs_offset = lhs.WorkspaceBytes();
  params->out_offset = params->rhs_offset + rhs.WorkspaceBytes();
  params->inner_offset = bytes;
  const double traffic = lhs.TrafficBytes() + rhs.TrafficBytes() + out.TrafficBytes();
  plan->kernel = &kernel;
  plan->slices = params->inner.slices;
  plan->workspace_bytes = bytes + params->inner.workspace_bytes;
  plan->microseconds = params->inner.microseconds +
                       kUnalignedCopies * traffic / gpu.dram_bytes_per_us +
                       gpu.launch_us * (out.Copied() ? 2 : 1);
  plan->params = std::move(params);
  return {};
}

}  // namespace

KernelDesc PaddedKernel(const KernelDesc& kernel, const char* name) {
  KernelDesc padded = kernel;
  padded.name = name;
  padded.plan = PlanPadded;
  padded.instance = &kernel;
  return padded;
}

}  // namespace jaxconv
