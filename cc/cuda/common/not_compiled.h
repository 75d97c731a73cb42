// The launch of an instance that JAXCONV_CUDA_INSTANCES=EACH_FORM left out (sources.cmake).
#ifndef JAXCONV_CUDA_COMMON_NOT_COMPILED_H_
#define JAXCONV_CUDA_COMMON_NOT_COMPILED_H_

#include "cuda/common/instances.h"
#include "cuda/common/kernel.h"

#define JAXCONV_NOT_COMPILED(op, family, dtype, variant)                                     \
  Status JAXCONV_LAUNCH(op, family, dtype, variant)(const Plan&, const Operands&, void*) {   \
    return Status::Unimplemented(JAXCONV_NAME(                                               \
        op, family, dtype, variant) " was not compiled (JAXCONV_CUDA_INSTANCES=EACH_FORM)"); \
  }

#endif  // JAXCONV_CUDA_COMMON_NOT_COMPILED_H_
