// Shared by programs that run single kernels: error checks, random numbers, device memory, and the
// time of launches.
#ifndef JAXCONV_TESTS_CC_DEVICE_PROGRAM_CUH_
#define JAXCONV_TESTS_CC_DEVICE_PROGRAM_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/status.h"

namespace jaxconv {

// Ends the program if a call of the CUDA runtime failed.
inline void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// 32 random bits.
__device__ inline uint32_t Random(uint64_t index, uint32_t seed) {
  uint64_t z = index + seed * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 16);
}

// Device memory.
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

// The number of operand sets that a measurement cycles through: 2 to 16, more than 300 MB in all
// where 16 sets reach that, so that no operand is in L2 when it is read.
inline int SetsToTime(int64_t set_bytes) {
  return static_cast<int>(std::clamp<int64_t>((300'000'000 + set_bytes - 1) / set_bytes, 2, 16));
}

// The median time of nine replays of a CUDA graph of what `launch` enqueues, after three replays to
// warm up. An error of `launch` is passed on.
template <class Launch>
Status TimeReplays(cudaStream_t stream, const char* what, const Launch& launch,
                   double* microseconds) {
  constexpr int kWarmUp = 3, kReplays = 9;
  Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const Status status = launch();
  cudaGraph_t graph = nullptr;
  Require(cudaStreamEndCapture(stream, &graph), "capture");
  if (status.ok()) {
    cudaGraphExec_t replay;
    cudaEvent_t start, stop;
    Require(cudaGraphInstantiate(&replay, graph, 0), "graph");
    Require(cudaEventCreate(&start), "event");
    Require(cudaEventCreate(&stop), "event");
    std::vector<float> times;
    for (int run = 0; run < kWarmUp + kReplays; ++run) {
      float milliseconds = 0;
      Require(cudaEventRecord(start, stream), "event");
      Require(cudaGraphLaunch(replay, stream), "graph");
      Require(cudaEventRecord(stop, stream), "event");
      Require(cudaEventSynchronize(stop), what);
      Require(cudaEventElapsedTime(&milliseconds, start, stop), "event");
      if (run >= kWarmUp) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    *microseconds = times[times.size() / 2] * 1e3;
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    cudaGraphExecDestroy(replay);
  }
  cudaGraphDestroy(graph);
  return status;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_DEVICE_PROGRAM_CUH_
