// Candidates -> predicted microseconds -> choice. Pure: the same problem and GPU give the same
// choice, and nothing runs.
#ifndef JAXCONV_CUDA_SELECT_H_
#define JAXCONV_CUDA_SELECT_H_

#include <string_view>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// `algorithm`: "auto", "native", a family ("igemm_simt"), an alias of some of its instances
// ("winograd_f4x4") or an instance name. "auto" and "native" leave out instances that are chosen on
// request only; they and families leave out, at precision "default", those that multiply float32 as
// three TF32 products. Fills `selection` with the kernel that is predicted fastest among those that
// take the problem. Where none does, its instance is empty and its refusals say why; under "auto"
// also where XLA's convolution is predicted faster and as accurate (xla_cost.h), the prediction
// being the one refusal. The status is OK in both cases. An algorithm that names nothing is
// InvalidArgument, listing the families and aliases.
Status Select(const ConvProblem& problem, const Gpu& gpu, std::string_view algorithm,
              Selection* selection);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_H_
