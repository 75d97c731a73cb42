// igemm_wmma for few channels: x passes through shared memory once, whatever the filter.
//
// With 3 channels a pixel is 6 bytes: no copy of a pixel is worth its instruction, and each is
// wanted by R S / stride^2 windows. So a CTA lays down the whole patch of x (dgrad: of dy) that its
// tile needs, once, and multiplies from there; its fragments are words of the patch, read by plain
// loads where ldmatrix would want rows of 16 bytes. A CTA takes every gridDim.x-th tile; several
// CTAs share an SM and hide each other's loads.
//
// fprop, y[(n,p,q), k]: rows are 128 pixels, the reduction the runs of a window, S C neighbouring
// elements under each filter row. A run is padded to pairs, whose odd half is masked away (it is
// the next pixel's, and may be NaN). The filter stays in shared memory. Pixels at odd elements read
// a copy of the patch that is shifted by one.
//
// wgrad, dw[(r,s,c), k]: the reduction is 128 pixels; pairs of it are neighbouring pixels, so the
// patch is stored by channel and residue of the column modulo the stride. Slices of the tiles are
// added in order by splitk_reduce.cu.
//
// dgrad, z[(n,h,q), (s,c)] = sum over r, k of dy[n, p(h,r), q, k] w[r,s,c,k] in the accumulators,
// then dx[n,h,w,c] = sum over s of z[n, h, q(w,s), s, c] out of shared memory: 3 channels fill 21
// of 24 columns of a 7x7 filter instead of 3 of 16.
//
// Refuses: groups; lhs_dilation; rank 3; patches beyond 100 KB of shared memory; results in
// float32, as all narrow copies do; K not a multiple of 8 (dgrad, wgrad).
#ifndef JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_CUH_
#define JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_CUH_

#include <algorithm>
#include <string>

#include "cuda/device/element.cuh"
#include "cuda/device/fused_epilogue.cuh"
#include "cuda/device/mma_tile.cuh"
#include "cuda/device/patch_params.h"
#include "cuda/kernels/igemm_wmma_patch.h"

namespace jaxconv {

constexpr int kPatchThreads = 128;

// A tile of y's pixels: where it starts.
struct PatchTile {
  int32_t image, row, column;

  __device__ __forceinline__ PatchTile(const PatchParams& params, int32_t index) {
    int32_t across, down;
    params.tiles_across.Divmod(index, &index, &across);
    params.tiles_down.Divmod(index, &image, &down);
    row = down * params.tile_rows;
    column = across * params.tile_columns;
  }
};

// Copies the patch of x that a tile needs by pairs of elements: Load fetches a thread's next pairs,
// Store hands them out, so that a caller can multiply between the two. A patch row begins with the
// even element at or before the tile's first one (patch_lead says which).
template <typename T>
class PatchLoader {
 public:
  static constexpr int kInFlight = 4;

  __device__ __forceinline__ PatchLoader(const PatchParams& params, const T* x)
      : params_(params), x_(reinterpret_cast<const unsigned short*>(x)) {
    params.patch_row_divmod.Divmod(threadIdx.x, &thread_row_, &thread_pair_);
  }

  __device__ __forceinline__ void Begin(const PatchTile& tile) {
    first_row_ = tile.row * params_.rows.stride - params_.rows.pad;
    first_element_ = (tile.column * params_.columns.stride - params_.columns.pad) * params_.c -
                     params_.patch_lead;
    image_ = x_ + int64_t{tile.image} * (params_.rows.in * params_.columns.in * params_.c);
    row_ = thread_row_;
    pair_ = thread_pair_;
    left_ = params_.patch_pairs;
  }
  __device__ __forceinline__ bool More() const { return left_ > 0; }
  // Whether the next fetch is the last.
  __device__ __forceinline__ bool Last() const { return left_ <= kInFlight * kPatchThreads; }

  __device__ __forceinline__ void Load() {
    if (params_.patch_words) {
      // Rows are whole pairs: a pair lies inside or outside.
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
      if (i * kPatchThreads >= left_) break;
      if (row_ < params_.patch_rows) store(row_, pair_, values_[i]);
      Next(&row_, &pair_);
    }
    left_ -= kInFlight * kPatchThreads;
  }

 private:
  template <typename FetchPair>
  __device__ __forceinline__ void Fetch(FetchPair fetch) {
    int32_t row = row_, pair = pair_;
    const int32_t row_elements = params_.columns.in * params_.c;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * kPatchThreads >= left_) break;  // for all threads alike
      const int32_t from = first_row_ + row, element = first_element_ + pair * 2;
      const bool inside = row < params_.patch_rows &&
                          static_cast<uint32_t>(from) < static_cast<uint32_t>(params_.rows.in);
      // An element of a row that does not exist is outside.
      values_[i] =
          fetch(image_ + (from * row_elements + element), inside ? element : -2, row_elements);
      Next(&row, &pair);
    }
  }
  __device__ __forceinline__ void Next(int32_t* row, int32_t* pair) const {
    const auto pairs = static_cast<int32_t>(params_.patch_row_divmod.divisor);
    *row += params_.rows_a_pass;
    *pair += params_.pairs_a_pass;
    if (*pair >= pairs) *pair -= pairs, ++*row;
  }

  const PatchParams& params_;
  const unsigned short* x_;
  const unsigned short* image_;
  int32_t thread_row_, thread_pair_;  // of its first value in any patch
  int32_t first_row_, first_element_;
  int32_t row_, pair_;  // of the next value
  int32_t left_ = 0;    // pairs that no thread has fetched
  uint32_t values_[kInFlight];
};

// Two neighbouring 16-bit rows of 64 columns: a stage of dy or the filter, rows along the
// reduction.
template <typename T>
using PatchMatrix = OperandTile<T, 64, 128, true>;

// Bytes in which a warp turns 16 rows of 64 outputs round.
constexpr int kStagedBytes = 16 * 64 * 2;

// The accumulators of fprop's tile -> y: two blocks of 16 neighbouring pixels a warp, 64 channels.
// They are rounded first and then pass through shared memory, to be stored by 16 bytes.
template <typename T>
__device__ __forceinline__ void StorePixels(const PatchParams& params, const PatchTile& tile,
                                            const float (&acc)[2][8][4], uint32_t staging, T* y,
                                            int n_first) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Chunk c of row r lies at c ^ r % 8.
  const uint32_t store = staging + g * 128 + (g * 16 + t * 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        T pair[2] = {FromFloat<T>(acc[i][j][upper * 2]), FromFloat<T>(acc[i][j][upper * 2 + 1])};
        uint32_t word;
        memcpy(&word, pair, sizeof(word));
        StoreWord((store ^ (j * 16)) + upper * 1024, word);
      }
    }
    __syncwarp();
    const int32_t block = threadIdx.x / 32 * 2 + i, down = block >> params.log2_across;
    const int32_t p = tile.row + down;
    const int32_t q_first = tile.column + (block - (down << params.log2_across)) * 16;
    if (p >= params.rows.out) continue;
    T* row = y + (int64_t{tile.image} * params.rows.out + p) * params.columns.out * params.k;
    if (params.k_vector) {
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int pixel = pass * 4 + lane / 8, chunk = lane % 8;
        const int32_t q = q_first + pixel, n = n_first + chunk * 8;
        const uint4 value = LoadChunk(staging + pixel * 128 + (chunk ^ pixel % 8) * 16);
        if (q < params.columns.out && n < params.k) {
          *reinterpret_cast<uint4*>(row + int64_t{q} * params.k + n) = value;
        }
      }
    } else {
      const int columns = min(64, params.k - n_first);
#pragma unroll 1
      for (int pixel = 0; pixel < 16 && q_first + pixel < params.columns.out; ++pixel) {
        for (int n = lane; n < columns; n += 32) {
          const uint32_t word =
              LoadWord(staging + pixel * 128 + (n / 8 ^ pixel % 8) * 16 + n % 8 / 2 * 4);
          const auto half = static_cast<unsigned short>(n % 2 == 0 ? word : word >> 16);
          reinterpret_cast<unsigned short*>(
              row)[int64_t{q_first + pixel} * params.k + n_first + n] = half;
        }
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPatchThreads, 4)
    FpropPatch(const __grid_constant__ PatchParams params) {
  using Tile = MmaTile<128, 64, 128, 4, 1, 1, 4>;
  using Filter = PatchMatrix<T>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* filter = shared;
  unsigned char* staged = filter + params.steps * 16 * Filter::kRowBytes;
  int2* table = reinterpret_cast<int2*>(staged + kStagedBytes * kPatchThreads / 32);
  unsigned char* patch = reinterpret_cast<unsigned char*>(table + params.steps * 8);
  const uint32_t staging = SharedAddress(staged);
  int32_t part, batch;
  params.column_parts.Divmod(blockIdx.y, &batch, &part);
  const int n_first = part * 64;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* w = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;

  for (int32_t i = threadIdx.x; i < params.steps * 16 * Filter::kChunks; i += kPatchThreads) {
    const int32_t row = i / Filter::kChunks, chunk = i % Filter::kChunks;
    int32_t run, pair;
    params.pairs_of_run.Divmod(row / 2, &run, &pair);
    const int32_t element = pair * 2 + row % 2;
    const bool valid = run < params.runs && element < params.run_elements;
    const int n = n_first + chunk * 8;
    const auto* source = reinterpret_cast<const unsigned short*>(w) +
                         (int64_t{run} * params.run_elements + element) * params.k + n;
    unsigned char* to = filter + Filter::Offset(row, chunk);
    if (params.k_vector) {
      *reinterpret_cast<uint4*>(to) = valid && n < params.k
                                          ? __ldg(reinterpret_cast<const uint4*>(source))
                                          : make_uint4(0, 0, 0, 0);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        reinterpret_cast<unsigned short*>(to)[e] =
            valid && n + e < params.k ? __ldg(source + e) : 0;
      }
    }
  }
  for (int32_t i = threadIdx.x; i < params.steps * 8; i += kPatchThreads) {
    int32_t run, pair;
    params.pairs_of_run.Divmod(i, &run, &pair);
    const int32_t r = run / params.runs_of_row, s = run % params.runs_of_row;
    const int32_t offset =
        r * params.rows.dilation * params.pitch + s * params.columns.dilation * params.c + pair * 2;
    const int32_t mask = pair * 2 + 1 < params.run_elements ? -1 : 0xffff;
    table[i] = run < params.runs ? make_int2(offset * 2, mask) : make_int2(0, 0);
  }

  PatchLoader<T> loader(params, x);
  auto store_to = [&](unsigned char* to) {
    return [&params, to](int32_t row, int32_t pair, uint32_t value) {
      const int32_t at = row * params.pitch + pair * 2;
      *reinterpret_cast<uint32_t*>(to + at * 2) = value;
      if (params.copy_bytes > 0) {
        // The element before a row's first is the last of the row above, which no window wants.
        auto* copy = reinterpret_cast<unsigned short*>(to + params.copy_bytes) + at;
        copy[-1] = static_cast<unsigned short>(value);
        copy[0] = static_cast<unsigned short>(value >> 16);
      }
    };
  };
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Where the window of this lane's pixel begins, in each of the warp's two blocks.
  uint32_t window[Tile::kBlocksM];
  const uint32_t patch_address = SharedAddress(patch);
#pragma unroll
  for (int i = 0; i < Tile::kBlocksM; ++i) {
    const int block = threadIdx.x / 32 * Tile::kBlocksM + i;
    const int32_t row = block >> params.log2_across;
    const int32_t column = (block - (row << params.log2_across)) * 16 + g;
    const int32_t at = row * params.rows.stride * params.pitch + params.patch_lead +
                       column * params.columns.stride * params.c;
    window[i] = patch_address + (at % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2);
  }
  const uint32_t half_block = 8 * params.columns.stride * params.c * 2;
  const uint32_t table_address = SharedAddress(table) + t * 8;
  const FragmentReader<T, Filter, true> reader(SharedAddress(filter), 0);

  int32_t index = blockIdx.x;
  PatchTile tile(params, index);
  if (index < params.tiles) {
    for (loader.Begin(tile); loader.More();) {
      loader.Load();
      loader.Store(store_to(patch));
    }
  }
  __syncthreads();
  uint32_t offset = 0;
  for (; index < params.tiles; index += gridDim.x) {
    const uint32_t other = params.patch_bytes - offset;
    const PatchTile next(params, index + gridDim.x);
    if (index + gridDim.x < params.tiles) loader.Begin(next);
    float acc[Tile::kBlocksM][Tile::kBlocksN][4] = {};
    int32_t step = 0;
    // The next patch arrives in parts, each while a share of the steps is multiplied.
    do {
      if (loader.More()) loader.Load();
      const int32_t end =
          loader.Last() ? params.steps : min(params.steps, step + params.steps_a_fetch);
#pragma unroll 1
      for (; step < end; ++step) {
        uint32_t at[2], mask[2];
        LoadPair(table_address + step * 64, &at[0], &mask[0]);
        LoadPair(table_address + step * 64 + 32, &at[1], &mask[1]);
        uint32_t b[Tile::kBlocksN / 2][4];
        reader.Read(step, b);
#pragma unroll
        for (int i = 0; i < Tile::kBlocksM; ++i) {
          uint32_t a[4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t from = window[i] + offset + at[half];
            a[half * 2] = LoadWord(from) & mask[half];
            a[half * 2 + 1] = LoadWord(from + half_block) & mask[half];
          }
#pragma unroll
          for (int j = 0; j < Tile::kBlocksN; ++j) {
            MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      if (loader.More()) loader.Store(store_to(patch + other));
    } while (loader.More() || step < params.steps);
    StorePixels(params, tile, acc, staging + threadIdx.x / 32 * kStagedBytes,
                static_cast<T*>(params.out) + batch * params.out_batch, n_first);
    __syncthreads();
    offset = other;
    tile = next;
  }
}

// kWarpsM x kWarpsN x kWarpsK warps: of rows (kBlocksM * 16 each), of columns and of the pixels of
// a tile.
template <typename T, int kWarpsM, int kWarpsN, int kWarpsK, int kBlocksM>
__global__ void __launch_bounds__(kPatchThreads, kBlocksM > 2 ? 3 : 5)
    WgradPatch(const __grid_constant__ PatchParams params) {
  using Gradient = PatchMatrix<T>;
  constexpr int kRows = kWarpsM * kBlocksM * 16;
  constexpr int kBlocksN = 8 / kWarpsN;
  constexpr int kPixels = 128;
  constexpr int kGradientBytes = kPixels * Gradient::kRowBytes;
  static_assert(kWarpsM * kWarpsN * kWarpsK * 32 == kPatchThreads);
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* patch = shared + 2 * kGradientBytes;
  int32_t rest, n_part, m_part, batch;
  params.column_parts.Divmod(blockIdx.y, &rest, &n_part);
  params.row_parts.Divmod(rest, &batch, &m_part);
  const int n_first = n_part * 64, m_first = m_part * kRows;
  const int32_t m_end = params.rows.filter * params.columns.filter * params.c;
  const T* x = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* dy = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;
  // One channel of one row of x, its columns by residue modulo the stride.
  const int32_t plane = params.columns.stride * params.pitch;

  // Where an element of a patch row belongs: by channel, residue and column.
  auto* place = reinterpret_cast<unsigned short*>(patch + 2 * params.patch_bytes);
  const auto row_pairs = static_cast<int32_t>(params.patch_row_divmod.divisor);
  for (int32_t i = threadIdx.x; i < row_pairs * 2; i += kPatchThreads) {
    int32_t column, channel, j, residue;
    params.c_divmod.Divmod(max(0, i - params.patch_lead), &column, &channel);
    params.column_stride_divmod.Divmod(column, &j, &residue);
    // Pairs at either end may hold elements that no window wants.
    const bool wanted = i >= params.patch_lead && j < params.pitch;
    place[i] = static_cast<unsigned short>(wanted ? channel * plane + residue * params.pitch + j
                                                  : params.patch_spare);
  }
  __syncthreads();
  PatchLoader<T> loader(params, x);
  auto store_to = [&](int buffer) {
    unsigned char* to = patch + buffer * params.patch_bytes;
    return [&params, to, place, plane](int32_t row, int32_t pair, uint32_t value) {
      const uint32_t places = reinterpret_cast<const uint32_t*>(place)[pair];
      auto* low = reinterpret_cast<unsigned short*>(to) + row * params.c * plane;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto* at = low + (e == 0 ? places & 0xffff : places >> 16);
        const auto half = static_cast<unsigned short>(e == 0 ? value : value >> 16);
        *at = half;
        // One element further on lies what the copy does not need.
        if (params.copy_bytes > 0) at[params.copy_bytes / 2 - 1] = half;
      }
    };
  };
  // Pass u of the gradient's copy is block u of 16 pixels.
  const uint32_t gradient =
      SharedAddress(shared) + Gradient::Offset(threadIdx.x / 8, threadIdx.x % 8);
  const int n_of_thread = n_first + threadIdx.x % 8 * 8;
  const int32_t k_bytes = params.k * int32_t{sizeof(T)};
  auto load_gradient = [&](const PatchTile& tile, int buffer) {
    const T* image =
        dy + int64_t{tile.image} * (params.rows.out * params.columns.out) * params.k + n_of_thread;
#pragma unroll
    for (int u = 0; u < kPixels / 16; ++u) {
      const int32_t down = u >> params.log2_across;
      const int32_t p = tile.row + down;
      const int32_t q = tile.column + (u - (down << params.log2_across)) * 16 +
                        static_cast<int32_t>(threadIdx.x / 8);
      const bool valid = p < params.rows.out && q < params.columns.out && n_of_thread < params.k;
      CopyAsync<16>(gradient + buffer * kGradientBytes + u * 16 * Gradient::kRowBytes,
                    OffsetBytes(image, p * params.columns.out + q, k_bytes), valid);
    }
    CopyAsyncCommit();
  };

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_m = threadIdx.x / 32 / (kWarpsN * kWarpsK);
  const int warp_k = threadIdx.x / 32 / kWarpsN % kWarpsK;
  const int warp_column = threadIdx.x / 32 % kWarpsN * kBlocksN * 8;
  // Where the elements of this lane's rows lie for the patch's first pixel.
  uint32_t row_address[kBlocksM * 2];
#pragma unroll
  for (int i = 0; i < kBlocksM * 2; ++i) {
    const int32_t m = m_first + (warp_m * kBlocksM * 2 + i) * 8 + g;
    int32_t tap, channel;
    params.c_divmod.Divmod(m < m_end ? m : 0, &tap, &channel);
    const int32_t r = tap / params.columns.filter, s = tap % params.columns.filter;
    int32_t j, residue;
    params.column_stride_divmod.Divmod(s * params.columns.dilation, &j, &residue);
    const int32_t at =
        (r * params.rows.dilation * params.c + channel) * plane + residue * params.pitch + j;
    row_address[i] =
        SharedAddress(patch) + (j % 2 == 0 ? at * 2 : params.copy_bytes + at * 2 - 2) + t * 4;
  }
  const FragmentReader<T, Gradient, true> reader(SharedAddress(shared), warp_column);

  float acc[kBlocksM][kBlocksN][4] = {};
  int32_t index = blockIdx.x;
  PatchTile tile(params, index);
  if (index < params.tiles) {
    load_gradient(tile, 0);
    for (loader.Begin(tile); loader.More();) {
      loader.Load();
      loader.Store(store_to(0));
    }
  }
  int buffer = 0;
  for (; index < params.tiles; index += gridDim.x) {
    CopyAsyncWait<0>();
    __syncthreads();
    const PatchTile next(params, index + gridDim.x);
    if (index + gridDim.x < params.tiles) {
      load_gradient(next, 1 - buffer);
      loader.Begin(next);
    }
    int step = warp_k;
    // The next patch arrives in parts, each while a share of the steps is multiplied.
    do {
      if (loader.More()) loader.Load();
      const int end =
          loader.Last() ? kPixels / 16 : min(kPixels / 16, step + params.steps_a_fetch * kWarpsK);
#pragma unroll 1
      for (; step < end; step += kWarpsK) {
        const int32_t down = step >> params.log2_across;
        const int32_t column = (step - (down << params.log2_across)) * 16;
        // Pixels that y does not have: their gradients are zeros, their x may be NaN.
        const int32_t left = params.columns.out - tile.column - column;
        if (tile.row + down >= params.rows.out || left <= 0) continue;
        uint32_t mask[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t pair_left = left - half * 8 - t * 2;
          mask[half] = pair_left >= 2 ? 0xffffffffu : pair_left == 1 ? 0xffffu : 0;
        }
        uint32_t b[kBlocksN / 2][4];
        reader.Read(buffer * (kPixels / 16) + step, b);
        const uint32_t offset = buffer * params.patch_bytes +
                                (down * params.rows.stride * params.c * plane + column) * 2;
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i) {
          uint32_t a[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            a[e] = LoadWord(row_address[i * 2 + e % 2] + offset + e / 2 * 16) & mask[e / 2];
          }
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            MultiplyAdd<T>(acc[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
      }
      if (loader.More()) loader.Store(store_to(1 - buffer));
    } while (loader.More() || step < kPixels / 16);
    buffer = 1 - buffer;
    tile = next;
  }

  float* out =
      static_cast<float*>(params.out) + blockIdx.x * params.out_elements + batch * params.out_batch;
  if constexpr (kWarpsK > 1) {
    // The warps' sums meet in shared memory and are added in order.
    static_assert(kWarpsK * kRows * 64 * 4 <= 2 * kGradientBytes);
    auto* sums = reinterpret_cast<float*>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int row = (warp_m * kBlocksM * 2 + i) * 8 + g;
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        *reinterpret_cast<float2*>(sums + (warp_k * kRows + row) * 64 + warp_column + j * 8 +
                                   t * 2) =
            make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * 64; i += kPatchThreads) {
      float sum = 0;
#pragma unroll
      for (int from = 0; from < kWarpsK; ++from) sum += sums[from * kRows * 64 + i];
      const int32_t m = m_first + i / 64, n = n_first + i % 64;
      if (m < m_end && n < params.k) out[int64_t{m} * params.k + n] = sum;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      const int32_t m = m_first + (warp_m * kBlocksM * 2 + i) * 8 + g;
      if (m >= m_end) continue;
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const int32_t n = n_first + warp_column + j * 8 + t * 2;
        if (n >= params.k) continue;
        *reinterpret_cast<float2*>(out + int64_t{m} * params.k + n) =
            make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
      }
    }
  }
}

// Floats of a pixel's row of z: a stride at which eight rows of four pairs meet no bank twice.
template <int kBlocksN>
inline constexpr int kDgradPitch = kBlocksN <= 3 ? 24 : 56;

// kBlocksN * 8 columns (s, c); 16 blocks of 16 pixels of dy's rows; 64 channels of dy at a time.
template <typename T, int kBlocksN>
__global__ void __launch_bounds__(kPatchThreads, kBlocksN > 3 ? 2 : 5)
    DgradPatch(const __grid_constant__ PatchParams params) {
  using Gradient = OperandTile<T, 256, 128, false>;
  constexpr int kBlocksM = 4;  // of a warp
  constexpr int kPitch = kDgradPitch<kBlocksN>;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* z = reinterpret_cast<float*>(shared);  // after the multiplications, in the patch's place
  unsigned char* filter = shared + params.patch_bytes;
  const int32_t batch = blockIdx.y;
  const T* dy = static_cast<const T*>(params.lhs) + batch * params.lhs_batch;
  const T* w = static_cast<const T*>(params.rhs) + batch * params.rhs_batch;
  const int log2_columns = 4 + params.log2_across;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;

  // The filter in the order of fragments: (r, step, block of 8 columns, lane, two words).
  const int32_t columns = params.columns.filter * params.c;
  const int32_t chunks = params.steps * 2;  // of 8 channels
  for (int32_t i = threadIdx.x; i < params.rows.filter * kBlocksN * 8 * chunks;
       i += kPatchThreads) {
    const int32_t chunk = i % chunks, line = i / chunks;
    const int32_t r = line / (kBlocksN * 8), n = line % (kBlocksN * 8);
    const bool valid = n < columns && chunk * 8 < params.k;
    const T* source = w + (int64_t{r} * columns + n) * params.k + chunk * 8;
    const uint4 value =
        valid ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {value.x, value.y, value.z, value.w};
    const int32_t fragment = (r * params.steps + chunk / 2) * kBlocksN + n / 8;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      *reinterpret_cast<uint32_t*>(filter + (fragment * 32 + n % 8 * 4 + e) * 8 + chunk % 2 * 4) =
          words[e];
    }
  }
  // What an element of a row of dx is the sum of: its first term in a row of z, and their number.
  int2* sums = reinterpret_cast<int2*>(filter + params.rows.filter * params.steps * kBlocksN * 256);
  for (int32_t i = threadIdx.x; i < params.tile_columns * params.c; i += kPatchThreads) {
    int32_t column, channel;
    params.c_divmod.Divmod(i, &column, &channel);
    // q stride = column + pad - s dilation, with q counted from the patch's first column.
    int32_t numerator = column + params.columns.pad - params.first_column * params.columns.stride;
    int32_t s = 0;
    while (s < params.columns.filter && numerator % params.columns.stride != 0) {
      ++s;
      numerator -= params.columns.dilation;
    }
    const int32_t left = params.columns.filter - s + params.column_period - 1;
    const int32_t q = numerator / params.columns.stride;
    sums[i] = make_int2(q * kPitch + s * params.c + channel, left / params.column_period);
  }
  // The warp's blocks: rows of dx of one residue modulo the stride (the host sees to that), so that
  // they share their taps.
  const int log2_rows = params.log2_across < 2 ? 2 - params.log2_across : 0;
  const int32_t warp_row = warp >> (params.log2_across > 2 ? params.log2_across - 2 : 0);
  int32_t block_pixel[kBlocksM], block_row[kBlocksM];
  uint32_t block_offset[kBlocksM];  // in the patch, from the first pixel of the warp's first row
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
    const int down = i >> (2 - log2_rows);
    const int across = params.log2_across > 2 ? warp % (1 << (params.log2_across - 2)) * 4 + i
                                              : i - (down << (2 - log2_rows));
    block_row[i] = warp_row + down * 4;
    block_pixel[i] = across * 16;
    block_offset[i] = ((params.row_stride_divmod.Div(down * 4) << log2_columns) + block_pixel[i]) *
                      Gradient::kRowBytes;
  }
  // Taps of the warp's rows: r_first, r_first + row_period, ...
  int32_t r_first = 0;
  {
    int32_t numerator = warp_row + params.rows.pad - params.first_row * params.rows.stride;
    while (r_first < params.rows.filter &&
           (numerator - r_first * params.rows.dilation) % params.rows.stride != 0) {
      ++r_first;
    }
  }
  const uint32_t gradient = SharedAddress(shared) + Gradient::Offset(lane % 16, lane / 16);
  const uint32_t fragment_address = SharedAddress(filter) + lane * 8;
  const uint32_t copied =
      SharedAddress(shared) + Gradient::Offset(threadIdx.x / 8, threadIdx.x % 8);
  const int32_t k_bytes = params.k * int32_t{sizeof(T)};

  for (int32_t index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const PatchTile tile(params, index);
    const int32_t p_first = params.first_row + params.row_stride_divmod.Div(tile.row);
    const int32_t q_first = params.first_column + params.column_stride_divmod.Div(tile.column);
    float acc[kBlocksM][kBlocksN][4] = {};
    for (int32_t k_first = 0; k_first < params.steps * 16; k_first += 64) {
      __syncthreads();
      const int32_t k = k_first + static_cast<int32_t>(threadIdx.x % 8) * 8;
      const T* image =
          dy + int64_t{tile.image} * (params.rows.out * params.columns.out) * params.k + k;
      for (int32_t across = 0; across < 1 << params.log2_across; ++across) {
        // One column of blocks of 16 pixels.
        const int32_t q = q_first + across * 16 + static_cast<int32_t>(threadIdx.x / 8);
        const bool inside =
            static_cast<uint32_t>(q) < static_cast<uint32_t>(params.columns.out) && k < params.k;
        uint32_t to = copied + across * 16 * Gradient::kRowBytes;
        int32_t pixel = p_first * params.columns.out + q;
#pragma unroll 4
        for (int32_t row = 0; row < params.patch_rows; ++row) {
          const bool valid = inside && static_cast<uint32_t>(p_first + row) <
                                           static_cast<uint32_t>(params.rows.out);
          CopyAsync<16>(to, OffsetBytes(image, pixel, k_bytes), valid);
          to += Gradient::kRowBytes << log2_columns;
          pixel += params.columns.out;
        }
      }
      CopyAsyncCommit();
      CopyAsyncWait<0>();
      __syncthreads();
      // 48 columns have no registers for it.
      if (kBlocksN <= 3 && k_first == 0 && index + gridDim.x < params.tiles) {
        // The next tile's pixels on their way to L2, a line of 64 channels each.
        const PatchTile next(params, index + gridDim.x);
        const int32_t p_next = params.first_row + params.row_stride_divmod.Div(next.row);
        const int32_t q_next = params.first_column + params.column_stride_divmod.Div(next.column);
        const T* next_image =
            dy + int64_t{next.image} * (params.rows.out * params.columns.out) * params.k;
        for (int32_t i = threadIdx.x; i < params.patch_rows << log2_columns; i += kPatchThreads) {
          const int32_t down = i >> log2_columns;
          const int32_t p = p_next + down, q = q_next + i - (down << log2_columns);
          if (static_cast<uint32_t>(p) < static_cast<uint32_t>(params.rows.out) &&
              static_cast<uint32_t>(q) < static_cast<uint32_t>(params.columns.out)) {
            PrefetchToL2(OffsetBytes(next_image, p * params.columns.out + q, k_bytes));
          }
        }
      }
      const int32_t steps = min(4, params.steps - k_first / 16);
      for (int32_t r = r_first; r < params.rows.filter; r += params.row_period) {
        const int32_t row = params.row_stride_divmod.Div(warp_row + params.rows.pad -
                                                         params.first_row * params.rows.stride -
                                                         r * params.rows.dilation);
        const uint32_t row_address = gradient + (row << log2_columns) * Gradient::kRowBytes;
#pragma unroll 2
        for (int32_t step = 0; step < steps; ++step) {
          uint32_t b[kBlocksN][2];
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            LoadPair(
                fragment_address + ((r * params.steps + k_first / 16 + step) * kBlocksN + j) * 256,
                &b[j][0], &b[j][1]);
          }
#pragma unroll
          for (int i = 0; i < kBlocksM; ++i) {
            uint32_t a[4];
            LoadMatrices((row_address + block_offset[i]) ^ (step * 32), a);
#pragma unroll
            for (int j = 0; j < kBlocksN; ++j) MultiplyAdd<T>(acc[i][j], a, b[j][0], b[j][1]);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int32_t pixel = block_pixel[i] + upper * 8 + g;
        float* row = z + ((block_row[i] << log2_columns) + pixel) * kPitch + t * 2;
        // Zeros of a pixel outside dy may have met an infinite weight.
        const bool inside =
            static_cast<uint32_t>(q_first + pixel) < static_cast<uint32_t>(params.columns.out);
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          *reinterpret_cast<float2*>(row + j * 8) =
              inside ? make_float2(acc[i][j][upper * 2], acc[i][j][upper * 2 + 1])
                     : make_float2(0, 0);
        }
      }
    }
    __syncthreads();
    const int32_t elements = min(params.tile_columns, params.columns.in - tile.column) * params.c;
    const int32_t rows = min(params.tile_rows, params.rows.in - tile.row);
    T* out = static_cast<T*>(params.out) + batch * params.out_batch +
             ((int64_t{tile.image} * params.rows.in + tile.row) * params.columns.in + tile.column) *
                 params.c;
    // A warp's rows are four apart, and up to four.
    const int32_t row_elements = params.columns.in * params.c;
    for (int32_t element = lane; element < elements; element += 32) {
      const int2 at = sums[element];
      const float* from = z + (warp << log2_columns) * kPitch + at.x;
      float sum[4] = {};
#pragma unroll 1
      for (int32_t tap = 0; tap < at.y; ++tap, from += params.z_step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (warp + i * 4 < rows) sum[i] += from[((i * 4) << log2_columns) * kPitch];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t row = warp + i * 4;
        if (row < rows) out[row * row_elements + element] = FromFloat<T>(sum[i]);
      }
    }
  }
}

template <DType kType, PatchTileId kTile>
Status LaunchPatch(const PatchParams& params, int64_t shared_bytes, int64_t ctas, int64_t grid_y,
                   void* stream) {
  using T = typename ElementOf<kType>::Type;
  void (*kernel)(PatchParams) = nullptr;
  if constexpr (kTile == PatchTileId::kFprop) kernel = FpropPatch<T>;
  if constexpr (kTile == PatchTileId::kDgrad16) kernel = DgradPatch<T, 2>;
  if constexpr (kTile == PatchTileId::kDgrad24) kernel = DgradPatch<T, 3>;
  if constexpr (kTile == PatchTileId::kDgrad48) kernel = DgradPatch<T, 6>;
  if constexpr (kTile == PatchTileId::kWgrad32) kernel = WgradPatch<T, 1, 2, 2, 2>;
  if constexpr (kTile == PatchTileId::kWgrad64) kernel = WgradPatch<T, 2, 2, 1, 2>;
  if constexpr (kTile == PatchTileId::kWgrad192) kernel = WgradPatch<T, 4, 1, 1, 3>;
  const auto bytes = static_cast<int>(shared_bytes);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (ctas == 0 && error == cudaSuccess) {
    int device = 0, sm_count = 0, of_sm = 0;
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kPatchThreads, bytes);
    }
    // At least one, whose launch then says what is wrong.
    ctas = std::clamp<int64_t>(int64_t{sm_count} * of_sm / grid_y, 1, params.tiles);
  }
  if (error == cudaSuccess) {
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(grid_y));
    kernel<<<grid, kPatchThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    cudaGetLastError();
    return Status::Internal(std::string("igemm_wmma patch: ") + cudaGetErrorString(error));
  }
  return {};
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_IGEMM_WMMA_PATCH_CUH_
