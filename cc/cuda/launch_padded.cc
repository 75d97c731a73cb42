#include "cuda/common/padded_channels.h"
#include "cuda/launch_table.h"

namespace jaxconv {

Status LaunchPadded(const Plan& plan, const Operands& operands, void* stream) {
  const auto& params = plan.As<PaddedParams>();
  char* const workspace = static_cast<char*>(operands.workspace);
  Operands inner = operands;
  PitchedCopy lhs = params.lhs, rhs = params.rhs, out = params.out;
  if (lhs.elements > 0) {
    lhs.from = operands.lhs;
    inner.lhs = lhs.to = workspace;
  }
  if (rhs.elements > 0) {
    rhs.from = operands.rhs;
    inner.rhs = rhs.to = workspace + params.rhs_offset;
  }
  if (out.elements > 0) {
    out.from = inner.out = workspace + params.out_offset;
    out.to = operands.out;
  }
  inner.workspace_bytes = params.inner.workspace_bytes;
  inner.workspace = inner.workspace_bytes > 0 ? workspace + params.inner_offset : nullptr;
  JAXCONV_RETURN_IF_ERROR(LaunchPitchedCopies(lhs, rhs, stream));
  JAXCONV_RETURN_IF_ERROR(FindLaunch(params.inner.kernel->name)(params.inner, inner, stream));
  return LaunchPitchedCopies(out, PitchedCopy(), stream);
}

}  // namespace jaxconv
