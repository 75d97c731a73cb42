// Decoding and checking of a custom call, the same on every platform.
//
// Operands and result have the axis order of the caller's arrays; `*_axes[i]` is the array position
// of canonical axis i, and the layout constraint put on the call stores the array in canonical
// order, the filter in the problem's layout. Everything is compared with the problem that the call
// carries: a mismatch is an INVALID_ARGUMENT that names the buffer, what was expected and what was
// found. A call that matches allocates nothing here.
#ifndef JAXCONV_FFI_CALL_H_
#define JAXCONV_FFI_CALL_H_

#include <string_view>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/pooling/windows.h"
#include "xla/ffi/api/ffi.h"

namespace jaxconv {

namespace ffi = ::xla::ffi;

using Axes = ffi::Span<const int64_t>;

// The arguments, results and attributes that all handlers share.
struct Call {
  ffi::AnyBuffer lhs, rhs, out, workspace;
  std::string_view instance;
  std::string_view problem;  // ConvProblem::ToString
  int64_t slices;
  Axes lhs_axes, rhs_axes, out_axes;
};

// The call `jaxconv_int8`: fprop of 8-bit operands with the epilogue of core/epilogue.h. Arrays lie
// in the problem's layouts, row-major; an absent operand has no elements.
struct Int8Call {
  ffi::AnyBuffer x, w, scale, offset, bias, residual, residual_scale, out, workspace;
  std::string_view instance;
  std::string_view problem;
  int64_t slices;
};

// The call `jaxconv_fused`: fprop of floating-point operands with the epilogue of core/epilogue.h.
// `residual` and `pre` have the axes of y, an absent array has no elements.
struct FusedCall {
  ffi::AnyBuffer x, w, scale, bias, residual, y, pre, statistics, workspace;
  std::string_view instance;
  std::string_view problem;
  int64_t slices;
  Axes lhs_axes, rhs_axes, out_axes;
};

// The call `jaxconv_normalise_add` (cuda/batch_norm/normalise_add.h): arrays of one type and shape,
// the channels innermost, vectors of float32; an absent one has no elements.
struct NormaliseAddCall {
  ffi::AnyBuffer y, y2, shortcut, mean, mean2, scale, scale2, offset, offset2, result, bits;
};

// Compares the buffers with each other. The numbers are those of the rows and of the channels.
Status CheckNormaliseAddCall(const NormaliseAddCall& call, DType* dtype, int64_t* rows,
                             int64_t* channels);

// The call `jaxconv_masked_sums` (cuda/batch_norm/masked_sums.h): arrays of one type and shape, the
// channels innermost, vectors of float32; an absent one has no elements.
struct MaskedSumsCall {
  ffi::AnyBuffer gradient, gradient2, result, bits, y, y2, mean, mean2, scale, offset;
  ffi::AnyBuffer masked, sums;
};

Status CheckMaskedSumsCall(const MaskedSumsCall& call, DType* dtype, int64_t* rows,
                           int64_t* channels);

// Extents of pooling along the spatial axes, of which there are one to three.
struct PoolAttributes {
  Axes sizes, strides, padding;  // in front
};

// The call `jaxconv_max_pool` (cuda/pooling/max_pool.h): x, maxima and operands of one type, the
// channels innermost, places of 8 bits, vectors of float32; an absent one has no elements.
struct MaxPoolCall {
  ffi::AnyBuffer x, mean, scale, offset, maxima, places, operands;
};

// The call `jaxconv_max_pool_gradient` (cuda/pooling/max_pool_gradient.h).
struct MaxPoolGradientCall {
  ffi::AnyBuffer dy, dy2, places, y, scale, y_scale, offset, dx;
};

// Compare the buffers with each other and with the attributes.
Status CheckMaxPoolCall(const MaxPoolCall& call, const PoolAttributes& attributes, DType* dtype,
                        PoolWindows* windows);
Status CheckMaxPoolGradientCall(const MaxPoolGradientCall& call, const PoolAttributes& attributes,
                                DType* dtype, PoolWindows* windows);

// Whether an operand or a result that a call may leave out is there.
inline bool Present(const ffi::AnyBuffer& buffer) { return buffer.element_count() > 0; }

// Compares the buffers with the problem that the call carries, and the operation with `op`.
Status CheckCall(Op op, const Call& call, const ConvProblem& problem);

Status CheckFusedCall(const FusedCall& call, const ConvProblem& problem);

Status CheckInt8Call(const Int8Call& call, const ConvProblem& problem);

ffi::Error ToError(const Status& status);

}  // namespace jaxconv

// The part of a handler's binding that all handlers share, after their contexts.
#define JAXCONV_BIND_CALL(binding)        \
  (binding)                               \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Attr<std::string_view>("instance") \
      .Attr<std::string_view>("problem")  \
      .Attr<int64_t>("slices")            \
      .Attr<::jaxconv::Axes>("lhs_axes")  \
      .Attr<::jaxconv::Axes>("rhs_axes")  \
      .Attr<::jaxconv::Axes>("out_axes")

// The same of `jaxconv_fused`.
#define JAXCONV_BIND_FUSED_CALL(binding)  \
  (binding)                               \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Attr<std::string_view>("instance") \
      .Attr<std::string_view>("problem")  \
      .Attr<int64_t>("slices")            \
      .Attr<::jaxconv::Axes>("lhs_axes")  \
      .Attr<::jaxconv::Axes>("rhs_axes")  \
      .Attr<::jaxconv::Axes>("out_axes")

// The same of `jaxconv_normalise_add`.
#define JAXCONV_BIND_NORMALISE_ADD_CALL(binding) \
  (binding)                                      \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Arg<::xla::ffi::AnyBuffer>()              \
      .Ret<::xla::ffi::AnyBuffer>()              \
      .Ret<::xla::ffi::AnyBuffer>()              \
      .Attr<float>("below")

// The same of `jaxconv_masked_sums`.
#define JAXCONV_BIND_MASKED_SUMS_CALL(binding) \
  (binding)                                    \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Arg<::xla::ffi::AnyBuffer>()            \
      .Ret<::xla::ffi::AnyBuffer>()            \
      .Ret<::xla::ffi::AnyBuffer>()            \
      .Attr<float>("above")                    \
      .Attr<float>("below")

#define JAXCONV_BIND_POOL_ATTRIBUTES(binding)                                                      \
  (binding).Attr<::jaxconv::Axes>("sizes").Attr<::jaxconv::Axes>("strides").Attr<::jaxconv::Axes>( \
      "padding")

// The same of `jaxconv_max_pool`.
#define JAXCONV_BIND_MAX_POOL_CALL(binding)                      \
  JAXCONV_BIND_POOL_ATTRIBUTES((binding)                         \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Ret<::xla::ffi::AnyBuffer>() \
                                   .Ret<::xla::ffi::AnyBuffer>() \
                                   .Ret<::xla::ffi::AnyBuffer>())

// The same of `jaxconv_max_pool_gradient`.
#define JAXCONV_BIND_MAX_POOL_GRADIENT_CALL(binding)             \
  JAXCONV_BIND_POOL_ATTRIBUTES((binding)                         \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Arg<::xla::ffi::AnyBuffer>() \
                                   .Ret<::xla::ffi::AnyBuffer>())

// The same of `jaxconv_int8`.
#define JAXCONV_BIND_INT8_CALL(binding)   \
  (binding)                               \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Arg<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Ret<::xla::ffi::AnyBuffer>()       \
      .Attr<std::string_view>("instance") \
      .Attr<std::string_view>("problem")  \
      .Attr<int64_t>("slices")

#endif  // JAXCONV_FFI_CALL_H_
