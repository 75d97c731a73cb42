// A CTA splits one block of 64 x 64 elements: 16 bytes a thread in and out, through shared memory
// with the reduction as rows, 65 elements apart.
#include "cuda/common/launch.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/igemm_wgmma/filter_split.h"

namespace jaxconv::igemm_wgmma {
namespace {

constexpr int kBlock = 64;
constexpr int kThreads = 256;
constexpr int kChunks = kBlock / 4;  // of 16 bytes in a row
constexpr int kRowsOfPass = kThreads / kChunks;
constexpr int kPasses = kBlock / kRowsOfPass;

__global__ void __launch_bounds__(kThreads)
    SplitFilter(const float* __restrict__ in, FilterSplit split, int32_t row_blocks,
                int32_t column_blocks, float* __restrict__ out) {
  __shared__ float block[kBlock][kBlock + 1];  // of column, row
  const int32_t rest = blockIdx.x / column_blocks;
  const int64_t column_first = int64_t{kBlock} * (blockIdx.x - rest * column_blocks);
  const int64_t row_first = int64_t{kBlock} * (rest % row_blocks);
  const int64_t matrix = rest / row_blocks;
  const int chunk = threadIdx.x % kChunks, line_of_pass = threadIdx.x / kChunks;
  const float* const source = in + matrix * split.matrix_stride;
  // A line is a column where the matrix is transposed, else a row.
  const int64_t line_first = split.transposed ? column_first : row_first;
  const int64_t chunk_at = (split.transposed ? row_first : column_first) + chunk * 4;
  const int64_t lines = split.transposed ? split.columns : split.rows;
  const int64_t length = split.transposed ? split.rows : split.columns;
  float4 quad[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int64_t line = line_first + line_of_pass + i * kRowsOfPass;
    quad[i] = make_float4(0, 0, 0, 0);
    if (line < lines && chunk_at < length) {
      quad[i] = *reinterpret_cast<const float4*>(source + line * split.row_stride + chunk_at);
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int line = line_of_pass + i * kRowsOfPass;
    const float value[4] = {quad[i].x, quad[i].y, quad[i].z, quad[i].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      (split.transposed ? block[line][chunk * 4 + e] : block[chunk * 4 + e][line]) = value[e];
    }
  }
  __syncthreads();
  const int64_t pitch = split.pitch;
  if (column_first + chunk * 4 >= pitch) return;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = line_of_pass + i * kRowsOfPass;
    if (row_first + row >= split.rows) return;
    uint32_t big[4], small[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      SplitTf32Finite(__float_as_uint(block[chunk / 4 * 16 + 4 * t + chunk % 4][row]), &big[t],
                      &small[t]);
    }
    const int64_t at = (matrix * split.rows + row_first + row) * pitch + column_first + chunk * 4;
    *reinterpret_cast<uint4*>(out + at) = make_uint4(big[0], big[1], big[2], big[3]);
    *reinterpret_cast<uint4*>(out + at + split.matrices * split.rows * pitch) =
        make_uint4(small[0], small[1], small[2], small[3]);
  }
}

}  // namespace

Status LaunchFilterSplit(const void* filter, const FilterSplit& split, void* out, void* stream) {
  const int64_t row_blocks = (split.rows + kBlock - 1) / kBlock;
  const int64_t column_blocks = (split.columns + kBlock - 1) / kBlock;
  const int64_t ctas = split.matrices * row_blocks * column_blocks;
  if (ctas >= int64_t{1} << 31) return Status::Unimplemented("a filter of more than 2^43 elements");
  LaunchConfig config;
  config.grid = static_cast<unsigned>(ctas);
  config.threads = kThreads;
  return Launch<SplitFilter>("filter_split", config, stream, static_cast<const float*>(filter),
                             split, static_cast<int32_t>(row_blocks),
                             static_cast<int32_t>(column_blocks), static_cast<float*>(out));
}

}  // namespace jaxconv::igemm_wgmma
