// XLA:GPU handlers over the CUDA kernels. A handler launches and returns: it allocates nothing,
// waits for nothing and tunes nothing, so every one may be recorded into a command buffer.
#include <charconv>
#include <set>

#include "cuda/kernels/query_device.h"
#include "cuda/select/kernel_table.h"
#include "cuda/select/select.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

template <Op kOp>
ffi::Error Execute(void* stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                   std::string_view instance, std::string_view line, int64_t slices, Axes lhs_axes,
                   Axes rhs_axes, Axes out_axes) {
  Call call;
  Status status = DecodeCall(kOp, line, lhs, rhs, *out, *workspace, slices, lhs_axes, rhs_axes,
                             out_axes, &call);
  if (!status.ok()) return ToError(status);
  const KernelRow* kernel = FindKernel(instance);
  if (kernel == nullptr || kernel->op != kOp) {
    return ToError(Status::InvalidArgument("instance: no " + std::string(Name(kOp)) +
                                           " kernel of this build is named '" +
                                           std::string(instance) + "'"));
  }
  return ToError(kernel->launch(call.problem, {call.lhs, call.rhs, call.out, call.workspace,
                                               call.workspace_bytes, call.slices, stream}));
}

// PlatformStream decodes to any pointer type; the kernels take the stream as void*, and this file
// needs no CUDA header.
#define JAXCONV_CUDA_HANDLER(name, op)                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                \
      name, Execute<op>, JAXCONV_BIND_CALL(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()), \
      {ffi::Traits::kCmdBufferCompatible})

JAXCONV_CUDA_HANDLER(JaxconvCudaFprop, Op::kFprop);
JAXCONV_CUDA_HANDLER(JaxconvCudaDgrad, Op::kDgrad);
JAXCONV_CUDA_HANDLER(JaxconvCudaWgrad, Op::kWgrad);

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", reinterpret_cast<void*>(JaxconvCudaFprop)},
          {"jaxconv_dgrad", reinterpret_cast<void*>(JaxconvCudaDgrad)},
          {"jaxconv_wgrad", reinterpret_cast<void*>(JaxconvCudaWgrad)}};
}

// "sm_90a" -> a device of capability 9.0; empty -> this process's first device (JAX wants all of
// one kind), or, without one, the oldest that the portable kernels run on.
Status Target(std::string_view target, DeviceInfo* device) {
  constexpr std::string_view kPrefix = "sm_";
  if (target.empty()) {
    if (!QueryDevice(0, device).ok()) *device = PortableTarget(8, 0);
    return {};
  }
  int capability = 0;
  bool readable = target.substr(0, kPrefix.size()) == kPrefix;
  if (readable) {
    std::string_view digits = target.substr(kPrefix.size());
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), capability);
    std::string_view rest(end, digits.data() + digits.size() - end);
    readable = error == std::errc() && (rest.empty() || rest == "a") && capability >= 10;
  }
  if (!readable) {
    return Status::InvalidArgument("target: expected an architecture such as sm_90a, got '" +
                                   std::string(target) + "'");
  }
  *device = PortableTarget(capability / 10, capability % 10);
  return {};
}

Status SelectLine(std::string_view line, std::string_view algorithm, std::string_view target,
                  Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(line, &problem));
  DeviceInfo device;
  JAXCONV_RETURN_IF_ERROR(Target(target, &device));
  return Select(problem, device, algorithm, selection);
}

std::vector<std::string> Kernels() {
  std::vector<std::string> names;
  for (const KernelRow& kernel : KernelTable()) names.push_back(kernel.name);
  return names;
}

std::vector<std::string> Families() {
  std::set<std::string> families;
  for (const KernelRow& kernel : KernelTable()) families.insert(kernel.family);
  return {families.begin(), families.end()};
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  DeviceInfo device;
  Status status = QueryDevice(0, &device);
  return {{"cuda", JAXCONV_CUDA_VERSION},
          {"architectures", JAXCONV_CUDA_ARCHITECTURES},
          {"device", status.ok() ? device.name + " (sm_" + std::to_string(device.cc_major) +
                                       std::to_string(device.cc_minor) + ")"
                                 : "none: " + status.message()}};
}

}  // namespace

const PlatformInterface& CudaPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers, SelectLine, Kernels, Families, BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
