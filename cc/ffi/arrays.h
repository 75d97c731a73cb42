// The names and the order of every custom call's arrays.
//
// Each struct below is one call (ffi/call.cc has its name). It reads its members, in order of
// declaration, from a call's operands and results, and lists their names for the Python side, which
// emits the call by these names (jaxconv/_src/library/custom_call.py). Names and order are an
// interface: exported programs must keep loading, so a call may only grow at its end, under a new
// name.
//
// An absent optional operand or result is an array without elements.
#ifndef JAXCONV_FFI_ARRAYS_H_
#define JAXCONV_FFI_ARRAYS_H_

#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "ffi/platform.h"
#include "xla/ffi/api/ffi.h"

namespace jaxconv {

namespace ffi = ::xla::ffi;
using Dimensions = ffi::AnyBuffer::Dimensions;

// An array of a call, with its name in messages.
class Array {
 public:
  Array(const char* name, std::optional<ffi::AnyBuffer> buffer) : name_(name), buffer_(buffer) {}

  const char* name() const { return name_; }
  Array Named(const char* name) const { return {name, buffer_}; }
  const ffi::AnyBuffer& buffer() const { return *buffer_; }
  Dimensions dimensions() const { return buffer_->dimensions(); }
  ffi::DataType type() const { return buffer_->element_type(); }
  bool present() const { return buffer_.has_value() && buffer_->element_count() > 0; }

  // Null if the array is absent.
  template <class T = void>
  T* data() const {
    return present() ? static_cast<T*>(buffer_->untyped_data()) : nullptr;
  }

 private:
  const char* name_;
  std::optional<ffi::AnyBuffer> buffer_;
};

// The base of the structs below. An object is made from a call, or to list the names.
class Arrays {
 public:
  Arrays(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : operands_(&operands), results_(&results) {}
  explicit Arrays(CallArrays* names) : names_(names) {}

  // Checks that the call has as many operands and results as the struct reads.
  Status CheckCounts() const;

 protected:
  Array Operand(const char* name);
  Array Result(const char* name);

 private:
  const ffi::RemainingArgs* operands_ = nullptr;
  const ffi::RemainingRets* results_ = nullptr;
  CallArrays* names_ = nullptr;
  size_t operands_read_ = 0, results_read_ = 0;
};

// fprop, dgrad and wgrad; the operands are the other two of x, w and y.
struct ConvArrays : Arrays {
  using Arrays::Arrays;
  Array lhs = Operand("lhs"), rhs = Operand("rhs");
  Array out = Result("out"), workspace = Result("workspace");
};

// fprop of floating-point operands with the epilogue of core/epilogue.h. `residual` and `pre` have
// the axes of y.
struct FusedArrays : Arrays {
  using Arrays::Arrays;
  Array x = Operand("x"), w = Operand("w");
  Array scale = Operand("scale"), bias = Operand("bias"), residual = Operand("residual");
  Array y = Result("y"), pre = Result("pre"), statistics = Result("statistics");
  Array workspace = Result("workspace");
};

// fprop of 8-bit operands with the epilogue of core/epilogue.h. Arrays lie in the problem's
// layouts, row-major.
struct Int8Arrays : Arrays {
  using Arrays::Arrays;
  Array x = Operand("x"), w = Operand("w");
  Array scale = Operand("scale"), offset = Operand("offset"), bias = Operand("bias");
  Array residual = Operand("residual"), residual_scale = Operand("residual_scale");
  Array y = Result("y"), workspace = Result("workspace");
};

// cuda/normalisation/normalise_add.h: arrays of one type and shape, the channels innermost, vectors of
// float32.
struct NormaliseAddArrays : Arrays {
  using Arrays::Arrays;
  Array y = Operand("y"), y2 = Operand("y2"), shortcut = Operand("shortcut");
  Array mean = Operand("mean"), mean2 = Operand("mean2");
  Array scale = Operand("scale"), scale2 = Operand("scale2");
  Array offset = Operand("offset"), offset2 = Operand("offset2");
  Array result = Result("result"), bits = Result("bits");
};

// cuda/normalisation/normalise.h: vectors are (channels,) or (segments, channels).
struct NormaliseArrays : Arrays {
  using Arrays::Arrays;
  Array y = Operand("y");
  Array mean = Operand("mean"), scale = Operand("scale"), offset = Operand("offset");
  Array z = Result("z");
};

// cuda/normalisation/masked_sums.h: arrays as above; vectors are (channels,) or (segments,
// channels).
struct MaskedSumsArrays : Arrays {
  using Arrays::Arrays;
  Array gradient = Operand("gradient"), gradient2 = Operand("gradient2");
  Array result = Operand("result"), bits = Operand("bits");
  Array y = Operand("y"), y2 = Operand("y2");
  Array mean = Operand("mean"), mean2 = Operand("mean2");
  Array scale = Operand("scale"), offset = Operand("offset");
  Array masked = Result("masked"), sums = Result("sums");
};

// cuda/normalisation/moments.h.
struct MomentsArrays : Arrays {
  using Arrays::Arrays;
  Array y = Operand("y");
  Array moments = Result("moments");
};

// cuda/normalisation/activated_sums.h: vectors as in masked_sums.
struct ActivatedSumsArrays : Arrays {
  using Arrays::Arrays;
  Array y = Operand("y");
  Array mean = Operand("mean"), scale = Operand("scale"), offset = Operand("offset");
  Array sums = Result("sums");
};

// cuda/elementwise/elementwise.h: any number of operands and results, which have no names.
class ElementwiseArrays {
 public:
  ElementwiseArrays(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : operands_(operands), results_(results) {}

  Status CheckCounts() const { return {}; }  // the attributes name every array
  int64_t operands() const { return static_cast<int64_t>(operands_.size()); }
  int64_t results() const { return static_cast<int64_t>(results_.size()); }
  Array Operand(int64_t at) const { return {"operand", *operands_.get<ffi::AnyBuffer>(at)}; }
  Array Result(int64_t at) const { return {"result", **results_.get<ffi::AnyBuffer>(at)}; }

 private:
  const ffi::RemainingArgs& operands_;
  const ffi::RemainingRets& results_;
};

// cuda/pooling/max_pool.h: x, maxima and operands of one type, the channels innermost, places of 8
// bits, vectors of float32.
struct MaxPoolArrays : Arrays {
  using Arrays::Arrays;
  Array x = Operand("x");
  Array mean = Operand("mean"), scale = Operand("scale"), offset = Operand("offset");
  Array maxima = Result("maxima"), places = Result("places"), operands = Result("operands");
};

// cuda/pooling/max_pool_gradient.h.
struct MaxPoolGradientArrays : Arrays {
  using Arrays::Arrays;
  Array dy = Operand("dy"), dy2 = Operand("dy2"), places = Operand("places"), y = Operand("y");
  Array scale = Operand("scale"), y_scale = Operand("y_scale"), offset = Operand("offset");
  Array dx = Result("dx");
};

}  // namespace jaxconv

#endif  // JAXCONV_FFI_ARRAYS_H_
