// What the kernels of pkf_shmem.cuh know of a problem.
#ifndef JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

// Rows of the m x m outputs of a tile that one exchange through shared memory takes.
inline constexpr int kExchangeRows = 2;
// Channels of a k-block: 16 bytes for each of the four lanes of a row (direct_fragments.cuh).
inline constexpr int kBlockChannels = 32;

// Bytes of V of `tiles` tiles and all channels of a group, and of the exchange: what a CTA takes of
// shared memory beside its tiles' origins.
constexpr int64_t FusedInputBytes(int64_t alpha, int64_t tiles, int64_t channels) {
  return alpha * alpha * tiles * ((channels + kBlockChannels - 1) / kBlockChannels) *
         kBlockChannels * 2;
}
constexpr int64_t ExchangeBytes(int64_t alpha, int64_t tiles, int64_t columns) {
  return alpha * kExchangeRows * tiles * columns * 4;
}
// TileOrigin of each tile and Scales (fused_tile.cuh), up to the alignment of what follows.
constexpr int64_t OriginBytes(int64_t tiles) { return (tiles * 32 + 16 + 1023) / 1024 * 1024; }

struct PkfParams {
  Geometry geometry;
  const void* x = nullptr;
  const void* u = nullptr;  // float16
  void* y = nullptr;
  ScaleSource input_scale, filter_scale;
  int64_t u_point = 0;         // elements from a point of U to the next
  int32_t columns_of_cta = 0;  // output channels of a group that a CTA loops over
  bool out_is_f32 = false;
  // CTAs: parts of a group's columns fastest, then groups, then blocks of tiles.
  FastDivmod column_parts, groups;
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_
