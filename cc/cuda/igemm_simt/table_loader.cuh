// Global memory -> registers -> shared memory, for fprop and dgrad element by element and for wgrad
// by elements or quads.
//
// All threads decode the reduction indices of the next kTableStages stages into a table in shared
// memory. An address is the sum of a row's part and a table entry's part.
#ifndef JAXCONV_CUDA_IGEMM_SIMT_TABLE_LOADER_CUH_
#define JAXCONV_CUDA_IGEMM_SIMT_TABLE_LOADER_CUH_

#include <cstdint>
#include <type_traits>

#include "core/implicit_gemm.h"
#include "cuda/common/element.cuh"
#include "cuda/igemm_simt/gather_tile.cuh"
#include "cuda/igemm_simt/params.h"
#include "cuda/igemm_simt/simt_tile.cuh"

namespace jaxconv::igemm_simt {

// One reduction index: its addend to a row's source coordinates, its addend to the offset into A,
// and its first column of B.
struct alignas(16) ReduceEntry {
  int32_t src0, src1, src2;
  int32_t unused;
  int64_t a_offset;
  const void* b;
};

// Stages decoded at once. 16 make 128 entries of 32 bytes, one for each thread of most tiles, and
// spread the cost of decoding and of its barrier over 16 stages.
inline constexpr int kTableStages = 16;
using ReduceTable = ReduceEntry[kTableStages][kTileK];

template <typename T, class Tile, Op kOp, int kWidth>
class TableLoader {
 public:
  // fprop, dgrad.
  __device__ __forceinline__ TableLoader(const Params& params, const GatherTile<Tile>& tile,
                                         const SimtStage<Tile>& stage, ReduceTable& table)
      : params_(params), phase_(&tile.phase), table_(table), b_(static_cast<const T*>(tile.b)) {
    const ImplicitGemm& gemm = params.gemm;
    next_ = 0;
    end_ = ImplicitGemm::TapCount(tile.phase) * gemm.reduce_channels;
#pragma unroll
    for (int i = 0; i < kRowsOfA; ++i) {
      const int4 row = tile.row[Row(i)];
      row_[i].src0 = row.x, row_[i].src1 = row.y, row_[i].src2 = row.z;
      row_[i].a = static_cast<const T*>(tile.a) +
                  (row.w + gemm.SourcePixel(row.x, row.y, row.z)) * gemm.src_channels;
    }
    Init(tile.n_first, stage);
  }

  // wgrad: rows from m_first on, pixels from `first` to `end`.
  __device__ __forceinline__ TableLoader(const Params& params, const T* a, const T* b, int m_first,
                                         int n_first, int32_t first, int32_t end,
                                         const SimtStage<Tile>& stage, ReduceTable& table)
      : params_(params), phase_(nullptr), table_(table), b_(b), next_(first), end_(end) {
    const ImplicitGemm& gemm = params.gemm;
#pragma unroll
    for (int i = 0; i < kRowsOfA; ++i) {
      const int m = m_first + Row(i);
      row_[i].src0 = row_[i].src1 = row_[i].src2 = kInvalidCoordinate;
      row_[i].a = a;
      if (m < gemm.gemm_m) {
        int32_t tap[3], channel;
        gemm.DecodeFilterRow(m, tap, &channel);
        row_[i].src0 = tap[0] * gemm.axis[0].step + gemm.axis[0].off;
        row_[i].src1 = tap[1] * gemm.axis[1].step + gemm.axis[1].off;
        row_[i].src2 = tap[2] * gemm.axis[2].step + gemm.axis[2].off;
        const int64_t pixel =
            Dense() ? gemm.SourcePixel(row_[i].src0, row_[i].src1, row_[i].src2) : int64_t{0};
        row_[i].a +=
            static_cast<uint64_t>(pixel) * static_cast<uint32_t>(gemm.src_channels) + channel;
      }
    }
    Init(n_first, stage);
  }

  // The remaining stages plus one Fetch, at most one table at a time.
  __device__ __forceinline__ int FirstRun() {
    fetches_ = end_ > next_ ? (end_ - next_ + kTileK - 1) / kTileK + 1 : 0;
    return NextRun();
  }
  __device__ __forceinline__ int NextRun() {
    if (fetches_ == 0) return 0;
    // All threads have finished with the old table: a barrier follows each Fetch.
    for (int i = threadIdx.x; i < kTableStages * kTileK; i += Tile::kThreads) Decode(i);
    next_ += kTableStages * kTileK;
    entry_a_ = &table_[0][KOfA(0)];
    entry_b_ = &table_[0][KOfB(0)];
    __syncthreads();
    const int run = min(fetches_, kTableStages);
    fetches_ -= run;
    return run;
  }

  __device__ __forceinline__ void Fetch() {
    const ImplicitGemm& gemm = params_.gemm;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      const ReduceEntry& entry = entry_a_[i * (kTileK / kPassesA)];
      const int4 entry_src = *reinterpret_cast<const int4*>(&entry.src0);
#pragma unroll
      for (int r = 0; r < kRowsOfA; ++r) {
        int32_t src0 = row_[r].src0 + entry_src.x;
        int32_t src1 = row_[r].src1 + entry_src.y;
        int32_t src2 = row_[r].src2 + entry_src.z;
        const T* source = row_[r].a + entry.a_offset;
        bool valid = true;
        if (!Dense()) {
          valid = src0 >= 0 && src1 >= 0 && src2 >= 0;
          int32_t rest0, rest1, rest2;
          gemm.axis[0].div_divmod.Divmod(src0, &src0, &rest0);
          gemm.axis[1].div_divmod.Divmod(src1, &src1, &rest1);
          gemm.axis[2].div_divmod.Divmod(src2, &src2, &rest2);
          valid = valid && (rest0 | rest1 | rest2) == 0;
          source += gemm.SourcePixel(src0, src1, src2) * gemm.src_channels;
        }
        valid = valid && gemm.InSource(src0, src1, src2);
        a_pack_[i][r].Load(valid ? source : Zeros<T>());
      }
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      const ReduceEntry& entry = entry_b_[i * (kTileK / kPassesB)];
      const T* source = static_cast<const T*>(entry.b) + b_column_;
      // In dgrad the columns lie too far apart to read zeros from one array.
      if (kOp == Op::kDgrad && entry.b == nullptr) source = Zeros<T>();
      b_pack_[i].Load(source);
    }
    entry_a_ += kTileK;
    entry_b_ += kTileK;
  }

  __device__ __forceinline__ void Commit() const {
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfA; ++r) {
        a_pack_[i][r].Unpack(values);
        StoreShared(a_store_ + (i * (kTileK / kPassesA) * Tile::kStrideA + r * Tile::kThreads) * 4,
                    values);
      }
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      b_pack_[i].Unpack(values);
      StoreShared(b_store_ + i * (kTileK / kPassesB) * Tile::kStrideB * 4, values);
    }
  }

  __device__ __forceinline__ void FlipStage(int32_t bytes) {
    a_store_ += bytes;
    b_store_ += bytes;
  }

 private:
  static constexpr int kItemsOfA = Tile::kTileM / kWidth;
  static constexpr int kItemsOfB = Tile::kTileN / kWidth;
  static constexpr int kRowsOfA = kItemsOfA > Tile::kThreads ? kItemsOfA / Tile::kThreads : 1;
  static constexpr int kPassesA = kTileK * kItemsOfA / Tile::kThreads / kRowsOfA;
  static constexpr int kPassesB = kTileK * kItemsOfB / Tile::kThreads;
  static_assert(kItemsOfB <= Tile::kThreads && kPassesA >= 1 && kPassesB >= 1);

  // A row's part of the sums of ReduceEntry.
  struct TableRow {
    int32_t src0, src1, src2;
    const T* a;
  };

  // Row of the tile, and reduction index of the stage, that this thread loads.
  __device__ static int Row(int r) { return threadIdx.x % kItemsOfA * kWidth + r * Tile::kThreads; }
  __device__ static int KOfA(int pass) {
    return threadIdx.x / kItemsOfA + pass * (kTileK / kPassesA);
  }
  __device__ static int KOfB(int pass) {
    return threadIdx.x / kItemsOfB + pass * (kTileK / kPassesB);
  }

  // Whether the offsets of rows and of reduction indices add. They add in a stride residue class of
  // fprop and dgrad. Only the scalar instances compute wgrad with lhs_dilation, so that the others
  // carry no code for it.
  __device__ __forceinline__ bool Dense() const {
    return kOp != Op::kWgrad || kWidth != 1 || params_.gemm.Dense();
  }

  __device__ __forceinline__ void Init(int n_first, const SimtStage<Tile>& stage) {
    a_store_ = SharedAddress(&stage.a[KOfA(0)][Row(0)]);
    b_store_ = SharedAddress(&stage.b[KOfB(0)][threadIdx.x % kItemsOfB * kWidth]);
    n_first_ = n_first;
    // Columns past the last read the last one instead; their sums are not stored.
    const int column = min(n_first + static_cast<int>(threadIdx.x % kItemsOfB * kWidth),
                           params_.gemm.gemm_n - kWidth);
    b_column_ = static_cast<Column>(column - n_first);
    if (kOp == Op::kDgrad) b_column_ *= params_.gemm.b_column;
  }

  // Entry i of the table, for the reduction index next_ + i. Past the end, A lies outside the
  // source and B is zeros, so that the term is 0 * 0 for any memory content.
  __device__ __forceinline__ void Decode(int i) {
    const ImplicitGemm& gemm = params_.gemm;
    const int64_t index = int64_t{next_} + i;
    ReduceEntry entry{kInvalidCoordinate, kInvalidCoordinate, kInvalidCoordinate, 0, 0, nullptr};
    int64_t b_offset = n_first_ * gemm.b_column;
    if (index < end_) {
      if constexpr (kOp == Op::kWgrad) {
        int32_t image, dst[3];
        gemm.DecodePixel(static_cast<int32_t>(index), &image, dst);
        entry.src0 = dst[0] * gemm.axis[0].mul;
        entry.src1 = dst[1] * gemm.axis[1].mul;
        entry.src2 = dst[2] * gemm.axis[2].mul;
        int64_t pixel = image * gemm.SourceImage();
        if (Dense()) pixel += gemm.SourcePixel(entry.src0, entry.src1, entry.src2);
        entry.a_offset = pixel * gemm.src_channels;
        b_offset += index * gemm.b_reduce;
      } else {
        int32_t tap, channel, t[3], filter_tap[3];
        gemm.reduce_channels_divmod.Divmod(static_cast<int32_t>(index), &tap, &channel);
        gemm.DecodeTap(*phase_, tap, t);
#pragma unroll
        for (int a = 0; a < 3; ++a) {
          filter_tap[a] = (*phase_)[a].first_tap + t[a] * gemm.axis[a].tap_period;
        }
        entry.src0 = t[0] * gemm.axis[0].src_per_t;
        entry.src1 = t[1] * gemm.axis[1].src_per_t;
        entry.src2 = t[2] * gemm.axis[2].src_per_t;
        entry.a_offset =
            gemm.SourcePixel(entry.src0, entry.src1, entry.src2) * gemm.src_channels + channel;
        b_offset += gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2]) * gemm.b_tap +
                    channel * gemm.b_reduce;
      }
      entry.b = b_ + b_offset;
    } else if (kOp != Op::kDgrad) {
      entry.b = Zeros<T>();
    }
    table_[i / kTileK][i % kTileK] = entry;
  }

  const Params& params_;
  const AxisPhase (*phase_)[3];
  ReduceTable& table_;
  const T* b_;
  int32_t next_, end_;
  int32_t fetches_;  // Fetches after the current run
  int32_t n_first_;
  const ReduceEntry* entry_a_;
  const ReduceEntry* entry_b_;
  TableRow row_[kRowsOfA];
  // This thread's column, from the tile's first column on, in elements of B. Columns are contiguous
  // except in dgrad, so 32 bits suffice elsewhere and save a register.
  using Column = std::conditional_t<kOp == Op::kDgrad, int64_t, uint32_t>;
  Column b_column_;
  Pack<T, kWidth> a_pack_[kPassesA][kRowsOfA];
  Pack<T, kWidth> b_pack_[kPassesB];
  uint32_t a_store_, b_store_;  // shared-memory addresses of the stage that Commit fills
};

}  // namespace jaxconv::igemm_simt

#endif  // JAXCONV_CUDA_IGEMM_SIMT_TABLE_LOADER_CUH_
