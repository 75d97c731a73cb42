// A CTA transposes one block of 64 x 64 elements in shared memory: 16 bytes a thread in and out,
// four loads in flight, so that a large filter is one wave of CTAs. Rows lie 65 elements apart, so
// that columns spread over the banks.
#include "cuda/common/launch.cuh"
#include "cuda/igemm_wgmma/filter_transpose.h"

namespace jaxconv::igemm_wgmma {
namespace {

constexpr int kBlock = 64;
constexpr int kThreads = 256;
constexpr int kChunks = kBlock / 4;  // of 16 bytes in a row
constexpr int kPasses = kBlock * kChunks / kThreads;

__global__ void __launch_bounds__(kThreads)
    FilterTranspose(const float* __restrict__ in, int32_t rows, int32_t columns, int32_t row_blocks,
                    int32_t column_blocks, float* __restrict__ out) {
  __shared__ float block[kBlock][kBlock + 1];
  const int32_t rest = blockIdx.x / column_blocks;
  const int32_t column_first = (blockIdx.x - rest * column_blocks) * kBlock;
  const int32_t row_first = rest % row_blocks * kBlock;
  const int64_t matrix = int64_t{rest / row_blocks} * rows * columns;
  const int chunk = threadIdx.x % kChunks * 4, row_of_pass = threadIdx.x / kChunks;
  float4 quad[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int32_t row = row_first + row_of_pass + i * (kThreads / kChunks);
    if (row < rows && column_first + chunk < columns) {
      quad[i] = *reinterpret_cast<const float4*>(in + matrix + int64_t{row} * columns +
                                                 column_first + chunk);
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    float* to = &block[row_of_pass + i * (kThreads / kChunks)][chunk];
    to[0] = quad[i].x, to[1] = quad[i].y, to[2] = quad[i].z, to[3] = quad[i].w;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int column = row_of_pass + i * (kThreads / kChunks);
    if (column_first + column < columns && row_first + chunk < rows) {
      *reinterpret_cast<float4*>(out + matrix + int64_t{column_first + column} * rows + row_first +
                                 chunk) =
          make_float4(block[chunk][column], block[chunk + 1][column], block[chunk + 2][column],
                      block[chunk + 3][column]);
    }
  }
}

}  // namespace

Status LaunchFilterTranspose(const void* filter, int64_t matrices, int64_t rows, int64_t columns,
                             void* out, void* stream) {
  const int64_t row_blocks = (rows + kBlock - 1) / kBlock;
  const int64_t column_blocks = (columns + kBlock - 1) / kBlock;
  const int64_t ctas = matrices * row_blocks * column_blocks;
  if (ctas >= int64_t{1} << 31) return Status::Unimplemented("a filter of more than 2^43 elements");
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ctas);
  config.threads = kThreads;
  return Launch<FilterTranspose>("filter_transpose", config, stream,
                                 static_cast<const float*>(filter), static_cast<int32_t>(rows),
                                 static_cast<int32_t>(columns), static_cast<int32_t>(row_blocks),
                                 static_cast<int32_t>(column_blocks), static_cast<float*>(out));
}

}  // namespace jaxconv::igemm_wgmma
