#include "ffi/call.h"

#include <algorithm>
#include <initializer_list>
#include <string>

namespace jaxconv {
namespace {

// In the order of DType.
constexpr ffi::DataType kXlaTypes[] = {ffi::DataType::F32, ffi::DataType::F16, ffi::DataType::BF16,
                                       ffi::DataType::S8,  ffi::DataType::S32, ffi::DataType::U8};

// An array of a convolution and its name in messages.
struct NamedRole {
  Role role;
  const char* name;
};
// lhs, rhs and out of every operation.
constexpr NamedRole kRoles[][3] = {{{Role::kX, "x"}, {Role::kW, "w"}, {Role::kY, "y"}},
                                   {{Role::kY, "dy"}, {Role::kW, "w"}, {Role::kX, "dx"}},
                                   {{Role::kX, "x"}, {Role::kY, "dy"}, {Role::kW, "dw"}}};
constexpr const char* kAxesNames[] = {"lhs_axes", "rhs_axes", "out_axes"};

// The expected types of lhs, rhs and out; the call's attributes give the order of their axes.
Status TypesOf(const ConvProblem& problem, const Attributes& attributes, ArrayType (&types)[3]) {
  const DType dtypes[] = {problem.lhs_dtype(), problem.rhs_dtype(), problem.output_dtype()};
  for (size_t i = 0; i < 3; ++i) {
    const auto& [role, name] = kRoles[static_cast<int>(problem.op)][i];
    Axes axes;
    JAXCONV_RETURN_IF_ERROR(attributes.Get(kAxesNames[i], &axes));
    Extents canonical = problem.Shape(role);
    if (problem.batch == 1 && axes.size() + 1 == canonical.rank) {
      canonical = problem.Shape(role, /*with_batch=*/false);
    }
    types[i].dtype = dtypes[i];
    Extents& shape = types[i].shape;
    shape.rank = canonical.rank;
    shape.values.fill(-1);
    bool permutation = axes.size() == canonical.rank;
    for (size_t j = 0; permutation && j < axes.size(); ++j) {
      const auto axis = static_cast<size_t>(axes[j]);  // a negative axis becomes larger than the
                                                       // rank
      permutation = axis < shape.rank && shape.values[axis] == -1;
      if (permutation) shape.values[axis] = canonical.values[j];
    }
    if (!permutation) {
      return Mismatch(name, "expected axes that permute " + std::to_string(canonical.rank) +
                                " dimensions, got " + ToText(axes));
    }
  }
  return {};
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
          Named<NormaliseArrays>("jaxconv_normalise"),
          Named<NormaliseAddArrays>("jaxconv_normalise_add"),
          Named<MaskedSumsArrays>("jaxconv_masked_sums"),
          Named<MomentsArrays>("jaxconv_moments"),
          Named<ActivatedSumsArrays>("jaxconv_activated_sums"),
          {"jaxconv_elementwise", {}, {}},
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

Status Mismatch(const char* name, const std::string& message) {
  return Status::InvalidArgument(std::string(name) + ": " + message);
}

Status CheckEach(std::initializer_list<Expected> expected) {
  for (const auto& [type, present, arrays] : expected) {
    for (const Array& array : arrays) {
      const Dimensions found = array.dimensions();
      if (!present) {
        if (found.size() == 1 && found[0] == 0) continue;
        return Mismatch(array.name(), "expected no elements, got shape " + ToText(found));
      }
      if (array.type() != kXlaTypes[static_cast<int>(type.dtype)]) {
        return Mismatch(array.name(), std::string("expected dtype ") + Name(type.dtype) +
                                          ", got XLA type " +
                                          std::to_string(static_cast<int>(array.type())));
      }
      if (!std::equal(found.begin(), found.end(), type.shape.begin(), type.shape.end())) {
        return Mismatch(array.name(),
                        "expected shape " + ToText(type.shape) + ", got " + ToText(found));
      }
    }
  }
  return {};
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
  ArrayType types[3];
  JAXCONV_RETURN_IF_ERROR(TypesOf(problem, attributes, types));
  const auto& [lhs, rhs, out] = kRoles[static_cast<int>(op)];
  return CheckEach({{types[0], true, {arrays.lhs.Named(lhs.name)}},
                    {types[1], true, {arrays.rhs.Named(rhs.name)}},
                    {types[2], true, {arrays.out.Named(out.name)}}});
}

Status CheckFused(const FusedArrays& arrays, const Attributes& attributes,
                  const ConvProblem& problem) {
  const Epilogue& terms = problem.epilogue;
  if (terms.Plain() || problem.w_dtype == DType::kS8) {
    return Mismatch("problem", "expected fprop of floating-point operands with an epilogue, got " +
                                   problem.ToString());
  }
  ArrayType types[3];
  JAXCONV_RETURN_IF_ERROR(TypesOf(problem, attributes, types));
  const auto& [x, w, y] = types;
  const ArrayType vector = {DType::kF32, Extents::Of({problem.k})};
  const ArrayType statistics = {DType::kF32, Extents::Of({2, problem.k})};
  return CheckEach({{x, true, {arrays.x}},
                    {w, true, {arrays.w}},
                    {y, terms.residual, {arrays.residual}},
                    {y, true, {arrays.y}},
                    {y, terms.pre, {arrays.pre}},
                    {vector, terms.scale != ScaleKind::kNone, {arrays.scale}},
                    {vector, terms.bias, {arrays.bias}},
                    {statistics, terms.statistics, {arrays.statistics}}});
}

Status CheckFused(const Int8Arrays& arrays, const Attributes& /*attributes*/,
                  const ConvProblem& problem) {
  if (problem.op != Op::kFprop || problem.w_dtype != DType::kS8) {
    return Mismatch("problem", std::string("expected fprop of 8-bit operands, got ") +
                                   Name(problem.op) + " of " + Name(problem.x_dtype) + " and " +
                                   Name(problem.w_dtype));
  }
  const ArrayType x = {problem.x_dtype, problem.Shape(Role::kX, /*with_batch=*/false)};
  const ArrayType y = {problem.y_dtype, problem.Shape(Role::kY, /*with_batch=*/false)};
  Extents w = problem.Shape(Role::kW, /*with_batch=*/false);
  if (problem.filter_layout == FilterLayout::kKrsc) {
    std::rotate(w.values.begin(), w.values.begin() + (w.rank - 1), w.values.begin() + w.rank);
  }
  const Epilogue& terms = problem.epilogue;
  const int64_t images = terms.scale == ScaleKind::kImage ? problem.n : 1;
  const Extents channels = Extents::Of({problem.k});
  return CheckEach({{x, true, {arrays.x}},
                    {{problem.w_dtype, w}, true, {arrays.w}},
                    {y, true, {arrays.y}},
                    {{DType::kF32, Extents::Of({images * problem.k})},
                     terms.scale != ScaleKind::kNone,
                     {arrays.scale}},
                    {{DType::kS32, channels}, terms.offset, {arrays.offset}},
                    {{DType::kF32, channels}, terms.bias, {arrays.bias}},
                    {y, terms.residual, {arrays.residual}},
                    {{DType::kF32, Extents::Of({1})}, terms.residual, {arrays.residual_scale}}});
}

ffi::Error ToError(const Status& status) {
  // In the order of StatusCode.
  constexpr ffi::ErrorCode kCodes[] = {ffi::ErrorCode::kOk, ffi::ErrorCode::kInvalidArgument,
                                       ffi::ErrorCode::kUnimplemented, ffi::ErrorCode::kInternal};
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(kCodes[static_cast<int>(status.code())], "jaxconv: " + status.message());
}

}  // namespace jaxconv
