#include "ffi/call.h"

#include <algorithm>
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
    case DType::kU8:
      return ffi::DataType::U8;
  }
  return ffi::DataType::INVALID;
}

Status CheckArray(const char* name, const ffi::AnyBuffer& buffer, DType dtype,
                  const Extents& expected) {
  if (buffer.element_type() != ToXla(dtype)) {
    return Status::InvalidArgument(std::string(name) + ": expected dtype " + Name(dtype) +
                                   ", got XLA type " +
                                   std::to_string(static_cast<int>(buffer.element_type())));
  }
  const ffi::AnyBuffer::Dimensions found = buffer.dimensions();
  bool equal = found.size() == expected.rank;
  for (size_t i = 0; equal && i < expected.rank; ++i) equal = found[i] == expected.values[i];
  if (equal) return {};
  return Status::InvalidArgument(std::string(name) + ": expected shape " +
                                 ToText(expected.values, expected.rank) + ", got " +
                                 ToText(found, found.size()));
}

Status CheckAbsent(const char* name, const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions found = buffer.dimensions();
  if (found.size() == 1 && found[0] == 0) return {};
  return Status::InvalidArgument(std::string(name) + ": expected no elements, got shape " +
                                 ToText(found, found.size()));
}

// An array of 16 bits with its channels on the last axis: its type, shape, rows and channels.
Status CheckChannelsInnermost(const char* name, const ffi::AnyBuffer& buffer, DType* dtype,
                              Extents* shape, int64_t* rows, int64_t* channels) {
  const ffi::AnyBuffer::Dimensions found = buffer.dimensions();
  if (found.size() < 2 || found.size() > shape->values.size() || !Present(buffer)) {
    return Status::InvalidArgument(std::string(name) +
                                   ": expected elements along at least two axes, got shape " +
                                   ToText(found, found.size()));
  }
  for (const int64_t extent : found) shape->Append(extent);
  *dtype = buffer.element_type() == ffi::DataType::BF16 ? DType::kBF16 : DType::kF16;
  *channels = found.back();
  *rows = static_cast<int64_t>(buffer.element_count()) / *channels;
  return CheckArray(name, buffer, *dtype, *shape);
}

// One bit for each element of an array of this shape, eight channels in a byte.
Status CheckBits(const ffi::AnyBuffer& buffer, bool present, Extents shape) {
  if (!present) return CheckAbsent("bits", buffer);
  int64_t& channels = shape.values[shape.rank - 1];
  if (channels % 8 != 0) {
    return Status::InvalidArgument("bits: expected channels in a multiple of 8, got " +
                                   std::to_string(channels));
  }
  channels /= 8;
  return CheckArray("bits", buffer, DType::kU8, shape);
}

// A term of an epilogue, a vector of `count` elements where it is present.
Status CheckTerm(const char* name, const ffi::AnyBuffer& buffer, bool present, DType dtype,
                 int64_t count) {
  if (!present) return CheckAbsent(name, buffer);
  Extents expected;
  expected.Append(count);
  return CheckArray(name, buffer, dtype, expected);
}

Status CheckSlices(int64_t slices) {
  if (slices >= 1) return {};
  return Status::InvalidArgument("slices: expected at least 1, got " + std::to_string(slices));
}

Status CheckBuffer(const char* name, const ffi::AnyBuffer& buffer, DType dtype,
                   const ConvProblem& problem, Role role, Axes axes) {
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
  return CheckArray(name, buffer, dtype, expected);
}

// What a pooled array and its gradient share: `x` is the array's buffer, `y` one of the windows'.
Status CheckPooled(const char* x_name, const ffi::AnyBuffer& x, const char* y_name,
                   const ffi::AnyBuffer& y, const PoolAttributes& attributes, DType* dtype,
                   Extents* pooled, PoolWindows* windows) {
  const ffi::AnyBuffer::Dimensions from = x.dimensions(), to = y.dimensions();
  const size_t axes = from.size() < 2 ? 0 : from.size() - 2;
  if (axes < 1 || axes > kPoolAxes || !Present(x)) {
    return Status::InvalidArgument(std::string(x_name) +
                                   ": expected elements and one to three spatial axes, got shape " +
                                   ToText(from, from.size()));
  }
  for (const Axes& each : {attributes.sizes, attributes.strides, attributes.padding}) {
    if (each.size() != axes) {
      return Status::InvalidArgument("sizes, strides, padding: expected " + std::to_string(axes) +
                                     " numbers, got " + ToText(each, each.size()));
    }
  }
  if (to.size() != from.size() || !Present(y)) {
    return Status::InvalidArgument(std::string(y_name) + ": expected the axes of " + x_name +
                                   ", got shape " + ToText(to, to.size()));
  }
  *dtype = x.element_type() == ffi::DataType::BF16 ? DType::kBF16 : DType::kF16;
  windows->batch = from[0];
  windows->channels = from[axes + 1];
  Extents whole;
  whole.Append(from[0]);
  pooled->Append(from[0]);
  for (size_t i = 0; i < axes; ++i) {
    // Of two axes the outer and the inner one, of one the outer one.
    const size_t at = i == 1 && axes == 2 ? 2 : i;
    windows->in[at] = from[i + 1];
    windows->out[at] = to[i + 1];
    windows->size[at] = attributes.sizes[i];
    windows->stride[at] = attributes.strides[i];
    windows->low[at] = attributes.padding[i];
    whole.Append(from[i + 1]);
    pooled->Append(to[i + 1]);
  }
  whole.Append(windows->channels);
  pooled->Append(windows->channels);
  return CheckArray(x_name, x, *dtype, whole);
}

}  // namespace

Status CheckCall(Op op, const Call& call, const ConvProblem& problem) {
  if (problem.op != op) {
    return Status::InvalidArgument(std::string("problem: expected operation ") + Name(op) +
                                   ", got " + Name(problem.op));
  }
  if (!problem.epilogue.Plain()) {
    return Status::InvalidArgument(std::string("problem: expected a plain epilogue, got ") +
                                   problem.ToString());
  }
  JAXCONV_RETURN_IF_ERROR(CheckSlices(call.slices));
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

Status CheckFusedCall(const FusedCall& call, const ConvProblem& problem) {
  const Epilogue& terms = problem.epilogue;
  if (terms.Plain() || problem.w_dtype == DType::kS8) {
    return Status::InvalidArgument(
        "problem: expected fprop of floating-point operands with an epilogue, got " +
        problem.ToString());
  }
  JAXCONV_RETURN_IF_ERROR(CheckSlices(call.slices));
  auto check_output = [&](const char* name, const ffi::AnyBuffer& buffer, bool present) {
    if (!present) return CheckAbsent(name, buffer);
    return CheckBuffer(name, buffer, problem.y_dtype, problem, Role::kY, call.out_axes);
  };
  JAXCONV_RETURN_IF_ERROR(
      CheckBuffer("x", call.x, problem.x_dtype, problem, Role::kX, call.lhs_axes));
  JAXCONV_RETURN_IF_ERROR(
      CheckBuffer("w", call.w, problem.w_dtype, problem, Role::kW, call.rhs_axes));
  JAXCONV_RETURN_IF_ERROR(
      CheckTerm("scale", call.scale, terms.scale != ScaleKind::kNone, DType::kF32, problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("bias", call.bias, terms.bias, DType::kF32, problem.k));
  JAXCONV_RETURN_IF_ERROR(check_output("residual", call.residual, terms.residual));
  JAXCONV_RETURN_IF_ERROR(check_output("y", call.y, true));
  JAXCONV_RETURN_IF_ERROR(check_output("pre", call.pre, terms.pre));
  if (!terms.statistics) return CheckAbsent("statistics", call.statistics);
  Extents moments;
  moments.Append(2);
  moments.Append(problem.k);
  return CheckArray("statistics", call.statistics, DType::kF32, moments);
}

Status CheckInt8Call(const Int8Call& call, const ConvProblem& problem) {
  if (problem.op != Op::kFprop || problem.w_dtype != DType::kS8) {
    return Status::InvalidArgument(std::string("problem: expected fprop of 8-bit operands, got ") +
                                   Name(problem.op) + " of " + Name(problem.x_dtype) + " and " +
                                   Name(problem.w_dtype));
  }
  JAXCONV_RETURN_IF_ERROR(CheckSlices(call.slices));
  const Extents y = problem.Shape(Role::kY, /*with_batch=*/false);
  Extents w = problem.Shape(Role::kW, /*with_batch=*/false);
  if (problem.filter_layout == FilterLayout::kKrsc) {
    std::rotate(w.values.begin(), w.values.begin() + (w.rank - 1), w.values.begin() + w.rank);
  }
  const Epilogue& terms = problem.epilogue;
  const bool of_image = terms.scale == ScaleKind::kImage;
  JAXCONV_RETURN_IF_ERROR(
      CheckArray("x", call.x, problem.x_dtype, problem.Shape(Role::kX, /*with_batch=*/false)));
  JAXCONV_RETURN_IF_ERROR(CheckArray("w", call.w, problem.w_dtype, w));
  JAXCONV_RETURN_IF_ERROR(CheckArray("y", call.out, problem.y_dtype, y));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("scale", call.scale, terms.scale != ScaleKind::kNone,
                                    DType::kF32, of_image ? problem.n * problem.k : problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("offset", call.offset, terms.offset, DType::kS32, problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("bias", call.bias, terms.bias, DType::kF32, problem.k));
  if (terms.residual) {
    JAXCONV_RETURN_IF_ERROR(CheckArray("residual", call.residual, problem.y_dtype, y));
  } else {
    JAXCONV_RETURN_IF_ERROR(CheckAbsent("residual", call.residual));
  }
  return CheckTerm("residual_scale", call.residual_scale, terms.residual, DType::kF32, 1);
}

Status CheckNormaliseAddCall(const NormaliseAddCall& call, DType* dtype, int64_t* rows,
                             int64_t* channels) {
  Extents shape;
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost("y", call.y, dtype, &shape, rows, channels));
  const bool two = Present(call.y2);
  auto check = [&](const char* name, const ffi::AnyBuffer& buffer, bool present) {
    return present ? CheckArray(name, buffer, *dtype, shape) : CheckAbsent(name, buffer);
  };
  JAXCONV_RETURN_IF_ERROR(check("y2", call.y2, two));
  JAXCONV_RETURN_IF_ERROR(check("shortcut", call.shortcut, !two));
  const struct {
    const char* name;
    const ffi::AnyBuffer& buffer;
    bool present;
  } vectors[] = {{"mean", call.mean, true},     {"mean2", call.mean2, two},
                 {"scale", call.scale, true},   {"scale2", call.scale2, two},
                 {"offset", call.offset, true}, {"offset2", call.offset2, two}};
  for (const auto& [name, buffer, present] : vectors) {
    JAXCONV_RETURN_IF_ERROR(CheckTerm(name, buffer, present, DType::kF32, *channels));
  }
  JAXCONV_RETURN_IF_ERROR(check("result", call.result, true));
  return CheckBits(call.bits, true, shape);
}

Status CheckMaskedSumsCall(const MaskedSumsCall& call, DType* dtype, int64_t* rows,
                           int64_t* channels) {
  Extents shape;
  JAXCONV_RETURN_IF_ERROR(
      CheckChannelsInnermost("gradient", call.gradient, dtype, &shape, rows, channels));
  auto check = [&](const char* name, const ffi::AnyBuffer& buffer, bool present) {
    return present ? CheckArray(name, buffer, *dtype, shape) : CheckAbsent(name, buffer);
  };
  const bool two = Present(call.y2), by_result = Present(call.result);
  const bool by_bits = Present(call.bits), affine = !by_result && !by_bits;
  JAXCONV_RETURN_IF_ERROR(check("gradient2", call.gradient2, Present(call.gradient2)));
  JAXCONV_RETURN_IF_ERROR(check("result", call.result, by_result));
  JAXCONV_RETURN_IF_ERROR(CheckBits(call.bits, by_bits && !by_result, shape));
  JAXCONV_RETURN_IF_ERROR(check("y", call.y, true));
  JAXCONV_RETURN_IF_ERROR(check("y2", call.y2, two));
  JAXCONV_RETURN_IF_ERROR(check("masked", call.masked, Present(call.masked)));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("mean", call.mean, true, DType::kF32, *channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("mean2", call.mean2, two, DType::kF32, *channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("scale", call.scale, affine, DType::kF32, *channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("offset", call.offset, affine, DType::kF32, *channels));
  const ffi::AnyBuffer::Dimensions sums = call.sums.dimensions();
  Extents parts;
  parts.Append(sums.size() == 3 && sums[0] > 0 ? sums[0] : 1);
  parts.Append(two ? 3 : 2);
  parts.Append(*channels);
  return CheckArray("sums", call.sums, DType::kF32, parts);
}

Status CheckMaxPoolCall(const MaxPoolCall& call, const PoolAttributes& attributes, DType* dtype,
                        PoolWindows* windows) {
  Extents pooled;
  JAXCONV_RETURN_IF_ERROR(
      CheckPooled("x", call.x, "maxima", call.maxima, attributes, dtype, &pooled, windows));
  const bool affine = Present(call.mean);
  const int64_t channels = windows->channels;
  JAXCONV_RETURN_IF_ERROR(CheckTerm("mean", call.mean, affine, DType::kF32, channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("scale", call.scale, affine, DType::kF32, channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("offset", call.offset, affine, DType::kF32, channels));
  JAXCONV_RETURN_IF_ERROR(CheckArray("maxima", call.maxima, *dtype, pooled));
  if (!Present(call.places)) {
    JAXCONV_RETURN_IF_ERROR(CheckAbsent("places", call.places));
    return CheckAbsent("operands", call.operands);
  }
  JAXCONV_RETURN_IF_ERROR(CheckArray("places", call.places, DType::kU8, pooled));
  return Present(call.operands) ? CheckArray("operands", call.operands, *dtype, pooled)
                                : CheckAbsent("operands", call.operands);
}

Status CheckMaxPoolGradientCall(const MaxPoolGradientCall& call, const PoolAttributes& attributes,
                                DType* dtype, PoolWindows* windows) {
  Extents pooled;
  JAXCONV_RETURN_IF_ERROR(
      CheckPooled("dx", call.dx, "dy", call.dy, attributes, dtype, &pooled, windows));
  JAXCONV_RETURN_IF_ERROR(CheckArray("dy", call.dy, *dtype, pooled));
  JAXCONV_RETURN_IF_ERROR(Present(call.dy2) ? CheckArray("dy2", call.dy2, *dtype, pooled)
                                            : CheckAbsent("dy2", call.dy2));
  JAXCONV_RETURN_IF_ERROR(CheckArray("places", call.places, DType::kU8, pooled));
  const bool affine = Present(call.y);
  const int64_t channels = windows->channels;
  if (affine) {
    Extents whole;
    for (const int64_t extent : call.dx.dimensions()) whole.Append(extent);
    JAXCONV_RETURN_IF_ERROR(CheckArray("y", call.y, *dtype, whole));
  } else {
    JAXCONV_RETURN_IF_ERROR(CheckAbsent("y", call.y));
  }
  JAXCONV_RETURN_IF_ERROR(CheckTerm("scale", call.scale, affine, DType::kF32, channels));
  JAXCONV_RETURN_IF_ERROR(CheckTerm("y_scale", call.y_scale, affine, DType::kF32, channels));
  return CheckTerm("offset", call.offset, affine, DType::kF32, channels);
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
