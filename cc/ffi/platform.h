// What one kernel library (libjaxconv_cpu, libjaxconv_cuda) offers to the Python module over it. No
// XLA and no Python types, so that one library serves every Python version.
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

// Every call, of any platform.
JAXCONV_EXPORT std::vector<CallArrays> AllCalls();

struct PlatformInterface {
  int ffi_major;  // of the XLA headers the handlers were built against
  int ffi_minor;
  // FFI target name -> XLA_FFI_Handler.
  std::vector<std::pair<std::string, void*>> (*handlers)();
  // Parses the problem key and chooses an instance. `target`: an architecture such as "sm_90a", a
  // product such as "h200", or empty for the devices of this process. Unimplemented: the problem is
  // too large for the arithmetic of any kernel.
  Status (*select)(std::string_view key, std::string_view algorithm, std::string_view target,
                   Selection* selection);
  // The same of a pass, by its key. Null, as pass_kernels, where the platform has no kernels of any.
  Status (*plan_pass)(std::string_view key, std::string_view target, PassPlan* plan);
  std::vector<std::string> (*kernels)();
  // Of every kernel of a pass its name, family and pass.
  std::vector<std::array<std::string, 3>> (*pass_kernels)();
  std::vector<std::string> (*families)();
  std::vector<std::pair<std::string, std::string>> (*build_info)();
};

JAXCONV_EXPORT const PlatformInterface& CpuPlatform();
JAXCONV_EXPORT const PlatformInterface& CudaPlatform();

}  // namespace jaxconv

#endif  // JAXCONV_FFI_PLATFORM_H_
