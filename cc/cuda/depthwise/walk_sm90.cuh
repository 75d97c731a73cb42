// depthwise, fprop and dgrad at stride 2: each thread processes a column of outputs from top to
// bottom (sm_90a).
//
//     out[n, o, k] = sum over taps of gathered[n, o stride + tap - pad, k] filter[tap, k]
//
// A thread has kVec neighbouring channels (8 or 16 bytes) and kStrip outputs side by side, and holds
// the taps of its channels. Each step reads the next rows of the gathered tensor, adds
// them to the sums of this step's outputs and of later outputs, and stores this step's. So each row
// is converted once. A step of fprop is two rows of x and one row of outputs. A step of dgrad is
// one row of dy and a block of 2 x kStrip pixels of dx; each of the four parities has its own taps
// (3x3: 1, 2, 2 and 4).
//
// Thread numbers run over the chunks of kVec channels of a pixel first, then along the row. A warp
// therefore reads and stores runs of whole pixels for any number of channels, and neighbours in a
// CTA share the columns in which their windows overlap. A map's rows are divided into parts with
// separate threads; short parts let the CTAs that run at a time read and write one region of
// memory (docs/notes/depthwise.md).
//
//     shared memory: stage 0 | 1 | ... | kStages - 1    a stage: [row][column][thread], 2 kVec bytes
//
// A thread copies its own data (cp.async through L1, which serves the columns that neighbours
// share; zeros outside the tensor), kStages - 1 steps ahead. So threads need no barrier, and loads
// in flight take no registers.
//
// Refused, with a reason (walk_plan.cc): other filters, strides and dilations, channels that are
// not a multiple of 16 bytes, K other than C, a depth.
#ifndef JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_
#define JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/common/element.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/halo_box.cuh"
#include "cuda/common/kernel.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/ring_sm90.cuh"
#include "cuda/depthwise/walk_plan.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/kept.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace jaxconv::depthwise {

// kVec elements as float32.
template <typename T, int kVec>
__device__ __forceinline__ void UnpackWords(const Neighbours<T, kVec>& raw, float (&value)[kVec]) {
  if constexpr (sizeof(T) == 4) {
    raw.Unpack(value);
  } else {
    uint32_t word[kVec / 2];
    memcpy(word, &raw, sizeof(word));
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      float pair[2];
      LoadLane<T, 2>(reinterpret_cast<const unsigned char*>(&word[i]), pair);
      value[2 * i] = pair[0], value[2 * i + 1] = pair[1];
    }
  }
}

// The elements, computed before a branch that stores them: the compiler would move the sums behind
// it.
template <typename T, int kVec>
__device__ __forceinline__ Neighbours<T, kVec> Computed(const Neighbours<T, kVec>& elements) {
  int32_t word[sizeof(elements) / 4];
  memcpy(word, &elements, sizeof(word));
  for (int32_t& each : word) each = Kept(each);
  Neighbours<T, kVec> computed;
  memcpy(&computed, word, sizeof(word));
  return computed;
}

// The position of an item's outputs and of its window.
template <class Tag>
struct WalkPlace {
  int32_t image, channel;
  int32_t out_row, out_column;  // the first output
  int32_t row, column;          // of the gathered tensor: the first of its window
  int32_t steps;
  bool exists;

  __device__ __forceinline__ WalkPlace(const WalkParams& params, int32_t item) {
    const Axis &rows = params.axis[1], &columns = params.axis[2];
    exists = item < params.items;
    int32_t rest = min(item, params.items - 1), part, strip;
    params.chunks.Divmod(rest, &rest, &channel);
    params.strips.Divmod(rest, &rest, &strip);
    params.parts.Divmod(rest, &image, &part);
    channel *= Tag::kVec;
    out_row = part * params.steps * Tag::kRows - rows.shift;
    out_column = strip * Tag::kStrip - columns.shift;
    row = (out_row * Tag::kStride - rows.pad) / Tag::kSpread;
    column = (out_column * Tag::kStride - columns.pad) / Tag::kSpread;
    steps = min(params.steps, (rows.out - out_row + Tag::kRows - 1) / Tag::kRows);
  }
};

template <class Tag>
__global__ void __launch_bounds__(Tag::kCtaThreads, Tag::kCtasPerSm)
    WalkKernel(const __grid_constant__ WalkParams params) {
  using T = typename Tag::T;
  using Epilogue = typename Tag::Epilogue;
  using Raw = Neighbours<T, Tag::kVec>;
  constexpr int kVec = Tag::kVec, kR = Tag::kFilterRows, kS = Tag::kFilterColumns;
  constexpr int kStrip = Tag::kStrip, kRows = Tag::kRows, kTurns = Tag::kTurns;
  constexpr int kReadRows = Tag::kReadRows, kColumns = Tag::kColumns, kStages = Tag::kStages;
  constexpr int kChunk = kVec * int{sizeof(T)};
  // Bytes from a thread's chunk to that of the next column, and from one stage to the next.
  constexpr int kColumnBytes = Tag::kCtaThreads * kChunk;
  constexpr int kStageBytes = kReadRows * kColumns * kColumnBytes;
  // A step's data is read before the copies of a later step are issued, where registers allow.
  constexpr bool kAhead = kReadRows * kColumns * kChunk <= 64;
  extern __shared__ __align__(1024) unsigned char dynamic[];
  const Axis &rows = params.axis[1], &columns = params.axis[2];
  const WalkPlace<Tag> place(
      params, static_cast<int32_t>(blockIdx.x) * Tag::kCtaThreads + static_cast<int>(threadIdx.x));
  unsigned char* const mine = dynamic + threadIdx.x * kChunk;
  const uint32_t shared = SharedAddress(mine);
  const int64_t pitch = int64_t{params.channels} * int64_t{sizeof(T)};

  // Step t reads from row `row` + t kReadRows on. The first kTurns - 1 steps complete no outputs;
  // those before the window are skipped.
  int32_t row = place.row + Tag::kWindowRows - Tag::kTurns * kReadRows;
  const int32_t from_row = max(place.row, 0);
  const unsigned char* from =
      static_cast<const unsigned char*>(params.gathered) +
      ((int64_t{place.image} * rows.in + row) * columns.in + place.column) * pitch +
      place.channel * int64_t{sizeof(T)};
  const int64_t from_pitch = columns.in * pitch;
  bool inside[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    inside[c] = place.exists && Inside(place.column + c, columns.in);
  }
  auto copy = [&](int32_t stage) {
#pragma unroll
    for (int n = 0; n < kReadRows; ++n) {
      const uint32_t to = shared + stage * kStageBytes + n * kColumns * kColumnBytes;
      if (row >= from_row && row < rows.in) {
        const unsigned char* at = from;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          CopyAsync<kChunk, true>(to + c * kColumnBytes, at, inside[c]);
          at += pitch;
        }
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          *reinterpret_cast<typename Raw::Raw*>(mine + (to - shared) + c * kColumnBytes) = {};
        }
      }
      ++row;
      from += from_pitch;
    }
  };
  WaitForInputs();
  const int32_t first = -(kTurns - 1);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s < place.steps) copy(s);
    CopyAsyncCommit();
  }

  float tap[kR * kS][kVec];
  {
    const int32_t filter = params.images_divmod.Div(place.image);
    const int64_t step = params.flip ? -int64_t{params.tap_stride} : params.tap_stride;
    const T* at = static_cast<const T*>(params.filter) + filter * params.filter_stride +
                  place.channel * int64_t{params.channel_stride} +
                  (params.flip ? int64_t{kR * kS - 1} * params.tap_stride : 0);
    if (params.channel_stride == 1) {
#pragma unroll
      for (int i = 0; i < kR * kS; ++i) UnpackWords(Raw::Load(at + i * step), tap[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kR * kS; ++i) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          tap[i][v] = ToFloat(at[i * step + int64_t{v} * params.channel_stride]);
        }
      }
    }
  }

  const Epilogue epilogue(params.epilogue);
  // The results' address.
  unsigned char* to =
      static_cast<unsigned char*>(params.out) +
      ((int64_t{place.image} * rows.out + place.out_row) * columns.out + place.out_column) * pitch +
      place.channel * int64_t{sizeof(T)};
  bool stored[kStrip];
#pragma unroll
  for (int q = 0; q < kStrip; ++q) {
    stored[q] = place.exists && Inside(place.out_column + q, columns.out);
  }

  // sums[d]: the sums of the outputs of d steps later.
  float sums[kTurns][kRows][kStrip][kVec] = {};
  int32_t slot = 0, free = kStages - 1;
#pragma unroll 1
  for (int32_t t = first; t < place.steps; ++t) {
    CopyAsyncWait<kStages - 2>();
    const unsigned char* stage = mine + slot * kStageBytes;
    Raw ahead[kAhead ? kReadRows * kColumns : 1];
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kReadRows * kColumns; ++i) {
        ahead[i] = Raw::Load(reinterpret_cast<const T*>(stage + i * kColumnBytes));
      }
    }
    // The data of the stage before is in registers; the compiler fence keeps reads before the
    // copies that overwrite it.
    asm volatile("" ::: "memory");
    if (t + kStages - 1 < place.steps) copy(free);
    free = free + 1 == kStages ? 0 : free + 1;
    CopyAsyncCommit();
    slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
    for (int n = 0; n < kReadRows; ++n) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float pixel[kVec];
        const int at = n * kColumns + c;
        UnpackWords(kAhead ? ahead[kAhead ? at : 0]
                           : Raw::Load(reinterpret_cast<const T*>(stage + at * kColumnBytes)),
                    pixel);
        // The window row and column that a tap reads: (output * kStride + tap) / kSpread.
        const int i = (Tag::kWindowRows - kReadRows + n) * Tag::kSpread, j = c * Tag::kSpread;
#pragma unroll
        for (int d = 0; d < kTurns; ++d) {
#pragma unroll
          for (int p = 0; p < kRows; ++p) {
            const int r = i - (d * kRows + p) * Tag::kStride;
            if (r < 0 || r >= kR) continue;
#pragma unroll
            for (int q = 0; q < kStrip; ++q) {
              const int s = j - q * Tag::kStride;
              if (s < 0 || s >= kS) continue;
#pragma unroll
              for (int v = 0; v < kVec; ++v) {
                sums[d][p][q][v] = fmaf(pixel[v], tap[r * kS + s][v], sums[d][p][q][v]);
              }
            }
          }
        }
      }
    }
    if (t >= 0) {
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const bool some = Inside(place.out_row + t * kRows + p, rows.out);
#pragma unroll
        for (int q = 0; q < kStrip; ++q) {
          float (&values)[kVec] = sums[0][p][q];
          unsigned char* const result = to + q * pitch;
          if constexpr (Epilogue::kPlain) {
            const Raw rounded = Computed(Raw::Rounded(values));
            if (some && stored[q]) rounded.Store(reinterpret_cast<T*>(result));
          } else if (some && stored[q]) {
            const int64_t at = (result - static_cast<unsigned char*>(params.out)) / sizeof(T);
            Raw residual{};
            if (epilogue.params.residual != nullptr) {
              residual = epilogue.template Residual<T, kVec>(at);
            }
            epilogue.Scale(epilogue.template Terms<kVec>(place.channel), values);
            epilogue.template Add<T>(values, residual, at);
            Activate<T>(epilogue.params.activation, epilogue.params.negative_slope, values);
            Raw::Rounded(values).Store(reinterpret_cast<T*>(result));
          }
        }
        to += columns.out * pitch;
      }
    }
#pragma unroll
    for (int d = 0; d < kTurns; ++d) {
#pragma unroll
      for (int i = 0; i < kRows * kStrip * kVec; ++i) {
        const int p = i / (kStrip * kVec), q = i / kVec % kStrip, v = i % kVec;
        sums[d][p][q][v] = d + 1 < kTurns ? sums[d + 1 < kTurns ? d + 1 : d][p][q][v] : 0;
      }
    }
  }
}

// kFilterRows_ x kFilterColumns_ taps of a convolution of stride kConvStride; kVec_ channels and
// kStrip_ columns of outputs for each thread.
template <Op kOp, DType kType, int kFilterRows_, int kFilterColumns_, int kConvStride, int kVec_,
          int kStrip_, int kStages_, int kCtaThreads_, int kCtasPerSm_>
struct Walk {
  using T = typename ElementOf<kType>::Type;
  using Epilogue = PlainEpilogue;
  static constexpr int kFilterRows = kFilterRows_, kFilterColumns = kFilterColumns_;
  // The distance of neighbouring outputs in the dilated gathered tensor, and its dilation.
  static constexpr int kStride = kOp == Op::kDgrad ? 1 : kConvStride;
  static constexpr int kSpread = kOp == Op::kDgrad ? kConvStride : 1;
  static constexpr int kVec = kVec_, kStrip = kStrip_, kStages = kStages_;
  static constexpr int kCtaThreads = kCtaThreads_, kCtasPerSm = kCtasPerSm_;
  // For a step: its rows of outputs, the rows that it reads, the window of its outputs, and the
  // number of steps to which a row contributes.
  static constexpr int kRows = kSpread, kReadRows = kStride;
  static constexpr int kWindowRows = ((kRows - 1) * kStride + kFilterRows - 1) / kSpread + 1;
  static constexpr int kColumns = ((kStrip - 1) * kStride + kFilterColumns - 1) / kSpread + 1;
  static constexpr int kTurns = (kWindowRows + kReadRows - 1) / kReadRows;
  static_assert(kStrip % kSpread == 0 && kWindowRows >= kReadRows);

  template <class Tag>
  static Status Launch(const Plan& plan, const Operands& operands, void* stream) {
    const auto& launch = plan.As<HaloLaunch<WalkParams>>();
    WalkParams params = launch.kernel;
    params.gathered = operands.lhs;
    params.filter = operands.rhs;
    params.out = operands.out;
    BindEpilogue(operands, &params.epilogue);
    LaunchConfig config;
    config.grid = static_cast<unsigned>(launch.ctas);
    config.threads = kCtaThreads;
    config.shared_bytes = launch.shared_bytes;
    config.overlaps = true;
    return jaxconv::Launch<WalkKernel<Tag>>(plan.kernel->name, config, stream, params);
  }
};

}  // namespace jaxconv::depthwise

#endif  // JAXCONV_CUDA_DEPTHWISE_WALK_SM90_CUH_
