// block_diagonal, fprop and dgrad: groups of 2 to 32 channels on the tensor cores (sm_80), operands
// of 16 bits or float32.
//
// The groups of kBlock (16 or 32) neighbouring channels form one product with a block-diagonal
// filter:
//
//     out[pixel, 16 channels] += sum over taps of gathered[pixel under the tap, 16 channels] F[tap]
//
//            4 channels a group:    x x x x . . . . . . . . . . . .
//            F[tap] 16 x 16         . . . . x x x x . . . .          zeros multiply other groups'
//                                   . . . . . . . . x x x x ...      channels
//
// Zeros waste 3/4 of the products for groups of 4, but the limit is still memory. dgrad is the same
// product of dy with the filter rotated and transposed; copying dy's box inserts the zeros of a
// stride.
//
// Tile: 64 channels, and strips of up to 16 kBlocksM positions, from any rows x columns or from
// several whole maps. Warp w has the block of channels w % (64 / kBlock) and the strip w / (64 /
// kBlock). ldmatrix reads A directly from the box, whose pixels are rows of 128 bytes (tile.cuh). B
// has the order of mma.sync in shared memory, 16 bytes for each lane. Its zeros are written once,
// the elements of groups whenever the channels change:
//
//     stage 0: box | stage 1: box | B [block][tap][fragment][lane] | tables
//
// B's columns are permuted so that a lane has the sums of kBlock / 4 neighbouring channels of a
// pixel. A tap of 16 positions x 16 channels takes 4 wavefronts of ldmatrix, 2 products, and 4 /
// kBlocksM wavefronts of B. 3x3 with 28 x 8 positions: 2 x 43 KB of boxes, 18 KB of B, two CTAs on
// an SM.
//
// float32: a tile has 32 channels (equal bytes), a block 8, 16 or 32, and a product 8 gathered
// channels. B is copied element by element and rounded to TF32 in shared memory, A in registers.
// With three TF32 products (common/split_tf32.cuh) both are split in registers; a run of the
// reduction is up to 16 gathered channels under one tap.
//
// The next item's box is copied during the products of this one; two barriers for each item.
//
// Zeros of F multiply the channels of other groups in the block, so an Inf or NaN in x spreads to
// the outputs of its block of channels.
//
// Refused, with a reason (plan.cc): groups with different numbers of input and output channels or
// with sizes that do not divide 16 or 32, channels that are not multiples of 8, boxes beyond the
// shared memory.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/block_diagonal/filter_words.cuh"
#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/tile.cuh"
#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/common/split_tf32.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::block_diagonal {

// kBlock: channels of a block. kBlocksM: blocks of 16 positions of a warp. kThreeTf32: float32 as
// three products.
template <Op kOp, DType kType, int kBlock_, int kBlocksM_, int kCtasPerSm_,
          bool kThreeTf32_ = false>
struct Gather {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kChannels = TileChannels(sizeof(T));
  static constexpr int kBlock = kBlock_, kBlocksM = kBlocksM_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kBlocks = kChannels / kBlock, kStrips = kWarps / kBlocks;
  static constexpr int kStepsK = kBlock * int{sizeof(T)} / 32, kBlocksN = kBlock / 8;
  static constexpr bool kThreeTf32 = kThreeTf32_;
  using Filter = FilterWords<kStepsK, kBlocksN>;

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream);
};

// Copies B of a tile's channels and all taps: the elements of the groups, which are surrounded by
// zeros. In lane 4 g + t, word `half` of step kk and columns nb is the pair of gathered channels at
// 16 kk + 8 half + 2 t, for channel g / 2 * 2 kBlocksN + 2 nb + g % 2 of the result.
//
// A lane has two neighbouring channels of the result. A warp has one or two of the group's pairs of
// gathered channels and, for groups of 2 to 8 channels, every second to eighth tap.
//
// For 32-bit elements see CopyFilterElements (filter_words.cuh).
template <class Tag>
__device__ __forceinline__ void FillFilter(const Params& params, const TilePlace& tile,
                                           uint32_t to) {
  using T = typename Tag::T;
  constexpr int kBatch = 3;  // taps whose loads are in flight together
  const int warp = UniformWarp();
  const int in_tile = ComputedHere(threadIdx.x) % 32 * 2, in_block = in_tile % Tag::kBlock;
  const int32_t channel = tile.first_channel + in_tile;
  // B of missing channels is not written, because their outputs are not stored.
  if (channel >= params.channels) return;
  const int32_t taps = params.axis[0].taps * params.axis[1].taps * params.axis[2].taps;
  const int32_t group_log2 = ComputedHere(params.group_log2);
  const int32_t in_group = (1 << group_log2) - 1;  // a mask
  // One of the two strides is 1: a word contains either the pair or the two channels.
  const bool pairs = ComputedHere(params.reduction_stride == 1) != 0;
  const bool flip = ComputedHere(params.flip) != 0;
  const int64_t second = pairs ? params.channel_stride : params.reduction_stride;
  const T* filter = static_cast<const T*>(params.filter) +
                    params.images_divmod.Div(tile.image) * params.filter_stride +
                    (channel >> group_log2) * params.group_stride +
                    (channel & in_group) * params.channel_stride;
  const int g = in_block / (2 * Tag::kBlocksN) * 2, nb = in_block / 2 % Tag::kBlocksN;
  to += in_tile / Tag::kBlock * taps * Tag::Filter::kTapBytes + nb / 2 * 512 + g * 64 + nb % 2 * 8;

  const int32_t all_pairs = 1 << (group_log2 - 1);
  const int32_t warps_log2 = min(group_log2 - 1, 3);  // of a tap
  const int32_t first_tap = warp >> warps_log2, tap_step = kWarps >> warps_log2;
  const int64_t tap_stride = flip ? -params.tap_stride : params.tap_stride;
#pragma unroll 1
  for (int32_t pair = warp & ((1 << warps_log2) - 1); pair < all_pairs; pair += kWarps) {
    const int32_t f = (in_block & ~in_group) + 2 * pair;
    const T* source = filter + 2 * pair * params.reduction_stride +
                      (flip ? taps - 1 - first_tap : first_tap) * params.tap_stride;
    uint32_t at = to + first_tap * Tag::Filter::kTapBytes + f / 16 * (Tag::kBlocksN / 2 * 512) +
                  f / 8 % 2 * 4 + f % 8 / 2 * 16;
#pragma unroll 1
    for (int32_t tap = first_tap; tap < taps; tap += kBatch * tap_step) {
      uint32_t word[kBatch][2];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tap + i * tap_step < taps) {
          word[i][0] = __ldg(reinterpret_cast<const uint32_t*>(source));
          word[i][1] = __ldg(reinterpret_cast<const uint32_t*>(source + second));
        }
        source += tap_step * tap_stride;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (tap + i * tap_step < taps) {
          const uint32_t lower = __byte_perm(word[i][0], word[i][1], 0x5410);
          const uint32_t upper = __byte_perm(word[i][0], word[i][1], 0x7632);
          StoreWord(at, pairs ? word[i][0] : lower);
          StoreWord(at + 64, pairs ? word[i][1] : upper);
        }
        at += tap_step * Tag::Filter::kTapBytes;
      }
    }
  }
}

// AddTap with three TF32 products (common/split_tf32.cuh). words: the lane's words of B.
template <class Tag, int kBlocks>
__device__ __forceinline__ void AddTapSplit(uint32_t box, uint32_t filter,
                                            const uint32_t (&words)[Tag::Filter::kWords],
                                            const int32_t (&base)[Tag::kBlocksM],
                                            float (&sums)[Tag::kBlocksM][Tag::kBlocksN][4]) {
  constexpr int kBlocksN = Tag::kBlocksN;
  constexpr int kSteps = Tag::kStepsK < kSplitRunSteps ? Tag::kStepsK : kSplitRunSteps;
  auto& acc = reinterpret_cast<float (&)[kBlocks][kBlocksN][4]>(sums);
#pragma unroll
  for (int first = 0; first < Tag::kStepsK; first += kSteps) {
    uint32_t a[kSteps][4], b[kSteps][kBlocksN][2];
#pragma unroll
    for (int i = 0; i < kSteps * kBlocksN * 2; ++i) {
      b[i / (kBlocksN * 2)][i / 2 % kBlocksN][i % 2] = words[first * kBlocksN * 2 + i];
    }
    auto read_a = [&](int m, auto& of_block) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        LoadMatrices(box + base[m] + (first + s) * 32, of_block[s]);
      }
    };
    read_a(0, a);
    const uint32_t left = MultiplySplitRun(b, a, acc, read_a, [](auto) {});
    if (__any_sync(0xffffffff, left != 0)) {
      // Block by block, which needs few registers.
      Unroll<kBlocks>([&](auto block) {
        constexpr int m = decltype(block)::value;
        auto& of_block = reinterpret_cast<float (&)[1][kBlocksN][4]>(acc[m]);
        PromoteWithCare<kSteps>(left >> m & 1, of_block, [&](int step, auto& of_a, auto& of_b) {
          LoadMatrices(box + base[m] + (first + step) * 32, of_a[0]);
#pragma unroll
          for (int i = 0; i < kBlocksN * 2; ++i) {
            of_b[i / 2][i % 2] =
                LoadWord(filter + Tag::Filter::OfWord((first + step) * kBlocksN * 2 + i));
          }
        });
      });
    }
  }
}

// Adds one tap. box: the first pixel of the stage under the tap. base: the lane's pixel and chunk
// for every 16 positions, in bytes. filter: the lane's piece of the block's tap. kBlocks: blocks in
// the warp's strip.
template <class Tag, int kBlocks>
__device__ __forceinline__ void AddTap(uint32_t box, uint32_t filter,
                                       const int32_t (&base)[Tag::kBlocksM],
                                       float (&sums)[Tag::kBlocksM][Tag::kBlocksN][4]) {
  using T = typename Tag::T;
  uint32_t b[Tag::Filter::kWords];
  Tag::Filter::Load(filter, b);
  if constexpr (Tag::kThreeTf32) {
    AddTapSplit<Tag, kBlocks>(box, filter, b, base, sums);
  } else {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int kk = 0; kk < Tag::kStepsK; ++kk) {
        uint32_t a[4];
        LoadMatrices(box + base[m] + kk * 32, a);
        RoundFragment<T>(a);
#pragma unroll
        for (int nb = 0; nb < Tag::kBlocksN; ++nb) {
          const int at = (kk * Tag::kBlocksN + nb) * 2;
          MultiplyAdd<T>(sums[m][nb], a, b[at], b[at + 1]);
        }
      }
    }
  }
}

// Adds the taps of one depth tap for a strip of `blocks` <= kBlocks, a template argument inside, so
// that the loops contain no branches.
template <class Tag, int kBlocks = Tag::kBlocksM>
__device__ __forceinline__ void AddTaps(const Params& params, int blocks, uint32_t box,
                                        uint32_t filter, const int32_t (&base)[Tag::kBlocksM],
                                        float (&sums)[Tag::kBlocksM][Tag::kBlocksN][4]) {
  if (blocks < kBlocks) {
    if constexpr (kBlocks > 1) {
      AddTaps<Tag, kBlocks - 1>(params, blocks, box, filter, base, sums);
    }
    return;
  }
  constexpr int kUnrolled = Tag::kThreeTf32 ? 1 : 3;  // taps
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const int32_t step = columns.dilation * kPixelBytes;
  const int32_t row_step = rows.dilation * params.box_row_bytes - columns.taps * step;
#pragma unroll 1
  for (int32_t r = 0; r < rows.taps; ++r) {
    int32_t s = 0;
#pragma unroll 1
    for (; s + kUnrolled <= columns.taps; s += kUnrolled) {
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i) {
        AddTap<Tag, kBlocks>(box + i * step, filter + i * Tag::Filter::kTapBytes, base, sums);
      }
      box += kUnrolled * step, filter += kUnrolled * Tag::Filter::kTapBytes;
    }
    if constexpr (kUnrolled > 1) {  // else none is left, and the loop would be compiled for nothing
#pragma unroll 1
      for (; s < columns.taps; ++s) {
        AddTap<Tag, kBlocks>(box, filter, base, sums);
        box += step, filter += Tag::Filter::kTapBytes;
      }
    }
    box += row_step;
  }
}

// Stores the lane's outputs of a tile. positions: the lane's first position, in shared memory.
// channel: the first of its 2 kBlocksN channels.
template <class Tag, typename Out>
__device__ __forceinline__ void StoreTile(const Params& params,
                                          const typename Tag::Epilogue& epilogue,
                                          const TilePlace& tile, int32_t channel,
                                          uint32_t positions,
                                          const float (&sums)[Tag::kBlocksM][Tag::kBlocksN][4]) {
  constexpr int kCount = 2 * Tag::kBlocksN;
  if (channel >= params.channels) return;
  const uint32_t limits = Limits(params, tile);
  const int64_t first_pixel = FirstPixel(params, tile);
  auto* const first = reinterpret_cast<unsigned char*>(static_cast<Out*>(params.out) +
                                                       first_pixel * params.channels + channel);
  const auto pitch = static_cast<uint32_t>(params.channels * sizeof(Out));
#pragma unroll
  for (int m = 0; m < Tag::kBlocksM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t row_column, pixel;
      LoadPair(positions + (m * Tag::kStrips * 16 + half * 8) * kPlaceBytes, &row_column, &pixel);
      if (!InTile(limits, row_column)) continue;
      alignas(16) Out elements[kCount];
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const OutputPlace place{(first_pixel + pixel) * params.channels + channel + c,
                                static_cast<int32_t>(first_pixel + pixel), channel + c, true};
        elements[c] = FromFloat<Out>(
            epilogue.template operator()<Out>(sums[m][c / 2][half * 2 + c % 2], place));
      }
      using Piece = std::conditional_t<sizeof(elements) == 8, uint2, uint4>;
      Piece pieces[sizeof(elements) / sizeof(Piece)];
      memcpy(pieces, elements, sizeof(elements));
      auto* to = reinterpret_cast<Piece*>(first + uint64_t{pixel} * pitch);
#pragma unroll
      for (int i = 0; i < int{sizeof(elements) / sizeof(Piece)}; ++i) to[i] = pieces[i];
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(kThreads, Tag::kCtasPerSm)
    GatherKernel(const __grid_constant__ Params params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis& rows = params.axis[1];
  const int lane = threadIdx.x % 32, warp = UniformWarp();
  const int block = warp % Tag::kBlocks, strip = warp / Tag::kBlocks;
  const int32_t bytes_of_depth = rows.taps * params.axis[2].taps * Tag::Filter::kTapBytes;
  const int32_t bytes_of_block = params.axis[0].taps * bytes_of_depth;
  const uint32_t stages = SharedAddress(dynamic), filter = stages + 2 * params.stage_bytes;
  const uint32_t filter_at = filter + block * bytes_of_block + Tag::Filter::OfLane(lane);
  const Tables tables(filter + Tag::kBlocks * bytes_of_block);
  const uint32_t box_of_lane = tables.boxes + (strip * 16 + lane % 16) * kPlaceBytes + 4;
  const int32_t chunk_bytes = block * Tag::kBlock * int{sizeof(T)} + lane / 16 * 16;
  const Epilogue epilogue(params.epilogue);

  // Blocks of 16 positions: strip, strip + kStrips, ...
  const int32_t all_blocks = (params.tile_pixels + 15) / 16;
  const int blocks = (all_blocks - strip + Tag::kStrips - 1) / Tag::kStrips;
  auto fill = [&](int32_t item, int32_t depth_tap, int stage) {
    CopyBox<T>(params, TilePlace(params, item, Tag::kChannels), depth_tap, 0, tables.gathered,
               stages + stage * params.stage_bytes);
  };
  FillTables(params, 0, tables);
  // The zeros of B are the same for every filter.
  for (int32_t i = threadIdx.x * 16; i < Tag::kBlocks * bytes_of_block; i += kThreads * 16) {
    StoreChunk(filter + i, {0, 0, 0, 0});
  }
  __syncthreads();
  const Cursor range(params);
  if (!range.Done()) fill(range.item, 0, 0);
  CopyAsyncCommit();
  int stage = 0;
  int32_t held = -1;
  for (int32_t item = range.item; item < range.end; ++item) {
    {
      const TilePlace tile(params, item, Tag::kChannels);
      const int32_t wanted =
          params.images_divmod.Div(tile.image) * params.channels + tile.first_channel;
      // While the box is being copied.
      if (wanted != held) {
        if constexpr (sizeof(T) == 4) {
          // As for 16 bits, a lane has neighbouring channels of the result.
          CopyFilterElements<typename Tag::Filter>(params, tile, filter, [](int c) {
            return c / 2 % Tag::kBlocksN * 8 + c / (2 * Tag::kBlocksN) * 2 + c % 2;
          });
          CopyAsyncCommit();
          CopyAsyncWait<0>();
          if constexpr (!Tag::kThreeTf32) {
            __syncthreads();
            RoundFilter(filter, Tag::kBlocks * bytes_of_block);
          }
        } else {
          FillFilter<Tag>(params, tile, filter);
        }
        held = wanted;
      }
    }
    float sums[Tag::kBlocksM][Tag::kBlocksN][4] = {};
#pragma unroll 1
    for (int32_t depth_tap = 0; depth_tap < params.axis[0].taps; ++depth_tap) {
      const bool last = depth_tap + 1 == params.axis[0].taps;
      if (!last || item + 1 < range.end) {
        fill(item + last, last ? 0 : depth_tap + 1, stage ^ 1);
      }
      CopyAsyncCommit();
      CopyAsyncWait<1>();
      __syncthreads();
      // Read again for each box, so that they do not occupy registers while the copies of the next
      // box start.
      int32_t base[Tag::kBlocksM];
#pragma unroll
      for (int m = 0; m < Tag::kBlocksM; ++m) {
        base[m] = LoadWord(box_of_lane + m * Tag::kStrips * 16 * kPlaceBytes) + chunk_bytes;
      }
      AddTaps<Tag>(params, blocks, stages + stage * params.stage_bytes,
                   filter_at + depth_tap * bytes_of_depth, base, sums);
      // The next pass fills this stage, and after the last pass B.
      __syncthreads();
      stage ^= 1;
    }
    // Computed again to save registers.
    const TilePlace tile(params, ComputedHere(item), Tag::kChannels);
    const int32_t channel =
        tile.first_channel + block * Tag::kBlock + lane % 4 * (2 * Tag::kBlocksN);
    const uint32_t mine = tables.outputs + (strip * 16 + lane / 4) * kPlaceBytes;
    if (params.out_is_f32) {
      StoreTile<Tag, float>(params, epilogue, tile, channel, mine, sums);
    } else {
      StoreTile<Tag, T>(params, epilogue, tile, channel, mine, sums);
    }
  }
}

template <Op kOp, DType kType, int kBlock_, int kBlocksM_, int kCtasPerSm_, bool kThreeTf32_>
template <class Tag>
Status Gather<kOp, kType, kBlock_, kBlocksM_, kCtasPerSm_, kThreeTf32_>::Launch(
    const Plan& plan, const Operands& operands, void* stream) {
  return LaunchHaloGather<Params, GatherKernel<Tag>>(plan, operands, stream);
}

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_GATHER_CUH_
