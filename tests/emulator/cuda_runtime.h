// The part of CUDA's headers that device code and its launches use, for the emulator.
#ifndef JAXCONV_TESTS_EMULATOR_CUDA_RUNTIME_H_
#define JAXCONV_TESTS_EMULATOR_CUDA_RUNTIME_H_

#include <math.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "emulator.h"
#include "ptx.h"
#include "ptx_sm90.h"

// translate.py rewrites __shared__ and asm.
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __restrict__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern dim3 blockDim, gridDim;
extern uint3 blockIdx, threadIdx;
inline constexpr int warpSize = 32;

#define JAXCONV_VECTORS(name, type)                                                           \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                    \
  struct name##3 { type x, y, z; };                                                           \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
#define JAXCONV_VECTORS_BUT_3(name, type)                          \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(16) name##4 { type x, y, z, w; };                 \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
JAXCONV_VECTORS(char, signed char)
JAXCONV_VECTORS(uchar, unsigned char)
JAXCONV_VECTORS(short, short)
JAXCONV_VECTORS(ushort, unsigned short)
JAXCONV_VECTORS(int, int)
JAXCONV_VECTORS_BUT_3(uint, unsigned)
JAXCONV_VECTORS(float, float)
JAXCONV_VECTORS(double, double)
JAXCONV_VECTORS(longlong, long long)
JAXCONV_VECTORS(ulonglong, unsigned long long)
#undef JAXCONV_VECTORS
#undef JAXCONV_VECTORS_BUT_3

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}

namespace emulator {
template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
// Rounds to nearest, ties to even. Saturates; NaN gives 0.
inline int32_t RoundToInt(double value) {
  if (!(value == value)) return 0;
  if (value <= -2147483648.0) return INT32_MIN;
  return value >= 2147483647.0 ? INT32_MAX : static_cast<int32_t>(nearbyint(value));
}
}  // namespace emulator

using std::isfinite;
using std::isinf;
using std::isnan;
inline float __uint_as_float(unsigned v) { return emulator::BitCast<float>(v); }
inline float __int_as_float(int v) { return emulator::BitCast<float>(v); }
inline unsigned __float_as_uint(float v) { return emulator::BitCast<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::BitCast<int>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Rounds down. The product is exact in double; the sum rounds to `nearest` or the float below it.
inline float __fmaf_rd(float a, float b, float c) {
  const double sum = double{a} * b + c;
  const auto nearest = static_cast<float>(sum);
  return nearest > sum ? nextafterf(nearest, -INFINITY) : nearest;
}
inline float __saturatef(float a) { return a > 0 ? fminf(a, 1) : 0; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return expf(a); }
inline float rsqrtf(float a) { return 1 / sqrtf(a); }
inline int __float2int_rn(float v) { return emulator::RoundToInt(v); }
inline int __float2int_rz(float v) { return emulator::RoundToInt(truncf(v)); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  return emulator::ptx::Prmt(a, b, selector);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}
template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

// Fibers switch only where they wait, so an atomic operation is a plain read and write.
#define JAXCONV_ATOMIC(name, ...)                       \
  template <typename T, typename U>                     \
  T name(T* at, U operand) {                            \
    const T old = *at, value = static_cast<T>(operand); \
    *at = __VA_ARGS__;                                  \
    return old;                                         \
  }
JAXCONV_ATOMIC(atomicAdd, old + value)
JAXCONV_ATOMIC(atomicSub, old - value)
JAXCONV_ATOMIC(atomicMax, max(old, value))
JAXCONV_ATOMIC(atomicMin, min(old, value))
JAXCONV_ATOMIC(atomicOr, old | value)
JAXCONV_ATOMIC(atomicAnd, old& value)
JAXCONV_ATOMIC(atomicXor, old ^ value)
JAXCONV_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
#undef JAXCONV_ATOMIC
template <typename T>
T atomicExch(T* at, T value) {
  const T old = *at;
  *at = value;
  return old;
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  const T old = *at;
  if (old == expected) *at = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emulator::SharedAddressOf(pointer);
}
inline void __syncthreads() { emulator::BarrierSync(0, 0); }
inline void __syncwarp(unsigned mask = emulator::kAllLanes) {
  emulator::OverLanes("__syncwarp", mask, nullptr, [](void**) {});
}

namespace emulator {
template <typename T>
struct Shuffle {
  T value, result;
  int from;  // lane
};
template <typename T>
T ShuffleFrom(const char* what, unsigned mask, T value, int from) {
  Shuffle<T> shuffle{value, value, from};
  OverLanes(what, mask, &shuffle, [](void** lanes) {
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] == nullptr) continue;
      auto& to = *static_cast<Shuffle<T>*>(lanes[i]);
      if (lanes[to.from] != nullptr) {
        to.result = static_cast<Shuffle<T>*>(lanes[to.from])->value;
      }
    }
  });
  return shuffle.result;
}
// Combines the values of all lanes; every lane gets the result.
template <typename T, typename Combine>
T Reduce(const char* what, unsigned mask, T value, Combine) {
  OverLanes(what, mask, &value, [](void** lanes) {
    bool first = true;
    T sum{};
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] == nullptr) continue;
      const T lane = *static_cast<T*>(lanes[i]);
      sum = first ? lane : Combine::Of(sum, lane);
      first = false;
    }
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] != nullptr) *static_cast<T*>(lanes[i]) = sum;
    }
  });
  return value;
}
struct OrOf {
  template <typename T>
  static T Of(T a, T b) {
    return a | b;
  }
};
struct AndOf {
  template <typename T>
  static T Of(T a, T b) {
    return a & b;
  }
};
struct AddOf {
  template <typename T>
  static T Of(T a, T b) {
    return a + b;
  }
};
struct MaxOf {
  template <typename T>
  static T Of(T a, T b) {
    return a < b ? b : a;
  }
};
struct MinOf {
  template <typename T>
  static T Of(T a, T b) {
    return b < a ? b : a;
  }
};
}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int self = emulator::Lane();
  return emulator::ShuffleFrom("__shfl_sync", mask, value,
                               self / width * width + (lane & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int self = emulator::Lane(), from = self ^ bits;
  return emulator::ShuffleFrom("__shfl_xor_sync", mask, value,
                               from / width <= self / width ? from : self);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32) {
  const int self = emulator::Lane(), from = self + delta;
  return emulator::ShuffleFrom("__shfl_down_sync", mask, value,
                               from / width == self / width ? from : self);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32) {
  const int self = emulator::Lane(), from = self - delta;
  return emulator::ShuffleFrom("__shfl_up_sync", mask, value, self % width >= delta ? from : self);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emulator::Reduce("__reduce_or_sync", mask, value, emulator::OrOf());
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return emulator::Reduce("__reduce_and_sync", mask, value, emulator::AndOf());
}
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulator::Reduce("__reduce_max_sync", mask, value, emulator::MaxOf());
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulator::Reduce("__reduce_min_sync", mask, value, emulator::MinOf());
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulator::Reduce("__reduce_add_sync", mask, value, emulator::AddOf());
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const unsigned bit = predicate != 0 ? 1u << emulator::Lane() : 0;
  return emulator::Reduce("__ballot_sync", mask, bit, emulator::OrOf());
}
inline int __any_sync(unsigned mask, int predicate) {
  return emulator::Reduce("__any_sync", mask, int{predicate != 0}, emulator::OrOf());
}
inline int __all_sync(unsigned mask, int predicate) {
  return emulator::Reduce("__all_sync", mask, int{predicate != 0}, emulator::AndOf());
}

// The runtime: one device, an H200, whose streams execute everything at once. There is no clock:
// events and graphs exist only so that programs compile.
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "not in the emulator";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct CUstream_st;
using cudaStream_t = CUstream_st*;
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = nullptr, cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
using cudaEvent_t = void*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
template <typename... T>
cudaError_t NotEmulated(T...) {
  return cudaErrorNotSupported;
}
#define cudaStreamBeginCapture NotEmulated
#define cudaStreamEndCapture NotEmulated
#define cudaGraphInstantiate NotEmulated
#define cudaGraphLaunch NotEmulated
#define cudaGraphDestroy NotEmulated
#define cudaGraphExecDestroy NotEmulated
#define cudaEventCreate NotEmulated
#define cudaEventRecord NotEmulated
#define cudaEventSynchronize NotEmulated
#define cudaEventElapsedTime NotEmulated
#define cudaEventDestroy NotEmulated

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  return *data = emulator::Allocate(bytes, 256), cudaSuccess;
}
inline cudaError_t cudaFree(void* data) { return emulator::Free(data), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (bytes > 0) std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t) {
  for (size_t i = 0; i < height; ++i) std::memset(static_cast<char*>(to) + i * pitch, value, width);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
struct cudaDeviceProp {
  char name[16] = "NVIDIA H200";
  int major = 9, minor = 0, multiProcessorCount = 132, l2CacheSize = 50 << 20;
  size_t sharedMemPerBlockOptin = 232448;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  return *properties = {}, cudaSuccess;
}
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrClockRate,
  cudaDevAttrMemoryClockRate,
  cudaDevAttrGlobalMemoryBusWidth
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 0;
  return cudaSuccess;
}
enum { cudaEnableDefault };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* found) {
  *found = cudaDriverEntryPointSuccess;
  *address = std::strcmp(name, "cuTensorMapEncodeTiled") == 0
                 ? reinterpret_cast<void*>(cuTensorMapEncodeTiled)
             : std::strcmp(name, "cuTensorMapEncodeIm2col") == 0
                 ? reinterpret_cast<void*>(cuTensorMapEncodeIm2col)
                 : nullptr;
  return *address == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
struct cudaFuncAttributes {
  size_t sharedSizeBytes = 0;  // static part: a CTA's total is checked when it ends
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulator {
template <typename... Params>
void RunKernel(const Grid& grid, void (*kernel)(Params...), const std::tuple<Params...>& params) {
  using Call = std::pair<void (*)(Params...), const std::tuple<Params...>*>;
  const Call call{kernel, &params};
  Run(
      grid,
      [](const void* arguments) {
        const auto& of = *static_cast<const Call*>(arguments);
        std::apply(of.first, *of.second);
      },
      &call);
}
inline Grid GridOf(const dim3& grid, const dim3& threads, size_t shared_bytes, unsigned cluster) {
  return {grid.x, grid.y, grid.z, threads.x, threads.y, threads.z, shared_bytes, cluster};
}
// kernel<<<grid, threads, shared_bytes, stream>>>(...)
template <typename... Params>
auto Chevrons(void (*kernel)(Params...), dim3 grid, dim3 threads, size_t shared_bytes = 0,
              cudaStream_t = nullptr) {
  return [=](Params... params) {
    RunKernel(GridOf(grid, threads, shared_bytes, 1), kernel, std::tuple<Params...>(params...));
  };
}
}  // namespace emulator

template <typename... Params, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Arguments&... arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = config->attrs[i].val.clusterDim.x;
    }
  }
  emulator::RunKernel(
      emulator::GridOf(config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster),
      kernel, std::tuple<Params...>(arguments...));
  return cudaSuccess;
}

#endif  // JAXCONV_TESTS_EMULATOR_CUDA_RUNTIME_H_
