// depthwise, fprop and dgrad at stride 1: products of two taps at a time on tensor cores (sm_90a).
//
// For 8 channels, two neighbouring taps of a filter row form a matrix B of 16 rows and 8 columns:
// two diagonals. A row of A holds a pixel (first tap) and its right neighbour (second tap):
//
//     out[pixel][c] += sum over k < 8 of x[pixel + s][k] w[s][k] (k == c)
//                                      + x[pixel + s + 1][k] w[s + 1][k] (k == c)
//
// One m16n8k16 does 256 useful multiply-adds, an FMA instruction 32. In a filter row with an odd
// number of taps, the last tap is one m16n8k8. ldmatrix reads pixels in NHWC order without
// conversion, and the sums have the order of the result.
//
// A warp has 8 channels and 16 columns of pixels (or 8 columns of two images) and proceeds row by
// row. B stays in registers. Row i of pixels is read once, for output rows o = i - R + 1 ... i;
// output row o has its sums in place o % R. The loop is unrolled by R rows, so that all places are
// constants.
//
//     box [row][image][column][channel] | mbarriers full and done of each chunk of kRows rows
//
// A CTA has one tile and loads its whole box at the start; other CTAs of the SM hide the latency.
// Box rows have a multiple of 8 pixels, so that TMA's swizzle is the same in all rows. Results
// overwrite pixels that their warp has read and no other warp reads. Full(chunk): the chunk's
// pixels have arrived. Done(chunk): every warp has stored the results that the chunk completes; one
// chunk later the warps, in turn, wait for Done and store the results by TMA, which clips at the
// edge of the output.
//
// The zeros of B multiply the other channels, so an Inf or NaN of x spreads to the 8 channels of
// its block.
//
// Refused, with a reason (pairs_plan.cc): other filters, strides, dilation, depth; tensors that TMA
// cannot load.
#ifndef JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/depthwise/boxes_sm90.cuh"
#include "cuda/depthwise/pairs_plan.h"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/store_block.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/tma_sm90.cuh"
#include "cuda/ptx/wgmma_sm90.cuh"

namespace jaxconv::depthwise {

// The filter of a warp's 8 channels as B: a lane holds the taps of channel lane / 4 in the rows of
// its fragment.
template <class Tag>
struct PairedTaps {
  static constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kPairs = Tag::kPairs;
  uint32_t word[kR][kS];

  __device__ __forceinline__ PairedTaps(const Params& params, int32_t filter, int32_t channel,
                                        int lane) {
    const int column = lane / 4;
    const bool meets = column / 2 == lane % 4;
    const uint16_t* from = First(params, filter, channel + column);
    const int64_t step = params.flip ? -params.tap_stride : params.tap_stride;
#pragma unroll
    for (int tap = 0; tap < kR * kS; ++tap, from += step) {
      const uint32_t bits = meets ? *from : 0;
      word[tap / kS][tap % kS] = bits << column % 2 * 16;
    }
  }

  // Prefetches the taps of 8 channels.
  static __device__ __forceinline__ void Prefetch(const Params& params, int32_t filter,
                                                  int32_t channel, int lane) {
    const uint16_t* from = First(params, filter, channel);
    const int64_t step = params.flip ? -params.tap_stride : params.tap_stride;
    for (int tap = lane; tap < kR * kS; tap += 32) PrefetchToL2(from + tap * step);
  }

 private:
  // The address of a channel's tap for the first pixel of a window.
  static __device__ __forceinline__ const uint16_t* First(const Params& params, int32_t filter,
                                                          int32_t channel) {
    return static_cast<const uint16_t*>(params.filter) + filter * params.filter_stride +
           int64_t{min(channel, params.channels - 1)} * params.channel_stride +
           (params.flip ? int64_t{kR * kS - 1} * params.tap_stride : 0);
  }
};

// The sums of a warp's columns; output row o has place o % R.
template <class Tag>
struct PairedSums {
  static constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kPairs = Tag::kPairs;
  using T = typename Tag::T;
  float place[kR][4] = {};

  // Starts the output row of pixel row i, i % R == kRow.
  template <int kRow>
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int v = 0; v < 4; ++v) place[kRow % kR][v] = 0;
  }

  // Adds row i of pixels, i % R == kRow, to its R output rows and starts the last of them. Sums of
  // rows before the first or after the last are not used: tests between the products would cost
  // more.
  template <int kRow>
  __device__ __forceinline__ void Add(const uint32_t (&offset)[kPairs], int32_t at,
                                      const PairedTaps<Tag>& taps) {
    uint32_t a[kPairs][4];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (2 * j + 1 < kS) {
        LoadMatrices(offset[j] + at, a[j]);
      } else {
        uint32_t two[2];
        LoadMatrices(offset[j] + at, two);
        a[j][0] = two[0], a[j][1] = two[1];
      }
    }
    Begin<kRow>();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int s = 2 * j;
#pragma unroll
      for (int r = kR - 1; r >= 0; --r) {
        float (&sum)[4] = place[(kRow - r + kR) % kR];
        if (s + 1 < kS) {
          MultiplyAdd<T>(sum, a[j], taps.word[r][s], taps.word[r][s + 1 < kS ? s + 1 : s]);
        } else {
          const uint32_t half[2] = {a[j][0], a[j][1]};
          MultiplyAdd<T>(sum, half, taps.word[r][s]);
        }
      }
    }
  }
};

// The epilogue of a sum before rounding: none; scale, bias and a clamp, or a swish (silu or
// hard_swish); any.
enum class Finish { kNone, kClamp, kSwish, kAny };

// A lane's outputs of a row and their epilogue: pixel lane / 4 of both halves, two channels.
template <class Tag>
struct PairedOutputs {
  using T = typename Tag::T;
  const FusedEpilogue& epilogue;
  const LaneClamp<2> clamp;
  int32_t pixel[2];  // of the tile's first row
  bool exists[2];
  int32_t channel;

  __device__ __forceinline__ PairedOutputs(const Params& params, const FusedEpilogue& of,
                                           int32_t image, int32_t row, int32_t column,
                                           int32_t first_channel, int lane)
      : epilogue(of),
        clamp(of, LaneTerms<2>(of, min(first_channel + lane % 4 * 2, params.channels - 2))),
        channel(first_channel + lane % 4 * 2) {
    const int32_t height = params.axis[1].out, width = params.axis[2].out;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool two = params.tile_images == 2;
      const int32_t at = lane / 4 + (two ? 0 : 8 * h), of_image = image + (two ? h : 0);
      pixel[h] = (of_image * height + row) * width + column + at;
      exists[h] = at < params.axis[2].tile && column + at < width && of_image < params.images &&
                  channel < params.channels;
    }
  }

  __device__ __forceinline__ bool TakesSwish() const {
    return epilogue.params.residual == nullptr && epilogue.params.pre == nullptr &&
           IsSwish(epilogue.params.activation);
  }

  // Converts the sums of output row `row` of the tile to rounded pairs.
  template <Finish kWay>
  __device__ __forceinline__ void Round(const Params& params, int32_t row, const float (&sum)[4],
                                        uint32_t (&word)[2]) const {
    if constexpr (kWay == Finish::kSwish) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = fmaf(sum[i], clamp.terms.scale[i % 2], clamp.terms.bias[i % 2]);
      }
      ActivateSwish<T>(epilogue.params.activation, values);
      word[0] = PackPair<T>(values[0], values[1]), word[1] = PackPair<T>(values[2], values[3]);
      return;
    }
    if constexpr (kWay == Finish::kClamp) {
      word[0] = PackPair<T>(clamp(sum[0], 0), clamp(sum[1], 1));
      word[1] = PackPair<T>(clamp(sum[2], 0), clamp(sum[3], 1));
      return;
    }
    const int32_t width = ComputedHere(params.axis[2].out);
    float values[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float t[2] = {sum[2 * h], sum[2 * h + 1]};
      const int64_t offset = int64_t{pixel[h] + row * width} * params.channels + channel;
      Neighbours<T, 2> residual{};
      if (exists[h] && epilogue.params.residual != nullptr) {
        residual = epilogue.template Residual<T, 2>(offset);
      }
      epilogue.Scale(clamp.terms, t);
      if (exists[h]) epilogue.template Add<T>(t, residual, offset);
      values[2 * h] = t[0], values[2 * h + 1] = t[1];
    }
    Activate<T>(epilogue.params.activation, epilogue.params.negative_slope, values);
#pragma unroll
    for (int h = 0; h < 2; ++h) word[h] = PackPair<T>(values[2 * h], values[2 * h + 1]);
  }
};
template <class Tag>
struct PlainOutputs {
  template <class... Arguments>
  __device__ explicit PlainOutputs(const Arguments&...) {}
  template <Finish>
  __device__ __forceinline__ void Round(const Params&, int32_t, const float (&sum)[4],
                                        uint32_t (&word)[2]) const {
    word[0] = PackPair<typename Tag::T>(sum[0], sum[1]);
    word[1] = PackPair<typename Tag::T>(sum[2], sum[3]);
  }
};

template <Finish kWay>
using Way = std::integral_constant<Finish, kWay>;

// Calls f with each constant 0 ... kCount - 1.
template <int kCount, int kFirst = 0, typename F>
__device__ __forceinline__ void ForEachRow(F&& f) {
  if constexpr (kFirst < kCount) {
    f(std::integral_constant<int, kFirst>());
    ForEachRow<kCount, kFirst + 1>(f);
  }
}

template <class Tag>
__global__ void __launch_bounds__(Tag::kCtaThreads,
                                  PairsCtas(Tag::kCtasPerSm, !Tag::Epilogue::kPlain))
    PairsKernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap map,
                const __grid_constant__ CUtensorMap out_map) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  constexpr int kR = Tag::kFilterRows, kPairs = Tag::kPairs, kBytes = Tag::kPixelBytes;
  constexpr int kRows = Tag::kRows;  // of a stage
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const uint32_t box = SharedAddress(dynamic);
  const uint32_t full = box + params.stages * params.stage_bytes, done = full + params.stages * 8;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

  // Channel tiles are the fastest digit: neighbours share cache lines.
  int32_t image, row, column, first_channel;
  params.channel_tiles.Divmod(static_cast<int32_t>(blockIdx.x), &image, &first_channel);
  columns.tiles.Divmod(image, &image, &column);
  rows.tiles.Divmod(image, &image, &row);
  first_channel *= Tag::kChannels, column *= columns.tile, row *= rows.tile;
  image *= params.tile_images;
  const int32_t above = rows.pad - row;  // rows of the box before the image's first
  const int32_t count = min(rows.tile, rows.out - row);

  if (warp == 0 && ElectOne()) {
#pragma unroll 1
    for (int32_t s = 0; s < params.stages; ++s) {
      BarrierInit(full + s * 8, 1);
      BarrierInit(done + s * 8, Tag::kCtaThreads / 32);
    }
    BarrierInitFence();
    PrefetchTensorMap(&map);
    PrefetchTensorMap(&out_map);
  }
  const int32_t filter = params.images_divmod.Div(image);
  // Only one CTA of each channel tile prefetches: all CTAs would queue at the few lines of a narrow
  // filter.
  if (blockIdx.x < params.channel_tiles.divisor) {
    PairedTaps<Tag>::Prefetch(params, filter, first_channel + warp * 8, lane);
  }
  __syncthreads();
  WaitForInputs();
  if (warp == 0 && ElectOne()) {
#pragma unroll 1
    for (int32_t s = 0; s < params.stages; ++s) {
      BarrierArriveExpect(full + s * 8, params.stage_bytes);
      CopyTile4d(box + s * params.stage_bytes, &map, full + s * 8, first_channel,
                 column - columns.pad, image, s * kRows - above);
    }
  }
  __syncwarp();
  const PairedTaps<Tag> taps(params, filter, first_channel + warp * 8, lane);

  // The lane's ldmatrix address for a pair of taps: pixels 0-7, pixels 8-15 (or 0-7 of a second
  // image), and the same for the second tap. Columns that do not exist read other columns.
  auto chunk = [&](int32_t pixel) {
    const int32_t swizzle = kBytes == 128 ? pixel & 7 : pixel >> 1 & 3;
    return pixel * kBytes + ((warp ^ swizzle) << 4);
  };
  const int32_t second = params.tile_images == 2 ? columns.box : 8;  // pixels to the second half
  const int32_t row_bytes = params.stage_bytes / kRows;
  uint32_t offset[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int32_t half = lane / 8 % 2, at = lane % 8 + lane / 16 + 2 * j;
    offset[j] = box + (params.tile_images == 2 ? chunk(half * second + min(at, columns.box - 1))
                                               : chunk(min(half * second + at, columns.box - 1)));
  }
  const uint32_t out = box + chunk(lane / 4) + lane % 4 * 4;

  const Epilogue epilogue(params.epilogue);
  using Outputs = std::conditional_t<Epilogue::kPlain, PlainOutputs<Tag>, PairedOutputs<Tag>>;
  const Outputs outputs(params, epilogue, image, row, column, first_channel + warp * 8, lane);
  PairedSums<Tag> sums;
  const int32_t end = count + kR - 1;
  // The warps take turns, one chunk after the chunk is complete: TMA stores its output rows when
  // all warps have written theirs.
  auto store = [&](int32_t chunk) {
    if (chunk / kRows % (Tag::kCtaThreads / 32) != warp || !ElectOne()) return;
    BarrierWait(done + chunk / kRows * 8, 0);
    const int32_t from = max(chunk - (kR - 1), 0), to = min(chunk + kRows - (kR - 1), count);
#pragma unroll 1
    for (int32_t y = from; y < to; ++y) {
#pragma unroll 1
      for (int32_t n = 0; n < params.tile_images; ++n) {
        StoreTile4d(&out_map, box + y * row_bytes + n * second * kBytes, first_channel, column,
                    image + n, row + y);
      }
    }
    CommitStores();
  };
#pragma unroll 1
  for (int32_t chunk = 0; chunk < end; chunk += kRows) {
    BarrierWait(full + chunk / kRows * 8, 0);
    const int32_t stage = chunk / kRows * params.stage_bytes;
    // kAll: all rows of the chunk exist and complete outputs, so no tests are needed.
    auto walk = [&](auto all, auto way) {
      ForEachRow<kRows>([&](auto u) {
        constexpr bool kAll = decltype(all)::value;
        constexpr int kRow = decltype(u)::value;
        constexpr Finish kWay = decltype(way)::value;
        const int32_t i = chunk + kRow;
        if (kAll || Inside(i - above, rows.in)) {
          sums.template Add<kRow % kR>(offset, stage + kRow * row_bytes, taps);
        } else {
          sums.template Begin<kRow % kR>();
        }
        if (kAll || Inside(i - (kR - 1), count)) {
          const float (&sum)[4] = sums.place[(kRow + 1) % kR];
          uint32_t word[2];
          outputs.template Round<kWay>(params, i - (kR - 1), sum, word);
          const uint32_t to = out + stage + (kRow - (kR - 1)) * row_bytes;
          // Results overwrite pixels R - 1 rows above, which ldmatrix has read for all lanes. For
          // rows of the previous chunk, the barrier at its end orders these accesses; for rows of
          // this chunk, this one does.
          if constexpr (kRow % kR == kR - 1) __syncwarp();
          StoreWord(to, word[0]);
          StoreWord(to + second * kBytes, word[1]);
        }
      });
    };
    const bool all = chunk >= max(kR - 1, above) && chunk + kRows <= min(end, rows.in + above);
    if constexpr (Epilogue::kPlain) {
      all ? walk(std::true_type(), Way<Finish::kNone>())
          : walk(std::false_type(), Way<Finish::kNone>());
    } else if (outputs.TakesSwish()) {
      all ? walk(std::true_type(), Way<Finish::kSwish>())
          : walk(std::false_type(), Way<Finish::kSwish>());
    } else if (!LaneClamp<2>::Takes(epilogue)) {
      walk(std::false_type(), Way<Finish::kAny>());
    } else {
      all ? walk(std::true_type(), Way<Finish::kClamp>())
          : walk(std::false_type(), Way<Finish::kClamp>());
    }
    FenceForCopies();
    __syncwarp();
    if (lane == 0) BarrierArrive(done + chunk / kRows * 8);
    if (chunk > 0) store(chunk - kRows);
  }
  store((end - 1) / kRows * kRows);
  if (ElectOne()) WaitForStoresToRead();
}

// The tensor map of boxes [row][image][column][channel] of the gathered tensor, or of rows of an
// image's tile of the result.
inline Status EncodeRows(DType dtype, const void* address, int32_t channels, int32_t width,
                         int32_t height, int64_t images, const int32_t (&box)[4],
                         CUtensorMap* map) {
  DenseTensor tensor;
  tensor.dtype = dtype;
  tensor.rank = 4;
  tensor.address = address;
  tensor.extent[0] = channels;
  tensor.extent[1] = width;
  tensor.extent[2] = images;
  tensor.extent[3] = height;
  tensor.stride[1] = channels;
  tensor.stride[2] = int64_t{channels} * width * height;
  tensor.stride[3] = int64_t{channels} * width;
  return EncodeTiledMap(tensor, box, map);
}

// kFilterRows_ x kFilterColumns_ taps at stride 1; kChannelBlocks_ (4 or 8) blocks of 8 channels,
// one warp each.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kChannelBlocks_,
          int kCtasPerSm_>
struct Pairs {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  static constexpr int kPairs = (kFilterColumns + 1) / 2;
  static constexpr int kRows = PairsRows(kFilterRows);
  static constexpr int kChannels = 8 * kChannelBlocks_, kPixelBytes = kChannels * 2;
  static constexpr int kCtasPerSm = kCtasPerSm_, kCtaThreads = 32 * kChannelBlocks_;
  static_assert(kPixelBytes == 64 || kPixelBytes == 128);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const Params params = GatherParams(plan, operands);
    const Axis &rows = params.axis[1], &columns = params.axis[2];
    CUtensorMap map, out_map;
    JAXCONV_RETURN_IF_ERROR(
        EncodeRows(kType, operands.lhs, params.channels, columns.in, rows.in, params.images,
                   {kChannels, columns.box, params.tile_images, Tag::kRows}, &map));
    JAXCONV_RETURN_IF_ERROR(EncodeRows(kType, operands.out, params.channels, columns.out, rows.out,
                                       params.images, {kChannels, columns.tile, 1, 1}, &out_map));
    return LaunchWithMaps<PairsKernel<Tag>>(plan, params, Tag::kCtaThreads, stream, map, out_map);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_PAIRS_SM90_CUH_
