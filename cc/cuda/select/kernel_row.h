// A kernel instance as selection and the FFI handlers see it.
#ifndef JAXCONV_CUDA_SELECT_KERNEL_ROW_H_
#define JAXCONV_CUDA_SELECT_KERNEL_ROW_H_

#include <cstdint>
#include <functional>
#include <string>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/select/device_info.h"

namespace jaxconv {

// Device pointers, in the order of the operation's arguments: (x, w), (dy, w) or (x, dy).
struct KernelArgs {
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  void* out = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  int64_t slices = 1;      // of the Selection
  void* stream = nullptr;  // a cudaStream_t
};

// Whether the workspace is there and every buffer is aligned for 16-byte loads, as XLA's are (to 64
// bytes or more).
inline Status CheckBuffers(const KernelArgs& args, int64_t workspace_bytes) {
  if (args.workspace_bytes < workspace_bytes ||
      (workspace_bytes > 0 && args.workspace == nullptr)) {
    return Status::InvalidArgument("workspace: expected " + std::to_string(workspace_bytes) +
                                   " bytes, got " + std::to_string(args.workspace_bytes));
  }
  for (const void* pointer : {args.lhs, args.rhs, const_cast<const void*>(args.out),
                              const_cast<const void*>(args.workspace)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
      return Status::InvalidArgument("buffers: expected an alignment of 16 bytes");
    }
  }
  return {};
}

struct KernelRow {
  // <op>_<family>_<operand dtype>_<tile>_<variant>: registry key, test id and HLO attribute in one.
  std::string name;
  std::string family;
  Op op = Op::kFprop;
  int min_cc = 80;    // 10 * major + minor
  int max_cc = 1000;  // for instructions of one architecture

  // Whether the kernel takes the problem; if not, the message says why.
  std::function<Status(const ConvProblem&)> can_implement;
  // The split-K slices that suit the device (1 for a kernel that does not split).
  std::function<int64_t(const ConvProblem&, const DeviceInfo&)> slices;
  // Bytes of workspace for that many slices.
  std::function<int64_t(const ConvProblem&, int64_t slices)> workspace_bytes;
  // Predicted microseconds; only the order matters.
  std::function<double(const ConvProblem&, const DeviceInfo&, int64_t slices)> cost;
  // Checks the problem and the workspace again and enqueues the work: no allocation, no
  // synchronisation, fit for stream capture.
  std::function<Status(const ConvProblem&, const KernelArgs&)> launch;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_KERNEL_ROW_H_
