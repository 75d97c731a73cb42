// Runs the int8 kernels without Python and XLA: checks exact results, measures times.
//
//     int8_check check|error|time|plan PROBLEMS KERNEL...
//
// PROBLEMS: a problem key (ConvProblem::ToString writes it), or a file of lines "name<TAB>key".
// KERNEL: part of an instance's name, or "native", the instance of the int8 families with the
// shortest predicted time. LAYERS=text in the environment takes only the problems whose name
// contains the text.
//
//     check  compares every bit with the definition (core/epilogue.h). Operands are random, with
//            extreme values; scales have both signs, NaN and infinities; there are ties and sums
//            that wrap. The result and the memory behind it are filled with 0xa5 before. Kernels
//            that run on request only are exact on few operands only and get those of Sparsen
//     error  for sums (s32, without a scale) of random operands: the root mean square of the
//            difference from the definition, over the standard deviation of the definition
//     time   2 to 16 sets of operands (more than 300 MB), one CUDA graph over all, the median of 9
//            replays: us, TOP/s, TB/s and the prediction; "*" marks the instance of "native"
//     plan   the predictions only, for the product MODEL (h200); needs no GPU
//
// SMS=n in the environment plans for a GPU of n SMs, so that persistent CTAs process several tiles.
//
// CONTRIBUTING.md says how it is built. Exit status: 1 if a kernel fails or differs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "core/conv_problem.h"
#include "cuda/common/kernel.h"
#include "cuda/common/query_gpu.h"
#include "cuda/launch_table.h"
#include "cuda/registry.h"
#include "device_program.cuh"
#include "int8_definition.cuh"

namespace jaxconv {
namespace {

std::vector<KernelDesc> Int8Kernels() {
  std::vector<KernelDesc> all;
  for (const KernelDesc& kernel : Kernels()) {
    if (ByteWidth(kernel.dtype) == 1) all.push_back(kernel);
  }
  return all;
}

constexpr int kPoison = 0xa5;
constexpr int64_t kGuardBytes = 4096;

// Counts the bytes behind the result that a kernel has overwritten.
__global__ void CountTouched(const uint8_t* guard, int64_t bytes, Mismatch* found) {
  for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    if (guard[i] != kPoison) atomicAdd(&found->count, 1ull);
  }
}

// The operands of a problem in one allocation.
struct Tensors {
  int64_t x, w, y, residual, scale, channels, bytes;
  const ConvProblem& problem;

  static int64_t Aligned(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }
  explicit Tensors(const ConvProblem& p)
      : x(p.x_elements()),
        w(p.k * p.packed_row()),
        y(p.y_elements() * ByteWidth(p.y_dtype)),
        residual(p.epilogue.residual ? y : 0),
        scale((p.epilogue.scale == ScaleKind::kImage ? p.n : 1) * p.k * 4),
        channels(p.k * 4),
        problem(p) {
    bytes = Aligned(x) + Aligned(w) + Aligned(y + kGuardBytes) + Aligned(residual) +
            Aligned(scale) + 2 * Aligned(channels) + 1024;
  }

  Operands At(char* set) const {
    const Epilogue& e = problem.epilogue;
    Operands args;
    auto take = [&](int64_t size) {
      char* const at = set;
      set += Aligned(size);
      return at;
    };
    args.lhs = take(x);
    args.rhs = take(w);
    args.out = take(y + kGuardBytes);
    args.residual = take(residual);
    args.scale = reinterpret_cast<float*>(take(scale));
    args.bias = reinterpret_cast<float*>(take(channels));
    args.offset = reinterpret_cast<int32_t*>(take(channels));
    args.residual_scale = reinterpret_cast<float*>(take(4));
    if (!e.residual) args.residual = nullptr, args.residual_scale = nullptr;
    if (e.scale == ScaleKind::kNone) args.scale = nullptr;
    if (!e.bias) args.bias = nullptr;
    if (!e.offset) args.offset = nullptr;
    return args;
  }

  char* Scales(char* set) const {
    return set + Aligned(x) + Aligned(w) + Aligned(y + kGuardBytes) + Aligned(residual);
  }
  float RootOfTerms() const {
    return std::sqrt(static_cast<float>(problem.taps() * problem.c_per_group()));
  }
  // Replaces the activations, filter and scales that Fill wrote.
  void FillSparse(char* set, cudaStream_t stream) const {
    constexpr int kEvery = 16;
    const Operands args = At(set);
    auto* const activations = static_cast<int8_t*>(const_cast<void*>(args.lhs));
    auto* const filter = static_cast<int8_t*>(const_cast<void*>(args.rhs));
    Sparsen<<<2048, 256, 0, stream>>>(activations, x, kEvery, 1);
    Sparsen<<<2048, 256, 0, stream>>>(filter, w, kEvery, 2);
    FillScales<<<64, 256, 0, stream>>>(reinterpret_cast<float*>(Scales(set)), scale / 4,
                                       RootOfTerms() / kEvery, true);
  }
  void Fill(char* set, uint32_t seed, bool extremes, cudaStream_t stream) const {
    char* const all = set;
    const Operands args = At(all);
    FillBytes<<<2048, 256, 0, stream>>>(static_cast<uint8_t*>(const_cast<void*>(args.lhs)), x,
                                        4 * seed + 1);
    FillBytes<<<2048, 256, 0, stream>>>(static_cast<uint8_t*>(const_cast<void*>(args.rhs)), w,
                                        4 * seed + 2);
    // The zeros that pad the rows of the packed filter.
    const int64_t length = problem.taps() * problem.c_per_group();
    if (length < problem.packed_row()) {
      Require(cudaMemset2DAsync(static_cast<char*>(const_cast<void*>(args.rhs)) + length,
                                problem.packed_row(), 0, problem.packed_row() - length, problem.k,
                                stream),
              "zeros");
    }
    if (args.residual != nullptr) {
      FillResidual<<<2048, 256, 0, stream>>>(const_cast<void*>(args.residual), problem.y_elements(),
                                             problem.y_dtype, 4 * seed + 3);
      const float factor = -0.37f;
      Require(cudaMemcpyAsync(const_cast<float*>(args.residual_scale), &factor, 4,
                              cudaMemcpyHostToDevice, stream),
              "residual_scale");
    }
    // All arrays are filled; a kernel gets a null pointer for absent ones.
    char* const scales = Scales(all);
    FillScales<<<64, 256, 0, stream>>>(reinterpret_cast<float*>(scales), scale / 4,
                                       5500 * RootOfTerms(), extremes);
    FillBias<<<64, 256, 0, stream>>>(
        reinterpret_cast<float*>(scales + Aligned(scale)),
        reinterpret_cast<int32_t*>(scales + Aligned(scale) + Aligned(channels)), problem.k,
        extremes);
  }
};

struct Candidate {
  KernelDesc kernel;
  Plan plan;
  bool native = false;
};

std::vector<Candidate> Candidates(const ConvProblem& problem, const Gpu& gpu,
                                  const std::vector<std::string>& wanted, bool explain) {
  static const std::vector<KernelDesc> kernels = Int8Kernels();
  std::vector<Candidate> all;
  size_t best = 0;
  for (const KernelDesc& kernel : kernels) {
    Candidate candidate{kernel, Plan()};
    const int capability = gpu.compute_capability();
    if (capability < kernel.min_cc || capability > kernel.max_cc) continue;
    const Status status = kernel.plan(kernel, problem, gpu, 0, &candidate.plan);
    if (!status.ok()) {
      if (explain && kernel.dtype == problem.x_dtype) {
        std::printf("  %s: %s\n", kernel.name, status.message().c_str());
      }
      continue;
    }
    all.push_back(candidate);
    const Candidate& fastest = all[best];
    if (!kernel.on_request &&
        (fastest.kernel.on_request || all.back().plan.microseconds < fastest.plan.microseconds)) {
      best = all.size() - 1;
    }
  }
  if (!all.empty() && !all[best].kernel.on_request) all[best].native = true;
  std::vector<Candidate> chosen;
  for (const Candidate& candidate : all) {
    const std::string name = candidate.kernel.name;
    if (std::any_of(wanted.begin(), wanted.end(), [&](const std::string& part) {
          return part == "native" ? candidate.native : name.find(part) != std::string::npos;
        })) {
      chosen.push_back(candidate);
    }
  }
  return chosen;
}

Status Run(const Candidate& candidate, const Operands& operands, cudaStream_t stream) {
  JAXCONV_RETURN_IF_ERROR(CheckOperands(candidate.plan, operands));
  return FindLaunch(candidate.plan.kernel->name)(candidate.plan, operands, stream);
}

// Checks the candidates that run on request only (`on_request`), or the others.
int Check(const std::string& name, const ConvProblem& problem,
          const std::vector<Candidate>& candidates, bool on_request, cudaStream_t stream) {
  if (std::none_of(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
        return candidate.kernel.on_request == on_request;
      })) {
    return 0;
  }
  const Tensors tensors(problem);
  const Buffer set(tensors.bytes), sums(problem.y_elements() * 4), found_buffer(sizeof(Mismatch));
  tensors.Fill(set.data(), 0, true, stream);
  if (on_request) tensors.FillSparse(set.data(), stream);
  Operands args = tensors.At(set.data());
  const Definition definition(problem);
  auto* const sums_at = reinterpret_cast<int32_t*>(sums.data());
  auto* const found_at = reinterpret_cast<Mismatch*>(found_buffer.data());
  Define<<<4096, 256, 0, stream>>>(definition, args, sums_at);
  Require(cudaStreamSynchronize(stream), "definition");
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    if (candidate.kernel.on_request != on_request) continue;
    const char* kernel = candidate.kernel.name;
    const Buffer workspace(candidate.plan.workspace_bytes);
    args.workspace = workspace.data();
    args.workspace_bytes = candidate.plan.workspace_bytes;
    Require(cudaMemsetAsync(args.out, kPoison, tensors.y + kGuardBytes, stream), "poison");
    Require(cudaMemsetAsync(args.workspace, kPoison, args.workspace_bytes, stream), "poison");
    if (const Status status = Run(candidate, args, stream); !status.ok()) {
      ++failures;
      std::printf("FAILED %s %s: %s\n", kernel, name.c_str(), status.message().c_str());
      continue;
    }
    Mismatch found{0, ~0ull, 0, 0};
    Require(cudaMemcpyAsync(found_at, &found, sizeof(found), cudaMemcpyHostToDevice, stream),
            "copy");
    Compare<<<2048, 256, 0, stream>>>(definition, args, sums_at, found_at, false);
    Compare<<<2048, 256, 0, stream>>>(definition, args, sums_at, found_at, true);
    CountTouched<<<1, 256, 0, stream>>>(static_cast<const uint8_t*>(args.out) + tensors.y,
                                        kGuardBytes, found_at);
    Require(cudaMemcpyAsync(&found, found_at, sizeof(found), cudaMemcpyDeviceToHost, stream),
            "copy");
    Require(cudaStreamSynchronize(stream), kernel);
    if (found.count == 0) {
      std::printf("ok %s %s\n", kernel, name.c_str());
      continue;
    }
    ++failures;
    if (found.first == ~0ull) {
      std::printf("WRONG %s %s: %llu bytes written behind the output\n", kernel, name.c_str(),
                  found.count);
      continue;
    }
    const auto k = static_cast<unsigned long long>(problem.k);
    const auto pixels = static_cast<unsigned long long>(problem.out_pixels());
    std::printf(
        "WRONG %s %s: %llu of %lld differ, first at image %llu pixel %llu channel %llu: "
        "%x, expected %x\n    %s\n",
        kernel, name.c_str(), found.count, static_cast<long long>(problem.y_elements()),
        found.first / k / pixels, found.first / k % pixels, found.first % k, found.got,
        found.expected, problem.ToString().c_str());
  }
  return failures;
}

int Error(const std::string& name, const ConvProblem& problem,
          const std::vector<Candidate>& candidates, cudaStream_t stream) {
  if (problem.y_dtype != DType::kS32 || !problem.epilogue.Plain()) {
    std::printf("FAILED %s: error wants sums\n", name.c_str());
    return 1;
  }
  const Tensors tensors(problem);
  const auto elements = static_cast<size_t>(problem.y_elements());
  const Buffer set(tensors.bytes), sums(problem.y_elements() * 4);
  tensors.Fill(set.data(), 0, false, stream);
  Operands args = tensors.At(set.data());
  Define<<<4096, 256, 0, stream>>>(Definition(problem), args,
                                   reinterpret_cast<int32_t*>(sums.data()));
  std::vector<int32_t> expected(elements), got(elements);
  auto fetch = [&](std::vector<int32_t>* to, const void* from) {
    Require(cudaMemcpyAsync(to->data(), from, elements * 4, cudaMemcpyDeviceToHost, stream),
            "copy");
    Require(cudaStreamSynchronize(stream), "copy");
  };
  fetch(&expected, sums.data());
  double mean = 0, variance = 0;
  for (int32_t sum : expected) mean += sum / static_cast<double>(elements);
  for (int32_t sum : expected) variance += (sum - mean) * (sum - mean);
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const Buffer workspace(candidate.plan.workspace_bytes);
    args.workspace = workspace.data();
    args.workspace_bytes = candidate.plan.workspace_bytes;
    if (const Status status = Run(candidate, args, stream); !status.ok()) {
      ++failures;
      std::printf("FAILED %s %s: %s\n", candidate.kernel.name, name.c_str(),
                  status.message().c_str());
      continue;
    }
    fetch(&got, args.out);
    double squares = 0, largest = 0;
    for (size_t i = 0; i < elements; ++i) {
      const double difference = static_cast<double>(got[i]) - expected[i];
      squares += difference * difference;
      largest = std::max(largest, std::abs(difference));
    }
    std::printf("error rms %.4f max %.4f %s %s\n", std::sqrt(squares / variance),
                largest / std::sqrt(variance / static_cast<double>(elements)),
                candidate.kernel.name, name.c_str());
  }
  return failures;
}

int Time(const std::string& name, const ConvProblem& problem,
         const std::vector<Candidate>& candidates, cudaStream_t stream) {
  const Tensors tensors(problem);
  const int sets = SetsToTime(tensors.bytes);
  const Buffer pool(sets * tensors.bytes);
  for (int i = 0; i < sets; ++i) tensors.Fill(pool.data() + i * tensors.bytes, i, false, stream);
  Require(cudaStreamSynchronize(stream), "operands");
  int failures = 0;
  for (const Candidate& candidate : candidates) {
    const Plan& plan = candidate.plan;
    const char* kernel = candidate.kernel.name;
    const Buffer workspace(plan.workspace_bytes);
    auto launch_all = [&]() -> Status {
      for (int i = 0; i < sets; ++i) {
        Operands args = tensors.At(pool.data() + i * tensors.bytes);
        args.workspace = workspace.data();
        args.workspace_bytes = plan.workspace_bytes;
        JAXCONV_RETURN_IF_ERROR(Run(candidate, args, stream));
      }
      return {};
    };
    double us = 0;
    if (const Status status = TimeReplays(stream, kernel, launch_all, &us); !status.ok()) {
      ++failures;
      std::printf("FAILED %s %s: %s\n", kernel, name.c_str(), status.message().c_str());
      continue;
    }
    us /= sets;
    const int64_t bytes = tensors.x + tensors.w + tensors.y + tensors.residual;
    std::printf("%-18s %9.1f us %7.1f TOP/s %6.2f TB/s  predicted %7.1f  slices %-2lld %s%s\n",
                name.c_str(), us, static_cast<double>(problem.flops()) / us * 1e-6,
                static_cast<double>(bytes) / us * 1e-6, plan.microseconds,
                static_cast<long long>(plan.slices), kernel, candidate.native ? " *" : "");
  }
  return failures;
}

void PrintPlans(const std::string& name, const ConvProblem& problem,
                const std::vector<Candidate>& candidates) {
  for (const Candidate& candidate : candidates) {
    std::printf("%-18s predicted %7.1f us %7.1f TOP/s  %s%s\n", name.c_str(),
                candidate.plan.microseconds,
                static_cast<double>(problem.flops()) / candidate.plan.microseconds * 1e-6,
                candidate.kernel.name, candidate.native ? " *" : "");
  }
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 3 ? argv[1] : "";
  if (mode != "check" && mode != "error" && mode != "time" && mode != "plan") {
    std::printf("int8_check check|error|time|plan PROBLEMS KERNEL...\n");
    return 2;
  }
  const char* const model = std::getenv("MODEL");
  const char* const layers = std::getenv("LAYERS");
  Gpu gpu;
  cudaStream_t stream = nullptr;
  if (mode == "plan") {
    if (!ModelOf(model != nullptr ? model : "h200", &gpu)) return 2;
  } else {
    if (Status status = QueryGpu(0, &gpu); !status.ok()) {
      std::printf("%s\n", status.message().c_str());
      return 2;
    }
    Require(cudaStreamCreate(&stream), "stream");
  }
  if (const char* sms = std::getenv("SMS")) gpu.sm_count = std::atoi(sms);
  std::vector<std::string> lines;
  if (std::string(argv[2]).rfind("fprop ", 0) == 0) {
    lines.push_back(argv[2]);
  } else {
    std::ifstream file(argv[2]);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
  }
  int problems = 0, kernels = 0, failures = 0;
  for (const std::string& line : lines) {
    const size_t tab = line.find('\t');
    const std::string name = tab == std::string::npos ? "" : line.substr(0, tab);
    if (layers != nullptr && name.find(layers) == std::string::npos) continue;
    ConvProblem problem;
    const std::string key = line.substr(tab == std::string::npos ? 0 : tab + 1);
    if (const Status status = ConvProblem::Parse(key, &problem); !status.ok()) {
      std::printf("%s: %s\n", line.c_str(), status.message().c_str());
      return 2;
    }
    if (problem.filter_layout != FilterLayout::kPacked || problem.batch != 1) {
      std::printf("%s: expected a packed filter and one batch\n", line.c_str());
      return 2;
    }
    const auto candidates =
        Candidates(problem, gpu, {argv + 3, argv + argc}, mode == "plan" && lines.size() == 1);
    ++problems;
    kernels += static_cast<int>(candidates.size());
    if (candidates.empty()) std::printf("no kernel takes %s\n", line.c_str());
    if (mode == "check") {
      failures += Check(name, problem, candidates, false, stream);
      failures += Check(name, problem, candidates, true, stream);
    }
    if (mode == "error") failures += Error(name, problem, candidates, stream);
    if (mode == "time") failures += Time(name, problem, candidates, stream);
    if (mode == "plan") PrintPlans(name, problem, candidates);
    std::fflush(stdout);
  }
  std::printf("%s: %d problems, %d kernels, %d failures\n", mode.c_str(), problems, kernels,
              failures);
  return failures != 0 || kernels == 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
