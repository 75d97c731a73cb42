// XLA:CPU handlers over the oneDNN adapter.
#include <algorithm>
#include <functional>
#include <memory>

#include "cpu/epilogue_terms.h"
#include "cpu/execution.h"
#include "cpu/onednn.h"
#include "cpu/select.h"
#include "cpu/task_queue.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

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

// Finds the plan of a call, lets `check` compare the call with the planned problem, and computes.
template <class Check>
Status Run(ffi::ThreadPool& pool, const Attributes& attributes, const Array& lhs, const Array& rhs,
           const cpu::EpilogueTerms& terms, const Array& out, const Array& workspace,
           const Check& check) {
  PlanAttributes named;
  std::shared_ptr<const cpu::Plan> plan;
  JAXCONV_RETURN_IF_ERROR(named.Read(attributes));
  JAXCONV_RETURN_IF_ERROR(cpu::FindPlan(named.problem, named.instance, named.slices, &plan));
  JAXCONV_RETURN_IF_ERROR(check(cpu::ProblemOf(*plan)));
  return cpu::Execute(*plan, lhs.data(), rhs.data(), terms, out.data(), workspace.data(),
                      static_cast<int64_t>(workspace.buffer().size_bytes()), OnPool(pool));
}

template <Op kOp>
Status Conv(ffi::ThreadPool& pool, const ConvArrays& arrays, const Attributes& attributes) {
  return Run(
      pool, attributes, arrays.lhs, arrays.rhs, {}, arrays.out, arrays.workspace,
      [&](const ConvProblem& problem) { return CheckConv(kOp, arrays, attributes, problem); });
}

Status Int8(ffi::ThreadPool& pool, const Int8Arrays& arrays, const Attributes& attributes) {
  cpu::EpilogueTerms terms;
  terms.scale = arrays.scale.data<const float>();
  terms.offset = arrays.offset.data<const int32_t>();
  terms.bias = arrays.bias.data<const float>();
  terms.residual = arrays.residual.data();
  terms.residual_scale = arrays.residual_scale.data<const float>();
  return Run(pool, attributes, arrays.x, arrays.w, terms, arrays.y, arrays.workspace,
             [&](const ConvProblem& problem) { return CheckInt8(arrays, problem); });
}

Status Fused(ffi::ThreadPool& pool, const FusedArrays& arrays, const Attributes& attributes) {
  cpu::EpilogueTerms terms;
  terms.scale = arrays.scale.data<const float>();
  terms.bias = arrays.bias.data<const float>();
  terms.residual = arrays.residual.data();
  terms.pre = arrays.pre.data();
  terms.statistics = arrays.statistics.data<float>();
  return Run(pool, attributes, arrays.x, arrays.w, terms, arrays.y, arrays.workspace,
             [&](const ConvProblem& problem) { return CheckFused(arrays, attributes, problem); });
}

struct Cpu {
  using Context = ffi::ThreadPool&;

  template <class Run>
  static auto Bind(Run run) {
    return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs().To(
        [run](ffi::ThreadPool pool, auto... call) { return run(pool, call...); });
  }
};

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", reinterpret_cast<void*>(Handler<Cpu, Conv<Op::kFprop>>::Call)},
          {"jaxconv_dgrad", reinterpret_cast<void*>(Handler<Cpu, Conv<Op::kDgrad>>::Call)},
          {"jaxconv_wgrad", reinterpret_cast<void*>(Handler<Cpu, Conv<Op::kWgrad>>::Call)},
          {"jaxconv_fused", reinterpret_cast<void*>(Handler<Cpu, Fused>::Call)},
          {"jaxconv_int8", reinterpret_cast<void*>(Handler<Cpu, Int8>::Call)}};
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
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,         SelectKey, nullptr,
      cpu::KernelNames,  nullptr,           cpu::FamilyNames, BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
