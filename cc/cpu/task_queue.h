// The tasks of one call, executed by any free thread.
#ifndef JAXCONV_CPU_TASK_QUEUE_H_
#define JAXCONV_CPU_TASK_QUEUE_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "core/selection.h"

namespace jaxconv::cpu {

// The tasks of one call on XLA's intra-op pool. Any free thread claims the next task, the calling
// thread included. So a call finishes even if no pool thread is free (each may itself be inside a
// call), and no threads beyond XLA's are needed.
class TaskQueue {
 public:
  TaskQueue(int64_t tasks, const std::function<void(int64_t)>& body) : tasks_(tasks), body_(body) {}

  void Work() {
    for (int64_t task; (task = next_.fetch_add(1)) < tasks_;) {
      body_(task);
      if (done_.fetch_add(1) + 1 == tasks_) {
        std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_all();
      }
    }
  }

  // `body_` is only accessed for claimed tasks, so it may be destroyed after this returns.
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_.load() == tasks_; });
  }

 private:
  const int64_t tasks_;
  const std::function<void(int64_t)>& body_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// Runs the tasks on the calling thread and on free threads of a pool, such as XLA's intra-op pool.
template <class Pool>
ParallelFor ParallelForOn(Pool& pool) {
  return [&pool](int64_t tasks, const std::function<void(int64_t)>& body) {
    if (tasks <= 1) {
      for (int64_t task = 0; task < tasks; ++task) body(task);
      return;
    }
    auto queue = std::make_shared<TaskQueue>(tasks, body);
    int64_t others = std::min(tasks, pool.num_threads()) - 1;
    for (int64_t i = 0; i < others; ++i) pool.Schedule([queue] { queue->Work(); });
    queue->Work();
    queue->Wait();
  };
}

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_TASK_QUEUE_H_
