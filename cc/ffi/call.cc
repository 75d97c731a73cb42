#include "ffi/call.h"

#include <string>
#include <vector>

namespace jaxconv {
namespace {

std::string ToText(ffi::Span<const int64_t> values) {
  std::string text = "(";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
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

// `canonical` leads with the batch of independent convolutions; arrays of an unbatched call lack
// it.
Status CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, DType dtype,
                   std::vector<int64_t> canonical, Axes axes) {
  if (buffer.element_type() != ToXla(dtype)) {
    return Status::InvalidArgument(std::string(name) + ": expected dtype " + Name(dtype) +
                                   ", got XLA type " +
                                   std::to_string(static_cast<int>(buffer.element_type())));
  }
  if (axes.size() + 1 == canonical.size() && canonical[0] == 1) {
    canonical.erase(canonical.begin());
  }
  std::vector<int64_t> expected(canonical.size(), -1);
  bool permutation = axes.size() == canonical.size();
  for (size_t i = 0; permutation && i < axes.size(); ++i) {
    int64_t axis = axes[i];
    permutation = axis >= 0 && axis < static_cast<int64_t>(expected.size()) && expected[axis] == -1;
    if (permutation) expected[axis] = canonical[i];
  }
  if (!permutation) {
    return Status::InvalidArgument(std::string(name) + ": expected axes that permute " +
                                   std::to_string(canonical.size()) + " dimensions, got " +
                                   ToText(axes));
  }
  ffi::AnyBuffer::Dimensions found = buffer.dimensions();
  if (std::vector<int64_t>(found.begin(), found.end()) != expected) {
    return Status::InvalidArgument(
        std::string(name) + ": expected shape " +
        ToText(ffi::Span<const int64_t>(expected.data(), expected.size())) + ", got " +
        ToText(found));
  }
  return {};
}

}  // namespace

Status DecodeCall(Op op, std::string_view line, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                  ffi::AnyBuffer out, ffi::AnyBuffer workspace, int64_t slices, Axes lhs_axes,
                  Axes rhs_axes, Axes out_axes, Call* call) {
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(line, &call->problem));
  const ConvProblem& problem = call->problem;
  if (problem.op != op) {
    return Status::InvalidArgument(std::string("problem: expected operation ") + Name(op) +
                                   ", got " + Name(problem.op));
  }
  if (slices < 1) {
    return Status::InvalidArgument("slices: expected at least 1, got " + std::to_string(slices));
  }
  auto check_x = [&](const ffi::AnyBuffer& buffer, Axes axes) {
    return CheckBuffer(op == Op::kDgrad ? "dx" : "x", buffer, problem.x_dtype, problem.x_shape(),
                       axes);
  };
  auto check_w = [&](const ffi::AnyBuffer& buffer, Axes axes) {
    return CheckBuffer(op == Op::kWgrad ? "dw" : "w", buffer, problem.w_dtype, problem.w_shape(),
                       axes);
  };
  auto check_y = [&](const ffi::AnyBuffer& buffer, Axes axes) {
    return CheckBuffer(op == Op::kFprop ? "y" : "dy", buffer, problem.y_dtype, problem.y_shape(),
                       axes);
  };
  switch (op) {
    case Op::kFprop:
      JAXCONV_RETURN_IF_ERROR(check_x(lhs, lhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_w(rhs, rhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_y(out, out_axes));
      break;
    case Op::kDgrad:
      JAXCONV_RETURN_IF_ERROR(check_y(lhs, lhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_w(rhs, rhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_x(out, out_axes));
      break;
    case Op::kWgrad:
      JAXCONV_RETURN_IF_ERROR(check_x(lhs, lhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_y(rhs, rhs_axes));
      JAXCONV_RETURN_IF_ERROR(check_w(out, out_axes));
      break;
  }
  call->lhs = lhs.untyped_data();
  call->rhs = rhs.untyped_data();
  call->out = out.untyped_data();
  call->workspace = workspace.untyped_data();
  call->workspace_bytes = static_cast<int64_t>(workspace.size_bytes());
  call->slices = slices;
  return {};
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
