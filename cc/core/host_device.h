// JAXCONV_HOST_DEVICE: before an inline function that kernels call too.
#ifndef JAXCONV_CORE_HOST_DEVICE_H_
#define JAXCONV_CORE_HOST_DEVICE_H_

#ifdef __CUDACC__
#define JAXCONV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAXCONV_HOST_DEVICE inline
#endif

#endif  // JAXCONV_CORE_HOST_DEVICE_H_
