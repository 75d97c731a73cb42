// igemm_wgmma, wgrad in 3xTF32 (common/split_tf32.cuh) by wgmma (sm_90a).
//
//     rows = blocks of 32 channels under taps, columns = K / groups, reduction = output pixels
//
// Both operands lie across the reduction. dy is split and transposed in front, into the workspace, by
// the kernel that does so with the filters of three_tf32_sm90.cuh. x comes as it is, in im2col boxes of
// 32 pixels by 32 channels; the fragments of wgmma's A come from registers, so they may be read across
// the box:
//
//     lane 4 g + t of warp w: pixels 16 h + 4 t + 2 s + f, channels 16 (w % 2) + 2 g and 2 g + 1 of
//     box w / 2, which are rows g and g + 8, column t + 4 f of instruction 2 h + s
//
// The split puts pixel 4 t + q of 16 at 4 q + t. Lanes of t >= 2 read s in reverse order, so that lanes
// that read together have different chunks: pixels 8 apart are swizzled alike.
//
// The products of a k-block, and how its sums are added, are those of three_tf32_sm90.cuh. Persistent; split-K as in wgrad_sm90.cuh.
//
// Shared memory of 128x128: barriers and the producer's list of boxes in 1 KB, 4 stages of (16 +
// 2 x 16) KB.
//
// Refused, beside what wgrad_mma_sync_sm90.cuh refuses: dy of which both parts take more than 512 MB.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_

#include <cstdint>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/igemm_wgmma/launch_sm90.cuh"
#include "cuda/igemm_wgmma/three_tf32_sm90.cuh"
#include "cuda/igemm_wgmma/wgrad_mma_sync_sm90.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// kWarpgroups x 64 rows by kN columns.
template <int kWarpgroups_, int kN_, int kStages_>
struct WgradThreeTf32Tile {
  using Products = ThreeTf32Tile<kWarpgroups_, kN_, /*kStages=*/2>;  // its ring is not used
  static constexpr int kWarpgroups = kWarpgroups_, kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kFilterSlots = 0, kStationary = 0;
  static constexpr int kTileM = kWarpgroups * 64, kTileN = kN_, kStages = kStages_;
  static constexpr int kPixels = 32;               // of a k-block
  static constexpr int kBoxBytes = kPixels * 128;  // of 32 channels
  static constexpr int kBytesA = kTileM / 32 * kBoxBytes;
  static constexpr int kBytesB = 2 * kTileN * 128;  // both parts
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBoxesAt = 512;  // the producer's list of boxes; in front of it, barriers
  static constexpr int kRingAt = 1024;
  // 1024 more to align the ring.
  static constexpr int kSharedBytes = kRingAt + kStages * kStageBytes + 1024;
  static_assert(kSharedBytes + 1024 <= 232448, "227 KB a CTA, barriers among them");
  static constexpr int kProducerRegisters = Products::kProducerRegisters;
  static constexpr int kConsumerRegisters = Products::kConsumerRegisters;

  using Fragments = typename Products::Fragments;

  static __device__ __forceinline__ void CopyColumns(uint32_t shared, const CUtensorMap* map,
                                                     uint32_t barrier, int32_t pixel,
                                                     int32_t column, int32_t batch) {
    CopyTile4d(shared, map, barrier, pixel, column, 0, batch);
  }

  // Where a consumer lane's first 8 bytes lie in a stage.
  static __device__ __forceinline__ uint32_t FragmentAt() {
    const int g = Lane() / 4, t = Lane() % 4, warp = threadIdx.x / 32 - 4;
    const int chunk = (warp % 2 * 4 + g / 2) ^ (t % 2 * 4 + t / 2 * 2);
    return warp / 2 * kBoxBytes + t * 512 + t / 2 * 256 + chunk * 16 + g % 2 * 8;
  }

  // `at`: FragmentAt().
  static __device__ __forceinline__ void Load(uint32_t stage, uint32_t at, Fragments* to) {
    const bool reversed = Lane() % 4 >= 2;
    uint32_t word[4][4];  // of instruction, register
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        uint32_t pair[2][2];  // of s in the order in which this lane reads it, row
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint32_t place = (at ^ (2 * s + f) * 16) + (reversed ? -256 * s : 256 * s);
          LoadPair(stage + h * 2048 + f * 128 + place, &pair[s][0], &pair[s][1]);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            word[2 * h + s][2 * f + r] = reversed ? pair[1 - s][r] : pair[s][r];
          }
        }
      }
    }
    to->Split(word);
  }
};

// A warp's 16 rows from `row` of wgrad's GEMM on: rows g and g + 8 of the fragments are channels 2 g
// and 2 g + 1.
template <class Tile, class Epilogue>
__device__ __forceinline__ void StoreWgradRows(const Params& params, const TilePlace& place,
                                               const ResidueClass& of,
                                               const float (&sums)[Tile::kTileN / 2], int32_t row,
                                               const Epilogue& epilogue) {
  if (row >= of.rows) return;
  const int g = Lane() / 4, t = Lane() % 4;
  const int32_t n_first = place.n_tile * Tile::kTileN;
  const int columns = params.gemm_n - n_first;
  float* const out = static_cast<float*>(params.out) + place.OutputOffset(params, n_first) + 2 * t;
  int32_t tap, channel_block;
  params.channel_blocks.Divmod(row / 32, &tap, &channel_block);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t channel = channel_block * 32 + row % 32 + 2 * g + r;
    if (channel >= params.row_channels) continue;
    const int32_t of_filter = tap * params.row_channels + channel;
    float* const to = out + int64_t{of_filter} * params.out_channels;
#pragma unroll
    for (int j = 0; j < Tile::kTileN / 8; ++j) {
      if (j * 8 >= columns) break;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        pair[e] = epilogue.template operator()<float>(
            sums[j * 4 + r * 2 + e],
            OutputPlace{to + j * 8 + e - static_cast<float*>(params.out), of_filter,
                        place.group * params.gemm_n + n_first + j * 8 + 2 * t + e,
                        /*inside=*/true});
      }
      *reinterpret_cast<float2*>(to + j * 8) = make_float2(pair[0], pair[1]);
    }
  }
}

// A consumer warpgroup.
template <class Tile, class Epilogue>
__device__ __forceinline__ void ConsumeWgradThreeTf32(const Params& params, uint32_t ring,
                                                      const Barriers<Tile>& barriers) {
  const Release release;
  const uint32_t fragment_at = Tile::FragmentAt();
  const ResidueClass& of = params.residue_class[0];
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t k_blocks =
        min(params.k_blocks_per_slice, of.k_blocks - place.slice * params.k_blocks_per_slice);
    float sums[Tile::kTileN / 2] = {};
    SumKBlocks<typename Tile::Products>(
        k_blocks, ring + Tile::kRingAt, barriers, release, stage,
        [&](uint32_t at, typename Tile::Fragments* to) { Tile::Load(at, fragment_at, to); }, sums);
    const auto epilogue = MakeEpilogue<Epilogue>(params.epilogue, params.slice_elements > 0);
    const int32_t warp = threadIdx.x / 32 - 4;
    StoreWgradRows<Tile>(params, place, of, sums, place.m_tile * Tile::kTileM + warp * 16,
                         epilogue);
    FinishTile<Tile>(params, place, of, epilogue);
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kThreads, 1)
    WgradThreeTf32Kernel(const __grid_constant__ Params params, const __grid_constant__ Maps maps) {
  using Tile = typename Tag::Tile;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const uint32_t ring = (SharedAddress(dynamic) + 1023) & ~1023u;
  const Barriers<Tile> barriers{ring};
  static_assert(Barriers<Tile>::kCount * 8 <= Tile::kBoxesAt);
  if (threadIdx.x == 0) {
    barriers.Init(Tile::kWarpgroups);
    PrefetchTensorMap(&maps.a[0]);
    PrefetchTensorMap(&maps.b);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    LowerRegisters<Tile::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && ElectOne()) {
      ProduceMmaSyncStages(params, maps, ring, barriers);
    }
  } else {
    RaiseRegisters<Tile::kConsumerRegisters>();
    WaitForInputs();
    ConsumeWgradThreeTf32<Tile, typename Tag::Epilogue>(params, ring, barriers);
  }
}

template <Op kOp, DType kType_, int kWarpgroups, int kN, int kStages>
struct WgradThreeTf32 : WgradThreeTf32Tile<kWarpgroups, kN, kStages> {
  static_assert(kOp == Op::kWgrad && kType_ == DType::kF32);
  static constexpr DType kType = kType_;
  using Tile = WgradThreeTf32Tile<kWarpgroups, kN, kStages>;
  using Epilogue = PlainEpilogue;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    return LaunchWithMaps<WgradThreeTf32Kernel<Tag>, Tag, Maps>(
        plan, operands, stream, /*overlaps=*/true,
        [](const LaunchParams& launch, const Params&, const void* a, const void* b, Maps* maps) {
          JAXCONV_RETURN_IF_ERROR(
              EncodeActivations(launch, kType, a, Tile::kPixels, maps, /*whole_f32=*/true));
          // dy as split: (part, batch, columns, pixels). One copy loads a tile's columns of both.
          const FilterSplit& split = launch.filter_split;
          DenseTensor dy;
          dy.dtype = kType;
          dy.whole_f32 = true;
          dy.rank = 4;
          dy.address = b;
          dy.extent[0] = split.pitch;
          dy.extent[1] = split.rows;
          dy.extent[2] = 2;
          dy.extent[3] = split.matrices;
          dy.stride[1] = split.pitch;
          dy.stride[2] = split.matrices * split.rows * split.pitch;
          dy.stride[3] = split.rows * split.pitch;
          const int32_t box[4] = {Tile::kPixels, Tile::kTileN, 2, 1};
          return EncodeTiledMap(dy, box, &maps->b);
        });
  }
};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_THREE_TF32_SM90_CUH_
