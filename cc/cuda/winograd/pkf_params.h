// The parameters of pkf_shmem.cuh.
#ifndef JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_
#define JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_

#include <cstdint>

#include "core/fast_divmod.h"
#include "cuda/winograd/params.h"

namespace jaxconv::winograd {

// Rows of a tile's m x m outputs in one exchange through shared memory.
inline constexpr int kExchangeRows = 2;
// Channels of a k-block: 16 bytes for each of the four lanes of a row (direct_fragments.cuh).
inline constexpr int kBlockChannels = 32;

// Bytes of V for `tiles` tiles and all channels of a group, and bytes of the exchange: a CTA's
// shared memory without its tiles' origins.
constexpr int64_t FusedInputBytes(int64_t alpha, int64_t tiles, int64_t channels) {
  return alpha * alpha * tiles * ((channels + kBlockChannels - 1) / kBlockChannels) *
         kBlockChannels * 2;
}
constexpr int64_t ExchangeBytes(int64_t alpha, int64_t tiles, int64_t columns) {
  return alpha * kExchangeRows * tiles * columns * 4;
}
// Bytes of the tiles' TileOrigin and of Scales (fused_tile.cuh), rounded up to the alignment of V.
constexpr int64_t OriginBytes(int64_t tiles) { return (tiles * 32 + 16 + 1023) / 1024 * 1024; }

struct PkfParams {
  Geometry geometry;
  const void* x = nullptr;
  const void* u = nullptr;  // float16
  void* y = nullptr;
  ScaleSource input_scale, filter_scale;
  int64_t u_point = 0;         // elements from a point of U to the next
  int32_t columns_of_cta = 0;  // output channels over which a CTA loops
  bool out_is_f32 = false;
  // CTAs: parts of a group's columns fastest, then groups, then blocks of tiles.
  FastDivmod column_parts, groups;
};

}  // namespace jaxconv::winograd

#endif  // JAXCONV_CUDA_WINOGRAD_PKF_PARAMS_H_
