// XLA:CPU handlers over the oneDNN adapter.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cpu/epilogue_terms.h"
#include "cpu/execution.h"
#include "cpu/onednn.h"
#include "cpu/select.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

// Tasks of one call, shared with others on XLA's intra-op pool. Whoever is free claims the next
// task, the calling thread included: so a call finishes even if the pool lends no thread (every
// pool thread may itself be inside a call), and no thread is ever added to XLA's own.
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

  // `body_` is only touched for claimed tasks, so it may go away once this returns.
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

ParallelFor OnPool(ffi::ThreadPool& pool) {
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

template <Op kOp>
ffi::Error Execute(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                   std::string_view instance, std::string_view key, int64_t slices, Axes lhs_axes,
                   Axes rhs_axes, Axes out_axes) {
  std::shared_ptr<const cpu::Plan> plan;
  Status status = cpu::FindPlan(key, instance, slices, &plan);
  if (status.ok()) {
    status = CheckCall(
        kOp, {lhs, rhs, *out, *workspace, instance, key, slices, lhs_axes, rhs_axes, out_axes},
        cpu::ProblemOf(*plan));
  }
  if (status.ok()) {
    status = cpu::Execute(*plan, lhs.untyped_data(), rhs.untyped_data(), out->untyped_data(),
                          workspace->untyped_data(), static_cast<int64_t>(workspace->size_bytes()),
                          OnPool(pool));
  }
  return ToError(status);
}

ffi::Error ExecuteInt8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                       ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                       ffi::AnyBuffer residual, ffi::AnyBuffer residual_scale,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                       std::string_view instance, std::string_view key, int64_t slices) {
  std::shared_ptr<const cpu::Plan> plan;
  Status status = cpu::FindPlan(key, instance, slices, &plan);
  if (status.ok()) {
    status = CheckInt8Call({x, w, scale, offset, bias, residual, residual_scale, *out, *workspace,
                            instance, key, slices},
                           cpu::ProblemOf(*plan));
  }
  if (status.ok()) {
    cpu::EpilogueTerms terms;
    terms.scale = static_cast<const float*>(scale.untyped_data());
    terms.offset = static_cast<const int32_t*>(offset.untyped_data());
    terms.bias = static_cast<const float*>(bias.untyped_data());
    terms.residual = residual.untyped_data();
    terms.residual_scale = static_cast<const float*>(residual_scale.untyped_data());
    status = cpu::Execute(*plan, x.untyped_data(), w.untyped_data(), terms, out->untyped_data(),
                          workspace->untyped_data(), static_cast<int64_t>(workspace->size_bytes()),
                          OnPool(pool));
  }
  return ToError(status);
}

ffi::Error ExecuteFused(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                        ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                        ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> pre,
                        ffi::Result<ffi::AnyBuffer> statistics,
                        ffi::Result<ffi::AnyBuffer> workspace, std::string_view instance,
                        std::string_view key, int64_t slices, Axes lhs_axes, Axes rhs_axes,
                        Axes out_axes) {
  std::shared_ptr<const cpu::Plan> plan;
  Status status = cpu::FindPlan(key, instance, slices, &plan);
  if (status.ok()) {
    status = CheckFusedCall({x, w, scale, bias, residual, *y, *pre, *statistics, *workspace,
                             instance, key, slices, lhs_axes, rhs_axes, out_axes},
                            cpu::ProblemOf(*plan));
  }
  if (status.ok()) {
    cpu::EpilogueTerms terms;
    terms.scale = static_cast<const float*>(scale.untyped_data());
    terms.bias = static_cast<const float*>(bias.untyped_data());
    terms.residual = residual.untyped_data();
    terms.pre = pre->untyped_data();
    terms.statistics = static_cast<float*>(statistics->untyped_data());
    status = cpu::Execute(*plan, x.untyped_data(), w.untyped_data(), terms, y->untyped_data(),
                          workspace->untyped_data(), static_cast<int64_t>(workspace->size_bytes()),
                          OnPool(pool));
  }
  return ToError(status);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCpuFprop, Execute<Op::kFprop>,
                              JAXCONV_BIND_CALL(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCpuDgrad, Execute<Op::kDgrad>,
                              JAXCONV_BIND_CALL(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCpuWgrad, Execute<Op::kWgrad>,
                              JAXCONV_BIND_CALL(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCpuFused, ExecuteFused,
                              JAXCONV_BIND_FUSED_CALL(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCpuInt8, ExecuteInt8,
                              JAXCONV_BIND_INT8_CALL(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", reinterpret_cast<void*>(JaxconvCpuFprop)},
          {"jaxconv_dgrad", reinterpret_cast<void*>(JaxconvCpuDgrad)},
          {"jaxconv_wgrad", reinterpret_cast<void*>(JaxconvCpuWgrad)},
          {"jaxconv_fused", reinterpret_cast<void*>(JaxconvCpuFused)},
          {"jaxconv_int8", reinterpret_cast<void*>(JaxconvCpuInt8)}};
}

Status SelectKey(std::string_view key, std::string_view algorithm, std::string_view /*target*/,
                 Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  return cpu::Select(problem, algorithm, cpu::Cores(), selection);  // a task for every core
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  return {{"compiler", "C++ " __VERSION__}, {"onednn", cpu::LibraryVersion()}};
}

}  // namespace

const PlatformInterface& CpuPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,  SelectKey,
      cpu::KernelNames,  cpu::FamilyNames,  BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
