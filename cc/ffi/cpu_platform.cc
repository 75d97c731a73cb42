// XLA:CPU handlers over the oneDNN adapter.
#include <memory>
#include <string_view>
#include <type_traits>

#include "cpu/epilogue_terms.h"
#include "cpu/execution.h"
#include "cpu/select.h"
#include "cpu/task_queue.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

// Finds the plan of a call, calls `check` to compare the call with the planned problem, and
// executes.
template <class Check>
Status Run(ffi::ThreadPool& pool, const Attributes& attributes, const Array& lhs, const Array& rhs,
           const cpu::EpilogueTerms& terms, const Array& out, const Array& workspace,
           const Check& check) {
  std::string_view instance, problem;
  int64_t slices;
  std::shared_ptr<const cpu::Plan> plan;
  JAXCONV_RETURN_IF_ERROR(
      attributes.Get("instance", &instance, "problem", &problem, "slices", &slices));
  JAXCONV_RETURN_IF_ERROR(cpu::FindPlan(problem, instance, slices, &plan));
  JAXCONV_RETURN_IF_ERROR(check(cpu::ProblemOf(*plan)));
  return cpu::Execute(*plan, lhs.data(), rhs.data(), terms, out.data(), workspace.data(),
                      static_cast<int64_t>(workspace.buffer().size_bytes()),
                      cpu::ParallelForOn(pool));
}

template <Op kOp>
Status Conv(ffi::ThreadPool& pool, const ConvArrays& arrays, const Attributes& attributes) {
  return Run(
      pool, attributes, arrays.lhs, arrays.rhs, {}, arrays.out, arrays.workspace,
      [&](const ConvProblem& problem) { return CheckConv(kOp, arrays, attributes, problem); });
}

// For FusedArrays and Int8Arrays.
template <class ArraysWithEpilogue>
Status Fused(ffi::ThreadPool& pool, const ArraysWithEpilogue& arrays,
             const Attributes& attributes) {
  cpu::EpilogueTerms terms;
  terms.scale = arrays.scale.template data<const float>();
  terms.bias = arrays.bias.template data<const float>();
  terms.residual = arrays.residual.data();
  if constexpr (std::is_same_v<ArraysWithEpilogue, Int8Arrays>) {
    terms.offset = arrays.offset.template data<const int32_t>();
    terms.residual_scale = arrays.residual_scale.template data<const float>();
  } else {
    terms.pre = arrays.pre.data();
    terms.statistics = arrays.statistics.template data<float>();
  }
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
          {"jaxconv_fused", reinterpret_cast<void*>(Handler<Cpu, Fused<FusedArrays>>::Call)},
          {"jaxconv_int8", reinterpret_cast<void*>(Handler<Cpu, Fused<Int8Arrays>>::Call)}};
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  return {{"compiler", "C++ " __VERSION__}, {"onednn", cpu::LibraryVersion()}};
}

}  // namespace

const PlatformInterface& CpuPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,         cpu::SelectForKey, nullptr,
      cpu::KernelNames,  nullptr,           cpu::FamilyNames, BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
