// Checks of a custom call, the same on every platform.
//
// Operands and result have the axis order of the caller's arrays. `*_axes[i]` is the array position
// of canonical axis i; the call's layout constraint stores the array in canonical order, and the
// filter in the problem's layout. Every array is compared with the problem in the call: a mismatch
// is an INVALID_ARGUMENT with the array, the expected and the actual value. The checks of a
// matching call allocate nothing.
#ifndef JAXCONV_FFI_CALL_H_
#define JAXCONV_FFI_CALL_H_

#include <initializer_list>
#include <string>
#include <string_view>

#include "core/conv_problem.h"
#include "core/status.h"
#include "ffi/arrays.h"
#include "ffi/handler.h"

namespace jaxconv {

using Axes = ffi::Span<const int64_t>;

Status Mismatch(const char* name, const std::string& message);

// "(2, 3)", for any container of int64_t.
template <class Values>
std::string ToText(const Values& values) {
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "(" : ", ") + std::to_string(value);
  return text.empty() ? "()" : text + ")";
}

// The expected array: one type or, if it must be absent, no elements.
struct Expected {
  ArrayType type;
  bool present;
  std::initializer_list<Array> arrays;
};

Status CheckEach(std::initializer_list<Expected> expected);

// Compare the arrays with the problem in the call, and its operation with `op`.
Status CheckConv(Op op, const ConvArrays& arrays, const Attributes& attributes,
                 const ConvProblem& problem);
Status CheckFused(const FusedArrays& arrays, const Attributes& attributes,
                  const ConvProblem& problem);
Status CheckFused(const Int8Arrays& arrays, const Attributes& attributes,
                  const ConvProblem& problem);

}  // namespace jaxconv

#endif  // JAXCONV_FFI_CALL_H_
