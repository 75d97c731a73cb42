// Tensor maps for TMA, encoded on the host by the driver.
#ifndef JAXCONV_CUDA_COMMON_TENSOR_MAP_H_
#define JAXCONV_CUDA_COMMON_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

// A tensor of up to five dimensions, innermost first, dense unless strides are given. TMA rounds
// float32 elements to TF32, to nearest even, unless whole_f32 is set; wgmma would truncate them,
// which biases the sums.
struct DenseTensor {
  DType dtype = DType::kBF16;
  int rank = 0;
  const void* address = nullptr;
  int64_t extent[5] = {};
  int64_t stride[5] = {};  // elements, of every dimension but the innermost; 0: dense
  bool whole_f32 = false;
  // 8: elements are opaque words of 8 bytes, whatever dtype is. Boxes have at most 256 elements in
  // each dimension, so longer rows need longer elements.
  int32_t word_bytes = 0;
};

// Boxes of `box` elements, zeros outside. Rows of 128, 64 or 32 bytes are swizzled and fetched by
// whole cache lines. Rows of another multiple of 16 bytes are not swizzled and are fetched by
// sectors, because a CTA may need the rest of their lines much later. Takes about 0.1 us.
Status EncodeTiledMap(const DenseTensor& tensor, const int32_t* box, CUtensorMap* map,
                      bool swizzled = true);

// im2col boxes of `pixels` pixels by `row_bytes` (128, 64, 32) bytes of channels; the base pixels
// advance in steps of `step` inside the corners (one entry for each spatial axis, innermost first).
Status EncodeIm2colMap(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map,
                       int32_t row_bytes = 128);

// The same for 8-bit activations in nchw32, rows of 32 bytes. The 32 channels of a block are not a
// dimension of the tensor: extents and copy coordinates are (W, H, channel blocks, images).
Status EncodeNchw32Map(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_TENSOR_MAP_H_
