#include "cuda/plan_cache.h"

#include <utility>

#include "cuda/common/folded_columns.h"
#include "cuda/registry.h"

namespace jaxconv {
namespace {

Status Make(const PlanKey& key, const PlanCache::GpuOfDevice& gpu_of, PlannedCall* call) {
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key.problem, &call->problem));
  call->kernel = FindKernel(key.instance);
  if (call->kernel == nullptr) {
    return Status::InvalidArgument("instance: no kernel of this build is named '" +
                                   std::string(key.instance) + "'");
  }
  if (key.slices < 1) {
    return Status::InvalidArgument("slices: expected at least 1, got " +
                                   std::to_string(key.slices));
  }
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(gpu_of(key.device, &gpu));
  const KernelDesc& kernel = *call->kernel;
  if (gpu.compute_capability() < kernel.min_cc || gpu.compute_capability() > kernel.max_cc) {
    return Status::InvalidArgument(std::string("instance: ") + kernel.name +
                                   " does not run on compute capability " +
                                   std::to_string(gpu.compute_capability()));
  }
  return MakePlan(kernel, call->problem, gpu, key.slices, &call->plan);
}

}  // namespace

size_t PlanCache::Hash::operator()(const PlanKey& key) const {
  size_t hash = std::hash<std::string_view>()(key.problem);
  for (size_t part : {std::hash<std::string_view>()(key.instance), static_cast<size_t>(key.slices),
                      static_cast<size_t>(key.device)}) {
    hash = hash * 0x9E3779B97F4A7C15ull + part;
  }
  return hash;
}

PlanCache::PlanCache(size_t capacity, GpuOfDevice gpu_of)
    : capacity_(capacity), gpu_of_(std::move(gpu_of)) {}

Status PlanCache::Find(const PlanKey& key, std::shared_ptr<const PlannedCall>* call) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      *call = found->second->call;
      return {};
    }
  }
  // Made outside the lock: if two threads make the same plan, the first one inserted is kept.
  auto made = std::make_shared<PlannedCall>();
  JAXCONV_RETURN_IF_ERROR(Make(key, gpu_of_, made.get()));
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    *call = found->second->call;
    return {};
  }
  entries_.push_front(
      {std::string(key.problem), std::string(key.instance), key.slices, key.device, made});
  by_key_.emplace(entries_.front().key(), entries_.begin());
  if (entries_.size() > capacity_) {
    by_key_.erase(entries_.back().key());
    entries_.pop_back();
  }
  *call = std::move(made);
  return {};
}

size_t PlanCache::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace jaxconv
