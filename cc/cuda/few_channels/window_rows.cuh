// wgrad's operand A from halo tiles of x: rows (r, s, c) of dw by pixels of y, for each layout of a
// tile in shared memory.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_WINDOW_ROWS_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_WINDOW_ROWS_CUH_

#include <cstdint>

#include "cuda/few_channels/halo_loader.cuh"
#include "cuda/few_channels/params.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::few_channels {

// The halo tile sorted by channel and by the column modulo the stride, so that a word is two
// neighbouring pixels. Pixels at odd positions read a copy that is shifted by one element.
template <typename T, int kBlocksM>
struct SortedHalo {
  const Params& params;
  unsigned char* halo;
  // One channel of one row of x, its columns by residue modulo the stride.
  const int32_t plane;
  // The position of an element of a halo row, by channel, residue and column.
  unsigned short* place;
  HaloLoader<T> loader;
  // The positions of the elements of this lane's rows for the first pixel of the halo tile.
  uint32_t row_address[kBlocksM * 2];

  // `m`: the warp's first row.
  __device__ __forceinline__ SortedHalo(const Params& p, const T* x, unsigned char* shared,
                                        int32_t m)
      : params(p),
        halo(shared),
        plane(p.columns.stride * p.pitch),
        place(reinterpret_cast<unsigned short*>(shared + 2 * p.halo_bytes)),
        loader(p, x) {
    const auto row_pairs = static_cast<int32_t>(params.halo_row_divmod.divisor);
    for (int32_t i = threadIdx.x; i < row_pairs * 2; i += kThreads) {
      int32_t column, channel, j, residue;
      params.c_divmod.Divmod(max(0, i - params.halo_lead), &column, &channel);
      params.column_stride_divmod.Divmod(column, &j, &residue);
      // Pairs at both ends may contain elements that no window reads.
      const bool wanted = i >= params.halo_lead && j < params.pitch;
      place[i] = static_cast<unsigned short>(wanted ? channel * plane + residue * params.pitch + j
                                                    : params.halo_spare);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t row = RowOf(params, m + i * 8 + lane / 4);
      int32_t tap, channel;
      params.c_divmod.Divmod(max(row, 0), &tap, &channel);
      const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
      int32_t j, residue;
      params.column_stride_divmod.Divmod(s * params.columns.dilation, &j, &residue);
      const int32_t at =
          (r * params.rows.dilation * params.c + channel) * plane + residue * params.pitch + j;
      row_address[i] = SharedAddress(halo) +
                       (j % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2) + lane % 4 * 4;
    }
  }
  // Row m of the GEMM as a row of dw, or -1.
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    return m < params.rows.filter * params.columns.filter * params.c ? m : -1;
  }
  // Stores the loader's pairs in a buffer.
  __device__ __forceinline__ void Store(int buffer) {
    unsigned char* to = halo + buffer * params.halo_bytes;
    loader.Store([this, to](int32_t row, int32_t pair, uint32_t value) {
      const uint32_t places = reinterpret_cast<const uint32_t*>(place)[pair];
      auto* low = reinterpret_cast<unsigned short*>(to) + row * params.c * plane;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto* at = low + (e == 0 ? places & 0xffff : places >> 16);
        const auto half = static_cast<unsigned short>(e == 0 ? value : value >> 16);
        *at = half;
        // The copy is shifted by one element.
        if (params.copy_bytes > 0) at[params.copy_bytes / 2 - 1] = half;
      }
    });
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) {
    for (loader.Begin(tile); loader.More();) {
      loader.Load();
      Store(0);
    }
  }
  // The offset of a block of 16 pixels.
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + (down * params.rows.stride * params.c * plane + column) * 2;
  }
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = LoadWord(row_address[i * 2 + e % 2] + offset + e / 2 * 16);
  }
};

// The halo tile in the order of x, copied by chunks of 16 bytes. A word is two neighbouring
// elements of a pixel's window. The words of two pixels are permuted into two fragments: even
// elements are rows 0 to 7 of a block of the GEMM, odd elements are rows 8 to 15. The rows
// therefore are runs of a filter row's elements, padded to pairs; the sums of padding are not
// stored.
template <typename T, int kBlocksM>
struct PlainHalo {
  const Params& params;
  const uint32_t halo;
  const ChunkLoader<T> loader;
  const uint32_t pixel_bytes;  // from one pixel's window to the next
  uint32_t pair_address[kBlocksM];

  __device__ __forceinline__ PlainHalo(const Params& p, const T* x, unsigned char* shared,
                                       int32_t m)
      : params(p),
        halo(SharedAddress(shared)),
        loader(p, x),
        pixel_bytes(p.columns.stride * p.c * 2) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      int32_t run, pair;
      params.words_of_run.Divmod(m / 2 + i * 8 + lane / 4, &run, &pair);
      if (run >= params.runs) run = pair = 0;
      const int32_t r = run / params.runs_of_row, s = run % params.runs_of_row;
      const int32_t at = r * params.rows.dilation * params.pitch +
                         s * params.columns.dilation * params.c + pair * 2 + params.halo_lead -
                         params.run_lead;
      pair_address[i] = halo + at * 2 + lane % 4 * 2 * pixel_bytes;
    }
  }
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    int32_t run, pair;
    params.words_of_run.Divmod(m / 16 * 8 + m % 8, &run, &pair);
    const int32_t element = pair * 2 + m / 8 % 2 - params.run_lead;
    const bool valid = run < params.runs &&
                       static_cast<uint32_t>(element) < static_cast<uint32_t>(params.run_elements);
    return valid ? run * params.run_elements + element : -1;
  }
  __device__ __forceinline__ void Load(const PixelTile& tile, int buffer) const {
    loader.Load(tile, halo + buffer * params.halo_bytes);
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) const { Load(tile, 0); }
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + down * params.rows.stride * params.pitch * 2 +
           column * pixel_bytes;
  }
  // `step`: the step within a block of 16 pixels; 16-bit elements have one.
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = pair_address[i] + offset + half * 8 * pixel_bytes;
      const uint32_t first = LoadWord(from), second = LoadWord(from + pixel_bytes);
      a[half * 2] = __byte_perm(first, second, 0x5410);
      a[half * 2 + 1] = __byte_perm(first, second, 0x7632);
    }
  }
};

// The float32 halo tile in the order of x: a word is one element of a pixel's window.
template <int kBlocksM>
struct WordHalo {
  const Params& params;
  const uint32_t halo;
  const ChunkLoader<float> loader;
  const uint32_t pixel_bytes;  // from one pixel's window to the next
  // The positions of the elements of this lane's rows for its first pixel of a block of 16.
  uint32_t row_address[kBlocksM * 2];

  __device__ __forceinline__ WordHalo(const Params& p, const float* x, unsigned char* shared,
                                      int32_t m)
      : params(p),
        halo(SharedAddress(shared)),
        loader(p, x),
        pixel_bytes(p.columns.stride * p.c * 4) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t row = RowOf(params, m + i * 8 + lane / 4);
      int32_t tap, channel;
      params.c_divmod.Divmod(max(row, 0), &tap, &channel);
      const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
      const int32_t at = r * params.rows.dilation * params.pitch +
                         s * params.columns.dilation * params.c + channel + params.halo_lead;
      row_address[i] =
          halo + at * 4 + SpreadPixel<2>(0, lane % 4, params.log2_spread) * pixel_bytes;
    }
  }
  static __device__ __forceinline__ int32_t RowOf(const Params& params, int32_t m) {
    return m < params.rows.filter * params.columns.filter * params.c ? m : -1;
  }
  __device__ __forceinline__ void Load(const PixelTile& tile, int buffer) const {
    loader.Load(tile, halo + buffer * params.halo_bytes);
  }
  __device__ __forceinline__ void LoadFirst(const PixelTile& tile) const { Load(tile, 0); }
  __device__ __forceinline__ uint32_t Offset(int buffer, int32_t down, int32_t column) const {
    return buffer * params.halo_bytes + down * params.rows.stride * params.pitch * 4 +
           column * pixel_bytes;
  }
  __device__ __forceinline__ void Fragment(int i, int step, uint32_t offset,
                                           uint32_t (&a)[4]) const {
    // Two pixels of a step; their distance from the first pixel is the same in every lane.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t pixel = SpreadPixel<2>(step * 2 + e / 2, 0, params.log2_spread);
      a[e] = LoadWord(row_address[i * 2 + e % 2] + (offset + pixel * pixel_bytes));
    }
  }
};

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_WINDOW_ROWS_CUH_
