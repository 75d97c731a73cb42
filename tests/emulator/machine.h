// The state of the threads, warps and CTAs of a cluster that runs in the emulator.
#ifndef JAXCONV_TESTS_EMULATOR_MACHINE_H_
#define JAXCONV_TESTS_EMULATOR_MACHINE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "context.h"
#include "emulator.h"

namespace emulator {

struct Copy {
  uint32_t shared;
  const void* source;
  uint32_t bytes;
  bool valid;
};

struct Cta;
struct Warp;

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  void* sanitizer_stack = nullptr;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int thread = 0;
  uint3 index{};
  bool done = false;
  const uint64_t* counter = nullptr;  // the fiber waits until it differs from `seen`
  uint64_t seen = 0;
  const char* what = "";
  int64_t detail = 0, more = 0;
  uint64_t cluster_phase = 0;
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<std::function<void()>> open_stores;
  std::deque<std::vector<std::function<void()>>> store_groups;
};

struct Collective {
  uint32_t arrived = 0;
  uint64_t generation = 0;
  const char* what = nullptr;
  void* lanes[32] = {};
};
struct Warp {
  std::map<uint32_t, Collective> collectives;  // by mask
  uint64_t wgmmas_issued = 0;
  std::vector<uint64_t> wgmma_groups;  // wgmmas_issued at each commit
};
struct Warpgroup {
  std::deque<WarpgroupOperation> operations;
  uint64_t completed = 0;  // index of operations.front()
  uint64_t issued = 0;     // by all four warps
};
struct NamedBarrier {
  int arrived = 0, threads = 0;
  uint64_t generation = 0;
};
struct Mbarrier {
  int32_t expected = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
};
struct StaticVariable {
  size_t at, bytes;
};

struct Cta {
  int rank = 0;
  uint3 index{};
  unsigned char* memory = nullptr;
  size_t dynamic_bytes = 0, end = 0;
  std::map<const void*, StaticVariable> variables;
  size_t static_bytes = 0;
  NamedBarrier barriers[16];
  std::map<uint32_t, Mbarrier> mbarriers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  int live = 0;
};

}  // namespace emulator

#endif  // JAXCONV_TESTS_EMULATOR_MACHINE_H_
