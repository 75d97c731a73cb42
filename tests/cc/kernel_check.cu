// Runs kernels without Python and XLA: checks exact results on integers, measures times.
//
//     kernel_check check|time|error|hash|host PROBLEMS KERNEL...
//
// PROBLEMS: a file of lines "name<TAB>key", the key as ConvProblem::ToString writes it (and as
// `jaxconv.explain` shows it). KERNEL: part of an instance's name; "native", the selected instance;
// "family:NAME", the instance selected within a family; or "listed", the instance in the third
// field of the line.
//
//     check  integers from -2 to 2; results and workspace are filled with NaN before. Compares with
//            the definition computed in double, exactly or within the kernel's stated error
//            (stated_error.h). With SLICES=n in the environment also runs n slices where the kernel
//            has them
//     time   normal operands, drawn anew for every kernel, in 2 to 16 sets (more than 300 MB), one
//            CUDA graph over all, the median of 9 replays: us, TF/s, TB/s and the prediction
//     error  normal operands, no epilogue: the rms of the error over the rms of the result, both
//            against the definition computed in double, over at most 16,384 elements of the result;
//            and the slope of the error over the result (a bias towards or away from zero)
//     hash   a hash of the result's bits, to compare processes
//     host   nanoseconds of host time for one call as the FFI handler makes it (plan lookup,
//            checks, launch), and for a bare launch of an empty kernel with parameters as large
//
// `time` and `host` also take problems with a prepared filter, which is drawn as any tensor is.
//
// If the problem has an epilogue, its operands are drawn too (in `check` as integers), and `pre` is
// stored and compared. Activations that are not exact may differ by their rounding, statistics by a
// millionth; `hash` includes them.
//
// SMS=n in the environment plans for a GPU of n SMs: persistent CTAs then process several tiles of
// a small problem, which suits racecheck.
//
// CONTRIBUTING.md says how it is built. Exit status: 1 if a kernel fails or differs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/conv_problem.h"
#include "cuda/common/folded_columns.h"
#include "cuda/common/query_gpu.h"
#include "cuda/launch_table.h"
#include "cuda/plan_cache.h"
#include "cuda/registry.h"
#include "cuda/select.h"
#include "definition.cuh"
#include "device_program.cuh"
#include "epilogue_reference.h"
#include "stated_error.h"
#include "statistics_reference.cuh"

namespace jaxconv {
namespace {

// Fills with integers, or with sums of four uniform numbers, which have standard deviation 1.
__global__ void Fill(void* tensor, int64_t elements, DType dtype, uint32_t seed, bool integers) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    float value = static_cast<float>(Random(i, seed) % 5) - 2;
    if (!integers) {
      value = 0;
      for (int j = 0; j < 4; ++j) value += Random(4 * i + j, seed) / 4294967296.f - 0.5f;
      value *= 1.732f;
    }
    Put(tensor, i, dtype, value);
  }
}

// Applies the epilogue to the sums in `result`; `before` gets the values before the activation.
__global__ void Finish(Epilogue terms, Operands operands, DType dtype, int64_t channels,
                       double* result, double* before, int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    double t = result[i];
    if (operands.scale != nullptr) t *= operands.scale[i % channels];
    if (operands.bias != nullptr) t += operands.bias[i % channels];
    if (operands.residual != nullptr) t += Get(operands.residual, i, dtype);
    before[i] = t;
    result[i] = ActivateReference(terms.activation, terms.negative_slope, t);
  }
}

// Compare for an activation that is not exact.
__global__ void CompareActivated(const void* out, DType dtype, const double* expected,
                                 const double* before, int64_t elements,
                                 unsigned long long* found) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const double error = fabs(Get(out, i, dtype) - expected[i]);
    if (error <= ActivationTolerance(dtype, before[i], expected[i])) continue;  // NaN differs
    atomicAdd(&found[0], 1ull);
    atomicMin(&found[1], static_cast<unsigned long long>(i));
  }
}

// The largest magnitude. The bits of nonnegative doubles have the order of the numbers.
__global__ void Largest(const double* values, int64_t elements, unsigned long long* bits) {
  double largest = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    largest = fmax(largest, fabs(values[i]));
  }
  atomicMax(bits, static_cast<unsigned long long>(__double_as_longlong(largest)));
}

// found[0]: elements that differ by more than `allowed`; found[1]: the first of them.
__global__ void Compare(const void* out, DType dtype, const double* expected, double allowed,
                        int64_t elements, unsigned long long* found) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    const double result = Get(out, i, dtype);
    if (result == Rounded(expected[i], dtype)) continue;
    if (fabs(result - expected[i]) <= allowed) continue;  // NaN differs
    atomicAdd(&found[0], 1ull);
    atomicMin(&found[1], static_cast<unsigned long long>(i));
  }
}

// Adds to `sums` the squared errors, the squared results, and errors times results.
__global__ void SumErrors(Window window, const void* lhs, const void* rhs, DType dtype,
                          const void* out, DType out_dtype, int64_t every, int64_t elements,
                          double* sums) {
  double sum[3] = {};
  const int64_t step = int64_t{gridDim.x} * blockDim.x * every;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * every; i < elements;
       i += step) {
    const double expected = Element(window, i, lhs, rhs, dtype);
    const double error = Get(out, i, out_dtype) - expected;
    sum[0] += error * error, sum[1] += expected * expected, sum[2] += error * expected;
  }
  for (int i = 0; i < 3; ++i) atomicAdd(&sums[i], sum[i]);
}

__global__ void Hash(const unsigned short* out, int64_t halves, unsigned long long* hash) {
  unsigned long long sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < halves; i += step) {
    sum += (out[i] + 1ull) * (2ull * i + 0x9E3779B97F4A7C15ull);
  }
  atomicAdd(hash, sum);
}

// The device memory for one problem of the program's loop.
struct Tensors {
  int64_t lhs, rhs, out;  // elements
  int64_t lhs_bytes, rhs_bytes, out_bytes;
  int64_t channels;
  bool scale, bias, residual, pre, statistics;

  explicit Tensors(const ConvProblem& problem) {
    const int64_t x = problem.x_elements(), y = problem.y_elements();
    const bool prepared = WinogradPoints(problem.filter_layout) > 0;
    const int64_t w = prepared ? problem.winograd_elements() : problem.w_elements();
    lhs = problem.op == Op::kDgrad ? y : x;
    rhs = problem.op == Op::kWgrad ? y : w;
    out = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
    lhs_bytes = lhs * ByteWidth(problem.lhs_dtype());
    rhs_bytes = rhs * ByteWidth(problem.rhs_dtype());
    out_bytes = out * ByteWidth(problem.output_dtype());
    channels = problem.k;
    scale = problem.epilogue.scale != ScaleKind::kNone;
    bias = problem.epilogue.bias;
    residual = problem.epilogue.residual;
    pre = problem.epilogue.pre;
    statistics = problem.epilogue.statistics;
  }
  static int64_t Aligned(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }
  int64_t SetBytes() const {
    return Aligned(lhs_bytes) + Aligned(rhs_bytes) +
           (1 + int{residual} + int{pre}) * Aligned(out_bytes) +
           (int{scale} + int{bias}) * Aligned(channels * 4) +
           int{statistics} * Aligned(channels * 8);
  }
  // All bytes that any kernel must move.
  int64_t MovedBytes() const {
    return lhs_bytes + rhs_bytes + (1 + int{residual} + int{pre}) * out_bytes;
  }
  Operands OperandsAt(char* set, char* workspace, int64_t workspace_bytes) const {
    auto take = [&set](bool present, int64_t bytes) -> void* {
      if (!present) return nullptr;
      set += Aligned(bytes);
      return set - Aligned(bytes);
    };
    Operands operands;
    operands.lhs = take(true, lhs_bytes);
    operands.rhs = take(true, rhs_bytes);
    operands.out = take(true, out_bytes);
    operands.scale = static_cast<const float*>(take(scale, channels * 4));
    operands.bias = static_cast<const float*>(take(bias, channels * 4));
    operands.residual = take(residual, out_bytes);
    operands.pre = take(pre, out_bytes);
    operands.statistics = static_cast<float*>(take(statistics, channels * 8));
    operands.workspace = workspace;
    operands.workspace_bytes = workspace_bytes;
    return operands;
  }
};

void FillOperands(const ConvProblem& problem, const Tensors& tensors, const Operands& args,
                  uint32_t seed, bool integers, cudaStream_t stream) {
  Fill<<<2048, 256, 0, stream>>>(const_cast<void*>(args.lhs), tensors.lhs, problem.lhs_dtype(),
                                 2 * seed + 1, integers);
  Fill<<<2048, 256, 0, stream>>>(const_cast<void*>(args.rhs), tensors.rhs, problem.rhs_dtype(),
                                 2 * seed + 2, integers);
  auto fill = [&](const void* term, int64_t elements, DType dtype, uint32_t of) {
    if (term == nullptr) return;
    Fill<<<2048, 256, 0, stream>>>(const_cast<void*>(term), elements, dtype, of * 0x10001u + seed,
                                   integers);
  };
  fill(args.scale, tensors.channels, DType::kF32, 3);
  fill(args.bias, tensors.channels, DType::kF32, 4);
  fill(args.residual, tensors.out, problem.output_dtype(), 5);
}

// Runs a plan as the FFI handler does.
Status Run(const Plan& plan, const Operands& operands, cudaStream_t stream) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(plan, operands));
  return FindLaunch(plan.kernel->name)(plan, operands, stream);
}

struct Candidate {
  const KernelDesc* kernel;
  Plan plan;
};

std::vector<Candidate> Candidates(const ConvProblem& problem, const Gpu& gpu,
                                  const std::vector<std::string>& wanted,
                                  const std::string& listed) {
  std::vector<Candidate> candidates;
  auto add = [&](const KernelDesc& kernel) {
    Plan plan;
    const int capability = gpu.compute_capability();
    if (kernel.op == problem.op && kernel.min_cc <= capability && capability <= kernel.max_cc &&
        MakePlan(kernel, problem, gpu, 0, &plan).ok()) {
      candidates.push_back({&kernel, plan});
    }
  };
  for (const std::string& part : wanted) {
    if (part == "listed") {
      if (const KernelDesc* kernel = FindKernel(listed)) add(*kernel);
      continue;
    }
    const bool family = part.rfind("family:", 0) == 0;
    if (part == "native" || family) {
      Selection selection;
      const Status status = Select(problem, gpu, family ? part.substr(7) : part, &selection);
      if (status.ok() && !selection.instance.empty()) add(*FindKernel(selection.instance));
      continue;
    }
    for (const KernelDesc& kernel : Kernels()) {
      if (std::string_view(kernel.name).find(part) != std::string_view::npos) add(kernel);
    }
  }
  return candidates;
}

// Returns the number of kernels that failed or differ.
int Check(const std::string& line, const ConvProblem& problem, const Gpu& gpu,
          const std::vector<Candidate>& candidates, cudaStream_t stream) {
  const Tensors tensors(problem);
  const Buffer set(tensors.SetBytes()), expected(tensors.out * 8), found(16);
  const Operands inputs = tensors.OperandsAt(set.data(), nullptr, 0);
  FillOperands(problem, tensors, inputs, 0, true, stream);
  Define<<<2048, 256, 0, stream>>>(Window(problem), inputs.lhs, inputs.rhs, problem.lhs_dtype(),
                                   reinterpret_cast<double*>(expected.data()), tensors.out);
  const bool fused = !problem.epilogue.Plain();
  const bool exact = ExactActivation(problem.epilogue.activation);
  const Buffer before(fused ? tensors.out * 8 : 0);
  if (fused) {
    Finish<<<2048, 256, 0, stream>>>(problem.epilogue, inputs, problem.output_dtype(),
                                     tensors.channels, reinterpret_cast<double*>(expected.data()),
                                     reinterpret_cast<double*>(before.data()), tensors.out);
  }
  double largest = 0;
  Require(cudaMemsetAsync(found.data(), 0, 8, stream), "clear");
  Largest<<<512, 256, 0, stream>>>(reinterpret_cast<double*>(expected.data()), tensors.out,
                                   reinterpret_cast<unsigned long long*>(found.data()));
  Require(cudaMemcpyAsync(&largest, found.data(), 8, cudaMemcpyDeviceToHost, stream), "copy");
  Require(cudaStreamSynchronize(stream), "expected");
  const char* slices = std::getenv("SLICES");
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const KernelDesc& kernel = *candidate.kernel;
    const double allowed = StatedError(kernel.name) * largest;
    for (bool forced : {false, true}) {
      Plan plan = candidate.plan;
      if (forced &&
          (slices == nullptr || !MakePlan(kernel, problem, gpu, std::atoll(slices), &plan).ok())) {
        continue;  // the kernel does not have these slices
      }
      const Buffer workspace(plan.workspace_bytes);
      const Operands operands =
          tensors.OperandsAt(set.data(), workspace.data(), plan.workspace_bytes);
      Require(cudaMemsetAsync(operands.out, 0xff, tensors.out_bytes, stream), "poison");
      if (tensors.pre) {
        Require(cudaMemsetAsync(operands.pre, 0xff, tensors.out_bytes, stream), "poison");
      }
      if (tensors.statistics) {
        Require(cudaMemsetAsync(operands.statistics, 0xff, tensors.channels * 8, stream), "poison");
      }
      Require(cudaMemsetAsync(operands.workspace, 0xff, plan.workspace_bytes, stream), "poison");
      if (const Status status = Run(plan, operands, stream); !status.ok()) {
        ++failures;
        std::printf("FAILED %s: %s: %s\n", kernel.name, line.c_str(), status.message().c_str());
        continue;
      }
      unsigned long long differ[2] = {0, ~0ull};
      Require(cudaMemcpyAsync(found.data(), differ, 16, cudaMemcpyHostToDevice, stream), "copy");
      const auto* y = reinterpret_cast<const double*>(expected.data());
      const auto* t = reinterpret_cast<const double*>(before.data());
      auto* differing = reinterpret_cast<unsigned long long*>(found.data());
      if (exact) {
        Compare<<<2048, 256, 0, stream>>>(operands.out, problem.output_dtype(), y, allowed,
                                          tensors.out, differing);
      } else {
        CompareActivated<<<2048, 256, 0, stream>>>(operands.out, problem.output_dtype(), y, t,
                                                   tensors.out, differing);
      }
      if (tensors.pre) {
        Compare<<<2048, 256, 0, stream>>>(operands.pre, problem.output_dtype(), t, 0, tensors.out,
                                          differing);
      }
      if (tensors.statistics) {
        CompareStatistics<Rounded><<<static_cast<unsigned>(tensors.channels), 256, 0, stream>>>(
            operands.statistics, problem.output_dtype(), y, tensors.out, tensors.channels,
            differing);
      }
      Require(cudaMemcpyAsync(differ, found.data(), 16, cudaMemcpyDeviceToHost, stream), "copy");
      Require(cudaStreamSynchronize(stream), kernel.name);
      if (differ[0] == 0) continue;
      ++failures;
      std::printf("WRONG %s in %lld slices: %llu of %lld differ, first at %llu: %s\n", kernel.name,
                  static_cast<long long>(plan.slices), differ[0],
                  static_cast<long long>(tensors.out), differ[1], line.c_str());
    }
  }
  return failures;
}

int Error(const std::string& name, const ConvProblem& problem,
          const std::vector<Candidate>& candidates, cudaStream_t stream) {
  const Tensors tensors(problem);
  const Buffer set(tensors.SetBytes()), sums(24);
  FillOperands(problem, tensors, tensors.OperandsAt(set.data(), nullptr, 0), 0, false, stream);
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const Buffer workspace(candidate.plan.workspace_bytes);
    const Operands operands =
        tensors.OperandsAt(set.data(), workspace.data(), candidate.plan.workspace_bytes);
    const Status status = problem.epilogue.Plain()
                              ? Run(candidate.plan, operands, stream)
                              : Status::Unimplemented("the error of plain sums only");
    if (!status.ok()) {
      ++failures;
      std::printf("FAILED %s: %s: %s\n", candidate.kernel->name, name.c_str(),
                  status.message().c_str());
      continue;
    }
    double sum[3] = {};
    Require(cudaMemsetAsync(sums.data(), 0, 24, stream), "clear");
    // An odd stride reaches all columns of a tile.
    SumErrors<<<128, 128, 0, stream>>>(Window(problem), operands.lhs, operands.rhs,
                                       problem.lhs_dtype(), operands.out, problem.output_dtype(),
                                       tensors.out / 16384 | 1, tensors.out,
                                       reinterpret_cast<double*>(sums.data()));
    Require(cudaMemcpyAsync(sum, sums.data(), 24, cudaMemcpyDeviceToHost, stream), "copy");
    Require(cudaStreamSynchronize(stream), candidate.kernel->name);
    std::printf("%-16s %-5s error %.2e  of it a multiple %+.2e  slices %-3lld %s\n", name.c_str(),
                Name(problem.op), std::sqrt(sum[0] / sum[1]), sum[2] / sum[1],
                static_cast<long long>(candidate.plan.slices), candidate.kernel->name);
  }
  return failures;
}

int Time(const std::string& name, const ConvProblem& problem,
         const std::vector<Candidate>& candidates, bool hash, cudaStream_t stream) {
  const Tensors tensors(problem);
  const int sets = hash ? 1 : SetsToTime(tensors.SetBytes());
  const Buffer pool(sets * tensors.SetBytes()), sum(8);
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const Plan& plan = candidate.plan;
    const char* kernel = candidate.kernel->name;
    const Buffer workspace(plan.workspace_bytes);
    auto operands_of = [&](int set) {
      return tensors.OperandsAt(pool.data() + set * tensors.SetBytes(), workspace.data(),
                                plan.workspace_bytes);
    };
    for (int i = 0; i < sets; ++i) FillOperands(problem, tensors, operands_of(i), i, false, stream);
    Require(cudaStreamSynchronize(stream), "operands");
    auto launch_all = [&]() -> Status {
      for (int i = 0; i < sets; ++i) JAXCONV_RETURN_IF_ERROR(Run(plan, operands_of(i), stream));
      return {};
    };
    double us = 0;
    const Status status = hash ? launch_all() : TimeReplays(stream, kernel, launch_all, &us);
    if (!status.ok()) {
      ++failures;
      std::printf("FAILED %s: %s: %s\n", kernel, name.c_str(), status.message().c_str());
    } else if (hash) {
      unsigned long long bits = 0;
      Require(cudaMemcpyAsync(sum.data(), &bits, 8, cudaMemcpyHostToDevice, stream), "copy");
      Hash<<<512, 256, 0, stream>>>(static_cast<const unsigned short*>(operands_of(0).out),
                                    tensors.out_bytes / 2,
                                    reinterpret_cast<unsigned long long*>(sum.data()));
      if (tensors.statistics) {
        Hash<<<1, 256, 0, stream>>>(reinterpret_cast<unsigned short*>(operands_of(0).statistics),
                                    tensors.channels * 4,
                                    reinterpret_cast<unsigned long long*>(sum.data()));
      }
      Require(cudaMemcpyAsync(&bits, sum.data(), 8, cudaMemcpyDeviceToHost, stream), "copy");
      Require(cudaStreamSynchronize(stream), kernel);
      std::printf("%s %s %016llx\n", name.c_str(), kernel, bits);
    } else {
      us /= sets;
      const int64_t bytes = tensors.MovedBytes();
      std::printf("%-16s %-5s %9.1f us %7.1f TF/s %6.2f TB/s  slices %-3lld predicted %7.1f  %s\n",
                  name.c_str(), Name(problem.op), us,
                  static_cast<double>(problem.flops()) / us * 1e-6,
                  static_cast<double>(bytes) / us * 1e-6, static_cast<long long>(plan.slices),
                  plan.microseconds, kernel);
    }
  }
  return failures;
}

// Parameters as large as those of most kernels.
struct EmptyParams {
  char bytes[3072];
};
__global__ void Empty(const __grid_constant__ EmptyParams) {}

// Host nanoseconds of one call of `enqueue`: the minimum over seven rounds of kCalls calls.
template <typename Enqueue>
double HostNanoseconds(Enqueue enqueue, cudaStream_t stream) {
  constexpr int kCalls = 200;  // fewer than a stream queues before the host waits
  double least = 0;
  for (int round = 0; round < 7; ++round) {
    Require(cudaStreamSynchronize(stream), "round");
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) enqueue();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    if (round == 0 || time.count() / kCalls < least) least = time.count() / kCalls;
  }
  Require(cudaStreamSynchronize(stream), "rounds");
  return least;
}

int Host(const std::string& name, const ConvProblem& problem,
         const std::vector<Candidate>& candidates, cudaStream_t stream) {
  static PlanCache plans(64, QueryGpu);
  const Tensors tensors(problem);
  const Buffer set(tensors.SetBytes());
  const std::string key = problem.ToString();
  const double bare =
      HostNanoseconds([&] { Empty<<<132, 384, 0, stream>>>(EmptyParams()); }, stream);
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const Buffer workspace(candidate.plan.workspace_bytes);
    const Operands operands =
        tensors.OperandsAt(set.data(), workspace.data(), candidate.plan.workspace_bytes);
    bool failed = false;
    auto find = [&](std::shared_ptr<const PlannedCall>* call) {
      failed =
          failed || !plans.Find({key, candidate.kernel->name, candidate.plan.slices, 0}, call).ok();
    };
    const double all = HostNanoseconds(
        [&] {
          std::shared_ptr<const PlannedCall> call;
          find(&call);
          failed = failed || !Run(call->plan, operands, stream).ok();
        },
        stream);
    const double lookup = HostNanoseconds(
        [&] {
          std::shared_ptr<const PlannedCall> call;
          find(&call);
        },
        stream);
    failures += failed;
    std::printf("%-16s %-5s host %6.0f ns, of which lookup %4.0f; an empty kernel %6.0f ns  %s%s\n",
                name.c_str(), Name(problem.op), all, lookup, bare, candidate.kernel->name,
                failed ? "  FAILED" : "");
  }
  return failures;
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 3 ? argv[1] : "";
  if (mode != "check" && mode != "time" && mode != "error" && mode != "hash" && mode != "host") {
    std::printf("kernel_check check|time|error|hash|host PROBLEMS KERNEL...\n");
    return 2;
  }
  Gpu gpu;
  if (Status status = QueryGpu(0, &gpu); !status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return 2;
  }
  if (const char* sms = std::getenv("SMS")) gpu.sm_count = std::atoi(sms);
  cudaStream_t stream;
  Require(cudaStreamCreate(&stream), "stream");
  std::ifstream file(argv[2]);
  int problems = 0, kernels = 0, failures = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name, key, listed;
    std::getline(fields, name, '\t');
    std::getline(fields, key, '\t');
    std::getline(fields, listed, '\t');
    ConvProblem problem;
    if (Status status = ConvProblem::Parse(key, &problem); !status.ok()) {
      std::printf("%s: %s\n", line.c_str(), status.message().c_str());
      return 2;
    }
    for (DType dtype : {problem.x_dtype, problem.w_dtype, problem.y_dtype}) {
      if (dtype == DType::kS8 || dtype == DType::kS32) {
        std::printf("%s: integers are not drawn here\n", line.c_str());
        return 2;
      }
    }
    const auto candidates = Candidates(problem, gpu, {argv + 3, argv + argc}, listed);
    ++problems;
    kernels += static_cast<int>(candidates.size());
    failures += mode == "check"   ? Check(line, problem, gpu, candidates, stream)
                : mode == "error" ? Error(name, problem, candidates, stream)
                : mode == "host"  ? Host(name, problem, candidates, stream)
                                  : Time(name, problem, candidates, mode == "hash", stream);
    std::fflush(stdout);
  }
  std::printf("%s: %d problems, %d kernels, %d failures\n", mode.c_str(), problems, kernels,
              failures);
  return failures != 0 || kernels == 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
