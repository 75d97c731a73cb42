// A spike, not part of the library: a pointwise convolution that normalises and activates its
// operand while loading it, y = relu(scale x + bias) W, 64 to 256 channels at 56x56, against a pass
// that normalises and the same product without. docs/notes/block_spike.md has the findings. Nothing
// builds it; by hand:
//
//     nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icc \
//         tests/cc/spikes/normalised_pointwise.cu -o normalised_pointwise && ./normalised_pointwise
//
// GEMM: pixels x 256 channels, reduction over 64. TMA copies tiles of 128 pixels by 64 channels
// with the 128-byte swizzle. Each of two consumer warpgroups loads its 64 pixels by ldmatrix,
// transforms the fragments in registers, releases the tile, and multiplies by wgmma with A in
// registers. The filter stays in shared memory (32 KB). Registers: 128 accumulators, 16 words of A,
// 32 of scale and bias. Shared memory: 6 tiles (96 KB), two staged results (64 KB).
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "cuda/ptx/mbarrier_sm90.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv {
namespace {

constexpr int kIn = 64, kOut = 256, kTile = 128, kStages = 6, kConsumers = 2;
constexpr int kTileBytes = kTile * kIn * 2, kFilterBytes = kOut * kIn * 2;
constexpr int kStagedBytes = 64 * kOut * 2;
constexpr int kSharedBytes = kFilterBytes + kStages * kTileBytes + kConsumers * kStagedBytes;

enum class Transform { kNone, kFloat, kPairs };

// relu(scale x + bias) of two channels, in float32, rounded once.
__device__ __forceinline__ uint32_t Normalise(uint32_t pair, const float2& scale,
                                              const float2& bias) {
  const float low = fmaf(__uint_as_float(pair << 16), scale.x, bias.x);
  const float high = fmaf(__uint_as_float(pair & 0xffff0000), scale.y, bias.y);
  uint32_t result;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
// The same in one instruction, with scale and bias rounded to bfloat16.
__device__ __forceinline__ uint32_t NormalisePairs(uint32_t pair, uint32_t scale, uint32_t bias) {
  uint32_t result;
  asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(scale), "r"(bias));
  return result;
}

template <Transform kTransform>
__global__ void __launch_bounds__((kConsumers + 1) * 128, 1)
    Pointwise(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
              const __grid_constant__ CUtensorMap y_map, const float* __restrict__ scale,
              const float* __restrict__ bias, int tiles) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kStages + 1];
  const uint32_t filter = SharedAddress(shared), ring = filter + kFilterBytes;
  const uint32_t full = SharedAddress(barriers), empty = full + kStages * 8;
  const uint32_t of_filter = empty + kStages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(full + i * 8, 1);
      BarrierInit(empty + i * 8, kConsumers * 4);
    }
    BarrierInit(of_filter, 1);
    BarrierInitFence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == kConsumers) {
    LowerRegisters<40>();
    if (threadIdx.x % 128 >= 32 || !ElectOne()) return;
    BarrierArriveExpect(of_filter, kFilterBytes);
    CopyTile2d(filter, &w_map, of_filter, 0, 0);
    uint32_t stage = 0, parity = 1;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      BarrierWait(empty + stage * 8, parity);
      BarrierArriveExpect(full + stage * 8, kTileBytes);
      CopyTile2d(ring + stage * kTileBytes, &x_map, full + stage * 8, 0, tile * kTile);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    return;
  }
  RaiseRegisters<232>();
  const int lane = threadIdx.x % 32, t = lane % 4, warp = threadIdx.x / 32 % 4;
  float2 scales[8], biases[8];
  uint32_t scale_pairs[8], bias_pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    scales[i] = *reinterpret_cast<const float2*>(scale + i * 8 + t * 2);
    biases[i] = *reinterpret_cast<const float2*>(bias + i * 8 + t * 2);
    const __nv_bfloat162 s = __floats2bfloat162_rn(scales[i].x, scales[i].y);
    const __nv_bfloat162 b = __floats2bfloat162_rn(biases[i].x, biases[i].y);
    memcpy(&scale_pairs[i], &s, 4);
    memcpy(&bias_pairs[i], &b, 4);
  }
  BarrierWait(of_filter, 0);
  const uint32_t staged = ring + kStages * kTileBytes + warpgroup * kStagedBytes;
  const int row = warp * 16 + lane % 16;  // this lane's row of loaded and stored matrices
  const uint64_t b = KMajorDescriptor(filter);
  float acc[kOut / 2];
#pragma unroll
  for (float& sum : acc) sum = 0;
  uint32_t stage = 0, parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    BarrierWait(full + stage * 8, parity);
    uint32_t a[4][4];
    const uint32_t from = ring + stage * kTileBytes + (warpgroup * 64 + row) * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) LoadMatrices(from + ((k * 2 + lane / 16) ^ row % 8) * 16, a[k]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = k * 2 + i / 2;
        if constexpr (kTransform == Transform::kFloat) {
          a[k][i] = Normalise(a[k][i], scales[c], biases[c]);
        } else if constexpr (kTransform == Transform::kPairs) {
          a[k][i] = NormalisePairs(a[k][i], scale_pairs[c], bias_pairs[c]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(empty + stage * 8);
    if (++stage == kStages) stage = 0, parity ^= 1;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaFromRegisters(__nv_bfloat16{}, acc, a[k], b + k * 2, k);
    WgmmaCommit();
    // Meanwhile the previous result has been read by its store.
    if (warp == 0 && ElectOne()) WaitForStoresToRead();
    NamedBarrierSync(1 + warpgroup, 128);
    WgmmaWait<0>();
#pragma unroll
    for (int j = 0; j < kOut / 8; j += 2) {
      uint32_t word[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = (j + m / 2) * 4 + m % 2 * 2;
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(WgmmaResult(acc[at]), WgmmaResult(acc[at + 1]));
        memcpy(&word[m], &pair, 4);
      }
      const int chunk = j + lane / 16;
      StoreMatrices(staged + chunk / 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16, word[0],
                    word[1], word[2], word[3]);
    }
    FenceForCopies();
    NamedBarrierSync(1 + warpgroup, 128);
    if (warp == 0 && ElectOne()) {
#pragma unroll
      for (int box = 0; box < kOut / 64; ++box) {
        StoreTile2d(&y_map, staged + box * 8192, box * 64, tile * kTile + warpgroup * 64);
      }
      CommitStores();
    }
  }
  if (warp == 0 && ElectOne()) WaitForStoresToRead();
}

// The pass: relu(scale x + bias), 8 channels a thread and step.
__global__ void __launch_bounds__(256)
    NormalisePass(const uint4* __restrict__ x, const float* __restrict__ scale,
                  const float* __restrict__ bias, uint4* __restrict__ y, int64_t chunks) {
  const int c = threadIdx.x % (kIn / 8) * 8;
  float2 scales[4], biases[4];
  for (int i = 0; i < 4; ++i) {
    scales[i] = *reinterpret_cast<const float2*>(scale + c + i * 2);
    biases[i] = *reinterpret_cast<const float2*>(bias + c + i * 2);
  }
  const int64_t step = int64_t{gridDim.x} * 256;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < chunks; i += 4 * step) {
    uint4 in[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (i + u * step < chunks) in[u] = __ldcs(x + i + u * step);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (i + u * step < chunks) {
        y[i + u * step] = {
            Normalise(in[u].x, scales[0], biases[0]), Normalise(in[u].y, scales[1], biases[1]),
            Normalise(in[u].z, scales[2], biases[2]), Normalise(in[u].w, scales[3], biases[3])};
      }
    }
  }
}

void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

CUtensorMap MapOf(const void* address, int64_t rows, int columns, int box_rows) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  Require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(address), extent, stride, box,
      step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::printf("tensor map: %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return map;
}

constexpr int64_t kPixels = int64_t{256} * 56 * 56;
constexpr int kSets = 2;  // of operands: 1 GB, much more than L2

float Median(const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t graph_exec;
  cudaEvent_t begin, end;
  Require(cudaStreamCreate(&stream), "stream");
  Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  constexpr int kLaunches = 10;
  for (int i = 0; i < kLaunches; ++i) launch(i % kSets, stream);
  Require(cudaStreamEndCapture(stream, &graph), "graph");
  Require(cudaGraphInstantiate(&graph_exec, graph, 0), "graph");
  Require(cudaEventCreate(&begin), "event");
  Require(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 11; ++i) {
    Require(cudaEventRecord(begin, stream), "event");
    Require(cudaGraphLaunch(graph_exec, stream), "launch");
    Require(cudaEventRecord(end, stream), "event");
    Require(cudaStreamSynchronize(stream), "graph");
    float ms = 0;
    Require(cudaEventElapsedTime(&ms, begin, end), "event");
    times.push_back(ms * 1000 / kLaunches);
  }
  std::sort(times.begin(), times.end());
  return times[5];
}

}  // namespace
}  // namespace jaxconv

int main() {
  using namespace jaxconv;
  std::vector<__nv_bfloat16> x(kPixels * kIn), w(kOut * kIn);
  std::vector<float> scale(kIn), bias(kIn);
  uint32_t state = 1;
  auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.f - 1;
  };
  for (auto& value : x) value = __float2bfloat16(2 * random());
  for (auto& value : w) value = __float2bfloat16(random());
  for (int c = 0; c < kIn; ++c) scale[c] = 1 + 0.5f * random(), bias[c] = random();
  void *x_at[kSets], *y_at[kSets], *w_at, *normal_at;
  float *scale_at, *bias_at;
  Require(cudaMalloc(&w_at, w.size() * 2), "w");
  Require(cudaMalloc(&normal_at, kPixels * kIn * 2), "normalised");
  Require(cudaMalloc(&scale_at, kIn * 4), "scale");
  Require(cudaMalloc(&bias_at, kIn * 4), "bias");
  Require(cudaMemcpy(w_at, w.data(), w.size() * 2, cudaMemcpyHostToDevice), "w");
  Require(cudaMemcpy(scale_at, scale.data(), kIn * 4, cudaMemcpyHostToDevice), "scale");
  Require(cudaMemcpy(bias_at, bias.data(), kIn * 4, cudaMemcpyHostToDevice), "bias");
  CUtensorMap x_map[kSets], y_map[kSets];
  for (int i = 0; i < kSets; ++i) {
    Require(cudaMalloc(&x_at[i], kPixels * kIn * 2), "x");
    Require(cudaMalloc(&y_at[i], kPixels * kOut * 2), "y");
    Require(cudaMemcpy(x_at[i], x.data(), kPixels * kIn * 2, cudaMemcpyHostToDevice), "x");
    x_map[i] = MapOf(x_at[i], kPixels, kIn, kTile);
    y_map[i] = MapOf(y_at[i], kPixels, kOut, 64);
  }
  const CUtensorMap w_map = MapOf(w_at, kOut, kIn, kOut),
                    normal_map = MapOf(normal_at, kPixels, kIn, kTile);
  int sms = 0;
  Require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "SMs");
  auto product = [&](auto transform, const CUtensorMap& from, int set, cudaStream_t stream) {
    constexpr auto kKernel = Pointwise<decltype(transform)::value>;
    Require(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
        "shared");
    kKernel<<<sms, (kConsumers + 1) * 128, kSharedBytes, stream>>>(
        from, w_map, y_map[set], scale_at, bias_at, static_cast<int>(kPixels / kTile));
  };
  using None = std::integral_constant<Transform, Transform::kNone>;
  using Float = std::integral_constant<Transform, Transform::kFloat>;
  using Pairs = std::integral_constant<Transform, Transform::kPairs>;
  auto pass = [&](int set, cudaStream_t stream) {
    NormalisePass<<<sms * 8, 256, 0, stream>>>(static_cast<const uint4*>(x_at[set]), scale_at,
                                               bias_at, static_cast<uint4*>(normal_at),
                                               kPixels * kIn / 8);
  };
  // Errors against float64 of every 401st pixel.
  auto check = [&](const char* name, const std::function<void(int, cudaStream_t)>& launch) {
    Require(cudaMemset(y_at[0], 0xff, kPixels * kOut * 2), "poison");
    launch(0, nullptr);
    Require(cudaDeviceSynchronize(), name);
    std::vector<__nv_bfloat16> y(kPixels * kOut);
    Require(cudaMemcpy(y.data(), y_at[0], y.size() * 2, cudaMemcpyDeviceToHost), "y");
    double squares = 0, size = 0, worst = 0;
    int64_t count = 0;
    for (int64_t p = 0; p < kPixels; p += 401) {
      double normal[kIn];
      for (int c = 0; c < kIn; ++c) {
        normal[c] = std::max(0.0, double{__bfloat162float(x[p * kIn + c])} * scale[c] + bias[c]);
      }
      for (int n = 0; n < kOut; ++n, ++count) {
        double sum = 0;
        for (int c = 0; c < kIn; ++c) sum += normal[c] * __bfloat162float(w[n * kIn + c]);
        const double error = __bfloat162float(y[p * kOut + n]) - sum;
        squares += error * error;
        size += sum * sum;
        if (!(std::fabs(error) <= worst)) worst = std::fabs(error);
      }
    }
    std::printf("%s: rms error %.4g of %.4g, worst %.3g\n", name, std::sqrt(squares / count),
                std::sqrt(size / count), worst);
  };
  const auto both = [&](int set, cudaStream_t stream) {
    pass(set, stream);
    product(None(), normal_map, set, stream);
  };
  const auto in_float = [&](int set, cudaStream_t stream) {
    product(Float(), x_map[set], set, stream);
  };
  const auto in_pairs = [&](int set, cudaStream_t stream) {
    product(Pairs(), x_map[set], set, stream);
  };
  check("pass and product", both);
  check("in one, float32", in_float);
  check("in one, bfloat16 pairs", in_pairs);
  const double bytes = 2.0 * kPixels * (kIn + kOut);
  std::printf("bytes of the product at 4.3 TB/s: %.1f us, of the pass %.1f us\n", bytes / 4.3e6,
              4.0 * kPixels * kIn / 4.3e6);
  std::printf("product %.1f us\n", Median([&](int set, cudaStream_t stream) {
                product(None(), x_map[set], set, stream);
              }));
  std::printf("pass %.1f us\n", Median(pass));
  std::printf("pass and product %.1f us\n", Median(both));
  std::printf("in one, float32 %.1f us\n", Median(in_float));
  std::printf("in one, bfloat16 pairs %.1f us\n", Median(in_pairs));
  return 0;
}
