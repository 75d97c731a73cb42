#include "cuda/common/kernel.h"

#include <initializer_list>

namespace jaxconv {
namespace {

Status CheckEpilogue(const KernelDesc& kernel, const ConvProblem& problem) {
  if (!kernel.fused) {
    if (problem.epilogue.Plain()) return {};
    return Status::Unimplemented("stores plain sums only");
  }
  if (problem.epilogue.Plain()) {
    return Status::Unimplemented("has an epilogue, which this problem has not");
  }
  if (problem.epilogue.statistics) {
    if (!kernel.statistics) return Status::Unimplemented("has no statistics of its result");
    Epilogue rest = problem.epilogue;
    rest.statistics = false;
    if (!rest.Plain()) {
      return Status::Unimplemented("has statistics of plain sums only, no statistics behind terms");
    }
  }
  if (problem.output_dtype() != kernel.dtype) {
    return Status::Unimplemented(std::string("with an epilogue stores ") + Name(kernel.dtype) +
                                 " only, got " + Name(problem.output_dtype()));
  }
  return problem.RequireRsck();
}

}  // namespace

KernelDesc FusedKernel(const KernelDesc& kernel, const char* name) {
  KernelDesc fused = kernel;
  fused.name = name;
  fused.fused = true;
  return fused;
}

Status CheckTypes(const KernelDesc& kernel, const ConvProblem& problem, bool tf32) {
  if (problem.op != kernel.op) return Refuse(Name(kernel.op), Name(problem.op));
  const char* dtype = Name(kernel.dtype);
  if (problem.lhs_dtype() != kernel.dtype || problem.rhs_dtype() != kernel.dtype) {
    return Status::Unimplemented(std::string("expected operands of type ") + dtype + ", got " +
                                 Name(problem.lhs_dtype()) + " and " + Name(problem.rhs_dtype()));
  }
  if (problem.output_dtype() != kernel.dtype && problem.output_dtype() != DType::kF32) {
    return Status::Unimplemented(std::string("expected an output of type ") + dtype +
                                 " or f32, got " + Name(problem.output_dtype()));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsckOrKrsc());
  JAXCONV_RETURN_IF_ERROR(problem.RequireChannelsLast());
  JAXCONV_RETURN_IF_ERROR(CheckEpilogue(kernel, problem));
  if (tf32 && !kernel.three_tf32 && kernel.dtype == DType::kF32 &&
      problem.precision != Precision::kDefault) {
    return Status::Unimplemented(std::string("multiplies float32 in TF32, precision ") +
                                 Name(problem.precision) + " asks for more");
  }
  return {};
}

Status CheckInt8Types(const KernelDesc& kernel, const ConvProblem& problem) {
  if (problem.op != kernel.op) return Refuse(Name(kernel.op), Name(problem.op));
  if (problem.x_dtype != kernel.dtype || problem.w_dtype != DType::kS8) {
    return Refuse(std::string("operands of type ") + Name(kernel.dtype) + " and s8",
                  std::string(Name(problem.x_dtype)) + " and " + Name(problem.w_dtype));
  }
  if (problem.filter_layout != FilterLayout::kPacked) {
    return Refuse("a packed filter", Name(problem.filter_layout));
  }
  return {};
}

double Int8OutputBytes(const ConvProblem& problem) {
  return static_cast<double>(ByteWidth(problem.y_dtype)) * (problem.epilogue.residual ? 2 : 1);
}
double Int8Bytes(const ConvProblem& problem) {
  return static_cast<double>(problem.x_elements() + problem.k * problem.packed_row()) +
         static_cast<double>(problem.y_elements()) * Int8OutputBytes(problem);
}

Status RequireOneSlice(int64_t slices) {
  if (slices == 0 || slices == 1) return {};
  return Status::InvalidArgument("slices: expected 1, got " + std::to_string(slices));
}

Status Refuse(const std::string& expected, const std::string& got) {
  return Status::Unimplemented("expected " + expected + ", got " + got);
}
Status Refuse(const std::string& expected, int64_t got) {
  return Refuse(expected, std::to_string(got));
}

Status RefuseSharedBytes(const std::string& what, int64_t bytes, const Gpu& gpu) {
  return Status::Unimplemented(what + " " + std::to_string(bytes) +
                               " bytes of shared memory, the GPU has " +
                               std::to_string(gpu.smem_per_block_optin));
}

Status CheckOperands(const Plan& plan, const Operands& operands) {
  if (operands.workspace_bytes < plan.workspace_bytes ||
      (plan.workspace_bytes > 0 && operands.workspace == nullptr)) {
    return Status::InvalidArgument("workspace: expected " + std::to_string(plan.workspace_bytes) +
                                   " bytes, got " + std::to_string(operands.workspace_bytes));
  }
  for (const void* pointer : std::initializer_list<const void*>{
           operands.lhs, operands.rhs, operands.scale, operands.offset, operands.bias,
           operands.residual, operands.out, operands.pre, operands.statistics,
           operands.workspace}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      return Status::InvalidArgument("buffers: expected an alignment of 16 bytes");
    }
  }
  return {};
}

}  // namespace jaxconv
