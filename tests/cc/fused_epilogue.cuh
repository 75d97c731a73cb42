// Shared by the tests of fused epilogues: compiles an instance's device code with FusedEpilogue,
// runs it through its family's plan, and compares with a double-precision reference.
#ifndef JAXCONV_TESTS_CC_FUSED_EPILOGUE_CUH_
#define JAXCONV_TESTS_CC_FUSED_EPILOGUE_CUH_

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cc/epilogue_reference.h"
#include "cc/naive_conv.h"
#include "core/conv_problem.h"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/gpu.h"
#include "cuda/common/instances.h"
#include "cuda/common/kernel.h"
#include "cuda/common/query_gpu.h"

// Defines the tag of every line of a family's kernels.def with the fused epilogue. Device code is
// compiled only for the instances that JAXCONV_CHECK names.
#define JAXCONV_FUSED_TAG(op, dtype, variant, family, form, arguments)                   \
  struct JAXCONV_TAG(op, family, dtype, variant)                                         \
      : family::form<JAXCONV_OP_##op, JAXCONV_DTYPE_##dtype, JAXCONV_UNPACK arguments> { \
    using Epilogue = FusedEpilogue;                                                      \
  };

// Checks an instance on a problem in `slices` slices (0: the plan chooses).
#define JAXCONV_CHECK(op, family, dtype, variant, gpu, problem, slices)                            \
  CheckInstance<JAXCONV_TAG(op, family, dtype, variant), JAXCONV_DTYPE_##dtype,                    \
                family::LaunchParams>(JAXCONV_NAME(op, family, dtype, variant), family::Kernels(), \
                                      gpu, problem, slices)

namespace jaxconv {

inline int failures = 0;

inline void Fail(const std::string& what) {
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

// A 2-D layer with padding filter / 2.
inline ConvProblem Layer(Op op, DType dtype, int n, int height, int width, int c, int k, int filter,
                         int stride = 1) {
  ConvProblem problem;
  problem.op = op;
  problem.x_dtype = problem.w_dtype = problem.y_dtype = dtype;
  problem.n = n;
  problem.c = c;
  problem.k = k;
  problem.in = {1, height, width};
  for (int a = 1; a < 3; ++a) {
    problem.filter[a] = filter;
    problem.stride[a] = stride;
    problem.pad_lo[a] = problem.pad_hi[a] = filter / 2;
    problem.out[a] = OutputExtent(problem.in[a], filter, stride, 1, 1, filter / 2, filter / 2);
  }
  return problem;
}
inline ConvProblem Grouped(ConvProblem problem, int groups) {
  problem.groups = groups;
  return problem;
}
inline ConvProblem Batched(ConvProblem problem, int batch) {
  problem.batch = batch;
  return problem;
}

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<double>& values) {
    std::vector<T> converted(values.size());
    for (size_t i = 0; i < values.size(); ++i) converted[i] = T(static_cast<float>(values[i]));
    cudaMalloc(&data_, values.size() * sizeof(T));
    cudaMemcpy(data_, converted.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  T* data() const { return data_; }
  std::vector<double> Read(size_t size) const {
    std::vector<T> raw(size);
    cudaMemcpy(raw.data(), data_, size * sizeof(T), cudaMemcpyDeviceToHost);
    std::vector<double> values(size);
    for (size_t i = 0; i < size; ++i) values[i] = static_cast<float>(raw[i]);
    return values;
  }

 private:
  T* data_ = nullptr;
};

// Integers from -range to range, times `unit`.
inline std::vector<double> Draw(size_t size, int range, double unit, uint32_t* state) {
  std::vector<double> values(size);
  for (double& value : values) {
    *state = *state * 1664525u + 1013904223u;
    value = (static_cast<int>(*state >> 16) % (2 * range + 1) - range) * unit;
  }
  return values;
}

// Outputs are filled with NaN before the launch. The residual contains NaN and both infinities,
// which must reach only their own elements.
template <class Tag, DType kType, class LaunchParams>
void CheckInstance(const char* name, const std::vector<KernelDesc>& kernels, const Gpu& gpu,
                   const ConvProblem& problem, int64_t slices) {
  using T = typename ElementOf<kType>::Type;
  constexpr float kSlope = 0.125f;
  const KernelDesc* kernel = nullptr;
  for (const KernelDesc& candidate : kernels) {
    if (std::strcmp(candidate.name, name) == 0) kernel = &candidate;
  }
  if (kernel == nullptr) return Fail(std::string("no instance ") + name);
  const std::string what = std::string(name) + " on " + problem.ToString();
  Plan plan;
  if (Status status = problem.Validate(); !status.ok()) return Fail(what + ": " + status.message());
  if (Status status = kernel->plan(*kernel, problem, gpu, slices, &plan); !status.ok()) {
    return Fail(what + ": " + status.message());
  }
  const bool fprop = problem.op == Op::kFprop, dgrad = problem.op == Op::kDgrad;
  const size_t x = problem.x_elements(), w = problem.w_elements(), y = problem.y_elements();
  const size_t outputs = fprop ? y : dgrad ? x : w;
  const size_t channels = dgrad ? problem.c : problem.k;
  uint32_t state = 7;
  const std::vector<double> lhs = Draw(dgrad ? y : x, 2, 1, &state);
  const std::vector<double> rhs = Draw(problem.op == Op::kWgrad ? y : w, 1, 1, &state);
  const std::vector<double> scale = Draw(channels, 4, 0.25, &state);
  const std::vector<double> bias = Draw(channels, 4, 0.5, &state);
  std::vector<double> residual = Draw(outputs, 8, 0.5, &state);
  residual[3] = NAN, residual[channels + 1] = INFINITY, residual[2 * channels] = -INFINITY;
  const std::vector<double> sums = NaiveConv(problem, lhs, rhs);
  const DeviceArray<T> lhs_device(lhs), rhs_device(rhs), residual_device(residual);
  const DeviceArray<float> scale_device(scale), bias_device(bias);
  const DeviceArray<float> workspace(std::vector<double>(plan.workspace_bytes / 4 + 1, NAN));
  const auto same = [](double got, double expected, double tolerance) {
    return std::isnan(expected)   ? std::isnan(got)
           : std::isinf(expected) ? got == expected
                                  : std::abs(got - expected) <= tolerance;
  };
  for (Activation activation :
       {Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kLeakyRelu,
        Activation::kGelu, Activation::kGeluTanh, Activation::kSilu, Activation::kSigmoid,
        Activation::kTanh, Activation::kHardSwish}) {
    for (bool with_terms : {false, true}) {
      const DeviceArray<T> out(std::vector<double>(outputs, NAN));
      const DeviceArray<T> pre(std::vector<double>(outputs, NAN));
      auto params = std::make_shared<LaunchParams>(plan.As<LaunchParams>());
      params->kernel.epilogue.activation = activation;
      params->kernel.epilogue.negative_slope = kSlope;
      Plan fused = plan;
      fused.params = std::move(params);
      Operands operands;
      operands.lhs = lhs_device.data();
      operands.rhs = rhs_device.data();
      operands.out = out.data();
      operands.workspace = workspace.data();
      operands.workspace_bytes = plan.workspace_bytes;
      if (with_terms) {
        operands.scale = scale_device.data();
        operands.bias = bias_device.data();
        operands.residual = residual_device.data();
        if (fprop) operands.pre = pre.data();
      }
      const Status status = Tag::template Launch<Tag>(fused, operands, nullptr);
      const cudaError_t error = cudaDeviceSynchronize();
      if (!status.ok() || error != cudaSuccess) {
        return Fail(what + ": " + status.message() + " " + cudaGetErrorString(error));
      }
      const std::vector<double> got = out.Read(outputs), t = pre.Read(outputs);
      int wrong = 0;
      for (size_t i = 0; i < outputs; ++i) {
        double sum = sums[i];
        if (with_terms) sum = sum * scale[i % channels] + bias[i % channels] + residual[i];
        const double expected = ActivateReference(activation, kSlope, sum);
        wrong +=
            !same(got[i], expected, ActivationTolerance(kType, sum, expected)) ||
            (operands.pre != nullptr && !same(t[i], sum, ActivationTolerance(kType, sum, sum)));
      }
      if (wrong > 0) {
        Fail(what + ", " + std::to_string(plan.slices) + " slices, activation " +
             std::to_string(static_cast<int>(activation)) + (with_terms ? ", all terms: " : ": ") +
             std::to_string(wrong) + " of " + std::to_string(outputs) + " wrong");
      }
    }
  }
}

// The main function of a test. Returns 77 (skipped) if this GPU is not of the kind that it needs.
inline int RunTest(const char* name, void (*test)(const Gpu&), bool needs_hopper) {
  Gpu gpu;
  if (Status status = QueryGpu(0, &gpu); !status.ok()) {
    Fail(status.message());
  } else if (needs_hopper && gpu.compute_capability() != 90) {
    std::printf("needs compute capability 90, the GPU has %d\n", gpu.compute_capability());
    return 77;
  } else {
    test(gpu);
  }
  std::printf("%s: %d failures\n", name, failures);
  return failures != 0;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_FUSED_EPILOGUE_CUH_
