// DeviceInfo of a device that is present.
#ifndef JAXCONV_CUDA_KERNELS_QUERY_DEVICE_H_
#define JAXCONV_CUDA_KERNELS_QUERY_DEVICE_H_

#include "core/status.h"
#include "cuda/select/device_info.h"

namespace jaxconv {

// `ordinal` counts as the CUDA runtime does, CUDA_VISIBLE_DEVICES applied. Without a driver or a
// device: an error, nothing else.
Status QueryDevice(int ordinal, DeviceInfo* info);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_KERNELS_QUERY_DEVICE_H_
