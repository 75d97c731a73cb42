// Selection: predicts the microseconds of the candidates and chooses the fastest. Pure: the same
// problem and GPU give the same choice, and nothing runs.
#ifndef JAXCONV_CUDA_SELECT_H_
#define JAXCONV_CUDA_SELECT_H_

#include <string_view>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// `algorithm`: "auto", "native", a family ("igemm_simt"), an alias of some of its instances
// ("winograd_f4x4") or an instance name. "auto" and "native" exclude instances that run on request
// only; at precision "default" they and families also exclude those that multiply float32 as three
// TF32 products. Fills `selection` with the fastest predicted kernel among those that accept the
// problem. If none accepts it, the instance is empty and the refusals say why. Under "auto" the
// instance is also empty if XLA's convolution is predicted faster and as accurate (xla_cost.h);
// that prediction is then the only refusal. The status is OK in both cases. An unknown algorithm is
// InvalidArgument, with a list of the families and aliases.
Status Select(const ConvProblem& problem, const Gpu& gpu, std::string_view algorithm,
              Selection* selection);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_H_
