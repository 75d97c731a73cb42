// Kernels alone, without Python and XLA: exact on integers, and their times.
//
//     kernel_check check|time|hash PROBLEMS KERNEL...
//
// PROBLEMS: a file of lines "name<TAB>problem", the problem as ConvProblem::ToString writes it (and
// as `jaxconv.explain` shows it). KERNEL: part of an instance's name; "auto", what selection takes;
// or "family:NAME", the same within a family.
//
//     check  integers from -2 to 2, results and workspace filled with NaN before, compared exactly
//            with the definition computed in double; with SLICES=n in the environment also in n
//            slices where the kernel has them
//     time   normal operands, drawn anew for every kernel, in 2 to 16 sets (more than 300 MB), one
//            CUDA graph over all, the median of 9 replays: us, TF/s, TB/s and the prediction
//     hash   of the result's bits, to compare processes
//
// CONTRIBUTING.md says how it is built. Exit status: 1 where a kernel fails or differs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "core/conv_problem.h"
#include "cuda/kernels/query_device.h"
#include "cuda/select/kernel_table.h"
#include "cuda/select/select.h"

namespace jaxconv {
namespace {

void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ uint32_t Random(uint64_t index, uint32_t seed) {
  uint64_t z = index + seed * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 16);
}

__device__ void Put(void* tensor, int64_t at, DType dtype, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(tensor)[at] = value;
      break;
    case DType::kF16:
      static_cast<__half*>(tensor)[at] = __float2half(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(tensor)[at] = __float2bfloat16(value);
  }
}

__device__ double Get(const void* tensor, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(tensor)[at];
    case DType::kF16:
      return __half2float(static_cast<const __half*>(tensor)[at]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor)[at]);
  }
}

__device__ double Rounded(double value, DType dtype) {
  if (dtype == DType::kF16) return __half2float(__float2half(static_cast<float>(value)));
  if (dtype == DType::kBF16) return __bfloat162float(__float2bfloat16(static_cast<float>(value)));
  return value;
}

// Integers, or the sum of four uniform numbers with deviation 1.
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

// What the definition needs of a problem, by value.
struct Window {
  Op op;
  int64_t n, groups, c, k;
  int64_t in[3], filter[3], out[3], stride[3], lhs_dilation[3], dilation[3], pad_lo[3];
  int64_t to_k, to_c;  // of the filter, between neighbours along K and along C

  explicit Window(const ConvProblem& problem)
      : op(problem.op), n(problem.n), groups(problem.groups), c(problem.c), k(problem.k) {
    const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
    to_k = krsc ? problem.taps() * problem.c_per_group() : 1;
    to_c = krsc ? 1 : problem.k;
    for (int a = 0; a < 3; ++a) {
      in[a] = problem.in[a], filter[a] = problem.filter[a], out[a] = problem.out[a];
      stride[a] = problem.stride[a], lhs_dilation[a] = problem.lhs_dilation[a];
      dilation[a] = problem.dilation[a], pad_lo[a] = problem.pad_lo[a];
    }
  }
  static __device__ int64_t Volume(const int64_t (&extent)[3]) {
    return extent[0] * extent[1] * extent[2];
  }
  static __device__ int64_t Pixel(const int64_t (&extent)[3], const int64_t (&at)[3]) {
    return (at[0] * extent[1] + at[1]) * extent[2] + at[2];
  }
  static __device__ int64_t Split(int64_t index, const int64_t (&extent)[3], int64_t (&at)[3]) {
    for (int a = 2; a >= 0; --a) at[a] = index % extent[a], index /= extent[a];
    return index;
  }
  // The input position under tap `tap` of output `out_at`; false outside, or between inserted
  // zeros.
  __device__ bool Input(const int64_t (&out_at)[3], const int64_t (&tap)[3],
                        int64_t (&in_at)[3]) const {
    for (int a = 0; a < 3; ++a) {
      const int64_t at = out_at[a] * stride[a] + tap[a] * dilation[a] - pad_lo[a];
      if (at < 0 || at % lhs_dilation[a] != 0 || at / lhs_dilation[a] >= in[a]) return false;
      in_at[a] = at / lhs_dilation[a];
    }
    return true;
  }
  // The output whose window has input `in_at` under tap `tap`; false where there is none.
  __device__ bool Output(const int64_t (&in_at)[3], const int64_t (&tap)[3],
                         int64_t (&out_at)[3]) const {
    for (int a = 0; a < 3; ++a) {
      const int64_t at = in_at[a] * lhs_dilation[a] - tap[a] * dilation[a] + pad_lo[a];
      if (at < 0 || at % stride[a] != 0 || at / stride[a] >= out[a]) return false;
      out_at[a] = at / stride[a];
    }
    return true;
  }
};

// One element of the result by the definition.
__device__ double Element(const Window& window, int64_t index, const void* lhs, const void* rhs,
                          DType dtype) {
  const int64_t c_group = window.c / window.groups, k_group = window.k / window.groups;
  const int64_t in_pixels = Window::Volume(window.in), out_pixels = Window::Volume(window.out);
  const int64_t taps = Window::Volume(window.filter);
  int64_t in_at[3], out_at[3], tap[3];
  double sum = 0;
  if (window.op == Op::kWgrad) {
    const int64_t k = index % window.k, c = index / window.k % c_group;
    const int64_t batch = Window::Split(index / window.k / c_group, window.filter, tap);
    const int64_t x_channel = k / k_group * c_group + c;
    for (int64_t i = 0; i < window.n * out_pixels; ++i) {
      const int64_t image = batch * window.n + Window::Split(i, window.out, out_at);
      if (!window.Input(out_at, tap, in_at)) continue;
      const int64_t x = (image * in_pixels + Window::Pixel(window.in, in_at)) * window.c;
      const int64_t y = (image * out_pixels + Window::Pixel(window.out, out_at)) * window.k;
      sum += Get(lhs, x + x_channel, dtype) * Get(rhs, y + k, dtype);
    }
    return sum;
  }
  const bool fprop = window.op == Op::kFprop;
  const int64_t channels = fprop ? window.k : window.c, channel = index % channels;
  const int64_t image =
      Window::Split(index / channels, fprop ? window.out : window.in, fprop ? out_at : in_at);
  const int64_t group = channel / (fprop ? k_group : c_group);
  for (int64_t t = 0; t < taps; ++t) {
    Window::Split(t, window.filter, tap);
    if (!(fprop ? window.Input(out_at, tap, in_at) : window.Output(in_at, tap, out_at))) continue;
    const int64_t w = (image / window.n * taps * window.k + t * window.to_c) * c_group;
    if (fprop) {
      const int64_t x = (image * in_pixels + Window::Pixel(window.in, in_at)) * window.c;
      const int64_t row = w + channel * window.to_k;
      for (int64_t c = 0; c < c_group; ++c) {
        sum += Get(lhs, x + group * c_group + c, dtype) * Get(rhs, row + c * window.to_c, dtype);
      }
    } else {
      const int64_t y = (image * out_pixels + Window::Pixel(window.out, out_at)) * window.k;
      const int64_t row = w + channel % c_group * window.to_c;
      for (int64_t k = group * k_group; k < (group + 1) * k_group; ++k) {
        sum += Get(lhs, y + k, dtype) * Get(rhs, row + k * window.to_k, dtype);
      }
    }
  }
  return sum;
}

__global__ void Define(Window window, const void* lhs, const void* rhs, DType dtype, double* result,
                       int64_t elements) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    result[i] = Element(window, i, lhs, rhs, dtype);
  }
}

// found[0]: elements that differ; found[1]: the first of them.
__global__ void Compare(const void* out, DType dtype, const double* expected, int64_t elements,
                        unsigned long long* found) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    if (Get(out, i, dtype) == Rounded(expected[i], dtype)) continue;  // NaN differs
    atomicAdd(&found[0], 1ull);
    atomicMin(&found[1], static_cast<unsigned long long>(i));
  }
}

__global__ void Hash(const unsigned short* out, int64_t halves, unsigned long long* hash) {
  unsigned long long sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < halves; i += step) {
    sum += (out[i] + 1ull) * (2ull * i + 0x9E3779B97F4A7C15ull);
  }
  atomicAdd(hash, sum);
}

// Device memory that lives as long as the program's loop over problems needs it.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) {
    Require(cudaMalloc(&data_, std::max<int64_t>(bytes, 16)), "memory");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

struct Tensors {
  int64_t lhs, rhs, out;  // elements
  int64_t lhs_bytes, rhs_bytes, out_bytes;

  explicit Tensors(const ConvProblem& problem) {
    const int64_t x = problem.x_elements(), w = problem.w_elements(), y = problem.y_elements();
    lhs = problem.op == Op::kDgrad ? y : x;
    rhs = problem.op == Op::kWgrad ? y : w;
    out = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
    lhs_bytes = lhs * ByteWidth(problem.lhs_dtype());
    rhs_bytes = rhs * ByteWidth(problem.rhs_dtype());
    out_bytes = out * ByteWidth(problem.output_dtype());
  }
  static int64_t Aligned(int64_t bytes) { return (bytes + 1023) / 1024 * 1024; }
  int64_t SetBytes() const { return Aligned(lhs_bytes) + Aligned(rhs_bytes) + Aligned(out_bytes); }
  KernelArgs Args(char* set) const {
    KernelArgs args;
    args.lhs = set;
    args.rhs = set + Aligned(lhs_bytes);
    args.out = set + Aligned(lhs_bytes) + Aligned(rhs_bytes);
    return args;
  }
};

void FillOperands(const ConvProblem& problem, const Tensors& tensors, const KernelArgs& args,
                  uint32_t seed, bool integers, cudaStream_t stream) {
  Fill<<<2048, 256, 0, stream>>>(const_cast<void*>(args.lhs), tensors.lhs, problem.lhs_dtype(),
                                 2 * seed + 1, integers);
  Fill<<<2048, 256, 0, stream>>>(const_cast<void*>(args.rhs), tensors.rhs, problem.rhs_dtype(),
                                 2 * seed + 2, integers);
}

std::vector<const KernelRow*> Kernels(const ConvProblem& problem, const DeviceInfo& device,
                                      const std::vector<std::string>& wanted) {
  std::vector<const KernelRow*> rows;
  for (const std::string& part : wanted) {
    const bool family = part.rfind("family:", 0) == 0;
    if (part == "auto" || family) {
      Selection selection;
      const Status status = Select(problem, device, family ? part.substr(7) : part, &selection);
      if (status.ok() && !selection.instance.empty())
        rows.push_back(FindKernel(selection.instance));
      continue;
    }
    for (const KernelRow& row : KernelTable()) {
      const int capability = device.compute_capability();
      if (row.op == problem.op && row.name.find(part) != std::string::npos &&
          row.min_cc <= capability && capability <= row.max_cc && row.can_implement(problem).ok()) {
        rows.push_back(&row);
      }
    }
  }
  return rows;
}

// Returns the number of kernels that failed or differ.
int Check(const std::string& line, const ConvProblem& problem, const DeviceInfo& device,
          const std::vector<const KernelRow*>& rows, cudaStream_t stream) {
  const Tensors tensors(problem);
  const Buffer set(tensors.SetBytes()), expected(tensors.out * 8), found(16);
  KernelArgs args = tensors.Args(set.data());
  FillOperands(problem, tensors, args, 0, true, stream);
  Define<<<2048, 256, 0, stream>>>(Window(problem), args.lhs, args.rhs, problem.lhs_dtype(),
                                   reinterpret_cast<double*>(expected.data()), tensors.out);
  const char* slices = std::getenv("SLICES");
  int failures = 0;
  for (const KernelRow* row : rows) {
    for (bool forced : {false, true}) {
      if (forced && slices == nullptr) continue;
      args.slices = forced ? std::atoll(slices) : row->slices(problem, device);
      args.workspace_bytes = row->workspace_bytes(problem, args.slices);
      const Buffer workspace(args.workspace_bytes);
      args.workspace = workspace.data();
      args.stream = stream;
      Require(cudaMemsetAsync(args.out, 0xff, tensors.out_bytes, stream), "poison");
      Require(cudaMemsetAsync(args.workspace, 0xff, args.workspace_bytes, stream), "poison");
      const Status status = row->launch(problem, args);
      if (!status.ok()) {
        if (forced) continue;  // the kernel has not so many slices
        ++failures;
        std::printf("FAILED %s: %s: %s\n", row->name.c_str(), line.c_str(),
                    status.message().c_str());
        continue;
      }
      unsigned long long differ[2] = {0, ~0ull};
      Require(cudaMemcpyAsync(found.data(), differ, 16, cudaMemcpyHostToDevice, stream), "copy");
      Compare<<<2048, 256, 0, stream>>>(
          args.out, problem.output_dtype(), reinterpret_cast<const double*>(expected.data()),
          tensors.out, reinterpret_cast<unsigned long long*>(found.data()));
      Require(cudaMemcpyAsync(differ, found.data(), 16, cudaMemcpyDeviceToHost, stream), "copy");
      Require(cudaStreamSynchronize(stream), row->name.c_str());
      if (differ[0] == 0) continue;
      ++failures;
      std::printf("WRONG %s in %lld slices: %llu of %lld differ, first at %llu: %s\n",
                  row->name.c_str(), static_cast<long long>(args.slices), differ[0],
                  static_cast<long long>(tensors.out), differ[1], line.c_str());
    }
  }
  return failures;
}

int Time(const std::string& name, const ConvProblem& problem, const DeviceInfo& device,
         const std::vector<const KernelRow*>& rows, bool hash, cudaStream_t stream) {
  const Tensors tensors(problem);
  const int64_t wanted = (300'000'000 + tensors.SetBytes() - 1) / tensors.SetBytes();
  const int sets = hash ? 1 : static_cast<int>(std::clamp<int64_t>(wanted, 2, 16));
  const Buffer pool(sets * tensors.SetBytes()), sum(8);
  int failures = 0;
  for (const KernelRow* row : rows) {
    const int64_t slices = row->slices(problem, device);
    const Buffer workspace(row->workspace_bytes(problem, slices));
    auto args_of = [&](int set) {
      KernelArgs args = tensors.Args(pool.data() + set * tensors.SetBytes());
      args.slices = slices;
      args.workspace = workspace.data();
      args.workspace_bytes = row->workspace_bytes(problem, slices);
      args.stream = stream;
      return args;
    };
    for (int i = 0; i < sets; ++i) FillOperands(problem, tensors, args_of(i), i, false, stream);
    Require(cudaStreamSynchronize(stream), "operands");
    auto launch_all = [&]() -> Status {
      for (int i = 0; i < sets; ++i) JAXCONV_RETURN_IF_ERROR(row->launch(problem, args_of(i)));
      return {};
    };
    if (!hash) Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    const Status status = launch_all();
    cudaGraph_t graph = nullptr;
    if (!hash) Require(cudaStreamEndCapture(stream, &graph), "capture");
    if (!status.ok()) {
      ++failures;
      std::printf("FAILED %s: %s: %s\n", row->name.c_str(), name.c_str(), status.message().c_str());
    } else if (hash) {
      unsigned long long bits = 0;
      Require(cudaMemcpyAsync(sum.data(), &bits, 8, cudaMemcpyHostToDevice, stream), "copy");
      Hash<<<512, 256, 0, stream>>>(static_cast<const unsigned short*>(args_of(0).out),
                                    tensors.out_bytes / 2,
                                    reinterpret_cast<unsigned long long*>(sum.data()));
      Require(cudaMemcpyAsync(&bits, sum.data(), 8, cudaMemcpyDeviceToHost, stream), "copy");
      Require(cudaStreamSynchronize(stream), row->name.c_str());
      std::printf("%s %s %016llx\n", name.c_str(), row->name.c_str(), bits);
    } else {
      cudaGraphExec_t replay;
      cudaEvent_t start, stop;
      Require(cudaGraphInstantiate(&replay, graph, 0), "graph");
      Require(cudaEventCreate(&start), "event");
      Require(cudaEventCreate(&stop), "event");
      std::vector<float> times;
      for (int run = 0; run < 12; ++run) {
        float milliseconds = 0;
        Require(cudaEventRecord(start, stream), "event");
        Require(cudaGraphLaunch(replay, stream), "graph");
        Require(cudaEventRecord(stop, stream), "event");
        Require(cudaEventSynchronize(stop), row->name.c_str());
        Require(cudaEventElapsedTime(&milliseconds, start, stop), "event");
        if (run >= 3) times.push_back(milliseconds);  // three to warm up
      }
      std::sort(times.begin(), times.end());
      const double us = times[times.size() / 2] * 1e3 / sets;
      const int64_t bytes = tensors.lhs_bytes + tensors.rhs_bytes + tensors.out_bytes;
      std::printf("%-16s %-5s %9.1f us %7.1f TF/s %6.2f TB/s  slices %-3lld predicted %7.1f  %s\n",
                  name.c_str(), Name(problem.op), us,
                  static_cast<double>(problem.flops()) / us * 1e-6,
                  static_cast<double>(bytes) / us * 1e-6, static_cast<long long>(slices),
                  row->cost(problem, device, slices), row->name.c_str());
      cudaEventDestroy(start);
      cudaEventDestroy(stop);
      cudaGraphExecDestroy(replay);
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  return failures;
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 3 ? argv[1] : "";
  if (mode != "check" && mode != "time" && mode != "hash") {
    std::printf("kernel_check check|time|hash PROBLEMS KERNEL...\n");
    return 2;
  }
  DeviceInfo device;
  if (Status status = QueryDevice(0, &device); !status.ok()) {
    std::printf("%s\n", status.message().c_str());
    return 2;
  }
  cudaStream_t stream;
  Require(cudaStreamCreate(&stream), "stream");
  std::ifstream file(argv[2]);
  int problems = 0, kernels = 0, failures = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t tab = line.find('\t');
    const std::string name = tab == std::string::npos ? "" : line.substr(0, tab);
    ConvProblem problem;
    if (Status status = ConvProblem::Parse(line.substr(tab + 1), &problem); !status.ok()) {
      std::printf("%s: %s\n", line.c_str(), status.message().c_str());
      return 2;
    }
    for (DType dtype : {problem.x_dtype, problem.w_dtype, problem.y_dtype}) {
      if (dtype == DType::kS8 || dtype == DType::kS32) {
        std::printf("%s: integers are not drawn here\n", line.c_str());
        return 2;
      }
    }
    const auto rows = Kernels(problem, device, {argv + 3, argv + argc});
    ++problems;
    kernels += static_cast<int>(rows.size());
    failures += mode == "check" ? Check(line, problem, device, rows, stream)
                                : Time(name, problem, device, rows, mode == "hash", stream);
    std::fflush(stdout);
  }
  std::printf("%s: %d problems, %d kernels, %d failures\n", mode.c_str(), problems, kernels,
              failures);
  return failures != 0 || kernels == 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
