// Checks of a custom call, the same on every platform.
//
// Operands and result have the axis order of the caller's arrays; `*_axes[i]` is the array position
// of canonical axis i, and the layout constraint put on the call stores the array in canonical
// order, the filter in the problem's layout. Everything is compared with the problem that the call
// carries, or with each other where it carries none: a mismatch is an INVALID_ARGUMENT that names
// the array, what was expected and what was found. A call that matches allocates nothing here.
#ifndef JAXCONV_FFI_CALL_H_
#define JAXCONV_FFI_CALL_H_

#include <string_view>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/pooling/windows.h"
#include "ffi/arrays.h"
#include "ffi/handler.h"

namespace jaxconv {

using Axes = ffi::Span<const int64_t>;

// What a convolution's call says of its plan.
struct PlanAttributes {
  std::string_view instance;
  std::string_view problem;  // ConvProblem::ToString
  int64_t slices;

  Status Read(const Attributes& attributes);
};

// Compare the arrays with the problem that the call carries, and its operation with `op`.
Status CheckConv(Op op, const ConvArrays& arrays, const Attributes& attributes,
                 const ConvProblem& problem);
Status CheckFused(const FusedArrays& arrays, const Attributes& attributes,
                  const ConvProblem& problem);
Status CheckInt8(const Int8Arrays& arrays, const ConvProblem& problem);

// An array with its channels on the last axis, whose leading axis segments divide evenly.
struct RowsOfChannels {
  DType dtype;
  Extents shape;
  int64_t segments = 1, rows, channels, parts;  // rows and parts of a segment
};

// Compare the arrays with each other, and with the attribute "segments", 1 where there is none.
Status CheckNormaliseAdd(const NormaliseAddArrays& arrays, RowsOfChannels* rows);
Status CheckMaskedSums(const MaskedSumsArrays& arrays, const Attributes& attributes,
                       RowsOfChannels* rows);
Status CheckMoments(const MomentsArrays& arrays, const Attributes& attributes,
                    RowsOfChannels* rows);
// Compare the arrays with each other and with the attributes: sizes, strides and padding in front
// along the one to three spatial axes.
Status CheckMaxPool(const MaxPoolArrays& arrays, const Attributes& attributes, DType* dtype,
                    PoolWindows* windows);
Status CheckMaxPoolGradient(const MaxPoolGradientArrays& arrays, const Attributes& attributes,
                            DType* dtype, PoolWindows* windows);

}  // namespace jaxconv

#endif  // JAXCONV_FFI_CALL_H_
