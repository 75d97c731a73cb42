// Global memory -> registers -> shared memory for the three implicit GEMMs.
//
//   VectorGatherLoader  fprop, dgrad with channel extents that are multiples of 4. The reduction
//   runs tap
//                       by tap; inside a tap a load is a pointer and an increment. Whether a row's
//                       pixel lies in the padding is settled at the change of a tap, by pointing it
//                       at zeros.
//   TableLoader         everything else: fprop and dgrad element by element, wgrad by elements or
//   quads.
//                       Eight threads decode the eight reduction indices of a stage into a small
//                       table in shared memory one stage ahead; an address is then row part + table
//                       part.
#ifndef JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_
#define JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_

#include <cstdint>
#include <type_traits>

#include "core/implicit_gemm.h"
#include "cuda/device/element.cuh"
#include "cuda/device/igemm_params.h"
#include "cuda/device/simt_tile.cuh"

namespace jaxconv {

// What one CTA of fprop or dgrad knows of its tile. It lives in shared memory because it is needed
// only at the change of a tap, and registers are what the tile is short of.
template <class Tile>
struct GatherTile {
  int4 row[Tile::kTileM];         // src coordinates at t = 0, and the first pixel of the image
  int32_t dst_row[Tile::kTileM];  // pixel of the output, or -1
  AxisPhase phase[3];
  uint32_t tap_mask;  // taps that hit a source element for any row; all ones above 32 taps
  int32_t n_first;    // first column
  int64_t out;        // offset of this batch and group in the output
  const void* a;      // first element of this batch and group
  const void* b;
};

// Fills `tile` for the tile's first row; all threads call it. False: the tile has no row.
template <class Tile, typename T>
__device__ __forceinline__ bool InitGatherTile(const IgemmParams& params, int m_tile, int n_first,
                                               int phase_index, const T* a, const T* b, int64_t out,
                                               GatherTile<Tile>& tile) {
  const ImplicitGemm& gemm = params.gemm;
  if (threadIdx.x < 3) {
    tile.phase[threadIdx.x] = gemm.PhaseOfAxis(phase_index, threadIdx.x);
  } else if (threadIdx.x == 3) {
    tile.tap_mask = 0;
    tile.n_first = n_first;
    tile.out = out;
    tile.a = a;
    tile.b = b;
  }
  __syncthreads();
  const int32_t rows = ImplicitGemm::Rows(gemm.images, tile.phase);
  const int32_t first = m_tile * Tile::kTileM;
  if (first >= rows) return false;
  const int32_t taps = ImplicitGemm::TapCount(tile.phase);
  uint32_t mask = taps > 32 ? ~0u : 0u;
  for (int r = threadIdx.x; r < Tile::kTileM; r += Tile::kThreads) {
    int4 source = make_int4(kInvalidCoordinate, kInvalidCoordinate, kInvalidCoordinate, 0);
    int32_t dst = -1;
    if (first + r < rows) {
      int32_t image, j[3], src[3], coordinate[3];
      gemm.DecodeRow(tile.phase, first + r, &image, j);
#pragma unroll
      for (int a = 0; a < 3; ++a) {
        src[a] = tile.phase[a].src0 + j[a] * gemm.axis[a].src_per_j;
        coordinate[a] = tile.phase[a].phase + j[a] * gemm.axis[a].period;
      }
      source = make_int4(src[0], src[1], src[2], image * static_cast<int32_t>(gemm.SourceImage()));
      dst = ((image * gemm.axis[0].dst_extent + coordinate[0]) * gemm.axis[1].dst_extent +
             coordinate[1]) *
                gemm.axis[2].dst_extent +
            coordinate[2];
      if (taps <= 32) {
        uint32_t bit = 1;
        for (int t0 = 0; t0 < tile.phase[0].tap_count; ++t0) {
          bool hit0 = gemm.axis[0].InSource(src[0] + t0 * gemm.axis[0].src_per_t);
          for (int t1 = 0; t1 < tile.phase[1].tap_count; ++t1) {
            bool hit1 = hit0 && gemm.axis[1].InSource(src[1] + t1 * gemm.axis[1].src_per_t);
            for (int t2 = 0; t2 < tile.phase[2].tap_count; ++t2, bit <<= 1) {
              if (hit1 && gemm.axis[2].InSource(src[2] + t2 * gemm.axis[2].src_per_t)) mask |= bit;
            }
          }
        }
      }
    }
    tile.row[r] = source;
    tile.dst_row[r] = dst;
  }
  mask = __reduce_or_sync(0xffffffffu, mask);
  if (threadIdx.x % 32 == 0) atomicOr(&tile.tap_mask, mask);
  __syncthreads();
  return true;
}

// kTransposeB: the filter's reduction channels are neighbours in memory (dgrad) and not its
// columns.
template <typename T, class Tile, bool kTransposeB>
class VectorGatherLoader {
 public:
  __device__ __forceinline__ VectorGatherLoader(const IgemmParams& params,
                                                const GatherTile<Tile>& tile,
                                                const SimtStage<Tile>& stage)
      : params_(params), tile_(tile) {
    const int k = threadIdx.x % 2 * 4;
    a_store_ = SharedAddress(&stage.a[k][threadIdx.x / 2]);
    b_store_ =
        SharedAddress(kTransposeB ? &stage.b[k][threadIdx.x / 2]
                                  : &stage.b[threadIdx.x / kQuadsOfB][threadIdx.x % kQuadsOfB * 4]);
  }

  __device__ __forceinline__ void Fetch() {
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_pack_[i].Load(a_[i]);
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_pack_[i].Load(b_[i]);
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_[i] = AddBytes(a_[i], a_step_[i]);
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_[i] = AddBytes(b_[i], params_.b_step_bytes);
  }

  // A run is the whole stages of a tap, then its tail if it has one; the last is the Fetch too
  // many.
  __device__ __forceinline__ int FirstRun() {
    const int run = NextTap();
    return position_ < kEnd ? run : 0;
  }
  __device__ __forceinline__ int NextRun() {
    if (position_ >= kEnd) return 0;
    const bool in_tail = position_ % 2 == 1;
    if (!in_tail && params_.gemm.reduce_channels % kSimtTileK != 0) return EnterTail();
    return NextTap();
  }

  __device__ __forceinline__ void Commit() const {
    float quad[4];
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      a_pack_[i].Unpack(quad);
      StoreTransposed(a_store_ + i * (Tile::kThreads / 2) * 4, Tile::kStrideA * 4, quad);
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      b_pack_[i].Unpack(quad);
      if constexpr (kTransposeB) {
        StoreTransposed(b_store_ + i * (Tile::kThreads / 2) * 4, Tile::kStrideB * 4, quad);
      } else {
        StoreShared(b_store_ + i * kRowsOfB * Tile::kStrideB * 4, quad);
      }
    }
  }

  __device__ __forceinline__ void FlipStage(int32_t bytes) {
    a_store_ += bytes;
    b_store_ += bytes;
  }

 private:
  static constexpr int32_t kEnd = 1 << 30;
  static constexpr int kPassesA = Tile::kTileM * 2 / Tile::kThreads;
  static constexpr int kPassesB = Tile::kTileN * 2 / Tile::kThreads;
  static constexpr int kQuadsOfB = Tile::kTileN / 4;
  static constexpr int kRowsOfB = Tile::kThreads / kQuadsOfB;
  static_assert(kPassesA >= 1 && kPassesB >= 1);

  // An unsigned 32-bit step costs one register and two additions, a signed or 64-bit one more.
  __device__ static const T* AddBytes(const T* pointer, uint32_t bytes) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(pointer) + bytes);
  }

  // Four neighbours in memory go to four rows of the stage.
  __device__ static void StoreTransposed(uint32_t address, int row_bytes, const float (&quad)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value[1] = {quad[e]};
      StoreShared(address + e * row_bytes, value);
    }
  }

  // The last stage of a tap holds only 4 channels: the other half multiplies zeros by zeros.
  __device__ __forceinline__ int EnterTail() {
    ++position_;
    const bool upper = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      if (upper) a_[i] = Zeros<T>();
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      if (kTransposeB ? upper : threadIdx.x / kQuadsOfB + i * kRowsOfB >= 4) b_[i] = Zeros<T>();
    }
    return 1;
  }

  __device__ __forceinline__ int NextTap() {
    const ImplicitGemm& gemm = params_.gemm;
    const int32_t taps = ImplicitGemm::TapCount(tile_.phase);
    int32_t tap = position_ / 2 + 1;
    if (taps <= 32) {
      const uint32_t rest = tap < 32 ? tile_.tap_mask >> tap : 0;
      tap = rest != 0 ? tap + __ffs(rest) - 1 : taps;
    }
    if (tap >= taps) {
      position_ = kEnd;
#pragma unroll
      for (int i = 0; i < kPassesA; ++i) a_[i] = Zeros<T>();
#pragma unroll
      for (int i = 0; i < kPassesB; ++i) b_[i] = Zeros<T>();
      return 1;
    }
    position_ = 2 * tap;
    int32_t t[3], filter_tap[3];
    gemm.DecodeTap(tile_.phase, tap, t);
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      filter_tap[a] = tile_.phase[a].first_tap + t[a] * gemm.axis[a].tap_period;
      t[a] *= gemm.axis[a].src_per_t;
    }
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      const int4 row = tile_.row[threadIdx.x / 2 + i * (Tile::kThreads / 2)];
      const int32_t src0 = row.x + t[0], src1 = row.y + t[1], src2 = row.z + t[2];
      const bool valid = gemm.InSource(src0, src1, src2);
      // Pixels of a tensor number less than 2^31; outside of the source the sum may wrap, unused.
      const uint32_t pixel = row.w +
                             (static_cast<uint32_t>(src0) * gemm.axis[1].src_extent + src1) *
                                 static_cast<uint32_t>(gemm.axis[2].src_extent) +
                             src2;
      a_step_[i] = valid ? kSimtTileK * sizeof(T) : 0;
      a_[i] = valid ? static_cast<const T*>(tile_.a) +
                          static_cast<uint64_t>(pixel) * static_cast<uint32_t>(gemm.src_channels) +
                          threadIdx.x % 2 * 4
                    : Zeros<T>();
    }
    const T* filter = static_cast<const T*>(tile_.b) +
                      gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2]) * gemm.b_tap;
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      // Columns beyond the last read the last quad (or column) instead; nobody stores their sums.
      const int column = min(
          tile_.n_first + static_cast<int>(kTransposeB ? threadIdx.x / 2 + i * (Tile::kThreads / 2)
                                                       : threadIdx.x % kQuadsOfB * 4),
          gemm.gemm_n - (kTransposeB ? 1 : 4));
      const int k = kTransposeB ? threadIdx.x % 2 * 4 : threadIdx.x / kQuadsOfB + i * kRowsOfB;
      b_[i] = filter + k * gemm.b_reduce + column * gemm.b_column;
    }
    const int run = gemm.reduce_channels / kSimtTileK;
    return run > 0 ? run : EnterTail();
  }

  const IgemmParams& params_;
  const GatherTile<Tile>& tile_;
  const T* a_[kPassesA];
  const T* b_[kPassesB];
  uint32_t a_step_[kPassesA];   // bytes
  uint32_t a_store_, b_store_;  // shared-memory addresses of the stage that Commit fills
  Pack<T, 4> a_pack_[kPassesA];
  Pack<T, 4> b_pack_[kPassesB];
  int32_t position_ = -2;  // 2 * tap, and 1 more in its tail; kEnd after the last
};

// One reduction index: what it adds to a row's source coordinates and to the offset into A, and its
// first column of B.
struct alignas(16) ReduceEntry {
  int32_t src0, src1, src2;
  int32_t unused;
  int64_t a_offset;
  const void* b;
};

// Stages decoded at once. 16 make 128 entries of 32 bytes, one for each thread of most tiles, and
// spread the cost of decoding and of its barrier over 16 stages.
inline constexpr int kTableStages = 16;
using ReduceTable = ReduceEntry[kTableStages][kSimtTileK];

template <typename T, class Tile, Op kOp, int kWidth>
class TableLoader {
 public:
  // fprop, dgrad.
  __device__ __forceinline__ TableLoader(const IgemmParams& params, const GatherTile<Tile>& tile,
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

  // wgrad: the rows from m_first on, the pixels from `first` to `end`.
  __device__ __forceinline__ TableLoader(const IgemmParams& params, const T* a, const T* b,
                                         int m_first, int n_first, int32_t first, int32_t end,
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

  // The stages that are left and the Fetch too many, at most a table at a time.
  __device__ __forceinline__ int FirstRun() {
    fetches_ = end_ > next_ ? (end_ - next_ + kSimtTileK - 1) / kSimtTileK + 1 : 0;
    return NextRun();
  }
  __device__ __forceinline__ int NextRun() {
    if (fetches_ == 0) return 0;
    // Every thread has done its Fetches from the table: a barrier follows each of them.
    for (int i = threadIdx.x; i < kTableStages * kSimtTileK; i += Tile::kThreads) Decode(i);
    next_ += kTableStages * kSimtTileK;
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
      const ReduceEntry& entry = entry_a_[i * (kSimtTileK / kPassesA)];
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
      const ReduceEntry& entry = entry_b_[i * (kSimtTileK / kPassesB)];
      const T* source = static_cast<const T*>(entry.b) + b_column_;
      // Columns of dgrad lie too far apart for a row of zeros.
      if (kOp == Op::kDgrad && entry.b == nullptr) source = Zeros<T>();
      b_pack_[i].Load(source);
    }
    entry_a_ += kSimtTileK;
    entry_b_ += kSimtTileK;
  }

  __device__ __forceinline__ void Commit() const {
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfA; ++r) {
        a_pack_[i][r].Unpack(values);
        StoreShared(
            a_store_ + (i * (kSimtTileK / kPassesA) * Tile::kStrideA + r * Tile::kThreads) * 4,
            values);
      }
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      b_pack_[i].Unpack(values);
      StoreShared(b_store_ + i * (kSimtTileK / kPassesB) * Tile::kStrideB * 4, values);
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
  static constexpr int kPassesA = kSimtTileK * kItemsOfA / Tile::kThreads / kRowsOfA;
  static constexpr int kPassesB = kSimtTileK * kItemsOfB / Tile::kThreads;
  static_assert(kItemsOfB <= Tile::kThreads && kPassesA >= 1 && kPassesB >= 1);

  // A row's part of the sums of ReduceEntry.
  struct TableRow {
    int32_t src0, src1, src2;
    const T* a;
  };

  // Row of the tile, and reduction index of the stage, that this thread loads.
  __device__ static int Row(int r) { return threadIdx.x % kItemsOfA * kWidth + r * Tile::kThreads; }
  __device__ static int KOfA(int pass) {
    return threadIdx.x / kItemsOfA + pass * (kSimtTileK / kPassesA);
  }
  __device__ static int KOfB(int pass) {
    return threadIdx.x / kItemsOfB + pass * (kSimtTileK / kPassesB);
  }

  // Whether offsets of rows and reduction indices simply add. Phases make it so in fprop and dgrad;
  // wgrad with lhs_dilation is left to the scalar instances, so that the others carry no code for
  // it.
  __device__ __forceinline__ bool Dense() const {
    return kOp != Op::kWgrad || kWidth != 1 || params_.gemm.Dense();
  }

  __device__ __forceinline__ void Init(int n_first, const SimtStage<Tile>& stage) {
    a_store_ = SharedAddress(&stage.a[KOfA(0)][Row(0)]);
    b_store_ = SharedAddress(&stage.b[KOfB(0)][threadIdx.x % kItemsOfB * kWidth]);
    n_first_ = n_first;
    // Columns beyond the last read the last instead; nobody stores their sums.
    const int column = min(n_first + static_cast<int>(threadIdx.x % kItemsOfB * kWidth),
                           params_.gemm.gemm_n - kWidth);
    b_column_ = static_cast<Column>(column - n_first);
    if (kOp == Op::kDgrad) b_column_ *= params_.gemm.b_column;
  }

  // Entry i of the table, for the reduction index next_ + i. Beyond the end A is outside of the
  // source and B is zeros, so that the term is 0 * 0 whatever lies in memory.
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
    table_[i / kSimtTileK][i % kSimtTileK] = entry;
  }

  const IgemmParams& params_;
  const AxisPhase (*phase_)[3];
  ReduceTable& table_;
  const T* b_;
  int32_t next_, end_;
  int32_t fetches_;  // that follow the current run
  int32_t n_first_;
  const ReduceEntry* entry_a_;
  const ReduceEntry* entry_b_;
  TableRow row_[kRowsOfA];
  // Of this thread, from the first column of the tile on, in elements of B. Only in dgrad are
  // columns not neighbours; elsewhere the register of a wide offset is saved.
  using Column = std::conditional_t<kOp == Op::kDgrad, int64_t, uint32_t>;
  Column b_column_;
  Pack<T, kWidth> a_pack_[kPassesA][kRowsOfA];
  Pack<T, kWidth> b_pack_[kPassesB];
  uint32_t a_store_, b_store_;  // shared-memory addresses of the stage that Commit fills
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_
