// Tensor maps for the emulator: encodes them and checks what the driver checks.
#ifndef JAXCONV_TESTS_EMULATOR_CUDA_H_
#define JAXCONV_TESTS_EMULATOR_CUDA_H_

#include <cstdint>
#include <cstring>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_UINT64,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
};
enum CUtensorMapInterleave {
  CU_TENSOR_MAP_INTERLEAVE_NONE,
  CU_TENSOR_MAP_INTERLEAVE_16B,
  CU_TENSOR_MAP_INTERLEAVE_32B
};
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_NONE,
  CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  cuuint64_t opaque[16];
};

namespace emulator {

// The contents of a CUtensorMap. The innermost dimension comes first. With interleave 32B, the 32
// bytes of a channel block are not a dimension.
struct TensorMap {
  uint64_t address;
  uint64_t stride[5];  // bytes
  uint32_t extent[5];
  uint16_t box[5];  // tiled: elements; im2col: box[0] bytes a pixel, box[1] pixels
  int16_t lower[3], upper[3];
  uint8_t step[5];
  uint8_t rank, element_bytes, swizzle_bytes;
  bool valid, im2col, interleaved, rounds_to_tf32;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline TensorMap MapOf(const CUtensorMap& map) {
  TensorMap contents;
  std::memcpy(&contents, &map, sizeof(contents));
  return contents;
}

// Encodes the fields of both kinds of map. Returns false if the driver would refuse them.
inline bool EncodeCommon(TensorMap* map, CUtensorMapDataType type, uint32_t rank,
                         const void* address, const cuuint64_t* extent, const cuuint64_t* stride,
                         const cuuint32_t* step, CUtensorMapInterleave interleave,
                         CUtensorMapSwizzle swizzle) {
  map->interleaved = interleave == CU_TENSOR_MAP_INTERLEAVE_32B;
  const uint64_t alignment = map->interleaved ? 32 : 16;
  map->address = reinterpret_cast<uint64_t>(address);
  map->rank = static_cast<uint8_t>(rank);
  map->element_bytes =
      type == CU_TENSOR_MAP_DATA_TYPE_UINT8                                                 ? 1
      : type == CU_TENSOR_MAP_DATA_TYPE_UINT64                                              ? 8
      : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                                                                                            : 4;
  map->rounds_to_tf32 = type == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  map->swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  map->stride[0] = map->interleaved ? 32 : map->element_bytes;
  bool good = interleave != CU_TENSOR_MAP_INTERLEAVE_16B && rank >= 1 && rank <= 5 &&
              map->address != 0 && map->address % alignment == 0 &&
              (!map->interleaved || (rank >= 3 && map->swizzle_bytes == 32));
  for (uint32_t i = 0; good && i < rank; ++i) {
    good = extent[i] >= 1 && extent[i] <= uint64_t{1} << 32 && step[i] >= 1 && step[i] <= 8;
    map->extent[i] = static_cast<uint32_t>(extent[i]);
    map->step[i] = static_cast<uint8_t>(step[i]);
    if (i > 0) {
      map->stride[i] = stride[i - 1];
      good = good && stride[i - 1] % alignment == 0 && stride[i - 1] < uint64_t{1} << 40;
    }
  }
  map->valid = good;
  return good;
}

}  // namespace emulator

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank,
                                       void* address, const cuuint64_t* extent,
                                       const cuuint64_t* stride, const cuuint32_t* box,
                                       const cuuint32_t* step, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  emulator::TensorMap map{};
  bool good = emulator::EncodeCommon(&map, type, rank, address, extent, stride, step, interleave,
                                     swizzle) &&
              !map.interleaved;
  for (uint32_t i = 0; good && i < rank; ++i) {
    good = box[i] >= 1 && box[i] <= 256 && step[i] == 1;
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  const uint32_t row = good ? box[0] * map.element_bytes : 0;
  good = good && row % 16 == 0 && (map.swizzle_bytes == 0 || row <= map.swizzle_bytes);
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

inline CUresult cuTensorMapEncodeIm2col(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank,
                                        void* address, const cuuint64_t* extent,
                                        const cuuint64_t* stride, const int* lower,
                                        const int* upper, cuuint32_t channels, cuuint32_t pixels,
                                        const cuuint32_t* step, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill) {
  emulator::TensorMap map{};
  bool good = emulator::EncodeCommon(&map, type, rank, address, extent, stride, step, interleave,
                                     swizzle) &&
              rank >= 3 && channels <= 256 && pixels >= 1 && pixels <= 1024;
  map.im2col = true;
  map.box[0] = static_cast<uint16_t>(channels * map.element_bytes);
  map.box[1] = static_cast<uint16_t>(pixels);
  good = good && map.box[0] % 16 == 0 && map.box[0] != 0 &&
         (map.swizzle_bytes == 0 || map.box[0] <= map.swizzle_bytes);
  const int limit = rank == 3 ? 32768 : rank == 4 ? 128 : 16;
  for (uint32_t i = 0; good && i + 2 < rank; ++i) {
    good = -limit <= lower[i] && lower[i] < limit && -limit <= upper[i] && upper[i] < limit;
    map.lower[i] = static_cast<int16_t>(lower[i]);
    map.upper[i] = static_cast<int16_t>(upper[i]);
  }
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

#endif  // JAXCONV_TESTS_EMULATOR_CUDA_H_
