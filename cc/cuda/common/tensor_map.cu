#include <cuda_runtime.h>

#include <string>

#include "cuda/common/tensor_map.h"

namespace jaxconv {
namespace {

// The library does not link libcuda: it asks the installed driver for the addresses.
template <typename Function>
Function EntryPoint(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found) !=
          cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(address);
}

Status Check(const char* name, CUresult result) {
  if (result == CUDA_SUCCESS) return {};
  return Status::Internal(std::string(name) + ": the driver returned " +
                          std::to_string(static_cast<int>(result)));
}

struct Layout {
  CUtensorMapDataType type;
  cuuint64_t extent[5];
  cuuint64_t stride[4];  // bytes, of every dimension but the innermost
};

int64_t WidthOf(const DenseTensor& tensor) {
  return tensor.word_bytes > 0 ? tensor.word_bytes : ByteWidth(tensor.dtype);
}

Layout LayoutOf(const DenseTensor& tensor) {
  Layout layout{};
  const int64_t width = WidthOf(tensor);
  layout.type = width == 8                     ? CU_TENSOR_MAP_DATA_TYPE_UINT64
                : tensor.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                : tensor.dtype == DType::kF16  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                : ByteWidth(tensor.dtype) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                : tensor.whole_f32             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                               : CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  cuuint64_t bytes = width;
  for (int i = 0; i < tensor.rank; ++i) {
    layout.extent[i] = tensor.extent[i];
    bytes *= tensor.extent[i];
    if (i + 1 < tensor.rank) {
      layout.stride[i] = tensor.stride[i + 1] == 0 ? bytes : tensor.stride[i + 1] * width;
    }
  }
  return layout;
}

CUtensorMapSwizzle SwizzleOf(int64_t row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

Status EncodeIm2col(const DenseTensor& tensor, const Layout& layout, const int32_t* lower,
                    const int32_t* upper, const cuuint32_t* element_stride, int32_t pixels,
                    int32_t row_bytes, CUtensorMapInterleave interleave, CUtensorMap* map) {
  static const auto encode =
      EntryPoint<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  if (encode == nullptr) return Status::Internal("the driver has no cuTensorMapEncodeIm2col");
  return Check("cuTensorMapEncodeIm2col",
               encode(map, layout.type, tensor.rank, const_cast<void*>(tensor.address),
                      layout.extent, layout.stride, lower, upper,
                      static_cast<cuuint32_t>(row_bytes / ByteWidth(tensor.dtype)), pixels,
                      element_stride, interleave, SwizzleOf(row_bytes),
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

}  // namespace

Status EncodeTiledMap(const DenseTensor& tensor, const int32_t* box, CUtensorMap* map,
                      bool swizzled) {
  static const auto encode =
      EntryPoint<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return Status::Internal("the driver has no cuTensorMapEncodeTiled");
  const Layout layout = LayoutOf(tensor);
  cuuint32_t box_extent[5], element_stride[5];
  for (int i = 0; i < tensor.rank; ++i) box_extent[i] = box[i], element_stride[i] = 1;
  return Check(
      "cuTensorMapEncodeTiled",
      encode(map, layout.type, tensor.rank, const_cast<void*>(tensor.address), layout.extent,
             layout.stride, box_extent, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzled ? SwizzleOf(box[0] * WidthOf(tensor)) : CU_TENSOR_MAP_SWIZZLE_NONE,
             swizzled ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

Status EncodeIm2colMap(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map, int32_t row_bytes) {
  cuuint32_t element_stride[5] = {1, 1, 1, 1, 1};
  for (int a = 0; a + 2 < tensor.rank; ++a) element_stride[a + 1] = step[a];
  return EncodeIm2col(tensor, LayoutOf(tensor), lower, upper, element_stride, pixels, row_bytes,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, map);
}

Status EncodeNchw32Map(const DenseTensor& tensor, const int32_t* lower, const int32_t* upper,
                       const int32_t* step, int32_t pixels, CUtensorMap* map) {
  Layout layout = LayoutOf(tensor);
  for (int i = 0; i + 1 < tensor.rank; ++i) layout.stride[i] *= 32;
  const cuuint32_t element_stride[5] = {static_cast<cuuint32_t>(step[0]),
                                        static_cast<cuuint32_t>(step[1]), 1, 1, 1};
  return EncodeIm2col(tensor, layout, lower, upper, element_stride, pixels, 32,
                      CU_TENSOR_MAP_INTERLEAVE_32B, map);
}

}  // namespace jaxconv
