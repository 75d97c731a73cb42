// Global memory -> registers -> shared memory for the three implicit GEMMs.
//
//   VectorGatherLoader  fprop, dgrad with channel extents that are multiples of 4. The reduction runs tap
//                       by tap; inside a tap a load is a pointer and an increment. Whether a row's pixel
//                       lies in the padding is settled at the change of a tap, by pointing it at zeros.
//   TableLoader         everything else: fprop and dgrad element by element, wgrad by elements or quads.
//                       Eight threads decode the eight reduction indices of a stage into a small table in
//                       shared memory one stage ahead; an address is then row part + table part.
#ifndef JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_
#define JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_

#include <cstdint>

#include "core/implicit_gemm.h"
#include "cuda/device/element.cuh"
#include "cuda/device/igemm_params.h"
#include "cuda/device/simt_tile.cuh"

namespace jaxconv {

// What one CTA of fprop or dgrad knows of its tile. It lives in shared memory because it is needed only
// at the change of a tap, and registers are what the tile is short of.
template <class Tile>
struct GatherTile {
  int4 row[Tile::kTileM];         // src coordinates at t = 0, and the first pixel of the image
  int32_t dst_row[Tile::kTileM];  // pixel of the output, or -1
  AxisPhase phase[3];
  uint32_t tap_mask;  // taps that hit a source element for any row; all ones above 32 taps
  const void* a;      // first element of this batch and group
  const void* b;
};

// Fills `tile` for the tile's first row; all threads call it. False: the tile has no row.
template <class Tile, typename T>
__device__ __forceinline__ bool InitGatherTile(const IgemmParams& params, int m_tile, int phase_index,
                                               const T* a, const T* b, GatherTile<Tile>& tile) {
  const ImplicitGemm& gemm = params.gemm;
  if (threadIdx.x < 3) {
    tile.phase[threadIdx.x] = gemm.PhaseOfAxis(phase_index, threadIdx.x);
  } else if (threadIdx.x == 3) {
    tile.tap_mask = 0;
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

// kTransposeB: the filter's reduction channels are neighbours in memory (dgrad) and not its columns.
template <typename T, class Tile, bool kTransposeB>
class VectorGatherLoader {
 public:
  __device__ __forceinline__ VectorGatherLoader(const IgemmParams& params, const GatherTile<Tile>& tile,
                                                int n_first)
      : params_(params), tile_(tile) {
    const ImplicitGemm& gemm = params.gemm;
    column_ = n_first + (kTransposeB ? threadIdx.x / 2 : threadIdx.x % kQuadsOfB * 4);
    mask_ = tile.tap_mask;
    by_mask_ = ImplicitGemm::TapCount(tile.phase) <= 32;
    blocks_of_tap_ = gemm.reduce_channels / kSimtTileK;
    has_tail_ = gemm.reduce_channels % kSimtTileK != 0;
    NextTap();
  }

  // Stages of the whole reduction.
  __device__ __forceinline__ int Blocks() const {
    int taps = by_mask_ ? __popc(tile_.tap_mask) : ImplicitGemm::TapCount(tile_.phase);
    return taps * (blocks_of_tap_ + has_tail_);
  }

  __device__ __forceinline__ void Fetch(int) {
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_pack_[i].Load(a_[i]);
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_pack_[i].Load(b_[i]);
    if (--left_ != 0) {
      Advance();
    } else if (has_tail_ && !in_tail_) {
      Advance();
      EnterTail();
    } else {
      NextTap();
    }
  }

  __device__ __forceinline__ void Commit(SimtStage<Tile>& stage) const {
    float quad[4];
    const int k = threadIdx.x % 2 * 4;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      a_pack_[i].Unpack(quad);
#pragma unroll
      for (int e = 0; e < 4; ++e) stage.a[k + e][threadIdx.x / 2 + i * (Tile::kThreads / 2)] = quad[e];
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      b_pack_[i].Unpack(quad);
      if constexpr (kTransposeB) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          stage.b[k + e][threadIdx.x / 2 + i * (Tile::kThreads / 2)] = quad[e];
        }
      } else {
        *reinterpret_cast<float4*>(
            &stage.b[threadIdx.x / kQuadsOfB + i * kRowsOfB][threadIdx.x % kQuadsOfB * 4]) =
            make_float4(quad[0], quad[1], quad[2], quad[3]);
      }
    }
  }

 private:
  static constexpr int kPassesA = Tile::kTileM * 2 / Tile::kThreads;
  static constexpr int kPassesB = Tile::kTileN * 2 / Tile::kThreads;
  static constexpr int kQuadsOfB = Tile::kTileN / 4;
  static constexpr int kRowsOfB = Tile::kThreads / kQuadsOfB;
  static_assert(kPassesA >= 1 && kPassesB >= 1);

  __device__ __forceinline__ void Advance() {
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) a_[i] += a_step_[i];
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) b_[i] += b_step_[i];
  }

  // The last stage of a tap holds only 4 channels: the other half multiplies zeros by zeros.
  __device__ __forceinline__ void EnterTail() {
    in_tail_ = true;
    left_ = 1;
    const bool upper = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      if (upper) a_[i] = Zeros<T>();
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      if (kTransposeB ? upper : threadIdx.x / kQuadsOfB + i * kRowsOfB >= 4) b_[i] = Zeros<T>();
    }
  }

  __device__ __forceinline__ void NextTap() {
    const ImplicitGemm& gemm = params_.gemm;
    if (by_mask_) {
      tap_ = __ffs(mask_) - 1;
      mask_ &= mask_ - 1;
      if (tap_ < 0) return;  // after the last tap
    } else {
      ++tap_;
    }
    int32_t t[3], filter_tap[3];
    gemm.DecodeTap(tile_.phase, tap_, t);
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
      const int64_t pixel = row.w + gemm.SourcePixel(src0, src1, src2);
      a_step_[i] = valid ? kSimtTileK : 0;
      a_[i] = valid ? static_cast<const T*>(tile_.a) + pixel * gemm.src_channels +
                          threadIdx.x % 2 * 4
                    : Zeros<T>();
    }
    const T* tap = static_cast<const T*>(tile_.b) +
                   gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2]) * gemm.b_tap;
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      const int column = kTransposeB ? column_ + i * (Tile::kThreads / 2) : column_;
      const int k = kTransposeB ? threadIdx.x % 2 * 4 : threadIdx.x / kQuadsOfB + i * kRowsOfB;
      const bool valid = column < gemm.gemm_n;
      b_step_[i] = valid ? static_cast<int32_t>(gemm.b_reduce) * kSimtTileK : 0;
      b_[i] = valid ? tap + k * gemm.b_reduce + column * gemm.b_column : Zeros<T>();
    }
    in_tail_ = false;
    left_ = blocks_of_tap_;
    if (blocks_of_tap_ == 0) EnterTail();
  }

  const IgemmParams& params_;
  const GatherTile<Tile>& tile_;
  const T* a_[kPassesA];
  const T* b_[kPassesB];
  int32_t a_step_[kPassesA], b_step_[kPassesB];
  Pack<T, 4> a_pack_[kPassesA];
  Pack<T, 4> b_pack_[kPassesB];
  int32_t column_;
  uint32_t mask_;
  int32_t tap_ = -1, left_, blocks_of_tap_;
  bool by_mask_, has_tail_, in_tail_ = false;
};

// One reduction index: what it adds to a row's source coordinates and to the offsets into A and B.
struct alignas(16) ReduceEntry {
  int32_t src0, src1, src2;
  int32_t valid;
  int64_t a_offset, b_offset;
};

// A row's part of the same sums.
template <typename T>
struct TableRow {
  int32_t src0, src1, src2;
  const T* a;
};

template <typename T, class Tile, Op kOp, int kWidth>
class TableLoader {
 public:
  // fprop, dgrad.
  __device__ __forceinline__ TableLoader(const IgemmParams& params, const GatherTile<Tile>& tile,
                                         int n_first, ReduceEntry (&table)[2][kSimtTileK])
      : params_(params), phase_(&tile.phase), table_(table) {
    const ImplicitGemm& gemm = params.gemm;
    first_ = 0;
    end_ = ImplicitGemm::TapCount(tile.phase) * gemm.reduce_channels;
    dense_ = true;
#pragma unroll
    for (int i = 0; i < kRowsOfA; ++i) {
      const int4 row = tile.row[Row(i)];
      row_[i].src0 = row.x, row_[i].src1 = row.y, row_[i].src2 = row.z;
      row_[i].a = static_cast<const T*>(tile.a) +
                  (row.w + gemm.SourcePixel(row.x, row.y, row.z)) * gemm.src_channels;
    }
    InitColumn(static_cast<const T*>(tile.b), n_first);
    Decode(0);
    __syncthreads();
  }

  // wgrad: the rows from m_first on, the pixels from `first` to `end`.
  __device__ __forceinline__ TableLoader(const IgemmParams& params, const T* a, const T* b,
                                         int m_first, int n_first, int32_t first, int32_t end,
                                         ReduceEntry (&table)[2][kSimtTileK])
      : params_(params), phase_(nullptr), table_(table), first_(first), end_(end) {
    const ImplicitGemm& gemm = params.gemm;
    dense_ = gemm.Dense();
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
        int64_t pixel =
            dense_ ? gemm.SourcePixel(row_[i].src0, row_[i].src1, row_[i].src2) : int64_t{0};
        row_[i].a += pixel * gemm.src_channels + channel;
      }
    }
    InitColumn(b, n_first);
    Decode(0);
    __syncthreads();
  }

  __device__ __forceinline__ int Blocks() const {
    return (end_ - first_ + kSimtTileK - 1) / kSimtTileK;
  }

  __device__ __forceinline__ void Fetch(int block) {
    const ImplicitGemm& gemm = params_.gemm;
    const ReduceEntry* table = table_[block & 1];
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
      const ReduceEntry entry = table[KOfA(i)];
#pragma unroll
      for (int r = 0; r < kRowsOfA; ++r) {
        int32_t src0 = row_[r].src0 + entry.src0;
        int32_t src1 = row_[r].src1 + entry.src1;
        int32_t src2 = row_[r].src2 + entry.src2;
        const T* source = row_[r].a + entry.a_offset;
        bool valid = true;
        if (kOp == Op::kWgrad && !dense_) {
          valid = src0 >= 0 && src1 >= 0 && src2 >= 0;
          int32_t rest0, rest1, rest2;
          gemm.axis[0].div_divmod.Divmod(src0, &src0, &rest0);
          gemm.axis[1].div_divmod.Divmod(src1, &src1, &rest1);
          gemm.axis[2].div_divmod.Divmod(src2, &src2, &rest2);
          valid = valid && (rest0 | rest1 | rest2) == 0;
          source += gemm.SourcePixel(src0, src1, src2) * gemm.src_channels;
        }
        valid = valid && gemm.InSource(src0, src1, src2);
        a_pack_[i][r].Clear();
        if (valid) a_pack_[i][r].Load(source);
      }
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      const ReduceEntry& entry = table[KOfB(i)];
      b_pack_[i].Clear();
      if (column_valid_ && entry.valid) b_pack_[i].Load(b_ + entry.b_offset);
    }
    // The slot being filled was last read before the barrier that ended the stage before this one.
    Decode(block + 1);
  }

  __device__ __forceinline__ void Commit(SimtStage<Tile>& stage) const {
#pragma unroll
    for (int i = 0; i < kPassesA; ++i) {
#pragma unroll
      for (int r = 0; r < kRowsOfA; ++r) Store(a_pack_[i][r], &stage.a[KOfA(i)][Row(r)]);
    }
#pragma unroll
    for (int i = 0; i < kPassesB; ++i) {
      Store(b_pack_[i], &stage.b[KOfB(i)][threadIdx.x % kItemsOfB * kWidth]);
    }
  }

 private:
  static constexpr int kItemsOfA = Tile::kTileM / kWidth;
  static constexpr int kItemsOfB = Tile::kTileN / kWidth;
  static constexpr int kRowsOfA = kItemsOfA > Tile::kThreads ? kItemsOfA / Tile::kThreads : 1;
  static constexpr int kPassesA = kSimtTileK * kItemsOfA / Tile::kThreads / kRowsOfA;
  static constexpr int kPassesB = kSimtTileK * kItemsOfB / Tile::kThreads;
  static_assert(kItemsOfB <= Tile::kThreads && kPassesA >= 1 && kPassesB >= 1);

  // Row of the tile, and reduction index of the stage, that this thread loads.
  __device__ static int Row(int r) {
    return threadIdx.x % kItemsOfA * kWidth + r * Tile::kThreads;
  }
  __device__ static int KOfA(int pass) {
    return threadIdx.x / kItemsOfA + pass * (kSimtTileK / kPassesA);
  }
  __device__ static int KOfB(int pass) {
    return threadIdx.x / kItemsOfB + pass * (kSimtTileK / kPassesB);
  }

  __device__ __forceinline__ void InitColumn(const T* b, int n_first) {
    const int column = n_first + threadIdx.x % kItemsOfB * kWidth;
    column_valid_ = column < params_.gemm.gemm_n;
    b_ = b + column * params_.gemm.b_column;
  }

  __device__ static void Store(const Pack<T, 1>& pack, float* to) {
    float value[1];
    pack.Unpack(value);
    *to = value[0];
  }
  __device__ static void Store(const Pack<T, 4>& pack, float* to) {
    float quad[4];
    pack.Unpack(quad);
    *reinterpret_cast<float4*>(to) = make_float4(quad[0], quad[1], quad[2], quad[3]);
  }

  __device__ __forceinline__ void Decode(int block) {
    if (threadIdx.x >= kSimtTileK) return;
    const ImplicitGemm& gemm = params_.gemm;
    const int64_t index = int64_t{first_} + int64_t{block} * kSimtTileK + threadIdx.x;
    ReduceEntry entry{kInvalidCoordinate, kInvalidCoordinate, kInvalidCoordinate, 0, 0, 0};
    if (index < end_) {
      entry.valid = 1;
      if constexpr (kOp == Op::kWgrad) {
        int32_t image, dst[3];
        gemm.DecodePixel(static_cast<int32_t>(index), &image, dst);
        entry.src0 = dst[0] * gemm.axis[0].mul;
        entry.src1 = dst[1] * gemm.axis[1].mul;
        entry.src2 = dst[2] * gemm.axis[2].mul;
        int64_t pixel = image * gemm.SourceImage();
        if (dense_) pixel += gemm.SourcePixel(entry.src0, entry.src1, entry.src2);
        entry.a_offset = pixel * gemm.src_channels;
        entry.b_offset = index * gemm.b_reduce;
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
        entry.b_offset = gemm.TapIndex(filter_tap[0], filter_tap[1], filter_tap[2]) * gemm.b_tap +
                         channel * gemm.b_reduce;
      }
    }
    table_[block & 1][threadIdx.x] = entry;
  }

  const IgemmParams& params_;
  const AxisPhase (*phase_)[3];
  ReduceEntry (&table_)[2][kSimtTileK];
  int32_t first_, end_;
  TableRow<T> row_[kRowsOfA];
  const T* b_;
  Pack<T, kWidth> a_pack_[kPassesA][kRowsOfA];
  Pack<T, kWidth> b_pack_[kPassesB];
  bool column_valid_, dense_;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_DEVICE_GATHER_LOADERS_CUH_
