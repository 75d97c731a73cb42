// igemm_wgmma, wgrad of 16-bit operands: cooperative and pingpong tiles over the filter (sm_90a).
//
//     rows = channel blocks under taps, columns = K / groups, reduction = output pixels
//
// A tile's rows are kTileM / 64 boxes from the list of taps x blocks of 64 channels, so a tile may
// span taps. A k-block is 64 output pixels: for each box an im2col load of x under its tap, and the
// tile's columns of dy. Both operands are MN-major: a row of shared memory is 64 channels of one
// pixel.
//
//     128 x 256           dy: 4 boxes of 64 of K
//     x: tap t, block b   | consumer 0 |
//     tap t, block b + 1  | consumer 1 |     (pingpong: each consumer has a tile of its own)
//
// Split-K: a slice is a run of k-blocks; the slices' float32 sums are added in order by a second
// kernel. Consumers, shared memory and registers are those of cooperative_sm90.cuh and
// pingpong_sm90.cuh.
//
// Refused, with a reason: lhs_dilation; batched filters over pixels that are not a multiple of 64
// (the last k-block would read another batch's pixels); channels whose pitch is not a multiple of
// 16 bytes.
#ifndef JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_SM90_CUH_
#define JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_SM90_CUH_

#include "cuda/igemm_wgmma/cooperative_sm90.cuh"
#include "cuda/igemm_wgmma/pingpong_sm90.cuh"

namespace jaxconv::igemm_wgmma {

// Output pixels in a k-block.
inline constexpr int kWgradPixels = 64;

// The producer, one thread.
template <class Tile>
__device__ __forceinline__ void ProduceWgradStages(const Params& params, const Maps& maps,
                                                   uint32_t ring, const Barriers<Tile>& barriers) {
  constexpr int kBoxesA = Tile::kTileM / 64;
  const ResidueClass& of = params.residue_class[0];
  const CUtensorMap* map_a = &maps.a[0];
  RingPlace<Tile::kStages> stage;
  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const TilePlace place(params, index);
    const int32_t n_first = place.n_tile * Tile::kTileN;
    const int32_t k = place.group * params.b_group + n_first;
    const int boxes = FilterBoxes<Tile>(params, n_first);
    const int boxes_a =
        min(kBoxesA, params.filter_taps * static_cast<int32_t>(params.channel_blocks.divisor) -
                         place.m_tile * kBoxesA);
    int32_t channel[kBoxesA];
    uint16_t offset[kBoxesA][3];
#pragma unroll
    for (int i = 0; i < kBoxesA; ++i) {
      int32_t tap, channel_block, t1;
      params.channel_blocks.Divmod(place.m_tile * kBoxesA + i, &tap, &channel_block);
      channel[i] = place.group * params.a_group + channel_block * 64;
      t1 = tap / of.taps[0];
      offset[i][0] = of.offset0[0] + (tap - t1 * of.taps[0]) * of.offset_step[0];
      offset[i][2] = of.offset0[2] + t1 / of.taps[1] * of.offset_step[2];
      offset[i][1] = of.offset0[1] + t1 % of.taps[1] * of.offset_step[1];
    }
    const int32_t first = place.slice * params.k_blocks_per_slice;
    const int32_t k_blocks = min(params.k_blocks_per_slice, of.k_blocks - first);
    WaitForPrecedingGrids();
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      const int32_t pixel = (first + k_block) * kWgradPixels;
      const PixelPlace at(params, of, pixel, params.pixels, place.batch);
      BarrierWait(barriers.Empty(stage.slot), stage.parity ^ 1);
      const uint32_t barrier = barriers.Full(stage.slot);
      const uint32_t shared = ring + stage.slot * Tile::kStageBytes;
      BarrierArriveExpect(barrier, (boxes_a + boxes) * kBoxBytes);
#pragma unroll
      for (int i = 0; i < kBoxesA; ++i) {
        if (i >= boxes_a) break;
        LoadBox(params.rank, shared + i * kBoxBytes, map_a, barrier, channel[i], at, offset[i][0],
                offset[i][1], offset[i][2]);
      }
      for (int i = 0; i < boxes; ++i) {
        CopyTile3d(shared + Tile::kBytesA + i * kBoxBytes, &maps.b, barrier, k + i * 64, pixel,
                   place.batch);
      }
      stage.Next();
    }
  }
}

// What wgrad changes in a form of fprop and dgrad.
template <class Form>
struct WgradForm : Form {
  static constexpr int kPixels = kWgradPixels;  // pixels of a load

  static __device__ __forceinline__ void Produce(const Params& params, const Maps& maps,
                                                 uint32_t ring,
                                                 const Barriers<typename Form::Tile>& barriers) {
    ProduceWgradStages(params, maps, ring, barriers);
  }
};

template <Op kOp, DType kType, int kWarpgroups, int kBlocks, int kN0, int kN1, int kStages>
struct WgradCooperative
    : WgradForm<Cooperative<kOp, kType, kWarpgroups, kBlocks, kN0, kN1, kStages>> {};

template <Op kOp, DType kType, int kBlocks, int kN, int kStages>
struct WgradPingpong : WgradForm<Pingpong<kOp, kType, kBlocks, kN, kStages, 4096>> {};

}  // namespace jaxconv::igemm_wgmma

#endif  // JAXCONV_CUDA_IGEMM_WGMMA_WGRAD_SM90_CUH_
