#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/normalisation/channel_vectors.cuh"
#include "cuda/normalisation/normalise_add.h"
#include "cuda/normalisation/plan.h"
#include "cuda/ptx/min_max.cuh"

namespace jaxconv {
namespace {

constexpr int kVector = kChannelsOfThread;
// Rows that a thread loads at a time from two arrays.
template <typename T>
constexpr int kUnroll = kRowsInFlight<2 * kVector * sizeof(T)>;

// The normalisation of a thread's channels.
template <typename T>
struct Normalisation {
  float mean[kVector], scale[kVector], offset[kVector];

  __device__ __forceinline__ void Load(const NormaliseAdd& p, int array, int64_t channel) {
    LoadFloats(p.means[array] + channel, mean);
    LoadFloats(p.scales[array] + channel, scale);
    LoadFloats(p.offsets[array] + channel, offset);
  }
  __device__ __forceinline__ void Apply(const ChannelVector<T>& array,
                                        float (&values)[kVector]) const {
    array.Unpack(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = __fmaf_rn(__fsub_rn(values[i], mean[i]), scale[i], offset[i]);
    }
    ChannelVector<T>::Rounded(values).Unpack(values);
  }
};

template <typename T, int kArraysArg, bool kBoundedArg>
struct AddForm {
  using Element = T;
  static constexpr int kArrays = kArraysArg;
  static constexpr bool kBounded = kBoundedArg;
};

// blockIdx.x: a slice of up to kMaxLanes vectors of channels; blockIdx.y: every gridDim.y-th block
// of rows. The threads of a CTA cover `steps` rows of `lanes` vectors; the bits of a row are
// contiguous bytes. All CTAs process adjacent rows and advance from the end of the arrays to the
// start: the previous kernel has written the end of y last, and the next kernel begins where the
// result is written last.
template <class Tag>
__global__ void __launch_bounds__(kPassThreads, 2)
    NormaliseAndAdd(const NormaliseAdd p, int /*slices*/, int lanes, int steps) {
  using T = typename Tag::Element;
  constexpr int kArrays = Tag::kArrays;
  constexpr bool kBounded = Tag::kBounded;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int step = static_cast<int>(threadIdx.x) / lanes;
  const int64_t channel = (int64_t{blockIdx.x} * lanes + lane) * kVector;
  if (step >= steps || channel >= p.channels) return;
  Normalisation<T> of[kArrays];
#pragma unroll
  for (int a = 0; a < kArrays; ++a) of[a].Load(p, a, channel);
  const int64_t stride = steps * p.channels;
  constexpr int kRows = kUnroll<T>;
  const int64_t rows_of_block = kRows * steps;
  const int64_t blocks = (p.rows + rows_of_block - 1) / rows_of_block;
  for (int64_t block = blocks - 1 - blockIdx.y; block >= 0; block -= gridDim.y) {
    const int64_t row = block * rows_of_block + step;
    const int64_t at = row * p.channels + channel;
    ChannelVector<T> first[kRows], second[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (row + u * steps >= p.rows) continue;
      const int64_t here = at + u * stride;
      first[u] = LoadLastChannels<T>(p.arrays[0], here);
      second[u] = LoadLastChannels<T>(kArrays == 2 ? p.arrays[1] : p.shortcut, here);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (row + u * steps >= p.rows) continue;
      const int64_t here = at + u * stride;
      float values[kVector], other[kVector];
      of[0].Apply(first[u], values);
      if constexpr (kArrays == 2) {
        of[1].Apply(second[u], other);
      } else {
        second[u].Unpack(other);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = __fadd_rn(values[i], other[i]);
      // A sum may round up to the bound. A sum above 0 is a multiple of T's smallest number, so
      // none rounds to 0.
      if constexpr (kBounded) ChannelVector<T>::Rounded(values).Unpack(values);
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const bool inside = values[i] > 0 && (!kBounded || values[i] < p.below);
        bits |= static_cast<unsigned>(inside) << i;
        values[i] = MaxNan(values[i], 0);
        if constexpr (kBounded) values[i] = MinNan(values[i], p.below);
      }
      ChannelVector<T>::Rounded(values).Store(p.result, here);
      p.bits[here / kVector] = static_cast<uint8_t>(bits);
    }
  }
}

template <class Tag>
Status LaunchAdd(const NormaliseAdd& p, void* stream) {
  return LaunchRowByRow<NormaliseAndAdd<Tag>>("normalise_add", p, 1, kUnroll<typename Tag::Element>,
                                              stream);
}

#define JAXCONV_OF_activated_sums(...)
#define JAXCONV_OF_masked_sums(...)
#define JAXCONV_OF_moments(...)
#define JAXCONV_OF_normalise(...)
#define PASS(pass, types, variant, form) JAXCONV_OF_##pass(types, variant, JAXCONV_PASS_UNPACK form)
#define JAXCONV_OF_normalise_add(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_TAG, normalise_add, variant, AddForm, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
#undef JAXCONV_OF_normalise_add

constexpr PassLaunch<NormaliseAdd> kLaunches[] = {
#define JAXCONV_OF_normalise_add(types, variant, ...) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_ROW, normalise_add, variant, LaunchAdd, __VA_ARGS__)
#include "cuda/normalisation/kernels.def"
};

}  // namespace

Status LaunchNormaliseAdd(DType dtype, const NormaliseAdd& p, void* stream) {
  JAXCONV_RETURN_IF_ERROR(CheckCut(1, p.rows, p.channels, 1));
  JAXCONV_RETURN_IF_ERROR(CheckAligned({p.arrays[0], p.arrays[1], p.shortcut, p.result}));
  for (const auto& vectors : {p.means, p.scales, p.offsets}) {
    JAXCONV_RETURN_IF_ERROR(CheckAligned({vectors[0], vectors[1]}));
  }
  const int arrays = p.arrays[1] != nullptr ? 2 : 1, bounded = p.below == p.below;
  return LaunchOfForm(kLaunches, dtype, {arrays, bounded}, p, stream);
}

}  // namespace jaxconv
