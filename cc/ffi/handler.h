// Dispatches a custom call to the function that computes it, on every platform.
#ifndef JAXCONV_FFI_HANDLER_H_
#define JAXCONV_FFI_HANDLER_H_

#include <string>
#include <string_view>

#include "core/status.h"
#include "ffi/arrays.h"
#include "xla/ffi/api/ffi.h"

namespace jaxconv {

// The attributes of a call, by name.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& values) : values_(values) {}

  // Get("name", &value, "another", &other) reads in this order, up to the first attribute that the
  // call lacks.
  template <class T, class... Others>
  Status Get(std::string_view name, T* value, Others... others) const {
    const ffi::ErrorOr<T> found = values_.get<T>(name);
    if (!found.has_value()) {
      return Status::InvalidArgument("attribute " + std::string(name) + ": " +
                                     found.error().message());
    }
    *value = *found;
    if constexpr (sizeof...(others) > 0) return Get(others...);
    return {};
  }
  // Keeps the value if the call lacks the attribute, as programs of earlier versions do.
  template <class T>
  Status GetIf(std::string_view name, T* value) const {
    return values_.contains(name) ? Get(name, value) : Status();
  }

 private:
  const ffi::Dictionary& values_;
};

ffi::Error ToError(const Status& status);

// A custom call and its handler, which reads the arrays and calls kRun. `Platform` provides the
// Context for kRun, and Bind(run), which makes a handler of the arguments that XLA passes on that
// platform.
template <class Platform, auto kRun>
struct Handler;

template <class Platform, class OfCall,
          Status (*kRun)(typename Platform::Context, const OfCall&, const Attributes&)>
struct Handler<Platform, kRun> {
  static ffi::Error Run(typename Platform::Context context, const ffi::RemainingArgs& operands,
                        const ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
    const OfCall arrays(operands, results);
    Status status = arrays.CheckCounts();
    if (status.ok()) status = kRun(context, arrays, Attributes(attributes));
    return ToError(status);
  }

  static XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame) {
    static auto* const handler = Platform::Bind(Run).release();
    return handler->Call(frame);
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_FFI_HANDLER_H_
