// Candidates -> cost -> order. Pure: the same problem and device give the same plan, and nothing
// runs.
#ifndef JAXCONV_CUDA_SELECT_SELECT_H_
#define JAXCONV_CUDA_SELECT_SELECT_H_

#include <string_view>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"
#include "cuda/select/device_info.h"

namespace jaxconv {

// `algorithm`: "auto", a family ("igemm_simt") or an instance name. Fills `selection` with the
// cheapest kernel that takes the problem; where none does, its instance is empty and its refusals
// say why, and the status is still OK. An algorithm that names nothing is InvalidArgument, listing
// the families.
Status Select(const ConvProblem& problem, const DeviceInfo& device, std::string_view algorithm,
              Selection* selection);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_SELECT_H_
