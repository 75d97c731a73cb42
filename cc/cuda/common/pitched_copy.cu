// Copies between tensors with and without padded channels: see padded_channels.h.
//
// A thread writes 16 bytes from loads of 1, 2 or 4 elements: the widest that divides both row
// lengths.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "cuda/common/padded_channels.h"

namespace jaxconv {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;

template <int kElements>
struct PieceOf;
template <>
struct PieceOf<1> {
  using Type = unsigned short;
};
template <>
struct PieceOf<2> {
  using Type = uint32_t;
};
template <>
struct PieceOf<4> {
  using Type = uint2;
};

template <int kElements>
__device__ __forceinline__ void CopyVector(const PitchedCopy& copy, int64_t vector) {
  using Piece = typename PieceOf<kElements>::Type;
  constexpr int kPieces = kWidth / kElements;
  const int64_t first = vector * kWidth;
  Piece pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    int32_t block, row, column;
    copy.to_columns.Divmod(static_cast<int32_t>(first) + i * kElements, &row, &column);
    copy.to_rows.Divmod(row, &block, &row);
    const int64_t from = (int64_t{block} * copy.from_rows + row) * copy.from_columns + column;
    const bool inside =
        first + i * kElements < copy.elements && row < copy.from_rows && column < copy.from_columns;
    pieces[i] = inside ? __ldg(reinterpret_cast<const Piece*>(
                             static_cast<const unsigned short*>(copy.from) + from))
                       : Piece{};
  }
  auto* to = static_cast<unsigned short*>(copy.to) + first;
  if (first + kWidth <= copy.elements) {
    uint4 packed;
    memcpy(&packed, pieces, sizeof(packed));
    *reinterpret_cast<uint4*>(to) = packed;
  } else {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + i * kElements < copy.elements) reinterpret_cast<Piece*>(to)[i] = pieces[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    CopyPitched(const __grid_constant__ PitchedCopy first,
                const __grid_constant__ PitchedCopy second, int32_t first_ctas) {
  const bool is_first = static_cast<int32_t>(blockIdx.x) < first_ctas;
  const PitchedCopy& copy = is_first ? first : second;
  const int64_t cta = is_first ? blockIdx.x : blockIdx.x - first_ctas;
  const int64_t vector = cta * kThreads + threadIdx.x;
  if (vector * kWidth >= copy.elements) return;
  const uint32_t both = copy.from_columns | copy.to_columns.divisor;
  if (both % 4 == 0) {
    CopyVector<4>(copy, vector);
  } else if (both % 2 == 0) {
    CopyVector<2>(copy, vector);
  } else {
    CopyVector<1>(copy, vector);
  }
}

int64_t Ctas(const PitchedCopy& copy) {
  constexpr int64_t kOfCta = int64_t{kThreads} * kWidth;
  return (copy.elements + kOfCta - 1) / kOfCta;
}

}  // namespace

Status LaunchPitchedCopies(const PitchedCopy& first, const PitchedCopy& second, void* stream) {
  const int64_t first_ctas = Ctas(first), ctas = first_ctas + Ctas(second);
  if (ctas == 0) return {};
  CopyPitched<<<static_cast<unsigned>(ctas), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      first, second, static_cast<int32_t>(first_ctas));
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return Status::Internal(std::string("padding channels: ") + cudaGetErrorString(error));
  }
  return {};
}

}  // namespace jaxconv
