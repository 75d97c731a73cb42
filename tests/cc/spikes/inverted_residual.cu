// A spike, not part of the library: MobileNetV2's block at 56x56, 24 -> 144 -> 24 channels, in
// inference, as one kernel that keeps the 144 channels in registers. docs/notes/block_spike.md has
// the findings. Nothing builds it; by hand:
//
//     nvcc -std=c++17 -O3 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
//         -Icc tests/cc/spikes/inverted_residual.cu -o inverted_residual && ./inverted_residual
//
//     e = relu6(scale (x We) + bias)        1x1, 24 to 144
//     d = relu6(scale (e * Wd) + bias)      3x3 depthwise, stride 1, padding 1
//     y = x + scale (d Wp) + bias           1x1, 144 to 24
//
// A warp computes 14 columns by kRows rows of y. Both products have pixels as rows of an m16
// fragment and channels as columns, so a lane holds two neighbouring channels of two neighbouring
// pixels:
//
//     rows g, g + 8 of a fragment    pixels 2 g, 2 g + 1 of 16, of which 14 are outputs
//     columns 2 t, 2 t + 1           channels; two fragments of 8 columns are a chunk of 16
//
// The sums of the first product, activated and rounded to half2, are in place for the depthwise
// step: a pixel's neighbours are the lane's other pixel and a pixel of lane +-4, by shuffle. The
// depthwise sums are the A fragment of the second product without any movement. So the expanded
// tensor needs no shared memory and no barrier. For each chunk of 8 or 16 channels the warp goes
// down kRows + 2 rows, with three rows of half2 sums, and adds to kRows x 24 float32 sums of y.
//
// Activations are stored as relu6(v) / 6 in float16: fma.sat clamps to [0, 1] at no cost, and
// float16 has three more bits than bfloat16. The factor 6 is part of the next scale.
//
// Registers: 12 kRows sums of y, 42 words of a chunk's weights, 12 half2 sums, fragments. Shared
// memory: kRows + 2 rows of x (25 KB for 7 rows).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv {
namespace {

constexpr int kSide = 56, kNarrow = 24, kWide = 144;
constexpr int kStrips = 4, kStripColumns = kSide / kStrips;
// A row of x in shared memory: pixels of three 16-byte chunks, one pixel more on both sides. Eight
// pixels of a matrix lie 96 bytes apart, so ldmatrix has two-way bank conflicts.
constexpr int kPixelChunks = 3, kRowBytes = (kSide + 2) * kPixelChunks * 16;

// A lane's weights of a chunk of 8 kFragments channels.
template <int kFragments>
struct alignas(16) ChunkWeights {
  static constexpr int kChunks = kWide / (8 * kFragments);
  uint32_t expand[kFragments][3];  // B fragments: 16 and 8 of the 24 channels
  float expand_scale[kFragments][2], expand_bias[kFragments][2];  // two channels, divided by 6
  uint32_t taps[9][kFragments];                                   // half2
  uint32_t scale[kFragments], bias[kFragments];  // half2, of the depthwise step; bias divided by 6
  uint32_t project[3][kFragments];               // B fragments
};
template <int kFragments>
constexpr int kQuads = sizeof(ChunkWeights<kFragments>) / 16;

__device__ __forceinline__ float FmaSat(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
__device__ __forceinline__ __half2 AsHalf2(uint32_t word) {
  __half2 pair;
  memcpy(&pair, &word, 4);
  return pair;
}
__device__ __forceinline__ uint32_t AsWord(__half2 pair) {
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// Grid: bands of kRows rows of all images. x and y: (n, 56, 56, 24) bfloat16.
template <int kRows, int kFragments, int kCtasPerSm>
__global__ void __launch_bounds__(kStrips * 32, kCtasPerSm)
    Block(const __nv_bfloat16* __restrict__ x, const uint4* __restrict__ weights,
          const float* __restrict__ out_scale, const float* __restrict__ out_bias,
          __nv_bfloat16* __restrict__ y) {
  static_assert(kSide % kRows == 0);
  extern __shared__ __align__(128) unsigned char shared[];
  const int first_row = static_cast<int>(blockIdx.x % (kSide / kRows)) * kRows;
  const int64_t image = blockIdx.x / (kSide / kRows);
  constexpr int kRowChunks = kSide * kPixelChunks;
  const auto* from = reinterpret_cast<const unsigned char*>(x) + image * (kSide * kRowChunks * 16);
  const uint32_t tile = SharedAddress(shared);
  for (int i = threadIdx.x; i < (kRows + 2) * kRowChunks; i += kStrips * 32) {
    const int row = i / kRowChunks, chunk = i % kRowChunks, h = first_row - 1 + row;
    CopyAsync<16>(tile + row * kRowBytes + (kPixelChunks + chunk) * 16,
                  from + (h * kRowChunks + chunk) * 16, h >= 0 && h < kSide);
  }
  CopyAsyncCommit();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, strip = threadIdx.x / 32;
  // Pixels outside the image are zero after the activation.
  const uint32_t first_inside = strip == 0 && g == 0 ? 0 : 0xffffffff;
  const uint32_t second_inside = strip == kStrips - 1 && g == 7 ? 0 : 0xffffffff;
  // A lane's row of the loaded matrices: 8 channels of a pixel.
  const int pixel_of_lane = strip * kStripColumns + lane % 8 * 2 + lane / 8 % 2;
  const uint32_t load = tile + (pixel_of_lane * kPixelChunks + lane / 16) * 16;
  float acc[kRows][3][4] = {};
  CopyAsyncWait<0>();
  __syncthreads();

  using Chunk = ChunkWeights<kFragments>;
#pragma unroll 1
  for (int chunk = 0; chunk < Chunk::kChunks; ++chunk) {
    Chunk w;
    {
      constexpr int kOf = kQuads<kFragments>;
      uint4 quad[kOf];
#pragma unroll
      for (int i = 0; i < kOf; ++i) quad[i] = __ldg(weights + (chunk * kOf + i) * 32 + lane);
      memcpy(&w, quad, sizeof(w));
    }
    __half2 sums[3][kFragments][2];  // row % 3, fragment, pixel
#pragma unroll
    for (int e = 0; e < kRows + 2; ++e) {
      uint32_t a[4], a_rest[2];
      LoadMatrices(load + e * kRowBytes, a);
      LoadMatrices(load + e * kRowBytes - lane / 16 * 16 + 32, a_rest);
      const bool inside = first_row - 1 + e >= 0 && first_row - 1 + e < kSide;
      uint32_t wide[kFragments][2], deep[kFragments * 2];
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        float d[4] = {};
        MultiplyAdd<__nv_bfloat16>(d, a, w.expand[f][0], w.expand[f][1]);
        MultiplyAdd<__nv_bfloat16>(d, a_rest, w.expand[f][2]);
#pragma unroll
        for (int pixel = 0; pixel < 2; ++pixel) {
          wide[f][pixel] = AsWord(__floats2half2_rn(
              FmaSat(d[pixel * 2], w.expand_scale[f][0], w.expand_bias[f][0]),
              FmaSat(d[pixel * 2 + 1], w.expand_scale[f][1], w.expand_bias[f][1])));
          wide[f][pixel] &= pixel == 0 ? first_inside : second_inside;
          if (e == 0 || e == kRows + 1) wide[f][pixel] = inside ? wide[f][pixel] : 0;
        }
      }
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const __half2 own[4] = {AsHalf2(__shfl_up_sync(0xffffffff, wide[f][1], 4)),
                                AsHalf2(wide[f][0]), AsHalf2(wide[f][1]),
                                AsHalf2(__shfl_down_sync(0xffffffff, wide[f][0], 4))};
#pragma unroll
        for (int r = 0; r < 3; ++r) {
          const int o = e - r;
          if (o < 0 || o >= kRows) continue;
#pragma unroll
          for (int pixel = 0; pixel < 2; ++pixel) {
            __half2& sum = sums[o % 3][f][pixel];
#pragma unroll
            for (int s = 0; s < 3; ++s) {
              const __half2 tap = AsHalf2(w.taps[r * 3 + s][f]);
              sum = r + s == 0 ? __hmul2(own[pixel], tap) : __hfma2(own[pixel + s], tap, sum);
            }
          }
        }
      }
      if (e < 2) continue;
#pragma unroll
      for (int i = 0; i < kFragments * 2; ++i) {
        deep[i] = AsWord(__hfma2_sat(sums[(e - 2) % 3][i / 2][i % 2], AsHalf2(w.scale[i / 2]),
                                     AsHalf2(w.bias[i / 2])));
      }
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        if constexpr (kFragments == 2) {
          MultiplyAdd<__half>(acc[e - 2][n], deep, w.project[n][0], w.project[n][1]);
        } else {
          MultiplyAdd<__half>(acc[e - 2][n], deep, w.project[n][0]);
        }
      }
    }
  }

#pragma unroll
  for (int n = 0; n < 3; ++n) {
    const float2 scale = *reinterpret_cast<const float2*>(out_scale + n * 8 + t * 2);
    const float2 bias = *reinterpret_cast<const float2*>(out_bias + n * 8 + t * 2);
#pragma unroll
    for (int o = 0; o < kRows; ++o) {
#pragma unroll
      for (int pixel = 0; pixel < 2; ++pixel) {
        const int i = g * 2 + pixel;  // of the strip's 16
        if (i == 0 || i == 15) continue;
        const int column = strip * kStripColumns + i - 1;
        const uint32_t word =
            LoadWord(tile + (o + 1) * kRowBytes + ((column + 1) * kPixelChunks + n) * 16 + t * 4);
        const float2 residual =
            make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(fmaf(acc[o][n][pixel * 2], scale.x, bias.x) + residual.x,
                                  fmaf(acc[o][n][pixel * 2 + 1], scale.y, bias.y) + residual.y);
        *reinterpret_cast<__nv_bfloat162*>(
            y + ((image * kSide + first_row + o) * kSide + column) * kNarrow + n * 8 + t * 2) =
            pair;
      }
    }
  }
}

void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

float ToBf16(float value) { return __bfloat162float(__float2bfloat16(value)); }

struct Weights {
  std::vector<float> expand, taps, project;  // (24, 144), (9, 144), (144, 24)
  std::vector<float> scale[3], bias[3];
};

Weights MakeWeights() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Weights w;
  auto fill = [&](std::vector<float>& values, int count, float size, float mean, bool rounded) {
    values.resize(count);
    for (float& value : values) {
      value = mean + size * normal(random);
      if (rounded) value = ToBf16(value);
    }
  };
  fill(w.expand, kNarrow * kWide, 0.3f, 0, true);
  fill(w.taps, 9 * kWide, 0.3f, 0, true);
  fill(w.project, kWide * kNarrow, 0.08f, 0, true);
  for (int i = 0; i < 3; ++i) {
    fill(w.scale[i], i < 2 ? kWide : kNarrow, 0.2f, 1.2f, false);
    fill(w.bias[i], i < 2 ? kWide : kNarrow, 0.3f, 0.5f, false);
  }
  return w;
}

// The weights in the order of lanes.
template <int kFragments>
std::vector<uint32_t> Pack(const Weights& w) {
  using Chunk = ChunkWeights<kFragments>;
  constexpr int kOf = kQuads<kFragments>;
  std::vector<uint32_t> packed(Chunk::kChunks * kOf * 32 * 4);
  auto bf16_pair = [](float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
  };
  auto half_pair = [](float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
  };
  for (int chunk = 0; chunk < Chunk::kChunks; ++chunk) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      Chunk of{};
      for (int f = 0; f < kFragments; ++f) {
        const int first = (chunk * kFragments + f) * 8, channel = first + t * 2;
        for (int i = 0; i < 3; ++i) {
          const int k = i * 8 + t * 2;
          of.expand[f][i] =
              bf16_pair(w.expand[k * kWide + first + g], w.expand[(k + 1) * kWide + first + g]);
        }
        for (int i = 0; i < 2; ++i) {
          of.expand_scale[f][i] = w.scale[0][channel + i] / 6;
          of.expand_bias[f][i] = w.bias[0][channel + i] / 6;
        }
        for (int tap = 0; tap < 9; ++tap) {
          of.taps[tap][f] =
              half_pair(w.taps[tap * kWide + channel], w.taps[tap * kWide + channel + 1]);
        }
        of.scale[f] = half_pair(w.scale[1][channel], w.scale[1][channel + 1]);
        of.bias[f] = half_pair(w.bias[1][channel] / 6, w.bias[1][channel + 1] / 6);
        for (int n = 0; n < 3; ++n) {
          of.project[n][f] = half_pair(w.project[channel * kNarrow + n * 8 + g],
                                       w.project[(channel + 1) * kNarrow + n * 8 + g]);
        }
      }
      uint32_t words[kOf * 4];
      memcpy(words, &of, sizeof(of));
      for (int i = 0; i < kOf * 4; ++i) {
        packed[((chunk * kOf + i / 4) * 32 + lane) * 4 + i % 4] = words[i];
      }
    }
  }
  return packed;
}

// One image in float64; `rounded`: with the expanded tensors rounded to bfloat16, as three kernels
// store them.
std::vector<double> Reference(const Weights& w, const std::vector<float>& x, bool rounded) {
  auto activate = [&](double value) {
    value = std::min(std::max(value, 0.0), 6.0);
    return rounded ? double{ToBf16(static_cast<float>(value))} : value;
  };
  constexpr int kPixels = kSide * kSide;
  std::vector<double> wide(size_t{kPixels} * kWide), deep(size_t{kPixels} * kWide),
      y(size_t{kPixels} * kNarrow);
  for (int p = 0; p < kPixels; ++p) {
    for (int c = 0; c < kWide; ++c) {
      double sum = 0;
      for (int k = 0; k < kNarrow; ++k) sum += double{x[p * kNarrow + k]} * w.expand[k * kWide + c];
      wide[size_t{static_cast<size_t>(p)} * kWide + c] =
          activate(sum * w.scale[0][c] + w.bias[0][c]);
    }
  }
  for (int p = 0; p < kPixels; ++p) {
    for (int c = 0; c < kWide; ++c) {
      double sum = 0;
      for (int tap = 0; tap < 9; ++tap) {
        const int h = p / kSide + tap / 3 - 1, q = p % kSide + tap % 3 - 1;
        if (h < 0 || h >= kSide || q < 0 || q >= kSide) continue;
        sum += wide[static_cast<size_t>(h * kSide + q) * kWide + c] * w.taps[tap * kWide + c];
      }
      deep[static_cast<size_t>(p) * kWide + c] = activate(sum * w.scale[1][c] + w.bias[1][c]);
    }
  }
  for (int p = 0; p < kPixels; ++p) {
    for (int n = 0; n < kNarrow; ++n) {
      double sum = 0;
      for (int c = 0; c < kWide; ++c) {
        sum += deep[static_cast<size_t>(p) * kWide + c] * w.project[c * kNarrow + n];
      }
      sum = sum * w.scale[2][n] + w.bias[2][n] + x[p * kNarrow + n];
      y[p * kNarrow + n] = rounded ? double{ToBf16(static_cast<float>(sum))} : sum;
    }
  }
  return y;
}

constexpr int kSets = 4;  // of operands, 308 MB in all, more than the L2 of 50 MB

struct Operands {
  __nv_bfloat16 *x[kSets], *y[kSets];
  uint4* weights[2];  // in chunks of one fragment, of two
  float *scale, *bias;
};

template <int kRows, int kFragments, int kCtasPerSm>
void Run(const Operands& operands, const Weights& w, const std::vector<float>& x, int images) {
  const auto kernel = Block<kRows, kFragments, kCtasPerSm>;
  const int shared = (kRows + 2) * kRowBytes, grid = images * (kSide / kRows);
  Require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
          "shared");
  cudaFuncAttributes attributes;
  Require(cudaFuncGetAttributes(&attributes, kernel), "attributes");
  int ctas = 0;
  Require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kStrips * 32, shared),
          "ctas");
  const size_t elements = size_t{kSide} * kSide * kNarrow;
  Require(cudaMemset(operands.y[0], 0xff, elements * images * 2), "poison");
  auto launch = [&](int set, cudaStream_t stream) {
    kernel<<<grid, kStrips * 32, shared, stream>>>(operands.x[set],
                                                   operands.weights[kFragments - 1], operands.scale,
                                                   operands.bias, operands.y[set]);
  };
  launch(0, nullptr);
  Require(cudaDeviceSynchronize(), "kernel");
  for (int image : {0, images - 1}) {
    const std::vector<float> input(x.begin() + image * elements,
                                   x.begin() + (image + 1) * elements);
    const std::vector<double> exact = Reference(w, input, false), three = Reference(w, input, true);
    std::vector<__nv_bfloat16> y(elements);
    Require(cudaMemcpy(y.data(), operands.y[0] + image * elements, elements * 2,
                       cudaMemcpyDeviceToHost),
            "copy");
    double squares = 0, squares_of_three = 0, size = 0, worst = 0;
    for (size_t i = 0; i < elements; ++i) {
      const double error = __bfloat162float(y[i]) - exact[i];
      squares += error * error;
      squares_of_three += (three[i] - exact[i]) * (three[i] - exact[i]);
      size += exact[i] * exact[i];
      if (!(std::fabs(error) <= worst)) worst = std::fabs(error);
    }
    const auto count = static_cast<double>(elements);
    std::printf(
        "  image %d: rms error %.3g, of three kernels %.3g, of values of %.3g; worst %.3g\n", image,
        std::sqrt(squares / count), std::sqrt(squares_of_three / count), std::sqrt(size / count),
        worst);
  }
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t graph_exec;
  Require(cudaStreamCreate(&stream), "stream");
  Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  constexpr int kLaunches = 20;
  for (int i = 0; i < kLaunches; ++i) launch(i % kSets, stream);
  Require(cudaStreamEndCapture(stream, &graph), "graph");
  Require(cudaGraphInstantiate(&graph_exec, graph, 0), "graph");
  cudaEvent_t begin, end;
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
  std::printf(
      "%d rows, %d channels, %d registers, %d CTAs an SM, %d bytes of stack: %.1f us (least "
      "%.1f)\n",
      kRows, kFragments * 8, attributes.numRegs, ctas, static_cast<int>(attributes.localSizeBytes),
      times[5], times[0]);
}

}  // namespace
}  // namespace jaxconv

int main() {
  using namespace jaxconv;
  constexpr int kImages = 256;
  const Weights w = MakeWeights();
  const std::vector<uint32_t> packed[2] = {Pack<1>(w), Pack<2>(w)};
  const size_t elements = size_t{kSide} * kSide * kNarrow * kImages;
  std::vector<float> x(elements);
  std::vector<__nv_bfloat16> rounded(elements);
  uint32_t state = 1;
  for (size_t i = 0; i < elements; ++i) {
    state = state * 1664525u + 1013904223u;
    rounded[i] = __float2bfloat16(static_cast<float>(state >> 8) / 8388608.f * 1.7f - 1.7f);
    x[i] = __bfloat162float(rounded[i]);
  }
  Operands operands;
  for (int i = 0; i < kSets; ++i) {
    Require(cudaMalloc(&operands.x[i], elements * 2), "x");
    Require(cudaMalloc(&operands.y[i], elements * 2), "y");
    Require(cudaMemcpy(operands.x[i], rounded.data(), elements * 2, cudaMemcpyHostToDevice), "x");
  }
  for (int i = 0; i < 2; ++i) {
    const size_t bytes = packed[i].size() * 4;
    Require(cudaMalloc(&operands.weights[i], bytes), "weights");
    Require(cudaMemcpy(operands.weights[i], packed[i].data(), bytes, cudaMemcpyHostToDevice),
            "weights");
  }
  std::vector<float> scale = w.scale[2];
  for (float& value : scale) value *= 6;
  Require(cudaMalloc(&operands.scale, kNarrow * 4), "scale");
  Require(cudaMalloc(&operands.bias, kNarrow * 4), "bias");
  Require(cudaMemcpy(operands.scale, scale.data(), kNarrow * 4, cudaMemcpyHostToDevice), "scale");
  Require(cudaMemcpy(operands.bias, w.bias[2].data(), kNarrow * 4, cudaMemcpyHostToDevice), "bias");
  Run<7, 2, 3>(operands, w, x, kImages);
  Run<8, 2, 2>(operands, w, x, kImages);
  Run<4, 2, 4>(operands, w, x, kImages);
  Run<7, 1, 3>(operands, w, x, kImages);
  Run<7, 1, 4>(operands, w, x, kImages);
  Run<4, 1, 4>(operands, w, x, kImages);
  return 0;
}
