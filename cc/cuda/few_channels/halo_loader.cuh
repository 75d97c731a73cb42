// The halo tile of x in shared memory: the tiles of pixels of fprop and wgrad, and the loaders.
#ifndef JAXCONV_CUDA_FEW_CHANNELS_HALO_LOADER_CUH_
#define JAXCONV_CUDA_FEW_CHANNELS_HALO_LOADER_CUH_

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma_tile.cuh"
#include "cuda/few_channels/params.h"

namespace jaxconv::few_channels {

// Elements in a word, the unit of fragments and copies, and in a chunk of 16 bytes.
template <typename T>
inline constexpr int kWordElements = 4 / int{sizeof(T)};
template <typename T>
inline constexpr int kChunkElements = 16 / int{sizeof(T)};

// Maps lane `lane` of 1 << kBits, in group `group`, to its pixel among neighbours in a row. Pixels
// of neighbouring lanes are 1 << log2_spread apart, and 1 << log2_spread groups interleave their
// pixels. The plan chooses a distance without bank conflicts.
template <int kBits>
__device__ __forceinline__ int32_t SpreadPixel(int32_t group, int32_t lane, int32_t log2_spread) {
  const int32_t whole = group >> log2_spread;
  return (((whole << kBits) + lane) << log2_spread) + (group - (whole << log2_spread));
}

// The first pixel of a tile of y (dgrad: of dx).
struct PixelTile {
  int32_t image, row, column;

  __device__ __forceinline__ PixelTile(const Params& params, int32_t index) {
    int32_t across, down;
    params.tiles_across.Divmod(index, &index, &across);
    params.tiles_down.Divmod(index, &image, &down);
    row = down * params.tile_rows;
    column = across * params.tile_columns;
  }
};

// Copies the halo tile of x by pairs of elements. Load fetches a thread's next pairs and Store
// passes them on, so that a caller can multiply in between. A row of the halo tile begins with the
// even element at or before the tile's first element (halo_lead).
template <typename T>
class HaloLoader {
 public:
  static constexpr int kInFlight = kPairsInFlight;

  __device__ __forceinline__ HaloLoader(const Params& params, const T* x)
      : params_(params), x_(reinterpret_cast<const unsigned short*>(x)) {
    params.halo_row_divmod.Divmod(threadIdx.x, &thread_row_, &thread_pair_);
  }

  __device__ __forceinline__ void Begin(const PixelTile& tile) {
    first_row_ = tile.row * params_.rows.stride - params_.rows.pad;
    first_element_ = (tile.column * params_.columns.stride - params_.columns.pad) * params_.c -
                     params_.halo_lead;
    image_ = x_ + int64_t{tile.image} * (params_.rows.in * params_.columns.in * params_.c);
    row_ = thread_row_;
    pair_ = thread_pair_;
    left_ = params_.halo_pairs;
  }
  __device__ __forceinline__ bool More() const { return left_ > 0; }
  // Whether the next fetch is the last.
  __device__ __forceinline__ bool Last() const { return left_ <= kInFlight * kThreads; }

  __device__ __forceinline__ void Load() {
    if (params_.halo_words) {
      // Rows are whole pairs, so a pair is either inside or outside.
      Fetch([](const unsigned short* source, int32_t element, int32_t row_elements) {
        return static_cast<uint32_t>(element) < static_cast<uint32_t>(row_elements)
                   ? __ldg(reinterpret_cast<const uint32_t*>(source))
                   : 0;
      });
    } else {
      Fetch([](const unsigned short* source, int32_t element, int32_t row_elements) {
        uint32_t value = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (static_cast<uint32_t>(element + e) < static_cast<uint32_t>(row_elements)) {
            value |= uint32_t{__ldg(source + e)} << (e * 16);
          }
        }
        return value;
      });
    }
  }
  // store(row, pair of the row, two elements).
  template <typename StorePairOf>
  __device__ __forceinline__ void Store(StorePairOf store) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * kThreads >= left_) break;
      if (row_ < params_.halo_rows) store(row_, pair_, values_[i]);
      Next(&row_, &pair_);
    }
    left_ -= kInFlight * kThreads;
  }

 private:
  template <typename FetchPair>
  __device__ __forceinline__ void Fetch(FetchPair fetch) {
    int32_t row = row_, pair = pair_;
    const int32_t row_elements = params_.columns.in * params_.c;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * kThreads >= left_) break;  // uniform
      const int32_t from = first_row_ + row, element = first_element_ + pair * 2;
      const bool inside = row < params_.halo_rows &&
                          static_cast<uint32_t>(from) < static_cast<uint32_t>(params_.rows.in);
      // Elements of missing rows are outside.
      values_[i] =
          fetch(image_ + (from * row_elements + element), inside ? element : -2, row_elements);
      Next(&row, &pair);
    }
  }
  __device__ __forceinline__ void Next(int32_t* row, int32_t* pair) const {
    const auto pairs = static_cast<int32_t>(params_.halo_row_divmod.divisor);
    *row += params_.rows_per_pass;
    *pair += params_.pairs_per_pass;
    if (*pair >= pairs) *pair -= pairs, ++*row;
  }

  const Params& params_;
  const unsigned short* x_;
  const unsigned short* image_;
  int32_t thread_row_, thread_pair_;  // of its first value in any halo tile
  int32_t first_row_, first_element_;
  int32_t row_, pair_;  // of the next value
  int32_t left_ = 0;    // pairs not fetched yet
  uint32_t values_[kInFlight];
};

// Copies the halo tile of x by cp.async: in chunks of 16 bytes if rows of x are whole chunks,
// otherwise in words (float32 only). A row of the halo tile begins with the chunk (word) that
// contains the tile's first element.
template <typename T>
class ChunkLoader {
 public:
  __device__ __forceinline__ ChunkLoader(const Params& params, const T* x)
      : params_(params), x_(x) {
    params.halo_row_divmod.Divmod(threadIdx.x, &thread_row_, &thread_chunk_);
  }

  __device__ __forceinline__ void Load(const PixelTile& tile, uint32_t halo) const {
    if constexpr (sizeof(T) == 4) {
      if (params_.word_copies) return LoadBy<4>(tile, halo);
    }
    LoadBy<16>(tile, halo);
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ void LoadBy(const PixelTile& tile, uint32_t halo) const {
    constexpr int kElements = kBytes / int{sizeof(T)};
    const auto chunks = static_cast<int32_t>(params_.halo_row_divmod.divisor);
    const int32_t row_elements = params_.columns.in * params_.c;
    const int32_t first_row = tile.row * params_.rows.stride - params_.rows.pad;
    const int32_t first_element =
        (tile.column * params_.columns.stride - params_.columns.pad) * params_.c -
        params_.halo_lead;
    const T* image = x_ + int64_t{tile.image} * (params_.rows.in * row_elements);
    int32_t row = thread_row_, chunk = thread_chunk_;
#pragma unroll 2
    for (uint32_t to = halo + threadIdx.x * kBytes; row < params_.halo_rows;
         to += kThreads * kBytes) {
      const int32_t from = first_row + row, element = first_element + chunk * kElements;
      const bool inside = static_cast<uint32_t>(from) < static_cast<uint32_t>(params_.rows.in) &&
                          static_cast<uint32_t>(element) < static_cast<uint32_t>(row_elements);
      CopyAsync<kBytes>(to, image + (from * row_elements + element), inside);
      row += params_.rows_per_pass;
      chunk += params_.pairs_per_pass;
      if (chunk >= chunks) chunk -= chunks, ++row;
    }
    CopyAsyncCommit();
  }

  const Params& params_;
  const T* x_;
  int32_t thread_row_, thread_chunk_;  // of its first chunk in any halo tile
};

// Rows of 64 columns along the reduction: a tile of dy, or a 16-bit filter.
template <typename T>
using RowMatrix = OperandTile<T, 64, 128, true>;

// Whether fragments must be rounded before the product: float32 with one TF32 product.
template <class Tag>
inline constexpr bool kRounds = sizeof(typename Tag::T) == 4 && !Tag::kThreeTf32;

// A word that needs no rounding before the product.
template <class Tag>
__device__ __forceinline__ uint32_t Rounded(uint32_t word) {
  if constexpr (kRounds<Tag>) RoundToTf32(word);
  return word;
}

inline LaunchConfig ConfigOf(const LaunchParams& launch) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(launch.grid_x), static_cast<unsigned>(launch.grid_y));
  config.threads = kThreads;
  config.shared_bytes = static_cast<size_t>(launch.shared_bytes);
  return config;
}

}  // namespace jaxconv::few_channels

#endif  // JAXCONV_CUDA_FEW_CHANNELS_HALO_LOADER_CUH_
