// Runs device code on the host: the threads of a thread block cluster are fibers of one host
// thread.
//
// translate.py turns a CUDA source into C++ that calls what is declared here and in ptx.h. A fiber
// runs until it must wait: for other lanes of its warp, a barrier, or an asynchronous copy. Which
// one runs next, and when asynchronous work is done within what the instructions promise, is the
// schedule's choice:
//     seed 0   threads in order; asynchronous work as late as the kernel's waits allow
//     seed 1   threads in reverse; asynchronous work at once
//     others   random, and accesses to shared memory by PTX may be interrupted
// A race between a store and a load therefore shows as a wrong result under some seed. Shared
// memory begins as NaN bytes; what no instruction may do (bounds, alignment, unknown barriers), and
// a state in which no thread can run, end the program with a message.
#ifndef JAXCONV_TESTS_EMULATOR_EMULATOR_H_
#define JAXCONV_TESTS_EMULATOR_EMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

namespace emulator {

[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The seed is that of the environment, EMULATOR_SEED=N, unless a program sets it.
void SetSeed(uint32_t seed);

// Whether an asynchronous operation is done when it is issued.
bool DoneAtOnce();

// Suspends this fiber until *counter changes. What it waits for stands in the message of a
// deadlock.
void Wait(const uint64_t* counter, const char* what, int64_t detail = 0, int64_t more = 0);
// May let other fibers run first.
void Interrupt();

// All lanes of `mask` (a bit a lane of the warp) call it with the same `what`; the last one calls
// `body` with everyone's `arguments`, by lane.
void OverLanes(const char* what, uint32_t mask, void* arguments, void (*body)(void** lanes));
inline constexpr uint32_t kAllLanes = 0xffffffff;

// Place of the running thread.
int Thread();
int Lane();
int ClusterRank();
int ClusterSize();
int ClusterId();

// Shared memory by 32-bit address. Bits 0-23 are an offset; bits 24-31 are 0 for the thread's own
// CTA and 1 + rank for a CTA of its cluster. Fails outside of what was allocated.
inline constexpr uint32_t kOffsetMask = 0xffffff;
unsigned char* Shared(uint32_t address, size_t bytes, size_t alignment);
uint32_t SharedAddressOf(const void* pointer);
uint32_t MapToRank(uint32_t address, uint32_t rank);
// The address as other CTAs of the cluster write it: with the rank, also of the own CTA.
uint32_t InCluster(uint32_t address);

// The CTA's dynamic shared memory, and its variable of a `__shared__` declaration.
unsigned char* DynamicShared();
void* StaticShared(const void* declaration, size_t bytes, size_t alignment);

// bar.sync and bar.arrive; `threads` 0: all that have not ended.
void BarrierSync(int barrier, int threads);
void BarrierArrive(int barrier, int threads);

void ClusterArrive();
void ClusterWait();

// mbarriers, by shared address.
void MbarrierInit(uint32_t address, uint32_t arrivals);
void MbarrierArrive(uint32_t address, uint32_t arrivals, uint32_t expected_bytes);
void MbarrierComplete(uint32_t address, uint32_t bytes);
bool MbarrierTest(uint32_t address, uint32_t parity);  // whether the phase is complete
void MbarrierWait(uint32_t address, uint32_t parity);

// cp.async of the running thread: commit_group and wait_group.
void CopyAsync(uint32_t shared, const void* source, uint32_t bytes, bool valid);
void CopyAsyncCommit();
void CopyAsyncWait(uint32_t pending);

// Work that the cluster's copy units do some time: TMA loads.
void Later(std::function<void()> work);
// Bulk groups of the running thread: TMA stores.
void BulkStore(std::function<void()> work);
void BulkCommit();
void BulkWait(uint32_t pending);

// wgmma of the running thread's warpgroup. An operation is issued when all four warps have joined
// it; the wait of any warp completes its groups for the whole warpgroup, in order.
struct WarpgroupOperation {
  void (*run)(const WarpgroupOperation&) = nullptr;
  uint64_t a = 0, b = 0;  // descriptors
  bool accumulate = false;
  std::vector<void*> accumulators;  // of all threads
  uint32_t fragment[128][4] = {};   // A in registers
};
// Once a warp and operation: the warpgroup's, which is `operation` if this warp is the first, and
// this warp's number in the warpgroup. IssuedToWarpgroup follows.
WarpgroupOperation& JoinWarpgroup(const WarpgroupOperation& operation, int* warp);
void IssuedToWarpgroup();
// By every lane.
void WarpgroupCommit();
void WarpgroupWait(uint32_t pending);

// Global memory between pages that nobody may touch: it ends at one, rounded up to `alignment`, or
// under an odd seed begins at one. Its bytes are those of NaNs.
void* Allocate(size_t bytes, size_t alignment);
void Free(void* data);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
  unsigned threads_x = 1, threads_y = 1, threads_z = 1;
  size_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;
};
void Run(const Grid& grid, void (*thread)(const void*), const void* arguments);

}  // namespace emulator

#endif  // JAXCONV_TESTS_EMULATOR_EMULATOR_H_
