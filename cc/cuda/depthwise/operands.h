// What the plans of depthwise share.
#ifndef JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_
#define JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {

// The share of the DRAM's rate that predictions count with, fitted on an H200.
inline constexpr double kDramShare = 0.89;

// Refuses what no kernel of the family takes.
Status CheckOperands(const KernelDesc& kernel, const ConvProblem& problem);

// The fields that follow from the problem alone. Params: of the filter too.
void DescribeOperands(const ConvProblem& problem, DType dtype, HaloParams* params);
void DescribeOperands(const ConvProblem& problem, DType dtype, Params* params);

// Refuses what tiled copies cannot bring, or the kernels that use them do not store.
Status CheckTma(const ConvProblem& problem, const Params& params);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_
