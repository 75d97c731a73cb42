#include "cuda/depthwise/operands.h"

#include <string>

namespace jaxconv::depthwise {

Status CheckOperands(const KernelDesc& kernel, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  if (problem.op == Op::kWgrad && problem.filter_layout != FilterLayout::kRsck) {
    return Status::Unimplemented(std::string("stores filter gradients as rsck, got ") +
                                 Name(problem.filter_layout));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  if (problem.groups != problem.c) {
    return Status::Unimplemented("expected one input channel in a group, got " +
                                 std::to_string(problem.c_per_group()));
  }
  return {};
}

void DescribeOperands(const ConvProblem& problem, DType dtype, HaloParams* params) {
  DescribeAxes(problem, params);
  const bool dgrad = problem.op == Op::kDgrad;
  const int64_t multiplier = problem.k / problem.c;
  params->channels = static_cast<int32_t>(dgrad ? problem.c : problem.k);
  params->gathered_channels = static_cast<int32_t>(dgrad ? problem.k : problem.c);
  params->repeat = FastDivmod(dgrad ? 1 : multiplier);
  params->reduce = static_cast<int32_t>(dgrad ? multiplier : 1);
  params->vector = multiplier == 1 && problem.c * ByteWidth(dtype) % 16 == 0;
}

void DescribeOperands(const ConvProblem& problem, DType dtype, Params* params) {
  DescribeOperands(problem, dtype, static_cast<HaloParams*>(params));
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  params->tap_stride = static_cast<int32_t>(krsc ? 1 : problem.k);
  params->channel_stride = static_cast<int32_t>(krsc ? problem.taps() : 1);
}

Status CheckTma(const ConvProblem& problem, const Params& params) {
  bool dilated = false;
  for (const Axis& axis : params.axis) dilated = dilated || axis.in_dilation.divisor != 1;
  if (!params.vector || dilated || problem.filter[0] != 1) {
    return Status::Unimplemented(
        "expected as many outputs as inputs, channels in multiples of 16 bytes, inputs without "
        "dilation and a filter without depth");
  }
  if (problem.output_dtype() != problem.lhs_dtype() && problem.op != Op::kWgrad) {
    return Status::Unimplemented("stores results of the operands' type");
  }
  return {};
}

}  // namespace jaxconv::depthwise
