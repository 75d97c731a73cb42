// Global memory -> swizzled shared memory for the tensor-core implicit GEMM.
//
// The reduction is one flat index: over (tap, channel) in fprop and dgrad, over the output pixels
// in wgrad. A channel count that does not fill a stage therefore wastes nothing. A thread always
// copies the same chunk column of a stage:
//     fprop A, dgrad A and B   the column is a reduction index: one tap and channel for all rows
//     fprop B, wgrad B         rows are reduction indices, the column is gemm_n
//     wgrad A                  rows are pixels, the column is one tap and channel, in all stages
// Both operands are zero in the padding, in rows past the last, and past the end of the reduction.
//
// A chunk (16 bytes) is one copy if both channel counts allow; the align8, align2 and b_align2
// instances divide it into copies of 8 or 4 bytes, or into 16-bit loads through registers.
#ifndef JAXCONV_CUDA_IGEMM_WMMA_ASYNC_LOADER_CUH_
#define JAXCONV_CUDA_IGEMM_WMMA_ASYNC_LOADER_CUH_

#include <cstdint>
#include <type_traits>

#include "core/implicit_gemm.h"
#include "cuda/common/mma_tile.cuh"
#include "cuda/igemm_wmma/chunk_copy.cuh"
#include "cuda/igemm_wmma/gather_pixel.cuh"
#include "cuda/igemm_wmma/params.h"
#include "cuda/ptx/cp_async.cuh"

namespace jaxconv::igemm_wmma {

// The loader of both operands of an operation, for MmaMainloop. OperandA and OperandB: OperandTile.
// kCopyA, kCopyB: bytes of one copy, 16, 8 or kAnyCopy. kDilated: fprop with lhs_dilation, whose
// taps are a subset of the filter's.
template <Op kOp, typename T, class Tile, class OperandA, class OperandB, int kCopyA, int kCopyB,
          bool kDilated>
class AsyncLoader {
 public:
  static constexpr int kTileK = OperandA::kTileK;
  static constexpr int kThreads = Tile::kThreads;
  // wgrad: pixels are decoded kThreads at a time, one group ahead of their use.
  static constexpr int kStagesOfGroup = kThreads / kTileK;
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr bool kHasTapTable = kOp != Op::kWgrad && kCopyA != kAnyCopy;
  struct Shared {
    AxisPhase phase[3];  // filled before the loader is made
    GatherPixel pixel[kOp == Op::kWgrad ? 2 * kThreads : Tile::kTileM];
    int32_t dst[kOp == Op::kWgrad ? 1 : Tile::kTileM];  // fprop, dgrad: pixel of the output, or -1
    const T* a;                                         // fprop: this batch and group
    // fprop, dgrad, known copy width: kNoTap, then the taps of the stride residue class.
    TapEntry tap[kHasTapTable ? kMaxTableTaps + 1 : 1];
    // wgrad, any copy: the tile's rows.
    TapChannel row[kOp == Op::kWgrad && kCopyA == kAnyCopy ? Tile::kTileM : 1];
  };

  __device__ __forceinline__ AsyncLoader(const Params& params, const GemmTile<T>& tile,
                                         Shared& shared)
      : params_(params),
        shared_(shared),
        a_(tile.a),
        b_(tile.b),
        k_(tile.k_begin),
        k_end_(tile.k_end) {
    const ImplicitGemm& gemm = params.gemm;
    if constexpr (kOp == Op::kWgrad) {
      static_assert(kStagesOfGroup >= 2 && Tile::kStages - 1 < 2 * kStagesOfGroup);
      k_begin_ = tile.k_begin;
      LocateGroup(0);
      LocateGroup(1);
      next_group_ = 2;
      if constexpr (kCopyA == kAnyCopy) {
        for (int r = threadIdx.x; r < Tile::kTileM; r += kThreads) {
          shared.row[r] = TapChannel::Decode(gemm, shared.phase, gemm.row_channels_divmod,
                                             tile.m_first + r, gemm.gemm_m);
        }
      } else {
#pragma unroll
        for (int part = 0; part < kPartsA; ++part) {
          const TapChannel at = TapChannel::Decode(
              gemm, shared.phase, gemm.row_channels_divmod,
              tile.m_first + OwnerA::Column() * kWidth + part * (kWidth / kPartsA), gemm.gemm_m);
          cursor_[part] = {a_ + at.channel, at.pixel, at.taps};
        }
      }
    } else {
      for (int r = threadIdx.x; r < Tile::kTileM; r += kThreads) {
        shared.pixel[r] =
            LocatePixel(gemm, shared.phase, tile.m_first + r, tile.rows, &shared.dst[r]);
      }
      if constexpr (kHasTapTable) {
        if (threadIdx.x == 0) shared.a = tile.a;
        const int32_t taps = ImplicitGemm::TapCount(shared.phase);
        for (int entry = threadIdx.x; entry <= taps; entry += kThreads) {
          const TapChannel at = TapChannel::Decode(gemm, shared.phase, FastDivmod(),
                                                   entry == 0 ? taps : entry - 1, taps);
          shared.tap[entry] = {at.pixel, at.taps, at.filter_tap, 0};
        }
      }
    }
    n_ = tile.n_first + (kOp == Op::kDgrad ? OwnerB::Row() : OwnerB::Column() * kWidth);
    if constexpr (kOp != Op::kDgrad) {
      const int32_t k = k_ + OwnerB::Row();
      b_source_[0] = b_ + int64_t{k} * gemm.b_reduce + n_;
      // A column past the last copies no row.
      b_left_ = n_ < gemm.gemm_n ? k_end_ - k : 0;
    }
    __syncthreads();
    if constexpr (kOp != Op::kWgrad && kPixelsInRegisters) {
#pragma unroll
      for (int i = 0; i < OwnerA::kPasses; ++i) {
        pixel_[i] = shared.pixel[OwnerA::Row() + i * OwnerA::kRowsOfPass];
      }
    }
    Locate();
  }

  __device__ __forceinline__ void Prepare() {
    if constexpr (kOp == Op::kWgrad) {
      // Written to the half of the table that group next_group_ - 2 used. All threads have passed a
      // barrier since, except in the prologue, which needs only the first two groups.
      if (stage_ >= (next_group_ - 1) * kStagesOfGroup && stage_ >= Tile::kStages - 1) {
        LocateGroup(next_group_++);
      }
    }
  }

  template <int kPart, int kParts>
  __device__ __forceinline__ void IssuePart(uint32_t slot) {
    const uint32_t a = slot + OwnerA::Offset();
    const uint32_t b = slot + Tile::kBytesOfA + OwnerB::Offset();
    constexpr int kFirstB = OwnerB::kPasses * kPart / kParts;
    constexpr int kLastB = OwnerB::kPasses * (kPart + 1) / kParts;
    if constexpr (kCopyA != kAnyCopy) {
      constexpr int kFirstA = OwnerA::kPasses * kPart / kParts;
      constexpr int kLastA = OwnerA::kPasses * (kPart + 1) / kParts;
#pragma unroll
      for (int part = 0; part < kPartsA; ++part) {
        GatherRows<kCopyA, kFirstA, kLastA>(a, cursor_[part], part);
        if constexpr (kOp == Op::kDgrad) {
          FilterRows<kCopyA, kFirstB, kLastB>(b, b_source_[part], cursor_[part].taps, part);
        }
      }
    } else if constexpr (kPart == 0) {
      WithCopyBytes<T, kCopyA>(params_.a_copy_bytes, [&](auto bytes) { AnyWidthA<bytes>(a, b); });
    }
    if constexpr (kOp != Op::kDgrad) {
      if constexpr (kDilated) {
        if constexpr (kPart == 0) {
          WithCopyBytes<T, kCopyB>(params_.b_copy_bytes,
                                   [&](auto bytes) { DilatedRows<bytes>(b); });
        }
      } else if constexpr (kCopyB != kAnyCopy) {
        MatrixRows<kCopyB, kFirstB, kLastB>(b);
      } else if constexpr (kPart == 0) {
        WithCopyBytes<T, kCopyB>(params_.b_copy_bytes,
                                 [&](auto bytes) { MatrixRows<bytes, 0, OwnerB::kPasses>(b); });
      }
    }
  }

  __device__ __forceinline__ void Advance() {
    k_ += kTileK;
    if constexpr (kOp == Op::kWgrad) ++stage_;
    if constexpr (kOp != Op::kDgrad) {
      b_source_[0] = OffsetBytes(b_source_[0], kTileK,
                                 static_cast<int32_t>(params_.gemm.b_reduce) * int32_t{sizeof(T)});
      b_left_ -= kTileK;
    }
    Locate();
  }

  __device__ __forceinline__ void Finish(uint32_t slot) {
    if constexpr (kHeldA) {
      if (params_.a_copy_bytes == 2) held_a_.Store(slot + OwnerA::Offset());
    }
    if constexpr (kHeldB) {
      if (params_.b_copy_bytes == 2) {
        held_b_.Store(slot + Tile::kBytesOfA + OwnerB::Offset());
      }
    }
  }

 private:
  using OwnerA = ChunkOwner<OperandA, kThreads>;
  using OwnerB = ChunkOwner<OperandB, kThreads>;
  static constexpr int kPartsA = kCopyA == kAnyCopy ? 1 : 16 / kCopyA;
  static constexpr bool kHeldA = kCopyA == kAnyCopy && sizeof(T) == 2;
  static constexpr bool kHeldB = kCopyB == kAnyCopy && sizeof(T) == 2;
  static_assert(kOp != Op::kDgrad || kCopyA == kCopyB);
  // Whether the pixels of this thread's rows stay in registers; in fprop and dgrad all stages use
  // the same. The TF32 instances and wgrad with any copy width lack the registers.
  static constexpr bool kPixelsInRegisters =
      sizeof(T) == 2 && (kOp != Op::kWgrad || kCopyA != kAnyCopy);

  // Tap and channel in the next stage of a part of this thread's chunk column of A.
  struct Cursor {
    const T* source;
    int32_t pixel;
    uint32_t taps;
  };

  // Computes the components of the next stage's addresses, without a branch and a whole stage
  // before their use: in fprop and dgrad the tap and channel of this thread's column, in wgrad the
  // pixels of its rows.
  __device__ __forceinline__ void Locate() {
    if constexpr (kHasTapTable) {
      const ImplicitGemm& gemm = params_.gemm;
#pragma unroll
      for (int part = 0; part < kPartsA; ++part) {
        const int32_t k = k_ + OwnerA::Column() * kWidth + part * (kWidth / kPartsA);
        int32_t tap, channel;
        gemm.reduce_channels_divmod.Divmod(k, &tap, &channel);
        const TapEntry entry = shared_.tap[k < k_end_ ? tap + 1 : 0];
        // In fprop no register is left for the pointer.
        const T* a = kOp == Op::kFprop ? shared_.a : a_;
        cursor_[part] = {a + channel, entry.pixel, entry.taps};
        if constexpr (kOp == Op::kDgrad) {
          b_source_[part] = b_ + entry.filter_tap * gemm.b_tap + channel + n_ * gemm.b_column;
        }
      }
    } else if constexpr (kOp == Op::kWgrad && kPixelsInRegisters) {
#pragma unroll
      for (int i = 0; i < OwnerA::kPasses; ++i) {
        pixel_[i] = shared_.pixel[OwnerA::Row() + stage_ % (2 * kStagesOfGroup) * kTileK +
                                  i * OwnerA::kRowsOfPass];
      }
    }
  }

  // Copies the gathered tensor: passes kFirst to kLast of one part of the chunk.
  template <int kBytes, int kFirst, int kLast>
  __device__ __forceinline__ void GatherRows(uint32_t a, const Cursor& at, int part) {
    const int32_t pixel_bytes = params_.gemm.src_channels * int32_t{sizeof(T)};
    const GatherPixel* table = shared_.pixel + OwnerA::Row() +
                               (kOp == Op::kWgrad ? stage_ % (2 * kStagesOfGroup) * kTileK : 0);
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      const GatherPixel pixel = kPixelsInRegisters ? pixel_[i] : table[i * OwnerA::kRowsOfPass];
      CopyPart<kBytes>(
          held_a_, i, part, OwnerA::OfPass(a, i),
          reinterpret_cast<const char*>(at.source) + int64_t{pixel.pixel + at.pixel} * pixel_bytes,
          (at.taps & ~pixel.taps) == 0);
    }
  }

  // Copies B of dgrad: rows of gemm_n under one tap.
  template <int kBytes, int kFirst, int kLast>
  __device__ __forceinline__ void FilterRows(uint32_t b, const T* source, uint32_t taps, int part) {
    const int32_t row_bytes = static_cast<int32_t>(params_.gemm.b_column) * int32_t{sizeof(T)};
    const int32_t left = taps == kNoTap ? 0 : params_.gemm.gemm_n - n_;
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      CopyPart<kBytes>(held_b_, i, part, OwnerB::OfPass(b, i),
                       OffsetBytes(source, i * OwnerB::kRowsOfPass, row_bytes),
                       i * OwnerB::kRowsOfPass < left);
    }
  }

  // Copies B of fprop and wgrad, a plain matrix: rows of the reduction; b_left_ rows exist from
  // this thread's first on.
  template <int kBytes, int kFirst, int kLast>
  __device__ __forceinline__ void MatrixRows(uint32_t b) {
    const int32_t row_bytes = static_cast<int32_t>(params_.gemm.b_reduce) * int32_t{sizeof(T)};
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      MatrixRow<kBytes>(i, b, OffsetBytes(b_source_[0], i * OwnerB::kRowsOfPass, row_bytes),
                        i * OwnerB::kRowsOfPass < b_left_);
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void MatrixRow(int pass, uint32_t b, const void* source, bool valid) {
    constexpr int kElements = kBytes / int{sizeof(T)};
#pragma unroll
    for (int part = 0; part < 16 / kBytes; ++part) {
      CopyPart<kBytes>(held_b_, pass, part, OwnerB::OfPass(b, pass),
                       static_cast<const T*>(source) + part * kElements,
                       valid && (part == 0 || n_ + part * kElements < params_.gemm.gemm_n));
    }
  }
  // The same if each row has its own tap.
  template <int kBytes>
  __device__ __forceinline__ void DilatedRows(uint32_t b) {
    const ImplicitGemm& gemm = params_.gemm;
    // Unrolled only if registers hold the rows, which needs compile-time indices.
#pragma unroll(kBytes == 2 ? OwnerB::kPasses : 1)
    for (int i = 0; i < OwnerB::kPasses; ++i) {
      const TapChannel at =
          TapChannel::Decode(gemm, shared_.phase, gemm.reduce_channels_divmod,
                             k_ + OwnerB::Row() + i * OwnerB::kRowsOfPass, k_end_);
      MatrixRow<kBytes>(i, b, b_ + at.filter_tap * gemm.b_tap + at.channel * gemm.b_reduce + n_,
                        at.taps != kNoTap && n_ < gemm.gemm_n);
    }
  }

  // Copies A with any copy width; in dgrad also B, from the same reduction indices.
  template <int kBytes>
  __device__ __forceinline__ void AnyWidthA(uint32_t a, uint32_t b) {
    const ImplicitGemm& gemm = params_.gemm;
    constexpr int kElements = kBytes / int{sizeof(T)};
#pragma unroll
    for (int part = 0; part < 16 / kBytes; ++part) {
      const int column = OwnerA::Column() * kWidth + part * kElements;
      TapChannel at;
      if constexpr (kOp == Op::kWgrad) {
        at = shared_.row[column];
      } else {
        at = TapChannel::Decode(gemm, shared_.phase, gemm.reduce_channels_divmod, k_ + column,
                                k_end_);
      }
      GatherRows<kBytes, 0, OwnerA::kPasses>(a, Cursor{a_ + at.channel, at.pixel, at.taps}, part);
      if constexpr (kOp == Op::kDgrad) {
        FilterRows<kBytes, 0, OwnerB::kPasses>(
            b, b_ + at.filter_tap * gemm.b_tap + at.channel + int64_t{n_} * gemm.b_column, at.taps,
            part);
      }
    }
  }

  __device__ __forceinline__ void LocateGroup(int32_t group) {
    int32_t dst;
    shared_.pixel[group % 2 * kThreads + threadIdx.x] =
        LocatePixel(params_.gemm, shared_.phase,
                    k_begin_ + group * kThreads + static_cast<int32_t>(threadIdx.x), k_end_, &dst);
  }

  const Params& params_;
  Shared& shared_;
  const T* a_;  // of this batch and group
  const T* b_;
  int32_t k_, k_end_;  // first reduction index of the next stage; end of the slice
  int32_t n_;          // this thread's column of B; in dgrad its first row
  Cursor cursor_[kPartsA];
  const T* b_source_[kOp == Op::kDgrad ? kPartsA : 1];  // its first row of B in the next stage
  int32_t b_left_;
  GatherPixel pixel_[kPixelsInRegisters ? OwnerA::kPasses : 1];
  int32_t k_begin_, stage_ = 0, next_group_ = 0;  // wgrad
  HeldChunks<OperandA, kThreads, kHeldA> held_a_;
  HeldChunks<OperandB, kThreads, kHeldB> held_b_;
};

}  // namespace jaxconv::igemm_wmma

#endif  // JAXCONV_CUDA_IGEMM_WMMA_ASYNC_LOADER_CUH_
