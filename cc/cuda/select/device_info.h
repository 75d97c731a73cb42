// What selection knows of a device.
#ifndef JAXCONV_CUDA_SELECT_DEVICE_INFO_H_
#define JAXCONV_CUDA_SELECT_DEVICE_INFO_H_

#include <cstdint>
#include <string>

namespace jaxconv {

struct DeviceInfo {
  std::string name;
  int cc_major = 0;
  int cc_minor = 0;
  int sm_count = 0;
  int64_t smem_per_block_optin = 0;  // bytes
  int64_t l2_bytes = 0;

  int compute_capability() const { return cc_major * 10 + cc_minor; }
};

// A plausible device of that capability, for lowering where none is present.
DeviceInfo PortableTarget(int cc_major, int cc_minor);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_DEVICE_INFO_H_
