// Status: the result of an operation that may fail. The library never throws, exits or asserts on
// user input; it returns a message with the operand, the expected and the actual value.
#ifndef JAXCONV_CORE_STATUS_H_
#define JAXCONV_CORE_STATUS_H_

#include <string>
#include <utility>

namespace jaxconv {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the caller's problem or buffers are wrong
  kUnimplemented,    // legal, but this kernel does not accept it
  kInternal,         // CUDA or oneDNN reported an error
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status InvalidArgument(std::string m) {
    return {StatusCode::kInvalidArgument, std::move(m)};
  }
  static Status Unimplemented(std::string m) { return {StatusCode::kUnimplemented, std::move(m)}; }
  static Status Internal(std::string m) { return {StatusCode::kInternal, std::move(m)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace jaxconv

#define JAXCONV_RETURN_IF_ERROR(expr)                                      \
  do {                                                                     \
    if (::jaxconv::Status status_ = (expr); !status_.ok()) return status_; \
  } while (0)

#endif  // JAXCONV_CORE_STATUS_H_
