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

// The start of a message; fprop, dgrad and wgrad name their arrays otherwise.
Status Mismatch(const char* name, const std::string& message) {
  return Status::InvalidArgument(std::string(name) + ": " + message);
}

Status CheckNamed(const char* name, const Array& array, DType dtype, const Extents& expected) {
  const ffi::DataType type = array.buffer().element_type();
  if (type != ToXla(dtype)) {
    return Mismatch(name, std::string("expected dtype ") + Name(dtype) + ", got XLA type " +
                              std::to_string(static_cast<int>(type)));
  }
  const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
  bool equal = found.size() == expected.rank;
  for (size_t i = 0; equal && i < expected.rank; ++i) equal = found[i] == expected.values[i];
  if (equal) return {};
  return Mismatch(name, "expected shape " + ToText(expected.values, expected.rank) + ", got " +
                            ToText(found, found.size()));
}

Status CheckArray(const Array& array, DType dtype, const Extents& expected) {
  return CheckNamed(array.name(), array, dtype, expected);
}

Status CheckAbsent(const Array& array) {
  const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
  if (found.size() == 1 && found[0] == 0) return {};
  return Mismatch(array.name(), "expected no elements, got shape " + ToText(found, found.size()));
}

// An array that is there, or not.
Status CheckArrayIf(bool present, const Array& array, DType dtype, const Extents& expected) {
  return present ? CheckArray(array, dtype, expected) : CheckAbsent(array);
}

// Of an array of floating-point numbers, for which it is checked afterwards.
DType FloatType(const Array& array) {
  const ffi::DataType type = array.buffer().element_type();
  return type == ffi::DataType::BF16  ? DType::kBF16
         : type == ffi::DataType::F16 ? DType::kF16
                                      : DType::kF32;
}

Status CheckChannelsInnermost(const Array& array, RowsOfChannels* rows) {
  const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
  if (found.size() < 2 || found.size() > rows->shape.values.size() || !array.present()) {
    return Mismatch(array.name(), "expected elements along at least two axes, got shape " +
                                      ToText(found, found.size()));
  }
  if (rows->segments < 1 || found[0] % rows->segments != 0) {
    return Mismatch(array.name(), "expected a leading axis in " + std::to_string(rows->segments) +
                                      " equal segments, got shape " + ToText(found, found.size()));
  }
  for (const int64_t extent : found) rows->shape.Append(extent);
  rows->dtype = FloatType(array);
  rows->channels = found.back();
  rows->rows =
      static_cast<int64_t>(array.buffer().element_count()) / rows->channels / rows->segments;
  return CheckArray(array, rows->dtype, rows->shape);
}

// What is formed in parts of every segment: (parts, kinds, channels), with the segments in front
// where there are several.
Status CheckParts(const Array& array, int64_t kinds, const RowsOfChannels& rows) {
  const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
  Extents expected;
  if (rows.segments > 1) expected.Append(rows.segments);
  const size_t at = expected.rank;
  expected.Append(found.size() == at + 3 && found[at] > 0 ? found[at] : 1);
  expected.Append(kinds);
  expected.Append(rows.channels);
  return CheckArray(array, DType::kF32, expected);
}

// One bit for each element of an array of this shape, eight channels in a byte.
Status CheckBits(const Array& bits, bool present, Extents shape) {
  if (!present) return CheckAbsent(bits);
  int64_t& channels = shape.values[shape.rank - 1];
  if (channels % 8 != 0) {
    return Mismatch(bits.name(),
                    "expected channels in a multiple of 8, got " + std::to_string(channels));
  }
  channels /= 8;
  return CheckArray(bits, DType::kU8, shape);
}

// A vector of `count` elements where it is present.
Status CheckVector(const Array& array, bool present, DType dtype, int64_t count) {
  Extents expected;
  expected.Append(count);
  return CheckArrayIf(present, array, dtype, expected);
}

// A vector of the channels, of all segments or one for each.
Status CheckOfSegments(const Array& array, bool present, const RowsOfChannels& rows) {
  Extents expected;
  if (present && array.buffer().dimensions().size() == 2) expected.Append(rows.segments);
  expected.Append(rows.channels);
  return CheckArrayIf(present, array, DType::kF32, expected);
}

// An array of the problem, whose axes the attribute of a name puts in order.
Status CheckRole(const char* name, const Array& array, DType dtype, const ConvProblem& problem,
                 Role role, const Attributes& attributes, std::string_view axes_name) {
  Axes axes;
  JAXCONV_RETURN_IF_ERROR(attributes.Get(axes_name, &axes));
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
    return Mismatch(name, "expected axes that permute " + std::to_string(canonical.rank) +
                              " dimensions, got " + ToText(axes, axes.size()));
  }
  return CheckNamed(name, array, dtype, expected);
}

// What a pooled array and its gradient share: `x` is the array, `y` one of the windows'.
Status CheckPooled(const Array& x, const Array& y, const Attributes& attributes, DType* dtype,
                   Extents* pooled, PoolWindows* windows) {
  const ffi::AnyBuffer::Dimensions from = x.buffer().dimensions(), to = y.buffer().dimensions();
  const size_t axes = from.size() < 2 ? 0 : from.size() - 2;
  if (axes < 1 || axes > kPoolAxes || !x.present()) {
    return Mismatch(x.name(), "expected elements and one to three spatial axes, got shape " +
                                  ToText(from, from.size()));
  }
  Axes sizes, strides, padding;
  JAXCONV_RETURN_IF_ERROR(attributes.Get("sizes", &sizes));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("strides", &strides));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("padding", &padding));
  for (const Axes& each : {sizes, strides, padding}) {
    if (each.size() != axes) {
      return Mismatch("sizes, strides, padding", "expected " + std::to_string(axes) +
                                                     " numbers, got " + ToText(each, each.size()));
    }
  }
  if (to.size() != from.size() || !y.present()) {
    return Mismatch(y.name(), std::string("expected the axes of ") + x.name() + ", got shape " +
                                  ToText(to, to.size()));
  }
  *dtype = FloatType(x);
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
    windows->size[at] = sizes[i];
    windows->stride[at] = strides[i];
    windows->low[at] = padding[i];
    whole.Append(from[i + 1]);
    pooled->Append(to[i + 1]);
  }
  whole.Append(windows->channels);
  pooled->Append(windows->channels);
  return CheckArray(x, *dtype, whole);
}

template <class OfCall>
CallArrays Named(const char* target) {
  CallArrays names{target, {}, {}};
  OfCall{&names};
  return names;
}

}  // namespace

std::vector<CallArrays> AllCalls() {
  return {Named<ConvArrays>("jaxconv_fprop"),
          Named<ConvArrays>("jaxconv_dgrad"),
          Named<ConvArrays>("jaxconv_wgrad"),
          Named<FusedArrays>("jaxconv_fused"),
          Named<Int8Arrays>("jaxconv_int8"),
          Named<NormaliseAddArrays>("jaxconv_normalise_add"),
          Named<MaskedSumsArrays>("jaxconv_masked_sums"),
          Named<MomentsArrays>("jaxconv_moments"),
          Named<MaxPoolArrays>("jaxconv_max_pool"),
          Named<MaxPoolGradientArrays>("jaxconv_max_pool_gradient")};
}

Array Arrays::Operand(const char* name) {
  if (names_ != nullptr) names_->operands.push_back(name);
  if (operands_ == nullptr) return {name, std::nullopt};
  const auto found = operands_->get<ffi::AnyBuffer>(operands_read_++);
  return {name, found.has_value() ? std::optional(*found) : std::nullopt};
}

Array Arrays::Result(const char* name) {
  if (names_ != nullptr) names_->results.push_back(name);
  if (results_ == nullptr) return {name, std::nullopt};
  auto found = results_->get<ffi::AnyBuffer>(results_read_++);
  return {name, found.has_value() ? std::optional(**found) : std::nullopt};
}

Status Arrays::CheckCounts() const {
  if (operands_->size() == operands_read_ && results_->size() == results_read_) return {};
  auto counts = [](size_t operands, size_t results) {
    return std::to_string(operands) + " operands and " + std::to_string(results) + " results";
  };
  return Status::InvalidArgument("expected " + counts(operands_read_, results_read_) + ", got " +
                                 counts(operands_->size(), results_->size()) +
                                 "; the program is of another version of jaxconv");
}

Status PlanAttributes::Read(const Attributes& attributes) {
  JAXCONV_RETURN_IF_ERROR(attributes.Get("instance", &instance));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("problem", &problem));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("slices", &slices));
  if (slices >= 1) return {};
  return Mismatch("slices", "expected at least 1, got " + std::to_string(slices));
}

Status CheckConv(Op op, const ConvArrays& arrays, const Attributes& attributes,
                 const ConvProblem& problem) {
  if (problem.op != op) {
    return Mismatch("problem",
                    std::string("expected operation ") + Name(op) + ", got " + Name(problem.op));
  }
  if (!problem.epilogue.Plain()) {
    return Mismatch("problem", "expected a plain epilogue, got " + problem.ToString());
  }
  auto check = [&](Role role, const Array& array, std::string_view axes) {
    const bool is_x = role == Role::kX, is_w = role == Role::kW;
    const DType dtype = is_x ? problem.x_dtype : is_w ? problem.w_dtype : problem.y_dtype;
    const char* name = is_x   ? (op == Op::kDgrad ? "dx" : "x")
                       : is_w ? (op == Op::kWgrad ? "dw" : "w")
                              : (op == Op::kFprop ? "y" : "dy");
    return CheckRole(name, array, dtype, problem, role, attributes, axes);
  };
  const Role lhs = op == Op::kDgrad ? Role::kY : Role::kX;
  const Role rhs = op == Op::kWgrad ? Role::kY : Role::kW;
  const Role out = op == Op::kFprop ? Role::kY : op == Op::kDgrad ? Role::kX : Role::kW;
  JAXCONV_RETURN_IF_ERROR(check(lhs, arrays.lhs, "lhs_axes"));
  JAXCONV_RETURN_IF_ERROR(check(rhs, arrays.rhs, "rhs_axes"));
  return check(out, arrays.out, "out_axes");
}

Status CheckFused(const FusedArrays& arrays, const Attributes& attributes,
                  const ConvProblem& problem) {
  const Epilogue& terms = problem.epilogue;
  if (terms.Plain() || problem.w_dtype == DType::kS8) {
    return Mismatch("problem", "expected fprop of floating-point operands with an epilogue, got " +
                                   problem.ToString());
  }
  auto check = [&](Role role, const Array& array, DType dtype, std::string_view axes) {
    return CheckRole(array.name(), array, dtype, problem, role, attributes, axes);
  };
  auto check_output = [&](const Array& array, bool present) {
    return present ? check(Role::kY, array, problem.y_dtype, "out_axes") : CheckAbsent(array);
  };
  JAXCONV_RETURN_IF_ERROR(check(Role::kX, arrays.x, problem.x_dtype, "lhs_axes"));
  JAXCONV_RETURN_IF_ERROR(check(Role::kW, arrays.w, problem.w_dtype, "rhs_axes"));
  JAXCONV_RETURN_IF_ERROR(
      CheckVector(arrays.scale, terms.scale != ScaleKind::kNone, DType::kF32, problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckVector(arrays.bias, terms.bias, DType::kF32, problem.k));
  JAXCONV_RETURN_IF_ERROR(check_output(arrays.residual, terms.residual));
  JAXCONV_RETURN_IF_ERROR(check_output(arrays.y, true));
  JAXCONV_RETURN_IF_ERROR(check_output(arrays.pre, terms.pre));
  Extents moments;
  moments.Append(2);
  moments.Append(problem.k);
  return CheckArrayIf(terms.statistics, arrays.statistics, DType::kF32, moments);
}

Status CheckInt8(const Int8Arrays& arrays, const ConvProblem& problem) {
  if (problem.op != Op::kFprop || problem.w_dtype != DType::kS8) {
    return Mismatch("problem", std::string("expected fprop of 8-bit operands, got ") +
                                   Name(problem.op) + " of " + Name(problem.x_dtype) + " and " +
                                   Name(problem.w_dtype));
  }
  const Extents y = problem.Shape(Role::kY, /*with_batch=*/false);
  Extents w = problem.Shape(Role::kW, /*with_batch=*/false);
  if (problem.filter_layout == FilterLayout::kKrsc) {
    std::rotate(w.values.begin(), w.values.begin() + (w.rank - 1), w.values.begin() + w.rank);
  }
  const Epilogue& terms = problem.epilogue;
  const int64_t scales = terms.scale == ScaleKind::kImage ? problem.n * problem.k : problem.k;
  JAXCONV_RETURN_IF_ERROR(
      CheckArray(arrays.x, problem.x_dtype, problem.Shape(Role::kX, /*with_batch=*/false)));
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.w, problem.w_dtype, w));
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.y, problem.y_dtype, y));
  JAXCONV_RETURN_IF_ERROR(
      CheckVector(arrays.scale, terms.scale != ScaleKind::kNone, DType::kF32, scales));
  JAXCONV_RETURN_IF_ERROR(CheckVector(arrays.offset, terms.offset, DType::kS32, problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckVector(arrays.bias, terms.bias, DType::kF32, problem.k));
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(terms.residual, arrays.residual, problem.y_dtype, y));
  return CheckVector(arrays.residual_scale, terms.residual, DType::kF32, 1);
}

Status CheckNormaliseAdd(const NormaliseAddArrays& arrays, RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.y, rows));
  const bool two = arrays.y2.present();
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(two, arrays.y2, rows->dtype, rows->shape));
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(!two, arrays.shortcut, rows->dtype, rows->shape));
  for (const Array* vector : {&arrays.mean, &arrays.scale, &arrays.offset}) {
    JAXCONV_RETURN_IF_ERROR(CheckVector(*vector, true, DType::kF32, rows->channels));
  }
  for (const Array* vector : {&arrays.mean2, &arrays.scale2, &arrays.offset2}) {
    JAXCONV_RETURN_IF_ERROR(CheckVector(*vector, two, DType::kF32, rows->channels));
  }
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.result, rows->dtype, rows->shape));
  return CheckBits(arrays.bits, true, rows->shape);
}

Status CheckMaskedSums(const MaskedSumsArrays& arrays, const Attributes& attributes,
                       RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("segments", &rows->segments));
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.gradient, rows));
  const bool one = arrays.y.present(), two = one && arrays.y2.present();
  const bool by_result = arrays.result.present(), by_bits = !by_result && arrays.bits.present();
  const bool affine = !by_result && !by_bits && arrays.scale.present();
  for (const Array* array : {&arrays.gradient2, &arrays.result, &arrays.y, &arrays.masked}) {
    JAXCONV_RETURN_IF_ERROR(CheckArrayIf(array->present(), *array, rows->dtype, rows->shape));
  }
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(two, arrays.y2, rows->dtype, rows->shape));
  JAXCONV_RETURN_IF_ERROR(CheckBits(arrays.bits, by_bits, rows->shape));
  JAXCONV_RETURN_IF_ERROR(CheckOfSegments(arrays.mean, one, *rows));
  JAXCONV_RETURN_IF_ERROR(CheckOfSegments(arrays.mean2, two, *rows));
  JAXCONV_RETURN_IF_ERROR(CheckOfSegments(arrays.scale, affine, *rows));
  JAXCONV_RETURN_IF_ERROR(CheckOfSegments(arrays.offset, affine, *rows));
  return CheckParts(arrays.sums, 1 + one + two, *rows);
}

Status CheckMoments(const MomentsArrays& arrays, const Attributes& attributes,
                    RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("segments", &rows->segments));
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.y, rows));
  return CheckParts(arrays.moments, 2, *rows);
}

ChannelNumbers NumbersOf(const Array& vector) {
  const ffi::AnyBuffer::Dimensions shape = vector.buffer().dimensions();
  return {vector.data<const float>(), shape.size() == 2 ? shape[1] : 0};
}

Status CheckMaxPool(const MaxPoolArrays& arrays, const Attributes& attributes, DType* dtype,
                    PoolWindows* windows) {
  Extents pooled;
  JAXCONV_RETURN_IF_ERROR(
      CheckPooled(arrays.x, arrays.maxima, attributes, dtype, &pooled, windows));
  const bool affine = arrays.mean.present(), places = arrays.places.present();
  for (const Array* vector : {&arrays.mean, &arrays.scale, &arrays.offset}) {
    JAXCONV_RETURN_IF_ERROR(CheckVector(*vector, affine, DType::kF32, windows->channels));
  }
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.maxima, *dtype, pooled));
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(places, arrays.places, DType::kU8, pooled));
  return CheckArrayIf(places && arrays.operands.present(), arrays.operands, *dtype, pooled);
}

Status CheckMaxPoolGradient(const MaxPoolGradientArrays& arrays, const Attributes& attributes,
                            DType* dtype, PoolWindows* windows) {
  Extents pooled, whole;
  JAXCONV_RETURN_IF_ERROR(CheckPooled(arrays.dx, arrays.dy, attributes, dtype, &pooled, windows));
  for (const int64_t extent : arrays.dx.buffer().dimensions()) whole.Append(extent);
  const bool affine = arrays.y.present();
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.dy, *dtype, pooled));
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(arrays.dy2.present(), arrays.dy2, *dtype, pooled));
  JAXCONV_RETURN_IF_ERROR(CheckArray(arrays.places, DType::kU8, pooled));
  JAXCONV_RETURN_IF_ERROR(CheckArrayIf(affine, arrays.y, *dtype, whole));
  for (const Array* vector : {&arrays.scale, &arrays.y_scale, &arrays.offset}) {
    JAXCONV_RETURN_IF_ERROR(CheckVector(*vector, affine, DType::kF32, windows->channels));
  }
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
