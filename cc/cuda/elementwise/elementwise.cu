#include <cuda_runtime.h>

#include "cuda/common/element.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/elementwise/elementwise.h"
#include "cuda/elementwise/plan.h"

namespace jaxconv {
namespace {

__device__ __forceinline__ float Load(const void* array, DType type, uint32_t at) {
  if (type == DType::kF32) return __ldg(static_cast<const float*>(array) + at);
  if (type == DType::kF16) return ToFloat(static_cast<const __half*>(array)[at]);
  return ToFloat(static_cast<const __nv_bfloat16*>(array)[at]);
}

__device__ __forceinline__ void Store(float value, void* array, DType type, uint32_t at) {
  if (type == DType::kF32) {
    static_cast<float*>(array)[at] = value;
  } else if (type == DType::kF16) {
    static_cast<__half*>(array)[at] = FromFloat<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(array)[at] = FromFloat<__nv_bfloat16>(value);
  }
}

// NaN stays NaN in kMax and kMin. Products and sums are not contracted.
__device__ __forceinline__ float Apply(ElementwiseOp op, float a, float b) {
  switch (op) {
    case ElementwiseOp::kAdd:
      return __fadd_rn(a, b);
    case ElementwiseOp::kSub:
      return __fsub_rn(a, b);
    case ElementwiseOp::kMul:
      return __fmul_rn(a, b);
    case ElementwiseOp::kDiv:
      return __fdiv_rn(a, b);
    case ElementwiseOp::kMax:
      return isnan(a) || isnan(b) ? NAN : fmaxf(a, b);
    case ElementwiseOp::kMin:
      return isnan(a) || isnan(b) ? NAN : fminf(a, b);
    case ElementwiseOp::kNeg:
      return -a;
    case ElementwiseOp::kRsqrt:
      return rsqrtf(a);
    case ElementwiseOp::kSqrt:
      return sqrtf(a);
    case ElementwiseOp::kRoundF16:
      return ToFloat(FromFloat<__half>(a));
    case ElementwiseOp::kRoundBf16:
      return ToFloat(FromFloat<__nv_bfloat16>(a));
  }
  return NAN;
}

__device__ __forceinline__ float Compute(const ElementwiseFunction& function,
                                         const ElementwiseResult& of, uint32_t at) {
  float value[kElementwiseValues];
  int values = 0;
  for (int i = 0; i < function.operands; ++i) {
    value[values++] = Load(of.operand[i], of.operand_type[i], (of.one_number >> i & 1) ? 0 : at);
  }
  for (int i = 0; i < function.constants; ++i) value[values++] = function.constant[i];
  for (int i = 0; i < function.steps; ++i) {
    const ElementwiseStep step = function.step[i];
    value[values++] = Apply(step.op, value[step.first], value[step.second]);
  }
  return value[values - 1];
}

// A CTA computes up to kElementsOfCta elements of one result.
__global__ void __launch_bounds__(kElementwiseThreads)
    ComputeElementwise(const __grid_constant__ Elementwise p) {
  int low = 0, high = p.results - 1;
  while (low < high) {  // finds the last result whose first CTA is at most blockIdx.x
    const int middle = (low + high + 1) / 2;
    if (p.of[middle].first_cta <= blockIdx.x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const ElementwiseResult& of = p.of[low];
  const ElementwiseFunction& function = p.function[of.function];
  const uint32_t first = (blockIdx.x - of.first_cta) * static_cast<uint32_t>(kElementsOfCta);
  if (function.steps == 0) {  // a conversion: all loads of a thread are in flight together
    float value[kElementsOfThread];
#pragma unroll
    for (int i = 0; i < kElementsOfThread; ++i) {
      const uint32_t at = first + i * kElementwiseThreads + threadIdx.x;
      if (at < of.elements) {
        value[i] = Load(of.operand[0], of.operand_type[0], (of.one_number & 1) ? 0 : at);
      }
    }
#pragma unroll
    for (int i = 0; i < kElementsOfThread; ++i) {
      const uint32_t at = first + i * kElementwiseThreads + threadIdx.x;
      if (at < of.elements) Store(value[i], of.result, of.type, at);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kElementsOfThread; ++i) {
    const uint32_t at = first + i * kElementwiseThreads + threadIdx.x;
    if (at < of.elements) Store(Compute(function, of, at), of.result, of.type, at);
  }
}

bool IsFloat(DType type) {
  return type == DType::kF32 || type == DType::kF16 || type == DType::kBF16;
}

}  // namespace

Status LaunchElementwise(Elementwise* work, void* stream) {
  uint32_t ctas = 0;
  for (int i = 0; i < work->results; ++i) {
    ElementwiseResult& of = work->of[i];
    bool floats = IsFloat(of.type);
    for (int k = 0; k < work->function[of.function].operands; ++k) {
      floats = floats && IsFloat(of.operand_type[k]);
    }
    if (!floats) {
      return Status::Unimplemented("elementwise: expected float32, float16 or bfloat16");
    }
    of.first_cta = ctas;
    ctas += static_cast<uint32_t>((of.elements + kElementsOfCta - 1) / kElementsOfCta);
  }
  if (ctas == 0) return {};
  LaunchConfig config;
  config.threads = kElementwiseThreads;
  config.grid = ctas;
  return Launch<ComputeElementwise>("elementwise", config, stream, *work);
}

}  // namespace jaxconv
