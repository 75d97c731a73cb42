// The interface of a kernel library (libjaxconv_cpu, libjaxconv_cuda) for its Python module. It has
// no XLA and no Python types, so that one library serves every Python version.
#ifndef JAXCONV_FFI_PLATFORM_H_
#define JAXCONV_FFI_PLATFORM_H_

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/selection.h"
#include "core/status.h"

#define JAXCONV_EXPORT __attribute__((visibility("default")))

namespace jaxconv {

// The names of a custom call's arrays, in order (ffi/arrays.h).
struct CallArrays {
  std::string target;
  std::vector<std::string> operands, results;
};

// All calls of all platforms.
JAXCONV_EXPORT std::vector<CallArrays> AllCalls();

struct PlatformInterface {
  int ffi_major;  // of the XLA headers the handlers were built against
  int ffi_minor;
  // Maps FFI target names to XLA_FFI_Handler.
  std::vector<std::pair<std::string, void*>> (*handlers)();
  // Parses a problem key and selects an instance. `target`: an architecture such as "sm_90a", a
  // product such as "h200", or empty for the devices of this process. Unimplemented: the problem is
  // too large for every kernel's arithmetic.
  Status (*select)(std::string_view key, std::string_view algorithm, std::string_view target,
                   Selection* selection);
  // The same for a pass, by its key. Null, like pass_kernels, if the platform has no passes.
  Status (*plan_pass)(std::string_view key, std::string_view target, PassPlan* plan);
  std::vector<std::string> (*kernels)();
  // The name, family and pass of every kernel of a pass.
  std::vector<std::array<std::string, 3>> (*pass_kernels)();
  std::vector<std::string> (*families)();
  std::vector<std::pair<std::string, std::string>> (*build_info)();
};

JAXCONV_EXPORT const PlatformInterface& CpuPlatform();
JAXCONV_EXPORT const PlatformInterface& CudaPlatform();

}  // namespace jaxconv

#endif  // JAXCONV_FFI_PLATFORM_H_
