// The Python module over one kernel library, `_jaxconv.cpu` or `_jaxconv.cuda`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "ffi/platform.h"

namespace nb = nanobind;

namespace {

const jaxconv::PlatformInterface& Platform() { return jaxconv::JAXCONV_PLATFORM(); }

nb::dict Registrations() {
  nb::dict handlers;
  for (auto& [target, handler] : Platform().handlers()) {
    handlers[target.c_str()] = nb::capsule(handler);
  }
  return handlers;
}

nb::dict Arrays() {
  nb::dict arrays;
  for (auto& [target, operands, results] : jaxconv::AllCalls()) {
    arrays[target.c_str()] = nb::make_tuple(operands, results);
  }
  return arrays;
}

// (instance or "", workspace bytes, slices, predicted microseconds, XLA's predicted microseconds,
// [(kernel, reason), ...])
std::tuple<std::string, int64_t, int64_t, double, double,
           std::vector<std::pair<std::string, std::string>>>
Select(std::string_view key, std::string_view algorithm, std::string_view target) {
  jaxconv::Selection selection;
  jaxconv::Status status = Platform().select(key, algorithm, target, &selection);
  if (status.code() == jaxconv::StatusCode::kUnimplemented) {
    selection = {};
    selection.refusals.push_back({"jaxconv", status.message()});
  } else if (!status.ok()) {
    throw nb::value_error(status.message().c_str());
  }
  std::vector<std::pair<std::string, std::string>> refusals;
  for (auto& refusal : selection.refusals) refusals.emplace_back(refusal.kernel, refusal.reason);
  return {selection.instance,     selection.workspace_bytes,  selection.slices,
          selection.microseconds, selection.xla_microseconds, refusals};
}

// (kernel or "", reason or "", parts of a segment's rows, rows of a part at a time, microseconds)
std::tuple<std::string, std::string, int64_t, int64_t, double> PlanPass(std::string_view key,
                                                                        std::string_view target) {
  jaxconv::PassPlan plan;
  const jaxconv::Status status = Platform().plan_pass(key, target, &plan);
  if (!status.ok()) throw nb::value_error(status.message().c_str());
  return {plan.kernel, plan.reason, plan.parts, plan.block_rows, plan.microseconds};
}

nb::dict BuildInfo() {
  nb::dict info;
  info["version"] = JAXCONV_VERSION;
  for (auto& [name, value] : Platform().build_info()) info[name.c_str()] = value;
  return info;
}

}  // namespace

NB_MODULE(JAXCONV_MODULE, m) {
  m.def(
      "ffi_version", [] { return std::pair(Platform().ffi_major, Platform().ffi_minor); },
      "XLA FFI API version (major, minor) that the handlers were built against.");
  m.def("registrations", Registrations, "FFI target name -> handler capsule.");
  m.def("arrays", Arrays,
        "Of every call, on any platform: target name -> (names of the operands, of the results).");
  m.def("select", Select, nb::arg("key"), nb::arg("algorithm"), nb::arg("target"),
        "(instance or '', workspace bytes, slices, predicted microseconds of the fastest kernel or "
        "0, "
        "of XLA's convolution or 0, [(kernel, reason), ...]) for a problem key.");
  if (Platform().plan_pass != nullptr) {
    m.def("plan_pass", PlanPass, nb::arg("key"), nb::arg("target"),
          "(kernel or '', reason or '', parts, rows of a part at a time, predicted microseconds) "
          "for the key of a pass.");
    m.def(
        "pass_kernels", [] { return Platform().pass_kernels(); },
        "Of every kernel of a pass [name, family, pass].");
  }
  m.def("kernels", [] { return Platform().kernels(); }, "Names of all instances.");
  m.def("families", [] { return Platform().families(); }, "Names of the kernel families.");
  m.def("build_info", BuildInfo, "How this library was built.");
}
