#include "ffi/call.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace jaxconv {
namespace {

template <typename Values>
std::string ToText(const Values& values, size_t count) {
  std::string text = "(";
  for (size_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + ")";
}

// In the order of DType.
constexpr ffi::DataType kXlaTypes[] = {ffi::DataType::F32, ffi::DataType::F16, ffi::DataType::BF16,
                                       ffi::DataType::S8,  ffi::DataType::S32, ffi::DataType::U8};

// The start of a message; fprop, dgrad and wgrad name their arrays otherwise.
Status Mismatch(const char* name, const std::string& message) {
  return Status::InvalidArgument(std::string(name) + ": " + message);
}

Status CheckNamed(const char* name, const Array& array, DType dtype, const Extents& expected) {
  const ffi::DataType type = array.buffer().element_type();
  if (type != kXlaTypes[static_cast<int>(dtype)]) {
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

// An array of a call as it should be; where it is not present it has no elements.
struct Expected {
  const Array& array;
  bool present;
  DType dtype;
  Extents shape;
};

Status CheckEach(std::initializer_list<Expected> arrays) {
  for (const auto& [array, present, dtype, shape] : arrays) {
    const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
    if (present) {
      JAXCONV_RETURN_IF_ERROR(CheckNamed(array.name(), array, dtype, shape));
    } else if (found.size() != 1 || found[0] != 0) {
      return Mismatch(array.name(),
                      "expected no elements, got shape " + ToText(found, found.size()));
    }
  }
  return {};
}

Extents Shape(std::initializer_list<int64_t> extents) {
  Extents shape;
  for (const int64_t extent : extents) shape.Append(extent);
  return shape;
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
  const bool axes = found.size() >= 2 && found.size() <= rows->shape.values.size();
  if (!axes || !array.present() || rows->segments < 1 || found[0] % rows->segments != 0) {
    return Mismatch(array.name(), "expected elements along two to seven axes, the leading one in " +
                                      std::to_string(rows->segments) +
                                      " equal segments, got shape " + ToText(found, found.size()));
  }
  for (const int64_t extent : found) rows->shape.Append(extent);
  rows->dtype = FloatType(array);
  rows->channels = found.back();
  rows->rows =
      static_cast<int64_t>(array.buffer().element_count()) / rows->channels / rows->segments;
  return CheckEach({{array, true, rows->dtype, rows->shape}});
}

// What is formed in parts of every segment: (parts, kinds, channels), with the segments in front
// where there are several.
Extents PartsOf(const Array& array, int64_t kinds, RowsOfChannels* rows) {
  const ffi::AnyBuffer::Dimensions found = array.buffer().dimensions();
  const bool several = rows->segments > 1;
  rows->parts = found.size() == 3u + several ? std::max<int64_t>(found[several], 1) : 1;
  return several ? Shape({rows->segments, rows->parts, kinds, rows->channels})
                 : Shape({rows->parts, kinds, rows->channels});
}

// One bit for each element, eight channels in a byte.
Extents BitsOf(const RowsOfChannels& rows) {
  Extents shape = rows.shape;
  shape.values[shape.rank - 1] = (rows.channels + 7) / 8;
  return shape;
}

// A vector of the channels, of all segments or one for each.
Extents NumbersOf(const Array& array, const RowsOfChannels& rows) {
  return array.buffer().dimensions().size() == 2 ? Shape({rows.segments, rows.channels})
                                                 : Shape({rows.channels});
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
  for (size_t i = 0; i < axes; ++i) {
    windows->SetAxis(i, axes, from[i + 1], sizes[i], to[i + 1], strides[i], padding[i]);
  }
  Extents whole;
  for (size_t i = 0; i < axes + 2; ++i) {
    whole.Append(from[i]);
    pooled->Append(i == 0 || i > axes ? from[i] : to[i]);
  }
  return CheckEach({{x, true, *dtype, whole}});
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
  auto check = [&](Role role, const Array& array, DType dtype, std::string_view axes,
                   bool present = true) {
    return present ? CheckRole(array.name(), array, dtype, problem, role, attributes, axes)
                   : CheckEach({{array, false, dtype, {}}});
  };
  const DType dtype = problem.y_dtype;
  JAXCONV_RETURN_IF_ERROR(check(Role::kX, arrays.x, problem.x_dtype, "lhs_axes"));
  JAXCONV_RETURN_IF_ERROR(check(Role::kW, arrays.w, problem.w_dtype, "rhs_axes"));
  JAXCONV_RETURN_IF_ERROR(check(Role::kY, arrays.residual, dtype, "out_axes", terms.residual));
  JAXCONV_RETURN_IF_ERROR(check(Role::kY, arrays.y, dtype, "out_axes"));
  JAXCONV_RETURN_IF_ERROR(check(Role::kY, arrays.pre, dtype, "out_axes", terms.pre));
  const Extents channels = Shape({problem.k});
  return CheckEach({{arrays.scale, terms.scale != ScaleKind::kNone, DType::kF32, channels},
                    {arrays.bias, terms.bias, DType::kF32, channels},
                    {arrays.statistics, terms.statistics, DType::kF32, Shape({2, problem.k})}});
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
  const Extents x = problem.Shape(Role::kX, /*with_batch=*/false), channels = Shape({problem.k});
  const bool of_image = terms.scale == ScaleKind::kImage;
  const Extents scales = of_image ? Shape({problem.n * problem.k}) : channels;
  return CheckEach({{arrays.x, true, problem.x_dtype, x},
                    {arrays.w, true, problem.w_dtype, w},
                    {arrays.y, true, problem.y_dtype, y},
                    {arrays.scale, terms.scale != ScaleKind::kNone, DType::kF32, scales},
                    {arrays.offset, terms.offset, DType::kS32, channels},
                    {arrays.bias, terms.bias, DType::kF32, channels},
                    {arrays.residual, terms.residual, problem.y_dtype, y},
                    {arrays.residual_scale, terms.residual, DType::kF32, Shape({1})}});
}

Status CheckNormaliseAdd(const NormaliseAddArrays& arrays, RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.y, rows));
  const bool two = arrays.y2.present();
  const Extents vector = Shape({rows->channels});
  return CheckEach({{arrays.y2, two, rows->dtype, rows->shape},
                    {arrays.shortcut, !two, rows->dtype, rows->shape},
                    {arrays.mean, true, DType::kF32, vector},
                    {arrays.scale, true, DType::kF32, vector},
                    {arrays.offset, true, DType::kF32, vector},
                    {arrays.mean2, two, DType::kF32, vector},
                    {arrays.scale2, two, DType::kF32, vector},
                    {arrays.offset2, two, DType::kF32, vector},
                    {arrays.result, true, rows->dtype, rows->shape},
                    {arrays.bits, true, DType::kU8, BitsOf(*rows)}});
}

Status CheckMaskedSums(const MaskedSumsArrays& arrays, const Attributes& attributes,
                       RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("segments", &rows->segments));
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.gradient, rows));
  const bool one = arrays.y.present(), two = one && arrays.y2.present();
  const bool by_result = arrays.result.present(), by_bits = !by_result && arrays.bits.present();
  const bool affine = !by_result && !by_bits && arrays.scale.present();
  const auto like = [&](const Array& array, bool present) {
    return Expected{array, present, rows->dtype, rows->shape};
  };
  const auto vector = [&](const Array& array, bool present) {
    return Expected{array, present, DType::kF32, NumbersOf(array, *rows)};
  };
  return CheckEach({like(arrays.gradient2, arrays.gradient2.present()),
                    like(arrays.result, by_result),
                    {arrays.bits, by_bits, DType::kU8, BitsOf(*rows)},
                    like(arrays.y, one),
                    like(arrays.y2, two),
                    vector(arrays.mean, one),
                    vector(arrays.mean2, two),
                    vector(arrays.scale, affine),
                    vector(arrays.offset, affine),
                    like(arrays.masked, arrays.masked.present()),
                    {arrays.sums, true, DType::kF32, PartsOf(arrays.sums, 1 + one + two, rows)}});
}

Status CheckMoments(const MomentsArrays& arrays, const Attributes& attributes,
                    RowsOfChannels* rows) {
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("segments", &rows->segments));
  JAXCONV_RETURN_IF_ERROR(CheckChannelsInnermost(arrays.y, rows));
  return CheckEach({{arrays.moments, true, DType::kF32, PartsOf(arrays.moments, 2, rows)}});
}

Status CheckMaxPool(const MaxPoolArrays& arrays, const Attributes& attributes, DType* dtype,
                    PoolWindows* windows) {
  Extents pooled;
  JAXCONV_RETURN_IF_ERROR(
      CheckPooled(arrays.x, arrays.maxima, attributes, dtype, &pooled, windows));
  const bool affine = arrays.mean.present(), places = arrays.places.present();
  const Extents vector = Shape({windows->channels});
  return CheckEach({{arrays.mean, affine, DType::kF32, vector},
                    {arrays.scale, affine, DType::kF32, vector},
                    {arrays.offset, affine, DType::kF32, vector},
                    {arrays.maxima, true, *dtype, pooled},
                    {arrays.places, places, DType::kU8, pooled},
                    {arrays.operands, places && arrays.operands.present(), *dtype, pooled}});
}

Status CheckMaxPoolGradient(const MaxPoolGradientArrays& arrays, const Attributes& attributes,
                            DType* dtype, PoolWindows* windows) {
  Extents pooled, whole;
  JAXCONV_RETURN_IF_ERROR(CheckPooled(arrays.dx, arrays.dy, attributes, dtype, &pooled, windows));
  for (const int64_t extent : arrays.dx.buffer().dimensions()) whole.Append(extent);
  const bool affine = arrays.y.present();
  const Extents vector = Shape({windows->channels});
  return CheckEach({{arrays.dy, true, *dtype, pooled},
                    {arrays.dy2, arrays.dy2.present(), *dtype, pooled},
                    {arrays.places, true, DType::kU8, pooled},
                    {arrays.y, affine, *dtype, whole},
                    {arrays.scale, affine, DType::kF32, vector},
                    {arrays.y_scale, affine, DType::kF32, vector},
                    {arrays.offset, affine, DType::kF32, vector}});
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
