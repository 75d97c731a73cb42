// Runs device code on the host: the threads of a thread block cluster are fibers of one host
// thread.
//
// translate.py turns a CUDA source into C++ that calls the functions declared here and in ptx.h. A
// fiber runs until it must wait: for other lanes of its warp, a barrier, or an asynchronous copy. A
// schedule decides which fiber runs next, and when asynchronous operations complete, within the
// guarantees of the instructions:
//     seed 0   threads in order; asynchronous operations as late as the kernel's waits allow
//     seed 1   threads in reverse; asynchronous operations at once
//     others   random; PTX accesses to shared memory may be interrupted
// A race between a store and a load therefore gives a wrong result under some seed. Shared memory
// is initialised to NaN. The program ends with a message if an instruction is used wrongly (bounds,
// alignment, unknown barriers), and if no thread can run.
#ifndef JAXCONV_TESTS_EMULATOR_EMULATOR_H_
#define JAXCONV_TESTS_EMULATOR_EMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

namespace emulator {

[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The seed is EMULATOR_SEED=N of the environment, unless a program sets it.
void SetSeed(uint32_t seed);

// Whether an asynchronous operation completes when it is issued.
bool DoneAtOnce();

// Suspends this fiber until *counter changes. The other arguments describe the wait in the message
// of a deadlock.
void Wait(const uint64_t* counter, const char* what, int64_t detail = 0, int64_t more = 0);
// Lets other fibers run first, if the schedule says so.
void Interrupt();

// Called by all lanes of `mask` (a bit for each lane of the warp) with the same `what`. The last
// one calls `body` with the `arguments` of all, indexed by lane.
void OverLanes(const char* what, uint32_t mask, void* arguments, void (*body)(void** lanes));
inline constexpr uint32_t kAllLanes = 0xffffffff;

// The position of the running thread.
int Thread();
int Lane();
int ClusterRank();
int ClusterSize();
int ClusterId();

// Shared memory by 32-bit address. Bits 0-23 are an offset; bits 24-31 are 0 for the thread's own
// CTA and 1 + rank for a CTA of its cluster. Fails outside the allocated memory.
inline constexpr uint32_t kOffsetMask = 0xffffff;
unsigned char* Shared(uint32_t address, size_t bytes, size_t alignment);
uint32_t SharedAddressOf(const void* pointer);
uint32_t MapToRank(uint32_t address, uint32_t rank);
// The shared::cluster form of an address: with the rank, also for the thread's own CTA.
uint32_t InCluster(uint32_t address);

// The CTA's dynamic shared memory, and its instance of a `__shared__` variable.
unsigned char* DynamicShared();
void* StaticShared(const void* declaration, size_t bytes, size_t alignment);

// bar.sync and bar.arrive; `threads` 0: all threads that have not ended.
void BarrierSync(int barrier, int threads);
void BarrierArrive(int barrier, int threads);

void ClusterArrive();
void ClusterWait();

// mbarriers at an address in shared memory.
void MbarrierInit(uint32_t address, uint32_t arrivals);
void MbarrierArrive(uint32_t address, uint32_t arrivals, uint32_t expected_bytes);
void MbarrierComplete(uint32_t address, uint32_t bytes);
bool MbarrierTest(uint32_t address, uint32_t parity);  // whether the phase is complete
void MbarrierWait(uint32_t address, uint32_t parity);

// cp.async of the running thread: commit_group and wait_group.
void CopyAsync(uint32_t shared, const void* source, uint32_t bytes, bool valid);
void CopyAsyncCommit();
void CopyAsyncWait(uint32_t pending);

// Asynchronous work that completes at any time: TMA loads.
void Later(std::function<void()> work);
// Bulk groups of the running thread: TMA stores.
void BulkStore(std::function<void()> work);
void BulkCommit();
void BulkWait(uint32_t pending);

// wgmma of the running thread's warpgroup. An operation is issued when all four warps have joined
// it. A wait of any warp completes its groups, in order, for the whole warpgroup.
struct WarpgroupOperation {
  void (*run)(const WarpgroupOperation&) = nullptr;
  uint64_t a = 0, b = 0;  // descriptors
  bool accumulate = false;
  std::vector<void*> accumulators;  // of all threads
  uint32_t fragment[128][4] = {};   // A in registers
};
// Each warp calls this once for each operation. Returns the warpgroup's operation, which is
// `operation` if this warp is the first, and in `warp` this warp's number in the warpgroup. Call
// IssuedToWarpgroup next.
WarpgroupOperation& JoinWarpgroup(const WarpgroupOperation& operation, int* warp);
void IssuedToWarpgroup();
// Called by every lane.
void WarpgroupCommit();
void WarpgroupWait(uint32_t pending);

// Global memory between inaccessible pages. It ends at the second one, after rounding up to
// `alignment`; under an odd seed it begins after the first one. Every byte is that of a NaN.
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
