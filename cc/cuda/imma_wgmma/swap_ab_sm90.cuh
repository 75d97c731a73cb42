// imma_wgmma with the operands swapped: the filter is A, the pixels are B (sm_90a). For few output
// channels, and for few pixels.
//
// With 64 channels as columns, m64n64k32 reads 2 KB of pixels and 2 KB of the filter in 32 cycles,
// the full bandwidth of shared memory. With the filter's channels as rows and 256 pixels as
// columns, an instruction reads 2 + 8 KB in 128 cycles. A tile's pixels need not be a power of two:
// with 96, 7x7 maps have as many tiles as there are SMs.
//
// The filter's tensor map loads the 16 rows of a warp in the order 0 2 4 .. 14 1 3 .. 15. A thread
// holds rows g and g + 8, hence two neighbouring channels of its pixels, whose bytes form one
// 16-bit element. stmatrix transposes these elements to rows of channels:
//
//     staging of a warpgroup    pixel p: 64 bytes, 16 of each warp; chunk c at c ^ (p / 2 % 4)
//
// The mainloops are those of int8_sm90.cuh and filter_row_sm90.cuh. Results: 8 bits of one scale a
// channel, without a residual (RequantizePath kS8 and kU8).
#ifndef JAXCONV_CUDA_IMMA_WGMMA_SWAP_AB_SM90_CUH_
#define JAXCONV_CUDA_IMMA_WGMMA_SWAP_AB_SM90_CUH_

#include <cstdint>

#include "cuda/imma_wgmma/filter_row_sm90.cuh"
#include "cuda/imma_wgmma/int8_sm90.cuh"
#include "cuda/imma_wgmma/tile_sm90.cuh"

namespace jaxconv::imma_wgmma {

template <class Tile>
struct SwapAbResults;

// A warpgroup computes 64 channels by kTileM pixels, half of a tile of 128 channels (cooperative)
// or its own tile (pingpong).
template <bool kPingpong, int kTileM, int kStages, bool kFilterRow = false, int kFilterSlots = 0,
          int kStationary = 0>
struct SwapAbTile : TileRing<kPingpong, kTileM, kPingpong ? 64 : 128, kStages, kFilterRow,
                             kFilterSlots, kStationary> {
  static constexpr int kStagingAt = SwapAbTile::kRingBytes;
  static constexpr int kStagingBytes = kTileM * 64;  // of a warpgroup
  static constexpr int kSharedBytes = SwapAbTile::SharedBytes(2 * kStagingBytes);
  static_assert(SwapAbTile::Fits(kSharedBytes));
  static_assert(kTileM % 16 == 0, "a pass of stmatrix stores 32 pixels, the last one perhaps 16");
  static_assert(SwapAbTile::kBytesA % 1024 == 0, "the filter's swizzle");
  using Sums = int32_t[kTileM / 2];
  using Results = SwapAbResults<SwapAbTile>;

  static __device__ __forceinline__ uint32_t Pixels(const Params&, uint32_t shared, int) {
    return KMajorDescriptorLow(shared);
  }
  static __device__ __forceinline__ uint32_t Filter(uint32_t shared, int warpgroup) {
    return KMajorDescriptorLow(shared) + (kPingpong ? 0 : warpgroup * (64 * kKBlockBytes >> 4));
  }
  template <typename T>
  static __device__ __forceinline__ void Multiply(const Params& params, Sums& sums, uint32_t pixels,
                                                  uint32_t filter, bool accumulate) {
    WgmmaInt8(int8_t{}, T{}, sums, DescriptorOf(filter, KMajorDescriptorHigh()),
              DescriptorOf(pixels, params.descriptor), accumulate);
  }
};

template <class Tile>
struct SwapAbResults {
  const Params& params;
  const uint32_t staging;
  const int warpgroup;
  struct Output {
    float2 scale, bias;  // of the thread's two channels
  };

  __device__ __forceinline__ SwapAbResults(const Params& params, uint32_t ring, int warpgroup)
      : params(params),
        staging(ring + Tile::kStagingAt + warpgroup * Tile::kStagingBytes),
        warpgroup(warpgroup) {}
  __device__ __forceinline__ void Begin(int32_t) {}
  __device__ __forceinline__ Output Prepare(const TilePlace& place) const {
    const RequantizeParams& requantize = params.requantize;
    const int32_t mine = FirstColumn(place) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2;
    const int32_t channel = place.group * params.columns + (mine < params.columns ? mine : 0);
    Output output{__ldg(reinterpret_cast<const float2*>(requantize.scale + channel)), {}};
    if (requantize.bias != nullptr) {
      output.bias = __ldg(reinterpret_cast<const float2*>(requantize.bias + channel));
    }
    return output;
  }
  __device__ __forceinline__ void Store(const TilePlace& place, int32_t, const Output& output,
                                        typename Tile::Sums& sums) {
    // The previous tile's staging has been read: the warpgroup's threads have synchronised since,
    // at their turn, or do so here.
    if constexpr (!Tile::kPingpong) Meet();
    if (params.requantize.path == RequantizePath::kS8) {
      Stage<RequantizePath::kS8>(output, sums);
    } else {
      Stage<RequantizePath::kU8>(output, sums);
    }
    Meet();
    StoreStaged(place);
  }

 private:
  __device__ __forceinline__ int32_t FirstColumn(const TilePlace& place) const {
    return place.n_tile * Tile::kTileN + (Tile::kPingpong ? 0 : warpgroup * 64);
  }
  __device__ __forceinline__ void Meet() const { NamedBarrierSync(3 + warpgroup, 128); }

  template <RequantizePath kPath>
  __device__ __forceinline__ void Stage(const Output& output,
                                        const typename Tile::Sums& sums) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    auto row_of = [&](int pixel) { return staging + pixel * 64 + ((warp ^ (pixel / 2 % 4)) * 16); };
    const uint32_t row = row_of(lane), row_of_half = row_of(lane % 16);
    const float scale[4] = {output.scale.x, output.scale.y, output.scale.x, output.scale.y};
    const float bias[4] = {output.bias.x, output.bias.y, output.bias.x, output.bias.y};
#pragma unroll
    for (int p = 0; p < Tile::kTileM; p += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // For the last 16 pixels, the second pair of matrices repeats the first.
        const int eight = p / 8 + (p + 32 <= Tile::kTileM ? i : i % 2);
        const int32_t* const s = &sums[eight * 4];  // channels c, c, c + 1, c + 1
        const int32_t four[4] = {s[0], s[2], s[1], s[3]};
        words[i] = RequantizeFour<kPath>(params.requantize, four, scale, bias);
      }
      StoreMatricesTransposed((p + 32 <= Tile::kTileM ? row : row_of_half) + p * 64, words[0],
                              words[1], words[2], words[3]);
    }
  }

  // Four lanes a pixel, 16 bytes each.
  __device__ __forceinline__ void StoreStaged(const TilePlace& place) const {
    constexpr int kPasses = (Tile::kTileM + 31) / 32, kDecoded = (kPasses + 3) / 4;
    const RequantizeParams& requantize = params.requantize;
    const int thread = threadIdx.x % 128, chunk = thread % 4;
    // The four lanes share a pixel; each decodes every fourth pass. In units of 32 elements.
    int32_t decoded[kDecoded];
#pragma unroll
    for (int i = 0; i < kDecoded; ++i) {
      const int pixel = (i * 4 + chunk) * 32 + thread / 4;
      int32_t at = -1;
      if (pixel < Tile::kTileM) {
        at = OutputPixelOf<Tile>(params, place.m_tile * Tile::kTileM + pixel);
      }
      decoded[i] = static_cast<int32_t>(OutputPixel(requantize, at, at >= 0).at >> 5);
    }
    const int32_t column = FirstColumn(place) + chunk * 16;
    const int32_t channel = place.group * params.columns + column;
    const bool inside = column < params.columns;
    char* const out = static_cast<char*>(requantize.out) +
                      (channel >> 5) * requantize.block_stride + (channel & 31);
    const uint32_t from = staging + thread / 4 * 64 + ((chunk ^ (thread / 8 % 4)) * 16);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t at = __shfl_sync(0xffffffff, decoded[pass / 4], pass % 4, 4);
      if (pass * 32 + 32 > Tile::kTileM && thread / 4 >= 16) continue;
      const uint4 bytes = LoadChunk(from + pass * 32 * 64);
      if (inside && at >= 0) *reinterpret_cast<uint4*>(out + (int64_t{at} << 5)) = bytes;
    }
  }
};

template <Op kOp, DType kType, bool kPingpong, int kTileM, int kStages>
struct SwapAb : Int8Form<kType, SwapAbTile<kPingpong, kTileM, kStages>> {};

template <Op kOp, DType kType, int kTileM, int kStages, int kStationary>
struct SwapAbWeightStationary
    : FilterRowForm<kType, SwapAbTile<true, kTileM, kStages, true, 0, kStationary>> {};

template <Op kOp, DType kType, bool kPingpong, int kTileM, int kStages, int kFilterSlots>
struct SwapAbFilterRow
    : FilterRowForm<kType, SwapAbTile<kPingpong, kTileM, kStages, true, kFilterSlots>> {};

}  // namespace jaxconv::imma_wgmma

#endif  // JAXCONV_CUDA_IMMA_WGMMA_SWAP_AB_SM90_CUH_
