// A map that keeps its most recently used entries, for plans that are expensive to make.
#ifndef JAXCONV_CPU_PLAN_CACHE_H_
#define JAXCONV_CPU_PLAN_CACHE_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxconv::cpu {

// Thread-safe. Values are shared, so an entry evicted while in use lives until its user is done.
template <typename Key, typename Value>
class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  // The entry, which becomes the most recent one, or null. `key` may have any type that compares
  // with Key, such as a tuple of string_views.
  template <typename SameAsKey>
  std::shared_ptr<const Value> Find(const SameAsKey& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return found->second->second;
  }

  // If two threads made the same plan, both get the value of the first.
  std::shared_ptr<const Value> Insert(const Key& key, std::shared_ptr<const Value> value) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = index_.find(key);
    if (found != index_.end()) return found->second->second;
    entries_.emplace_front(key, value);
    index_[key] = entries_.begin();
    Shrink();
    return value;
  }

  void SetCapacity(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
    Shrink();
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

 private:
  using Entries = std::list<std::pair<Key, std::shared_ptr<const Value>>>;

  void Shrink() {
    while (entries_.size() > capacity_) {
      index_.erase(entries_.back().first);
      entries_.pop_back();
    }
  }

  std::mutex mutex_;
  size_t capacity_;
  Entries entries_;  // most recent first
  std::map<Key, typename Entries::iterator, std::less<>> index_;
};

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_PLAN_CACHE_H_
