// Forward convolutions with few output channels, float32: the last layer of a decoder or of a
// segmentation network.
#ifndef JAXCONV_CPU_FEW_OUTPUTS_H_
#define JAXCONV_CPU_FEW_OUTPUTS_H_

#include "cpu/region_kernel.h"

namespace jaxconv::cpu {

// Accepts up to 8 output channels without groups; needs AVX-512.
extern const RegionKernel kFewOutputs;

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_FEW_OUTPUTS_H_
