// A lane's strip in walk_sm90.cuh: its sums, and how the complete ones are stored.
#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_ROW_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WALK_ROW_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/depthwise/params.h"
#include "cuda/depthwise/store_block.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

// Where a lane stores its strip of a run's output rows, one row after another.
template <typename T, class Tag>
struct RowStore {
  static constexpr int kVec = Tag::kVec, kStrip = Tag::kStrip;
  using Row = float[kStrip][kVec];
  unsigned char* line;
  int32_t columns;  // of the strip that exist, at most

  __device__ __forceinline__ RowStore(const Params& params, const TilePlace& first,
                                      int32_t block_column, int32_t channel) {
    const int32_t height = params.axis[1].out, width = params.axis[2].out;
    const int32_t column = first.column + block_column;
    columns = first.exists && channel < params.channels ? width - column : 0;
    const int64_t pixel =
        ((int64_t{first.image} * params.axis[0].out + first.depth) * height + first.row) * width +
        column;
    line = static_cast<unsigned char*>(params.out) +
           (pixel * params.channels + channel) * int64_t{sizeof(T)};
  }

  // Bytes, and in a register: from elements the compiler makes five instructions an output.
  static __device__ __forceinline__ int64_t Pitch(const Params& params) {
    return int64_t{ComputedHere(params.channels)} * int64_t{sizeof(T)};
  }

  // finish(sum, v) of the lane's channel v.
  template <typename Finish>
  __device__ __forceinline__ void Store(const Params& params, const Row& row, Finish finish) {
    const int64_t pitch = Pitch(params);
    unsigned char* at = line;
#pragma unroll
    for (int q = 0; q < kStrip; ++q) {
      float values[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) values[v] = finish(row[q][v], v);
      if (q < columns) Neighbours<T, kVec>::Rounded(values).Store(reinterpret_cast<T*>(at));
      at += pitch;
    }
    line += params.axis[2].out * pitch;
  }

  // The same with every epilogue, kPart outputs under way at a time.
  __device__ __forceinline__ void StoreFused(const Params& params, const FusedEpilogue& epilogue,
                                             const ChannelTerms<kVec>& terms, const Row& row) {
    constexpr int kPart = 3;  // as the registers allow
    const int64_t at = (line - static_cast<unsigned char*>(params.out)) / int64_t{sizeof(T)};
#pragma unroll
    for (int q0 = 0; q0 < kStrip; q0 += kPart) {
      Neighbours<T, kVec> residual[kPart];
      if (epilogue.params.residual != nullptr) {
#pragma unroll
        for (int q = q0; q < q0 + kPart && q < kStrip; ++q) {
          if (q < columns) {
            residual[q - q0] = epilogue.template Residual<T, kVec>(at + q * params.channels);
          }
        }
      }
      float values[kPart * kVec] = {};
#pragma unroll
      for (int q = q0; q < q0 + kPart && q < kStrip; ++q) {
        float t[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) t[v] = row[q][v];
        epilogue.Scale(terms, t);
        if (q < columns) epilogue.template Add<T>(t, residual[q - q0], at + q * params.channels);
#pragma unroll
        for (int v = 0; v < kVec; ++v) values[(q - q0) * kVec + v] = t[v];
      }
      Activate(epilogue.params.activation, epilogue.params.negative_slope, values);
#pragma unroll
      for (int q = q0; q < q0 + kPart && q < kStrip; ++q) {
        float y[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) y[v] = values[(q - q0) * kVec + v];
        if (q < columns) {
          Neighbours<T, kVec>::Rounded(y).Store(static_cast<T*>(params.out) + at +
                                                q * params.channels);
        }
      }
    }
    line += params.axis[2].out * Pitch(params);
  }
};

// Two neighbouring elements as float32.
template <typename T>
__device__ __forceinline__ void Widen(uint32_t word, float (&value)[2]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    value[0] = __uint_as_float(word << 16), value[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    T pair[2];
    memcpy(pair, &word, sizeof(word));
    value[0] = ToFloat(pair[0]), value[1] = ToFloat(pair[1]);
  }
}

// The sums of a lane's strip in walk_sm90.cuh: what a row of pixels adds to them.
template <class Tag>
struct WalkSums {
  static constexpr int kR = Tag::kFilterRows, kS = Tag::kFilterColumns, kStrip = Tag::kStrip;
  static constexpr int kVec = Tag::kVec, kColumns = kStrip + kS - 1;
  using T = typename Tag::T;
  using Words = uint32_t[kColumns];
  using Taps = float[kR * kS][kVec];
  float slot[kR - 1][kStrip][kVec];  // slots 1 to R - 1 after a row
  float done[kStrip][kVec];          // slot 0

  // Adds tap (R - 1 - p, s) to slot p, for a pixel of output column q.
  __device__ __forceinline__ void Add(int p, int q, int s, const float (&pixel)[kVec],
                                      const Taps& tap) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      float& to = p == 0 ? done[q][v] : slot[(p + kR - 2) % (kR - 1)][q][v];
      const float before = s > 0 ? to : p < kR - 1 ? slot[p % (kR - 1)][q][v] : 0.0f;
      to = fmaf(pixel[v], tap[(kR - 1 - p) * kS + s][v], before);
    }
  }

  // With an epilogue the next row's words are loaded when the outputs are stored: registers are scarce.
  static constexpr bool kAhead = Tag::Epilogue::kPlain;
  static __device__ __forceinline__ uint32_t Word(const unsigned char* row, int c) {
    return *reinterpret_cast<const uint32_t*>(row + c * Tag::Pixels::kBytes);
  }
  static __device__ __forceinline__ void Load(const unsigned char* row, Words& words) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) words[c] = Word(row, c);
  }

  // A row all of whose filter rows meet outputs of the run. Each word makes room for the next row's.
  __device__ __forceinline__ void AddRow(Words& words, const unsigned char* next, const Taps& tap) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float pixel[kVec];
      Widen<T>(words[c], pixel);
      if constexpr (kAhead) words[c] = Word(next, c);
#pragma unroll
      for (int p = 0; p < kR; ++p) {
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          if (c - s >= 0 && c - s < kStrip) Add(p, c - s, s, pixel, tap);
        }
      }
    }
  }

  // Row i of a run of `rows`, some of whose filter rows do not.
  __device__ __forceinline__ void AddEdge(int32_t i, int32_t rows, Words& words,
                                          const unsigned char* next, const Taps& tap) {
#pragma unroll
    for (int p = 0; p < kR; ++p) {
      if (!Inside(i - (kR - 1 - p), rows)) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float pixel[kVec];
        Widen<T>(words[c], pixel);
#pragma unroll
        for (int s = 0; s < kS; ++s) {
          if (c - s >= 0 && c - s < kStrip) Add(p, c - s, s, pixel, tap);
        }
      }
    }
    if constexpr (kAhead) Load(next, words);
  }

  // A row of zeros.
  __device__ __forceinline__ void Shift() {
#pragma unroll
    for (int i = 0; i < kStrip * kVec; ++i) {
      const int q = i / kVec, v = i % kVec;
      done[q][v] = slot[0][q][v];
#pragma unroll
      for (int p = 0; p + 1 < kR - 1; ++p) slot[p][q][v] = slot[p + 1][q][v];
    }
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_ROW_CUH_
