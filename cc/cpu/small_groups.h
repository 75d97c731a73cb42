// Forward convolutions and data gradients of groups of 2 to 8 channels, float32: ResNeXt, RegNet.
#ifndef JAXCONV_CPU_SMALL_GROUPS_H_
#define JAXCONV_CPU_SMALL_GROUPS_H_

#include "cpu/region_kernel.h"

namespace jaxconv::cpu {

// Accepts groups of 2, 4 or 8 input and as many output channels, and data gradients of stride 1;
// needs AVX-512.
extern const RegionKernel kSmallGroups;

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_SMALL_GROUPS_H_
