// A cache of plans: a handler looks up its plan, sets pointers and launches.
#ifndef JAXCONV_CUDA_PLAN_CACHE_H_
#define JAXCONV_CUDA_PLAN_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/common/kernel.h"

namespace jaxconv {

// The request of a custom call; the strings are its attributes.
struct PlanKey {
  std::string_view problem;   // ConvProblem::ToString
  std::string_view instance;  // KernelDesc::name
  int64_t slices = 1;
  int device = 0;  // CUDA ordinal

  bool operator==(const PlanKey& other) const {
    return slices == other.slices && device == other.device && problem == other.problem &&
           instance == other.instance;
  }
};

struct PlannedCall {
  ConvProblem problem;
  const KernelDesc* kernel = nullptr;  // the requested instance
  Plan plan;
};

// A bounded map that evicts the least recently used plan. Thread-safe; a plan in use outlives its
// eviction.
class PlanCache {
 public:
  using GpuOfDevice = std::function<Status(int device, Gpu*)>;

  // `gpu_of` is called once for each plan made.
  PlanCache(size_t capacity, GpuOfDevice gpu_of);

  // Finds or makes the plan. InvalidArgument: the problem does not parse, or the instance does not
  // exist. A kernel's refusal is passed on. Failures are not cached.
  Status Find(const PlanKey& key, std::shared_ptr<const PlannedCall>* call);

  size_t size() const;

 private:
  struct Entry {
    std::string problem, instance;
    int64_t slices;
    int device;
    std::shared_ptr<const PlannedCall> call;
    PlanKey key() const { return {problem, instance, slices, device}; }
  };
  struct Hash {
    size_t operator()(const PlanKey& key) const;
  };

  const size_t capacity_;
  const GpuOfDevice gpu_of_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first; the keys of by_key_ point into them
  std::unordered_map<PlanKey, std::list<Entry>::iterator, Hash> by_key_;
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_PLAN_CACHE_H_
