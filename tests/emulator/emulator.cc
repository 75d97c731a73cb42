#include "emulator.h"

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "context.h"
#include "machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

dim3 blockDim, gridDim;
uint3 blockIdx, threadIdx;

namespace emulator {
namespace {

// The address of the first variable in a CTA's shared memory, and the gap between variables.
constexpr size_t kFirst = 1024, kGap = 256;
constexpr size_t kMostShared = 232448;  // of a CTA, sm_90
constexpr size_t kStaticShared = 65536;
constexpr size_t kCtaBytes = kFirst + kMostShared + kGap + kStaticShared;
constexpr unsigned char kPoison = 0xff, kCanary = 0xc5;

Fiber* self = nullptr;
Context scheduler;
void* scheduler_sanitizer_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
std::vector<std::unique_ptr<Cta>> ctas;  // of the running cluster
std::vector<std::function<void()>> under_way;
int cluster_arrived = 0;
uint64_t cluster_generation = 0;
int cluster_id = 0;
void (*thread_body)(const void*) = nullptr;
const void* thread_arguments = nullptr;
std::map<void*, std::pair<void*, size_t>> allocations;  // data -> its mapped pages
uint32_t seed = [] {
  const char* const text = std::getenv("EMULATOR_SEED");
  return text == nullptr ? 0 : static_cast<uint32_t>(std::atoi(text));
}();
std::minstd_rand random_numbers(seed + 1);

uint32_t Random(uint32_t below) { return random_numbers() / 8 % below; }

void SwitchTo(Fiber* fiber) {
  self = fiber;
  threadIdx = fiber->index;
  blockIdx = fiber->cta->index;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_sanitizer_stack, fiber->stack, kStackBytes);
#endif
  SwitchContext(&scheduler, &fiber->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_sanitizer_stack, nullptr, nullptr);
#endif
}

void SwitchBack() {
  Fiber* fiber = self;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fiber->done ? nullptr : &fiber->sanitizer_stack, scheduler_stack,
                                 scheduler_stack_bytes);
#endif
  SwitchContext(&fiber->context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber->sanitizer_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

void CheckBarrier(NamedBarrier* barrier, int threads) {
  if (barrier->arrived < threads) return;
  barrier->arrived = 0;
  barrier->threads = 0;
  ++barrier->generation;
}

void CheckClusterBarrier() {
  int live = 0;
  for (const auto& cta : ctas) live += cta->live;
  if (cluster_arrived < live || live == 0) return;
  cluster_arrived = 0;
  ++cluster_generation;
}

void FiberMain() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  thread_body(thread_arguments);
  if (!self->open_stores.empty() || !self->store_groups.empty()) {
    Fail("a thread ends before its TMA stores have read shared memory");
  }
  self->done = true;
  --self->cta->live;
  NamedBarrier& all = self->cta->barriers[0];
  if (all.arrived > 0) CheckBarrier(&all, self->cta->live);
  if (cluster_arrived > 0) CheckClusterBarrier();
  SwitchBack();
  std::abort();
}

void Perform(const Copy& copy) {
  unsigned char* to = Shared(copy.shared, copy.bytes, copy.bytes);
  if (copy.valid) {
    std::memcpy(to, copy.source, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

void FillGap(Cta* cta, size_t from) {
  std::memset(cta->memory + from, kCanary, kGap);
  ASAN_POISON_MEMORY_REGION(cta->memory + from, kGap);
}
void CheckGap(const Cta& cta, size_t from, const char* what) {
  ASAN_UNPOISON_MEMORY_REGION(cta.memory + from, kGap);
  for (size_t i = 0; i < kGap; ++i) {
    if (cta.memory[from + i] != kCanary) {
      Fail("CTA %u wrote %zu bytes past the end of %s shared memory", cta.index.x, i, what);
    }
  }
}

std::unique_ptr<Cta> MakeCta(const Grid& grid, int rank, uint3 index) {
  auto cta = std::make_unique<Cta>();
  const int threads = grid.threads_x * grid.threads_y * grid.threads_z;
  cta->rank = rank;
  cta->index = index;
  cta->dynamic_bytes = grid.shared_bytes;
  static auto& memories = *new std::vector<unsigned char*>;  // by rank; never freed
  while (memories.size() <= static_cast<size_t>(rank)) {
    // aligned_alloc requires a multiple of the alignment.
    const size_t bytes = (kCtaBytes + 1023) / 1024 * 1024;
    memories.push_back(static_cast<unsigned char*>(std::aligned_alloc(1024, bytes)));
  }
  cta->memory = memories[rank];
  std::memset(cta->memory + kFirst, kPoison, grid.shared_bytes);
  FillGap(cta.get(), kFirst - kGap);
  FillGap(cta.get(), kFirst + grid.shared_bytes);
  cta->end = kFirst + grid.shared_bytes + kGap;
  cta->warps.resize((threads + 31) / 32);
  cta->warpgroups.resize((threads + 127) / 128);
  cta->live = threads;
  return cta;
}

void FreeCta(Cta* cta) {
  for (const Warpgroup& group : cta->warpgroups) {
    if (!group.operations.empty()) Fail("CTA %u ends before its wgmmas have", cta->index.x);
  }
  CheckGap(*cta, kFirst - kGap, "(before) dynamic");
  CheckGap(*cta, kFirst + cta->dynamic_bytes, "dynamic");
  for (const auto& [declaration, variable] : cta->variables) {
    CheckGap(*cta, variable.at + variable.bytes, "static");
  }
  if (cta->dynamic_bytes + cta->static_bytes > kMostShared) {
    Fail("%zu bytes of dynamic and %zu of static shared memory, at most %zu in all",
         cta->dynamic_bytes, cta->static_bytes, kMostShared);
  }
}

[[noreturn]] void Deadlock(const std::vector<Fiber*>& fibers) {
  std::fprintf(stderr, "deadlock: no thread can run\n");
  for (size_t i = 0; i < fibers.size();) {
    const Fiber& fiber = *fibers[i];
    size_t end = i + 1;
    while (end < fibers.size() && fibers[end]->cta == fiber.cta &&
           fibers[end]->done == fiber.done && fibers[end]->counter == fiber.counter) {
      ++end;
    }
    if (!fiber.done) {
      std::fprintf(stderr, "  CTA %u threads %d to %d wait in %s (%lld, %lld)\n",
                   fiber.cta->index.x, fiber.thread, fibers[end - 1]->thread, fiber.what,
                   static_cast<long long>(fiber.detail), static_cast<long long>(fiber.more));
    }
    i = end;
  }
  Fail("deadlock");
}

void RunCluster(const std::vector<Fiber*>& fibers) {
  std::vector<Fiber*> order = fibers;
  if (seed == 1) std::reverse(order.begin(), order.end());
  for (;;) {
    bool ran = false, all_done = true;
    if (seed > 1) std::shuffle(order.begin(), order.end(), random_numbers);
    for (Fiber* fiber : order) {
      if (fiber->done) continue;
      all_done = false;
      if (fiber->counter != nullptr && *fiber->counter == fiber->seen) continue;
      fiber->counter = nullptr;
      ran = true;
      SwitchTo(fiber);
      if (seed > 1 && !under_way.empty() && Random(64) == 0) {
        const size_t i = Random(static_cast<uint32_t>(under_way.size()));
        auto work = std::move(under_way[i]);
        under_way.erase(under_way.begin() + i);
        work();
      }
    }
    if (all_done) break;
    if (ran) continue;
    if (under_way.empty()) Deadlock(fibers);
    auto work = std::move(under_way.front());
    under_way.erase(under_way.begin());
    work();
  }
  if (!under_way.empty()) Fail("a CTA ends while copies to its shared memory are under way");
}

Cta& CtaOf(uint32_t address) {
  const uint32_t rank = address >> 24;
  if (rank == 0) return *self->cta;
  if (rank > ctas.size()) Fail("shared address 0x%x: no CTA %u in the cluster", address, rank - 1);
  Cta& cta = *ctas[rank - 1];
  if (cta.live == 0) Fail("shared memory of CTA %u of the cluster, which has ended", rank - 1);
  return cta;
}

Mbarrier& MbarrierAt(uint32_t address) {
  Shared(address, 8, 8);
  auto& all = CtaOf(address).mbarriers;
  const auto found = all.find(address & kOffsetMask);
  if (found == all.end()) Fail("no mbarrier was initialised at shared address 0x%x", address);
  return found->second;
}

void CheckPhase(Mbarrier* barrier) {
  if (barrier->pending > 0 || barrier->bytes != 0) return;
  barrier->pending = barrier->expected;
  ++barrier->phase;
}

Warpgroup& WarpgroupOfSelf() { return self->cta->warpgroups[self->thread / 128]; }

// Executes every operation before number `end`.
void Complete(Warpgroup* group, uint64_t end) {
  while (group->completed < end) {
    const WarpgroupOperation operation = std::move(group->operations.front());
    group->operations.pop_front();
    ++group->completed;
    operation.run(operation);
  }
}

}  // namespace

void Fail(const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "emulator: ");
  if (self != nullptr && self->cta != nullptr) {
    std::fprintf(stderr, "CTA %u thread %d: ", self->cta->index.x, self->thread);
  }
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::fflush(stderr);
  ::_exit(3);
}

void SetSeed(uint32_t value) {
  seed = value;
  random_numbers.seed(value + 1);
}
bool DoneAtOnce() { return seed == 1 || (seed > 1 && Random(2) == 0); }

void Wait(const uint64_t* counter, const char* what, int64_t detail, int64_t more) {
  self->counter = counter;
  self->seen = *counter;
  self->what = what;
  self->detail = detail;
  self->more = more;
  SwitchBack();
}
void Interrupt() {
  if (seed > 1 && Random(16) == 0) SwitchBack();
}

void OverLanes(const char* what, uint32_t mask, void* arguments, void (*body)(void** lanes)) {
  const uint32_t lane = self->thread % 32, bit = uint32_t{1} << lane;
  if ((mask & bit) == 0) Fail("%s: lane %u is not in the mask 0x%x", what, lane, mask);
  Collective& collective = self->warp->collectives[mask];
  if (collective.arrived == 0) {
    collective.what = what;
  } else if (std::strcmp(collective.what, what) != 0) {
    Fail("lanes of a warp diverge: one calls %s, another %s", what, collective.what);
  }
  collective.arrived |= bit;
  collective.lanes[lane] = arguments;
  if (collective.arrived != mask) {
    Wait(&collective.generation, what, mask, collective.arrived);
    return;
  }
  body(collective.lanes);
  collective.arrived = 0;
  ++collective.generation;
}

int Thread() { return self->thread; }
int Lane() { return self->thread % 32; }
int ClusterRank() { return self->cta->rank; }
int ClusterSize() { return static_cast<int>(ctas.size()); }
int ClusterId() { return cluster_id; }

unsigned char* Shared(uint32_t address, size_t bytes, size_t alignment) {
  if (address % alignment != 0) {
    Fail("shared address 0x%x is not a multiple of %zu", address, alignment);
  }
  Cta& cta = CtaOf(address);
  const size_t at = address & kOffsetMask;
  if (at >= kFirst && at + bytes <= kFirst + cta.dynamic_bytes) return cta.memory + at;
  for (const auto& [declaration, variable] : cta.variables) {
    if (at >= variable.at && at + bytes <= variable.at + variable.bytes) return cta.memory + at;
  }
  Fail("%zu bytes at offset %zd of dynamic shared memory, which has %zu", bytes,
       static_cast<ssize_t>(at) - static_cast<ssize_t>(kFirst), cta.dynamic_bytes);
}
uint32_t SharedAddressOf(const void* pointer) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  const Cta& cta = *self->cta;
  if (at < cta.memory || at >= cta.memory + kCtaBytes) Fail("not a pointer to shared memory");
  return static_cast<uint32_t>(at - cta.memory);
}
uint32_t MapToRank(uint32_t address, uint32_t rank) {
  if (rank >= ctas.size()) Fail("mapa: no CTA %u in the cluster", rank);
  return (address & kOffsetMask) | (rank + 1) << 24;
}
uint32_t InCluster(uint32_t address) {
  return address >> 24 != 0 ? address : MapToRank(address, self->cta->rank);
}

unsigned char* DynamicShared() { return self->cta->memory + kFirst; }
void* StaticShared(const void* declaration, size_t bytes, size_t alignment) {
  Cta& cta = *self->cta;
  const auto found = cta.variables.find(declaration);
  if (found != cta.variables.end()) return cta.memory + found->second.at;
  const size_t at = (cta.end + alignment - 1) / alignment * alignment;
  if (at + bytes + kGap > kCtaBytes) {
    Fail("more than %zu bytes of static shared memory", kStaticShared);
  }
  cta.variables[declaration] = {at, bytes};
  cta.static_bytes += bytes;
  cta.end = at + bytes + kGap;
  std::memset(cta.memory + at, kPoison, bytes);
  FillGap(&cta, at + bytes);
  return cta.memory + at;
}

void BarrierSync(int barrier, int threads) {
  if (barrier < 0 || barrier > 15) Fail("bar.sync: there is no barrier %d", barrier);
  NamedBarrier& at = self->cta->barriers[barrier];
  const uint64_t generation = at.generation;
  BarrierArrive(barrier, threads);
  while (at.generation == generation) Wait(&at.generation, "bar.sync", barrier, threads);
}
void BarrierArrive(int barrier, int threads) {
  if (barrier < 0 || barrier > 15) Fail("bar.arrive: there is no barrier %d", barrier);
  if (threads % 32 != 0) Fail("barrier %d: %d threads are no whole warps", barrier, threads);
  NamedBarrier& at = self->cta->barriers[barrier];
  if (at.arrived > 0 && at.threads != threads) {
    Fail("barrier %d: some threads expect %d, others %d", barrier, at.threads, threads);
  }
  at.threads = threads;
  ++at.arrived;
  CheckBarrier(&at, threads == 0 ? self->cta->live : threads);
}

void ClusterArrive() {
  self->cluster_phase = cluster_generation;
  ++cluster_arrived;
  CheckClusterBarrier();
}
void ClusterWait() {
  while (cluster_generation == self->cluster_phase)
    Wait(&cluster_generation, "the cluster barrier");
}

void MbarrierInit(uint32_t address, uint32_t arrivals) {
  Shared(address, 8, 8);
  Mbarrier& barrier = CtaOf(address).mbarriers[address & kOffsetMask];
  barrier = {};
  barrier.expected = barrier.pending = static_cast<int32_t>(arrivals);
}
void MbarrierArrive(uint32_t address, uint32_t arrivals, uint32_t expected_bytes) {
  Mbarrier& barrier = MbarrierAt(address);
  barrier.bytes += expected_bytes;
  barrier.pending -= static_cast<int32_t>(arrivals);
  if (barrier.pending < 0) {
    Fail("the mbarrier at 0x%x counts more than its %d arrivals", address, barrier.expected);
  }
  CheckPhase(&barrier);
}
void MbarrierComplete(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = MbarrierAt(address);
  barrier.bytes -= bytes;
  CheckPhase(&barrier);
}
bool MbarrierTest(uint32_t address, uint32_t parity) {
  return (MbarrierAt(address).phase & 1) != parity;
}
void MbarrierWait(uint32_t address, uint32_t parity) {
  Mbarrier& barrier = MbarrierAt(address);
  while (!MbarrierTest(address, parity)) {
    Wait(&barrier.phase, "the mbarrier at offset, parity",
         static_cast<int64_t>(address & kOffsetMask) - static_cast<int64_t>(kFirst), parity);
  }
}

void CopyAsync(uint32_t shared, const void* source, uint32_t bytes, bool valid) {
  Shared(shared, bytes, bytes);
  if (valid && reinterpret_cast<uintptr_t>(source) % bytes != 0) {
    Fail("cp.async: the source is not aligned to %u bytes", bytes);
  }
  const Copy copy{shared, source, bytes, valid};
  if (DoneAtOnce()) {
    Perform(copy);
  } else {
    self->open_copies.push_back(copy);
  }
}
void CopyAsyncCommit() { self->copy_groups.push_back(std::exchange(self->open_copies, {})); }
void CopyAsyncWait(uint32_t pending) {
  while (self->copy_groups.size() > pending) {
    for (const Copy& copy : self->copy_groups.front()) Perform(copy);
    self->copy_groups.pop_front();
  }
}

void Later(std::function<void()> work) {
  if (DoneAtOnce()) {
    work();
  } else {
    under_way.push_back(std::move(work));
  }
}
void BulkStore(std::function<void()> work) {
  if (DoneAtOnce()) work(), work = [] {};
  self->open_stores.push_back(std::move(work));
}
void BulkCommit() { self->store_groups.push_back(std::exchange(self->open_stores, {})); }
void BulkWait(uint32_t pending) {
  while (self->store_groups.size() > pending) {
    for (const auto& work : self->store_groups.front()) work();
    self->store_groups.pop_front();
  }
}

WarpgroupOperation& JoinWarpgroup(const WarpgroupOperation& operation, int* warp) {
  Warpgroup& group = WarpgroupOfSelf();
  *warp = self->thread / 32 % 4;
  const uint64_t at = self->warp->wgmmas_issued - group.completed;
  if (at == group.operations.size()) group.operations.push_back(operation);
  WarpgroupOperation& joined = group.operations[at];
  if (joined.run != operation.run || joined.a != operation.a || joined.b != operation.b ||
      joined.accumulate != operation.accumulate) {
    Fail("the warps of a warpgroup issue different wgmmas");
  }
  return joined;
}
void IssuedToWarpgroup() {
  Warpgroup& group = WarpgroupOfSelf();
  ++self->warp->wgmmas_issued;
  uint64_t issued = self->warp->wgmmas_issued;
  for (int i = 0; i < 4; ++i) {
    const size_t warp = self->thread / 128 * 4 + i;
    if (warp >= self->cta->warps.size()) Fail("wgmma: a warpgroup of fewer than four warps");
    issued = std::min(issued, self->cta->warps[warp].wgmmas_issued);
  }
  if (issued == group.issued) return;
  group.issued = issued;
  if (DoneAtOnce()) Complete(&group, issued);
}
void WarpgroupCommit() {
  OverLanes("wgmma.commit_group", kAllLanes, nullptr,
            [](void**) { self->warp->wgmma_groups.push_back(self->warp->wgmmas_issued); });
}
void WarpgroupWait(uint32_t pending) {
  OverLanes("wgmma.wait_group", kAllLanes, nullptr, [](void**) {});
  const auto& groups = self->warp->wgmma_groups;
  if (groups.size() <= pending) return;
  const uint64_t end = groups[groups.size() - 1 - pending];
  Warpgroup& group = WarpgroupOfSelf();
  while (group.issued < end) Wait(&group.issued, "wgmma, for other warps of the warpgroup");
  Complete(&group, end);
}

void* Allocate(size_t bytes, size_t alignment) {
  constexpr size_t kPage = 4096;
  const size_t pages = (bytes + kPage - 1) / kPage + 2;
  void* const mapped =
      mmap(nullptr, pages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) Fail("no memory for %zu bytes", bytes);
  auto* const first = static_cast<unsigned char*>(mapped);
  unsigned char* const end = first + (pages - 1) * kPage;
  mprotect(first, kPage, PROT_NONE);
  mprotect(end, kPage, PROT_NONE);
  void* const data =
      seed % 2 == 1 ? first + kPage : end - (bytes + alignment - 1) / alignment * alignment;
  std::memset(data, kPoison, bytes);
  allocations[data] = {mapped, pages * kPage};
  return data;
}
void Free(void* data) {
  if (data == nullptr) return;
  const auto found = allocations.find(data);
  if (found == allocations.end()) Fail("freed memory that was not allocated");
  munmap(found->second.first, found->second.second);
  allocations.erase(found);
}

void Run(const Grid& grid, void (*thread)(const void*), const void* arguments) {
  const size_t threads = size_t{grid.threads_x} * grid.threads_y * grid.threads_z;
  if (threads == 0 || threads > 1024) Fail("%zu threads of a CTA", threads);
  if (grid.shared_bytes > kMostShared) {
    Fail("%zu bytes of dynamic shared memory", grid.shared_bytes);
  }
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (blocks == 0 || grid.cluster == 0 || grid.x % grid.cluster != 0) {
    Fail("a grid of %u x %u x %u CTAs in clusters of %u", grid.x, grid.y, grid.z, grid.cluster);
  }
  blockDim = dim3(grid.threads_x, grid.threads_y, grid.threads_z);
  gridDim = dim3(grid.x, grid.y, grid.z);
  thread_body = thread;
  thread_arguments = arguments;
  static std::vector<unsigned char*> stacks;
  while (stacks.size() < threads * grid.cluster) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) Fail("no memory for stacks");
    mprotect(stack, 4096, PROT_NONE);
    stacks.push_back(static_cast<unsigned char*>(stack));
  }
  for (uint64_t block = 0; block < blocks; block += grid.cluster) {
    cluster_id = static_cast<int>(block / grid.cluster);
    cluster_arrived = 0;
    ctas.clear();
    std::vector<Fiber> storage(threads * grid.cluster);
    std::vector<Fiber*> fibers;
    for (unsigned rank = 0; rank < grid.cluster; ++rank) {
      const uint64_t index = block + rank;
      const uint3 at{static_cast<unsigned>(index % grid.x),
                     static_cast<unsigned>(index / grid.x % grid.y),
                     static_cast<unsigned>(index / grid.x / grid.y)};
      ctas.push_back(MakeCta(grid, static_cast<int>(rank), at));
      for (size_t i = 0; i < threads; ++i) {
        Fiber& fiber = storage[rank * threads + i];
        const auto t = static_cast<unsigned>(i);
        fiber.stack = stacks[rank * threads + i];
        fiber.cta = ctas.back().get();
        fiber.warp = &fiber.cta->warps[i / 32];
        fiber.thread = static_cast<int>(i);
        fiber.index = {t % grid.threads_x, t / grid.threads_x % grid.threads_y,
                       t / grid.threads_x / grid.threads_y};
        Prepare(&fiber.context, fiber.stack, FiberMain);
        fibers.push_back(&fiber);
      }
    }
    RunCluster(fibers);
    self = nullptr;
    for (const auto& cta : ctas) FreeCta(cta.get());
  }
  ctas.clear();
}

}  // namespace emulator
