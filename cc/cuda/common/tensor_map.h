// Tensor maps for TMA, encoded on the host by the driver.
#ifndef JAXCONV_CUDA_COMMON_TENSOR_MAP_H_
#define JAXCONV_CUDA_COMMON_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv {

// A tensor of up to five dimensions, innermost first, dense unless strides are given. TMA rounds
// float32 elements to TF32, to the nearest, ties to even, unless they are to be kept whole; wgmma
// alone would truncate them, which biases the sums.
struct DenseTensor {
  DType dtype = DType::kBF16;
  int rank = 0;
  const void* address = nullptr;
  int64_t extent[5] = {};
  int64_t stride[5] = {};  // elements, of every dimension but the innermost; 0: dense
  bool whole_f32 = false;
};

// Boxes of `box` elements, zeros outside. Rows of 128, 64 or 32 bytes are swizzled, and fetched by
// whole cache lines; or, where they are any multiple of 16, left as they lie, and fetched by
// sectors, as the rest of their lines may be what a CTA reads much later. Takes about 0.1 us.
Status EncodeTiledMap(const DenseTensor& tensor, const int32_t* box, CUtensorMap* map,
                      bool swizzled = true);

// Columns of `pixels` pixels by `row_bytes` (128, 64, 32) of channels, walked in steps of `step`
// inside the corners (one entry for each spatial axis, innermost first).
Status EncodeIm2colMap(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map,
                       int32_t row_bytes = 128);

// The same of 8-bit activations in nchw32, rows of 32 bytes. The 32 channels of a block are no
// dimension of the tensor: its extents are (W, H, channel blocks, images), and so are the
// coordinates of a copy.
Status EncodeNchw32Map(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_TENSOR_MAP_H_
