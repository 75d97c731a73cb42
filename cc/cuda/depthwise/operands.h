// Shared by the plans of depthwise.
#ifndef JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_
#define JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/kernel.h"
#include "cuda/depthwise/params.h"

namespace jaxconv::depthwise {

// A warp's issue slots for an item, or for the setup of a CTA with one item, latencies included.
// Fitted to the times of this family on an H200 (docs/notes/depthwise.md).
inline constexpr double kItemSlots = 190;

// Additional turns of the last CTAs of a resident slot over an even share: they rarely start
// together.
inline constexpr double kLastTurn = 0.5;

// Refuses problems that no kernel of the family accepts.
Status CheckOperands(const KernelDesc& kernel, const ConvProblem& problem);

// Sets the fields that follow from the problem alone. Params: those of the filter too.
void DescribeOperands(const ConvProblem& problem, DType dtype, HaloParams* params);
void DescribeOperands(const ConvProblem& problem, DType dtype, Params* params);

// Refuses tensors that tiled copies cannot load, and results that the kernels with tiled copies do
// not store.
Status CheckTma(const ConvProblem& problem, const Params& params);

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_OPERANDS_H_
