// Global memory -> swizzled shared memory for the tensor-core implicit GEMMs.
//
// The reduction is one flat index over (tap, channel) in fprop and dgrad and over the output's
// pixels in wgrad, so a channel count that does not fill a stage wastes nothing. A thread always
// copies the same chunk column of a stage:
//     fprop A, dgrad A and B   the column is a reduction index: one tap and channel for all rows
//     fprop B, wgrad B         rows are reduction indices, the column is gemm_n
//     wgrad A                  rows are pixels, the column is one tap and channel, for ever
// What the gather needs of a pixel is two words: where it lies at tap 0, and one bit for each tap
// coordinate of each axis that says whether that coordinate stays inside the source. A tap is
// inside when its (up to three) bits are set. Everything else is zero-filled: the padding, rows
// past the last, and the reduction past its end, on both sides.
//
// A chunk (16 bytes) is one copy where both channel counts allow; the "narrow" instances cut it
// into copies of 8 or 4 bytes, or into 16-bit loads that pass through registers.
#ifndef JAXCONV_CUDA_DEVICE_ASYNC_LOADERS_CUH_
#define JAXCONV_CUDA_DEVICE_ASYNC_LOADERS_CUH_

#include <cstdint>

#include "core/implicit_gemm.h"
#include "cuda/device/igemm_wmma_params.h"
#include "cuda/device/mma_tile.cuh"

namespace jaxconv {

struct GatherPixel {
  int32_t pixel;  // of the gathered tensor's batch, at tap coordinates 0; may lie outside
  uint32_t taps;  // axis 0's bits lowest; bit 31 is never set
};
// A tap that no pixel has.
inline constexpr uint32_t kNoTap = 1u << 31;

// What one CTA knows of its tile.
struct WmmaTile {
  AxisPhase phase[3];
  int32_t m_first, n_first;
  int32_t k_begin, k_end;  // reduction indices of this slice
  const void* a;           // of this batch and group
  const void* b;
};

// Destination row or pixel -> GatherPixel.
__device__ __forceinline__ GatherPixel LocatePixel(const ImplicitGemm& gemm,
                                                   const AxisPhase (&phase)[3], int32_t row,
                                                   int32_t rows) {
  GatherPixel result{0, 0};
  if (row >= rows) return result;
  int32_t image, j[3], src[3];
  gemm.DecodeRow(phase, row, &image, j);
  uint32_t bit = 1;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    src[a] = phase[a].src0 + j[a] * gemm.axis[a].src_per_j;
    for (int t = 0; t < phase[a].tap_count; ++t, bit <<= 1) {
      if (gemm.axis[a].InSource(src[a] + t * gemm.axis[a].src_per_t)) result.taps |= bit;
    }
  }
  result.pixel = image * static_cast<int32_t>(gemm.SourceImage()) +
                 static_cast<int32_t>(gemm.SourcePixel(src[0], src[1], src[2]));
  return result;
}

// A reduction index of fprop or dgrad, or a row index of wgrad, as (tap, channel).
struct TapChannel {
  int32_t pixel;    // distance of the tap's pixel from tap 0's
  uint32_t taps;    // its bits
  int32_t channel;  // inside the group
  int32_t filter_tap;

  __device__ __forceinline__ static TapChannel Decode(const ImplicitGemm& gemm,
                                                      const AxisPhase (&phase)[3],
                                                      const FastDivmod& channels, int32_t index,
                                                      int32_t end) {
    TapChannel result{0, kNoTap, 0, 0};
    if (index >= end) return result;
    int32_t tap, t[3];
    channels.Divmod(index, &tap, &result.channel);
    gemm.DecodeTap(phase, tap, t);
    result.pixel = static_cast<int32_t>(gemm.SourcePixel(t[0] * gemm.axis[0].src_per_t,
                                                         t[1] * gemm.axis[1].src_per_t,
                                                         t[2] * gemm.axis[2].src_per_t));
    result.taps = (1u << t[0] | 1u << (phase[0].tap_count + t[1]) |
                   1u << (phase[0].tap_count + phase[1].tap_count + t[2]));
    result.filter_tap = gemm.TapIndex(phase[0].first_tap + t[0] * gemm.axis[0].tap_period,
                                      phase[1].first_tap + t[1] * gemm.axis[1].tap_period,
                                      phase[2].first_tap + t[2] * gemm.axis[2].tap_period);
    return result;
  }
  __device__ __forceinline__ bool Hits(uint32_t pixel_taps) const {
    return (taps & ~pixel_taps) == 0;
  }
};

// How a CTA's threads share the chunks of an operand: every thread has one column and kPasses rows.
template <class Operand, int kThreads>
struct ChunkOwner {
  static constexpr int kRowsOfPass = kThreads / Operand::kChunks;
  static constexpr int kPasses = Operand::kRows / kRowsOfPass;
  static_assert(kPasses >= 1 && kRowsOfPass * Operand::kChunks == kThreads);
  // So that the swizzle of a thread's rows is the same in all passes.
  static_assert(kRowsOfPass % 8 == 0 || Operand::Swizzle(kRowsOfPass) == 0);

  __device__ static int Column() { return threadIdx.x % Operand::kChunks; }
  __device__ static int Row() { return threadIdx.x / Operand::kChunks; }
  __device__ static uint32_t Offset() { return Operand::Offset(Row(), Column()); }
};

// Chunks that travel as 16-bit loads: held from Issue to Finish.
template <class Operand, int kThreads, bool kEnabled>
struct HeldChunks {
  static constexpr int kPasses = ChunkOwner<Operand, kThreads>::kPasses;
  uint16_t value[kPasses][8];
  __device__ __forceinline__ void Store(uint32_t shared) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = value[i][2 * w] | uint32_t{value[i][2 * w + 1]} << 16;
      StoreChunk(shared + i * ChunkOwner<Operand, kThreads>::kRowsOfPass * Operand::kRowBytes,
                 word);
    }
  }
};
template <class Operand, int kThreads>
struct HeldChunks<Operand, kThreads, false> {};

// kCopyBytes of global memory to piece `piece` of a chunk.
template <int kCopyBytes, class Held>
__device__ __forceinline__ void CopyPiece(Held& held, int pass, int piece, uint32_t chunk,
                                          const void* source, bool valid) {
  if constexpr (kCopyBytes == 2) {
    held.value[pass][piece] =
        valid ? __ldg(static_cast<const unsigned short*>(source)) : uint16_t{0};
  } else {
    CopyAsync<kCopyBytes>(chunk + piece * kCopyBytes, source, valid);
  }
}

// Calls body with the copy width as a compile-time constant.
template <typename T, bool kNarrow, typename Body>
__device__ __forceinline__ void WithCopyBytes(int32_t bytes, Body body) {
  if constexpr (!kNarrow) {
    body(std::integral_constant<int, 16>());
  } else if (bytes == 16) {
    body(std::integral_constant<int, 16>());
  } else if (bytes == 8) {
    body(std::integral_constant<int, 8>());
  } else if (sizeof(T) == 4 || bytes == 4) {
    body(std::integral_constant<int, 4>());
  } else {
    body(std::integral_constant<int, sizeof(T) == 4 ? 4 : 2>());
  }
}

// One operation's two operands. OperandA and OperandB: OperandTile.
template <Op kOp, typename T, class Tile, class OperandA, class OperandB, bool kNarrow>
class AsyncLoader {
 public:
  static constexpr int kTileK = OperandA::kTileK;
  static constexpr int kThreads = Tile::kThreads;
  // wgrad: pixels are located kThreads at a time, a group ahead of their use.
  static constexpr int kStagesOfGroup = kThreads / kTileK;
  static constexpr int kWidth = 16 / sizeof(T);
  struct Shared {
    WmmaTile tile;
    GatherPixel pixel[kOp == Op::kWgrad ? 2 * kThreads : Tile::kTileM];
    // wgrad, narrow: the tile's rows.
    TapChannel row[kOp == Op::kWgrad && kNarrow ? Tile::kTileM : 1];
  };

  __device__ __forceinline__ AsyncLoader(const IgemmWmmaParams& params, Shared& shared)
      : params_(params), shared_(shared) {
    const ImplicitGemm& gemm = params.gemm;
    const WmmaTile& tile = shared.tile;
    k_ = tile.k_begin;
    if constexpr (kOp == Op::kWgrad) {
      static_assert(kStagesOfGroup >= 1 && Tile::kStages - 1 < 2 * kStagesOfGroup);
      LocateGroup(0);
      LocateGroup(1);
      next_group_ = 2;
      stage_ = 0;
      const int32_t m = tile.m_first + OwnerA::Column() * kWidth;
      if constexpr (kNarrow) {
        for (int r = threadIdx.x; r < Tile::kTileM; r += kThreads) {
          shared.row[r] = TapChannel::Decode(gemm, tile.phase, gemm.row_channels_divmod,
                                             tile.m_first + r, gemm.gemm_m);
        }
      } else {
        cursor_ = TapChannel::Decode(gemm, tile.phase, gemm.row_channels_divmod, m, gemm.gemm_m);
      }
    } else {
      const int32_t rows = ImplicitGemm::Rows(gemm.images, tile.phase);
      for (int r = threadIdx.x; r < Tile::kTileM; r += kThreads) {
        shared.pixel[r] = LocatePixel(gemm, tile.phase, tile.m_first + r, rows);
      }
      if constexpr (!kNarrow) {
        cursor_.channel = 1 << 30;  // decode at the first stage
      }
    }
    __syncthreads();
    if constexpr (kOp != Op::kWgrad) {
#pragma unroll
      for (int i = 0; i < OwnerA::kPasses; ++i) {
        pixel_[i] = shared.pixel[OwnerA::Row() + i * OwnerA::kRowsOfPass];
      }
    }
  }

  __device__ __forceinline__ void Issue(uint32_t slot) {
    const uint32_t a = slot + OwnerA::Offset();
    const uint32_t b = slot + Tile::kBytesOfA + OwnerB::Offset();
    if constexpr (kOp == Op::kWgrad) {
      // The half of the table that group next_group_ - 2 used: everybody has passed a barrier
      // since, except in the prologue, where the first two groups suffice.
      if (stage_ >= (next_group_ - 1) * kStagesOfGroup && stage_ >= Tile::kStages - 1) {
        LocateGroup(next_group_++);
      }
      WithCopyBytes<T, kNarrow>(params_.a_copy_bytes, [&](auto bytes) { IssuePixels<bytes>(a); });
      WithCopyBytes<T, kNarrow>(params_.b_copy_bytes, [&](auto bytes) { IssueMatrix<bytes>(b); });
      ++stage_;
    } else if constexpr (kOp == Op::kFprop) {
      WithCopyBytes<T, kNarrow>(params_.a_copy_bytes,
                                [&](auto bytes) { IssueGather<bytes>(a, 0); });
      WithCopyBytes<T, kNarrow>(params_.b_copy_bytes, [&](auto bytes) { IssueMatrix<bytes>(b); });
    } else {
      WithCopyBytes<T, kNarrow>(params_.a_copy_bytes,
                                [&](auto bytes) { IssueGather<bytes>(a, b); });
    }
    k_ += kTileK;
  }

  __device__ __forceinline__ void Finish(uint32_t slot) {
    if constexpr (kNarrow && sizeof(T) == 2) {
      if (params_.a_copy_bytes == 2) held_a_.Store(slot + OwnerA::Offset());
      if (params_.b_copy_bytes == 2) {
        held_b_.Store(slot + Tile::kBytesOfA + OwnerB::Offset());
      }
    }
  }

 private:
  using OwnerA = ChunkOwner<OperandA, kThreads>;
  using OwnerB = ChunkOwner<OperandB, kThreads>;

  __device__ __forceinline__ const T* A() const { return static_cast<const T*>(shared_.tile.a); }
  __device__ __forceinline__ const T* B() const { return static_cast<const T*>(shared_.tile.b); }

  // fprop A; dgrad A and, from the same reduction indices, B.
  template <int kBytes>
  __device__ __forceinline__ void IssueGather(uint32_t a, uint32_t b) {
    const ImplicitGemm& gemm = params_.gemm;
    const WmmaTile& tile = shared_.tile;
    const int32_t k = k_ + OwnerA::Column() * kWidth;
    if constexpr (kBytes == 16) {
      // Inside a tap the next stage is kTileK channels on.
      cursor_.channel += kTileK;
      if (kNarrow || cursor_.channel >= gemm.reduce_channels || k >= tile.k_end) {
        cursor_ = TapChannel::Decode(gemm, tile.phase, gemm.reduce_channels_divmod, k, tile.k_end);
      }
      GatherPiece<16>(cursor_, 0, a, b);
    } else {
#pragma unroll
      for (int piece = 0; piece < 16 / kBytes; ++piece) {
        const TapChannel at = TapChannel::Decode(gemm, tile.phase, gemm.reduce_channels_divmod,
                                                 k + piece * (kBytes / int{sizeof(T)}), tile.k_end);
        GatherPiece<kBytes>(at, piece, a, b);
      }
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void GatherPiece(const TapChannel& at, int piece, uint32_t a,
                                              uint32_t b) {
    const ImplicitGemm& gemm = params_.gemm;
    const T* source = A() + at.channel;
#pragma unroll
    for (int i = 0; i < OwnerA::kPasses; ++i) {
      CopyPiece<kBytes>(held_a_, i, piece, a + i * OwnerA::kRowsOfPass * OperandA::kRowBytes,
                        source + int64_t{pixel_[i].pixel + at.pixel} * gemm.src_channels,
                        at.Hits(pixel_[i].taps));
    }
    if constexpr (kOp == Op::kDgrad) {
      const int32_t n = shared_.tile.n_first + OwnerB::Row();
      const T* filter = B() + at.filter_tap * gemm.b_tap + at.channel + int64_t{n} * gemm.b_column;
#pragma unroll
      for (int i = 0; i < OwnerB::kPasses; ++i) {
        CopyPiece<kBytes>(held_b_, i, piece, b + i * OwnerB::kRowsOfPass * OperandB::kRowBytes,
                          filter + int64_t{i * OwnerB::kRowsOfPass} * gemm.b_column,
                          at.taps != kNoTap && n + i * OwnerB::kRowsOfPass < gemm.gemm_n);
      }
    }
  }

  // fprop B, wgrad B: rows k of a matrix whose columns are gemm_n.
  template <int kBytes>
  __device__ __forceinline__ void IssueMatrix(uint32_t b) {
    const ImplicitGemm& gemm = params_.gemm;
    const WmmaTile& tile = shared_.tile;
    const int32_t n = tile.n_first + OwnerB::Column() * kWidth;
    const int32_t k = k_ + OwnerB::Row();
    if (kOp == Op::kWgrad || params_.all_taps) {
      const T* source = B() + int64_t{k} * gemm.b_reduce + n;
#pragma unroll
      for (int i = 0; i < OwnerB::kPasses; ++i) {
        MatrixRow<kBytes>(i, b, source + int64_t{i * OwnerB::kRowsOfPass} * gemm.b_reduce, n,
                          k + i * OwnerB::kRowsOfPass < tile.k_end);
      }
    } else {
#pragma unroll
      for (int i = 0; i < OwnerB::kPasses; ++i) {
        const TapChannel at = TapChannel::Decode(gemm, tile.phase, gemm.reduce_channels_divmod,
                                                 k + i * OwnerB::kRowsOfPass, tile.k_end);
        MatrixRow<kBytes>(i, b, B() + at.filter_tap * gemm.b_tap + at.channel * gemm.b_reduce + n,
                          n, at.taps != kNoTap);
      }
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void MatrixRow(int pass, uint32_t b, const T* source, int32_t n,
                                            bool valid) {
    constexpr int kElements = kBytes / int{sizeof(T)};
#pragma unroll
    for (int piece = 0; piece < 16 / kBytes; ++piece) {
      CopyPiece<kBytes>(held_b_, pass, piece, b + pass * OwnerB::kRowsOfPass * OperandB::kRowBytes,
                        source + piece * kElements,
                        valid && n + piece * kElements < params_.gemm.gemm_n);
    }
  }

  // wgrad A.
  template <int kBytes>
  __device__ __forceinline__ void IssuePixels(uint32_t a) {
    const ImplicitGemm& gemm = params_.gemm;
    const GatherPixel* pixels =
        shared_.pixel + stage_ % (2 * kStagesOfGroup) * kTileK + OwnerA::Row();
    constexpr int kElements = kBytes / int{sizeof(T)};
#pragma unroll
    for (int piece = 0; piece < 16 / kBytes; ++piece) {
      TapChannel at;
      if constexpr (kNarrow) {
        at = shared_.row[OwnerA::Column() * kWidth + piece * kElements];
      } else {
        at = cursor_;
      }
      const T* source = A() + at.channel;
#pragma unroll
      for (int i = 0; i < OwnerA::kPasses; ++i) {
        const GatherPixel pixel = pixels[i * OwnerA::kRowsOfPass];
        CopyPiece<kBytes>(held_a_, i, piece, a + i * OwnerA::kRowsOfPass * OperandA::kRowBytes,
                          source + int64_t{pixel.pixel + at.pixel} * gemm.src_channels,
                          at.Hits(pixel.taps));
      }
    }
  }

  __device__ __forceinline__ void LocateGroup(int32_t group) {
    const WmmaTile& tile = shared_.tile;
    shared_.pixel[group % 2 * kThreads + threadIdx.x] = LocatePixel(
        params_.gemm, tile.phase,
        tile.k_begin + group * kThreads + static_cast<int32_t>(threadIdx.x), tile.k_end);
  }

  const IgemmWmmaParams& params_;
  Shared& shared_;
  int32_t k_;  // first reduction index of the next stage
  TapChannel cursor_;
  GatherPixel pixel_[kOp == Op::kWgrad ? 1 : OwnerA::kPasses];
  int32_t stage_, next_group_;
  HeldChunks<OperandA, kThreads, kNarrow && sizeof(T) == 2> held_a_;
  HeldChunks<OperandB, kThreads, kNarrow && sizeof(T) == 2> held_b_;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_ASYNC_LOADERS_CUH_
