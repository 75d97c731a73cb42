#include "ffi/call.h"

#include <string>

namespace jaxconv {
namespace {

template <typename Values>
std::string ToText(const Values& values, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + ")";
}

ffi::DataType ToXla(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ffi::DataType::F32;
    case DType::kF16:
      return ffi::DataType::F16;
    case DType::kBF16:
      return ffi::DataType::BF16;
    case DType::kS8:
      return ffi::DataType::S8;
    case DType::kS32:
      return ffi::DataType::S32;
  }
  return ffi::DataType::INVALID;
}

Status CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, DType dtype,
                   const ConvProblem& problem, Role role, Axes axes) {
  if (buffer.element_type() != ToXla(dtype)) {
    return Status::InvalidArgument(std::string(name) + ": expected dtype " + Name(dtype) +
                                   ", got XLA type " +
                                   std::to_string(static_cast<int>(buffer.element_type())));
  }
  Extents canonical = problem.Shape(role);
  if (problem.batch == 1 && axes.size() + 1 == canonical.rank) {
    canonical = problem.Shape(role, /*with_batch=*/false);
  }
  Extents expected;
  expected.rank = canonical.rank;
  expected.values.fill(-1);
  bool permutation = axes.size() == canonical.rank;
  for (size_t i = 0; permutation && i < axes.size(); ++i) {
    const int64_t axis = axes[i];
    permutation =
        axis >= 0 && axis < static_cast<int64_t>(expected.rank) && expected.values[axis] == -1;
    if (permutation) expected.values[axis] = canonical.values[i];
  }
  if (!permutation) {
    return Status::InvalidArgument(std::string(name) + ": expected axes that permute " +
                                   std::to_string(canonical.rank) + " dimensions, got " +
                                   ToText(axes, axes.size()));
  }
  const ffi::AnyBuffer::Dimensions found = buffer.dimensions();
  bool equal = found.size() == expected.rank;
  for (size_t i = 0; equal && i < expected.rank; ++i) equal = found[i] == expected.values[i];
  if (!equal) {
    return Status::InvalidArgument(std::string(name) + ": expected shape " +
                                   ToText(expected.values, expected.rank) + ", got " +
                                   ToText(found, found.size()));
  }
  return {};
}

}  // namespace

Status CheckCall(Op op, const Call& call, const ConvProblem& problem) {
  if (problem.op != op) {
    return Status::InvalidArgument(std::string("problem: expected operation ") + Name(op) +
                                   ", got " + Name(problem.op));
  }
  if (call.slices < 1) {
    return Status::InvalidArgument("slices: expected at least 1, got " +
                                   std::to_string(call.slices));
  }
  auto check = [&](Role role, const ffi::AnyBuffer& buffer, Axes axes) {
    switch (role) {
      case Role::kX:
        return CheckBuffer(op == Op::kDgrad ? "dx" : "x", buffer, problem.x_dtype, problem, role,
                           axes);
      case Role::kW:
        return CheckBuffer(op == Op::kWgrad ? "dw" : "w", buffer, problem.w_dtype, problem, role,
                           axes);
      default:
        return CheckBuffer(op == Op::kFprop ? "y" : "dy", buffer, problem.y_dtype, problem, role,
                           axes);
    }
  };
  const Role lhs = op == Op::kDgrad ? Role::kY : Role::kX;
  const Role rhs = op == Op::kWgrad ? Role::kY : Role::kW;
  const Role out = op == Op::kFprop ? Role::kY : op == Op::kDgrad ? Role::kX : Role::kW;
  JAXCONV_RETURN_IF_ERROR(check(lhs, call.lhs, call.lhs_axes));
  JAXCONV_RETURN_IF_ERROR(check(rhs, call.rhs, call.rhs_axes));
  return check(out, call.out, call.out_axes);
}

ffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return ffi::Error::Success();
    case StatusCode::kInvalidArgument:
      return ffi::Error::InvalidArgument("jaxconv: " + status.message());
    case StatusCode::kUnimplemented:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, "jaxconv: " + status.message());
    case StatusCode::kInternal:
      break;
  }
  return ffi::Error::Internal("jaxconv: " + status.message());
}

}  // namespace jaxconv
