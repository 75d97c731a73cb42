// From a custom call to the function that computes it, the same on every platform.
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

  // Get("name", &value, "another", &other): in this order, up to the first that the call lacks.
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
  // Leaves the value where the call does not have the attribute: programs of earlier versions.
  template <class T>
  Status GetIf(std::string_view name, T* value) const {
    return values_.contains(name) ? Get(name, value) : Status();
  }

 private:
  const ffi::Dictionary& values_;
};

ffi::Error ToError(const Status& status);

// A custom call and its handler, which reads the arrays and calls kRun. `Platform` has the Context
// that kRun takes, and Bind(run), a handler of what XLA passes on that platform.
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
