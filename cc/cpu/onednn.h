// The CPU kernels' interface to oneDNN apart from convolutions: the engine, execution on the
// calling thread, reorders, instruction sets, and errors as a Status.
#ifndef JAXCONV_CPU_ONEDNN_H_
#define JAXCONV_CPU_ONEDNN_H_

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <utility>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

constexpr int64_t kAlignment = 64;  // a cache line, and the longest vector
inline int64_t AlignUp(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

const dnnl::engine& CpuEngine();

dnnl::memory::data_type ToDnnl(DType dtype);

// Whether oneDNN uses the instruction set, or one that contains it.
bool IsaHas(dnnl::cpu_isa isa);
const char* IsaName();

// oneDNN's version and the instruction set it uses here: "3.2.0 (avx512_core_bf16)".
std::string LibraryVersion();

// The cores on which this process may run: the number of threads in XLA's intra-op pool.
int64_t Cores();

// oneDNN reads the calling thread's OpenMP setting when it makes a primitive, and again when it
// runs one. The constructor sets one thread; the destructor restores the setting.
class SingleThreaded {
 public:
  SingleThreaded();
  ~SingleThreaded();
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int previous_;
};

// The memory object of a tensor. oneDNN's memory objects take no pointers to const, but only
// results are written.
dnnl::memory Memory(const dnnl::memory::desc& desc, const void* data);

using Arguments = std::initializer_list<std::pair<int, dnnl::memory>>;

// Runs a primitive on the calling thread, with at most 4 arguments. It avoids the argument map of
// dnnl::primitive::execute, which saves 0.2 us a call.
void Run(const dnnl::primitive& primitive, const Arguments& arguments);

// A reorder with a scratchpad from the caller. A scratchpad managed by oneDNN belongs to the thread
// that made the primitive, and concurrent executions would overwrite it.
struct Reorder {
  dnnl::reorder primitive;
  dnnl::memory::desc from, to, scratch;
};

// `add`: adds the result to the content of `to`.
Reorder MakeReorder(const dnnl::memory::desc& from, const dnnl::memory::desc& to, bool add);
void Run(const Reorder& reorder, const void* from, void* to, void* scratch);

// Runs `body`, which returns a Status and may throw; exceptions become a Status, too.
template <typename Body>
Status CatchErrors(const Body& body) {
  try {
    return body();
  } catch (const dnnl::error& error) {
    return Status::Internal(std::string("oneDNN: ") + error.what() + " (status " +
                            std::to_string(static_cast<int>(error.status)) + ")");
  } catch (const std::exception& error) {
    return Status::Internal(std::string("CPU convolution: ") + error.what());
  }
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_ONEDNN_H_
