// The time that an epilogue adds to a plain kernel, in addition to the traffic of its operands.
#ifndef JAXCONV_CUDA_COMMON_EPILOGUE_COST_H_
#define JAXCONV_CUDA_COMMON_EPILOGUE_COST_H_

#include "core/conv_problem.h"
#include "cuda/common/gpu.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// An activation's time relative to silu's in 16-bit kernels, measured on an H200; 0 for a clamp.
double ActivationFactor(Activation activation);

// SM cycles for each output of all terms of an epilogue except statistics.
double EpilogueCycles(const EpilogueCost& cost, const Epilogue& epilogue);

// Adds the epilogue of a fused instance to the terms of its plan, and updates its predicted time.
void AddEpilogue(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu, Plan* plan);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_EPILOGUE_COST_H_
