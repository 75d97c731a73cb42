// Calls of oneDNN and OpenMP, without decisions.
#include "cpu/onednn.h"

#include <omp.h>

#include <algorithm>
#include <utility>

namespace jaxconv::cpu {
namespace {

dnnl::stream& ThreadStream() {
  thread_local dnnl::stream stream(CpuEngine());
  return stream;
}

}  // namespace

const dnnl::engine& CpuEngine() {
  static const dnnl::engine* const engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

dnnl::memory::data_type ToDnnl(DType dtype) {
  using Type = dnnl::memory::data_type;
  constexpr Type kTypes[] = {Type::f32, Type::f16, Type::bf16, Type::s8, Type::s32, Type::u8};
  return kTypes[static_cast<int>(dtype)];
}

// The values of dnnl::cpu_isa are bit sets.
bool IsaHas(dnnl::cpu_isa isa) {
  auto bits = static_cast<unsigned>(isa);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & bits) == bits;
}

const char* IsaName() {
  using Isa = dnnl::cpu_isa;
  for (auto [isa, name] : {std::pair{Isa::sse41, "sse41"},
                           {Isa::avx, "avx"},
                           {Isa::avx2, "avx2"},
                           {Isa::avx2_vnni, "avx2_vnni"},
                           {Isa::avx2_vnni_2, "avx2_vnni_2"},
                           {Isa::avx512_core, "avx512_core"},
                           {Isa::avx512_core_vnni, "avx512_core_vnni"},
                           {Isa::avx512_core_bf16, "avx512_core_bf16"},
                           {Isa::avx512_core_fp16, "avx512_core_fp16"},
                           {Isa::avx512_core_amx, "avx512_core_amx"},
                           {Isa::avx512_core_amx_fp16, "avx512_core_amx_fp16"}}) {
    if (isa == dnnl::get_effective_cpu_isa()) return name;
  }
  return "unknown";
}

std::string LibraryVersion() {
  const dnnl_version_t* version = dnnl_version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch) + " (" + IsaName() + ")";
}

int64_t Cores() { return std::max(omp_get_num_procs(), 1); }

SingleThreaded::SingleThreaded() : previous_(omp_get_max_threads()) {
  if (previous_ != 1) omp_set_num_threads(1);
}

SingleThreaded::~SingleThreaded() {
  if (previous_ != 1) omp_set_num_threads(previous_);
}

dnnl::memory Memory(const dnnl::memory::desc& desc, const void* data) {
  return dnnl::memory(desc, CpuEngine(), const_cast<void*>(data));
}

void Run(const dnnl::primitive& primitive, const Arguments& arguments) {
  dnnl_exec_arg_t passed[4];
  int count = 0;
  for (const auto& [name, memory] : arguments) {
    passed[count++] = {name, memory.get()};
  }
  dnnl::error::wrap_c_api(
      dnnl_primitive_execute(primitive.get(), ThreadStream().get(), count, passed),
      "could not execute a primitive");
}

Reorder MakeReorder(const dnnl::memory::desc& from, const dnnl::memory::desc& to, bool add) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add) {
    dnnl::post_ops sum;
    sum.append_sum();
    attr.set_post_ops(sum);
  }
  dnnl::reorder::primitive_desc pd(CpuEngine(), from, CpuEngine(), to, attr);
  return {dnnl::reorder(pd), from, to, pd.scratchpad_desc()};
}

void Run(const Reorder& reorder, const void* from, void* to, void* scratch) {
  Run(reorder.primitive, {{DNNL_ARG_FROM, Memory(reorder.from, from)},
                          {DNNL_ARG_TO, Memory(reorder.to, to)},
                          {DNNL_ARG_SCRATCHPAD, Memory(reorder.scratch, scratch)}});
}

}  // namespace jaxconv::cpu
