// XLA:GPU handlers over the CUDA kernels. A handler looks its plan up and launches: it allocates
// nothing that it has seen before, waits for nothing and tunes nothing, so every one may be
// recorded into a command buffer.
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "cuda/batch_norm/masked_sums.h"
#include "cuda/batch_norm/normalise_add.h"
#include "cuda/common/launch_table.h"
#include "cuda/common/plan_cache.h"
#include "cuda/common/query_gpu.h"
#include "cuda/common/registry.h"
#include "cuda/common/select.h"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

// Several large networks' convolutions, of which each plan takes one to two KB.
constexpr size_t kPlans = 4096;

// The model of a device, asked of the driver once.
Status GpuOf(int device, Gpu* gpu) {
  static std::mutex mutex;
  static std::unordered_map<int, Gpu> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    JAXCONV_RETURN_IF_ERROR(QueryGpu(device, gpu));
    found = known.emplace(device, *gpu).first;
  }
  *gpu = found->second;
  return {};
}

PlanCache& Plans() {
  static PlanCache& plans = *new PlanCache(kPlans, GpuOf);
  return plans;
}

// Finds the plan of a call, lets `bind` check the call against the planned problem and set its
// operands, and launches. The workspace is the same in every call.
template <class AnyCall, class Bind>
Status Run(void* stream, int device, const AnyCall& call, const Bind& bind) {
  std::shared_ptr<const PlannedCall> planned;
  JAXCONV_RETURN_IF_ERROR(
      Plans().Find({call.problem, call.instance, call.slices, device}, &planned));
  Operands operands;
  operands.workspace = call.workspace.untyped_data();
  operands.workspace_bytes = static_cast<int64_t>(call.workspace.size_bytes());
  JAXCONV_RETURN_IF_ERROR(bind(planned->problem, &operands));
  JAXCONV_RETURN_IF_ERROR(CheckOperands(planned->plan, operands));
  return FindLaunch(planned->plan.kernel->name)(planned->plan, operands, stream);
}

Status RunPlain(Op op, void* stream, int device, const Call& call) {
  return Run(stream, device, call, [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckCall(op, call, problem));
    operands->lhs = call.lhs.untyped_data();
    operands->rhs = call.rhs.untyped_data();
    operands->out = call.out.untyped_data();
    return Status();
  });
}

template <Op kOp>
ffi::Error Execute(void* stream, int32_t device, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                   std::string_view instance, std::string_view problem, int64_t slices,
                   Axes lhs_axes, Axes rhs_axes, Axes out_axes) {
  return ToError(RunPlain(
      kOp, stream, device,
      {lhs, rhs, *out, *workspace, instance, problem, slices, lhs_axes, rhs_axes, out_axes}));
}

const void* PointerIf(bool present, const ffi::AnyBuffer& buffer) {
  return present ? buffer.untyped_data() : nullptr;
}
const float* FloatsIf(bool present, const ffi::AnyBuffer& buffer) {
  return static_cast<const float*>(PointerIf(present, buffer));
}

// The operands and terms that FusedCall and Int8Call share.
template <class CallWithEpilogue>
void SetOperandsAndTerms(const CallWithEpilogue& call, const Epilogue& terms, Operands* operands) {
  operands->lhs = call.x.untyped_data();
  operands->rhs = call.w.untyped_data();
  operands->scale = FloatsIf(terms.scale != ScaleKind::kNone, call.scale);
  operands->bias = FloatsIf(terms.bias, call.bias);
  operands->residual = PointerIf(terms.residual, call.residual);
}

Status RunFused(void* stream, int device, const FusedCall& call) {
  return Run(stream, device, call, [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckFusedCall(call, problem));
    SetOperandsAndTerms(call, problem.epilogue, operands);
    operands->out = call.y.untyped_data();
    operands->pre = problem.epilogue.pre ? call.pre.untyped_data() : nullptr;
    operands->statistics =
        problem.epilogue.statistics ? static_cast<float*>(call.statistics.untyped_data()) : nullptr;
    return Status();
  });
}

ffi::Error ExecuteFused(void* stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer w,
                        ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer residual,
                        ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> pre,
                        ffi::Result<ffi::AnyBuffer> statistics,
                        ffi::Result<ffi::AnyBuffer> workspace, std::string_view instance,
                        std::string_view problem, int64_t slices, Axes lhs_axes, Axes rhs_axes,
                        Axes out_axes) {
  return ToError(RunFused(stream, device,
                          {x, w, scale, bias, residual, *y, *pre, *statistics, *workspace, instance,
                           problem, slices, lhs_axes, rhs_axes, out_axes}));
}

Status RunInt8(void* stream, int device, const Int8Call& call) {
  return Run(stream, device, call, [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckInt8Call(call, problem));
    const Epilogue& terms = problem.epilogue;
    SetOperandsAndTerms(call, terms, operands);
    operands->offset = static_cast<const int32_t*>(PointerIf(terms.offset, call.offset));
    operands->residual_scale = FloatsIf(terms.residual, call.residual_scale);
    operands->out = call.out.untyped_data();
    return Status();
  });
}

ffi::Error ExecuteInt8(void* stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer w,
                       ffi::AnyBuffer scale, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                       ffi::AnyBuffer residual, ffi::AnyBuffer residual_scale,
                       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                       std::string_view instance, std::string_view problem, int64_t slices) {
  return ToError(RunInt8(stream, device,
                         {x, w, scale, offset, bias, residual, residual_scale, *out, *workspace,
                          instance, problem, slices}));
}

Status RunNormaliseAdd(void* stream, int device, const NormaliseAddCall& call, float below) {
  DType dtype;
  Gpu gpu;
  NormaliseAdd sum = {};
  JAXCONV_RETURN_IF_ERROR(CheckNormaliseAddCall(call, &dtype, &sum.rows, &sum.channels));
  JAXCONV_RETURN_IF_ERROR(GpuOf(device, &gpu));
  auto pointer = [](const ffi::AnyBuffer& buffer) { return PointerIf(Present(buffer), buffer); };
  auto floats = [](const ffi::AnyBuffer& buffer) { return FloatsIf(Present(buffer), buffer); };
  sum.ctas = 2 * gpu.sm_count;  // the kernel's launch bounds
  sum.arrays[0] = pointer(call.y);
  sum.arrays[1] = pointer(call.y2);
  sum.shortcut = pointer(call.shortcut);
  sum.means[0] = floats(call.mean);
  sum.means[1] = floats(call.mean2);
  sum.scales[0] = floats(call.scale);
  sum.scales[1] = floats(call.scale2);
  sum.offsets[0] = floats(call.offset);
  sum.offsets[1] = floats(call.offset2);
  sum.below = below;
  sum.result = call.result.untyped_data();
  sum.bits = static_cast<uint8_t*>(call.bits.untyped_data());
  return LaunchNormaliseAdd(dtype, sum, stream);
}

ffi::Error ExecuteNormaliseAdd(void* stream, int32_t device, ffi::AnyBuffer y, ffi::AnyBuffer y2,
                               ffi::AnyBuffer shortcut, ffi::AnyBuffer mean, ffi::AnyBuffer mean2,
                               ffi::AnyBuffer scale, ffi::AnyBuffer scale2, ffi::AnyBuffer offset,
                               ffi::AnyBuffer offset2, ffi::Result<ffi::AnyBuffer> result,
                               ffi::Result<ffi::AnyBuffer> bits, float below) {
  return ToError(RunNormaliseAdd(
      stream, device,
      {y, y2, shortcut, mean, mean2, scale, scale2, offset, offset2, *result, *bits}, below));
}

Status RunMaskedSums(void* stream, const MaskedSumsCall& call, float above, float below) {
  DType dtype;
  MaskedSums sums = {};
  JAXCONV_RETURN_IF_ERROR(CheckMaskedSumsCall(call, &dtype, &sums.rows, &sums.channels));
  auto pointer = [](const ffi::AnyBuffer& buffer) { return PointerIf(Present(buffer), buffer); };
  auto floats = [](const ffi::AnyBuffer& buffer) { return FloatsIf(Present(buffer), buffer); };
  sums.parts = call.sums.dimensions()[0];
  sums.gradient = pointer(call.gradient);
  sums.gradient2 = pointer(call.gradient2);
  sums.result = pointer(call.result);
  sums.bits = static_cast<const uint8_t*>(pointer(call.bits));
  sums.arrays[0] = pointer(call.y);
  sums.arrays[1] = pointer(call.y2);
  sums.means[0] = floats(call.mean);
  sums.means[1] = floats(call.mean2);
  sums.scale = floats(call.scale);
  sums.offset = floats(call.offset);
  sums.above = above;
  sums.below = below;
  sums.masked = Present(call.masked) ? call.masked.untyped_data() : nullptr;
  sums.sums = static_cast<float*>(call.sums.untyped_data());
  return LaunchMaskedSums(dtype, sums, stream);
}

ffi::Error ExecuteMaskedSums(void* stream, ffi::AnyBuffer gradient, ffi::AnyBuffer gradient2,
                             ffi::AnyBuffer result, ffi::AnyBuffer bits, ffi::AnyBuffer y,
                             ffi::AnyBuffer y2, ffi::AnyBuffer mean, ffi::AnyBuffer mean2,
                             ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                             ffi::Result<ffi::AnyBuffer> masked, ffi::Result<ffi::AnyBuffer> sums,
                             float above, float below) {
  return ToError(RunMaskedSums(
      stream,
      {gradient, gradient2, result, bits, y, y2, mean, mean2, scale, offset, *masked, *sums}, above,
      below));
}

Status RunMaxPool(void* stream, int32_t device, const MaxPoolCall& call,
                  const PoolAttributes& attributes) {
  DType dtype;
  MaxPool pool = {};
  JAXCONV_RETURN_IF_ERROR(CheckMaxPoolCall(call, attributes, &dtype, &pool.windows));
  auto floats = [](const ffi::AnyBuffer& buffer) { return FloatsIf(Present(buffer), buffer); };
  pool.x = call.x.untyped_data();
  pool.mean = floats(call.mean);
  pool.scale = floats(call.scale);
  pool.offset = floats(call.offset);
  pool.maxima = call.maxima.untyped_data();
  if (Present(call.places)) pool.places = static_cast<uint8_t*>(call.places.untyped_data());
  if (Present(call.operands)) pool.operands = call.operands.untyped_data();
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(GpuOf(device, &gpu));
  return LaunchMaxPool(dtype, pool, gpu.compute_capability() == 90, stream);
}

ffi::Error ExecuteMaxPool(void* stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer mean,
                          ffi::AnyBuffer scale, ffi::AnyBuffer offset,
                          ffi::Result<ffi::AnyBuffer> maxima, ffi::Result<ffi::AnyBuffer> places,
                          ffi::Result<ffi::AnyBuffer> operands, Axes sizes, Axes strides,
                          Axes padding) {
  return ToError(RunMaxPool(stream, device, {x, mean, scale, offset, *maxima, *places, *operands},
                            {sizes, strides, padding}));
}

Status RunMaxPoolGradient(void* stream, const MaxPoolGradientCall& call,
                          const PoolAttributes& attributes) {
  DType dtype;
  MaxPoolGradient gradient = {};
  JAXCONV_RETURN_IF_ERROR(CheckMaxPoolGradientCall(call, attributes, &dtype, &gradient.windows));
  gradient.dy = call.dy.untyped_data();
  gradient.dy2 = PointerIf(Present(call.dy2), call.dy2);
  gradient.places = static_cast<const uint8_t*>(call.places.untyped_data());
  const bool affine = Present(call.y);
  gradient.y = PointerIf(affine, call.y);
  gradient.scale = FloatsIf(affine, call.scale);
  gradient.y_scale = FloatsIf(affine, call.y_scale);
  gradient.offset = FloatsIf(affine, call.offset);
  gradient.dx = call.dx.untyped_data();
  return LaunchMaxPoolGradient(dtype, gradient, stream);
}

ffi::Error ExecuteMaxPoolGradient(void* stream, ffi::AnyBuffer dy, ffi::AnyBuffer dy2,
                                  ffi::AnyBuffer places, ffi::AnyBuffer y, ffi::AnyBuffer scale,
                                  ffi::AnyBuffer y_scale, ffi::AnyBuffer offset,
                                  ffi::Result<ffi::AnyBuffer> dx, Axes sizes, Axes strides,
                                  Axes padding) {
  return ToError(RunMaxPoolGradient(stream, {dy, dy2, places, y, scale, y_scale, offset, *dx},
                                    {sizes, strides, padding}));
}

// PlatformStream decodes to any pointer type; the kernels take the stream as void*, and this file
// needs no CUDA header.
#define JAXCONV_CUDA_HANDLER(name, op)                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                         \
      name, Execute<op>,                                                                 \
      JAXCONV_BIND_CALL(                                                                 \
          ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()), \
      {ffi::Traits::kCmdBufferCompatible})

JAXCONV_CUDA_HANDLER(JaxconvCudaFprop, Op::kFprop);
JAXCONV_CUDA_HANDLER(JaxconvCudaDgrad, Op::kDgrad);
JAXCONV_CUDA_HANDLER(JaxconvCudaWgrad, Op::kWgrad);

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCudaFused, ExecuteFused,
                              JAXCONV_BIND_FUSED_CALL(ffi::Ffi::Bind()
                                                          .Ctx<ffi::PlatformStream<void*>>()
                                                          .Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCudaInt8, ExecuteInt8,
                              JAXCONV_BIND_INT8_CALL(ffi::Ffi::Bind()
                                                         .Ctx<ffi::PlatformStream<void*>>()
                                                         .Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCudaNormaliseAdd, ExecuteNormaliseAdd,
                              JAXCONV_BIND_NORMALISE_ADD_CALL(ffi::Ffi::Bind()
                                                                  .Ctx<ffi::PlatformStream<void*>>()
                                                                  .Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxconvCudaMaskedSums, ExecuteMaskedSums,
    JAXCONV_BIND_MASKED_SUMS_CALL(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxconvCudaMaxPool, ExecuteMaxPool,
                              JAXCONV_BIND_MAX_POOL_CALL(ffi::Ffi::Bind()
                                                             .Ctx<ffi::PlatformStream<void*>>()
                                                             .Ctx<ffi::DeviceOrdinal>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxconvCudaMaxPoolGradient, ExecuteMaxPoolGradient,
    JAXCONV_BIND_MAX_POOL_GRADIENT_CALL(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()),
    {ffi::Traits::kCmdBufferCompatible});

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", reinterpret_cast<void*>(JaxconvCudaFprop)},
          {"jaxconv_dgrad", reinterpret_cast<void*>(JaxconvCudaDgrad)},
          {"jaxconv_wgrad", reinterpret_cast<void*>(JaxconvCudaWgrad)},
          {"jaxconv_fused", reinterpret_cast<void*>(JaxconvCudaFused)},
          {"jaxconv_int8", reinterpret_cast<void*>(JaxconvCudaInt8)},
          {"jaxconv_masked_sums", reinterpret_cast<void*>(JaxconvCudaMaskedSums)},
          {"jaxconv_normalise_add", reinterpret_cast<void*>(JaxconvCudaNormaliseAdd)},
          {"jaxconv_max_pool", reinterpret_cast<void*>(JaxconvCudaMaxPool)},
          {"jaxconv_max_pool_gradient", reinterpret_cast<void*>(JaxconvCudaMaxPoolGradient)}};
}

// A product or an architecture ("h200", "sm_90a"); empty: this process's first device (JAX wants
// all of one kind), or, without one, the oldest that the portable kernels run on.
Status Target(std::string_view target, Gpu* gpu) {
  if (target.empty()) {
    if (!GpuOf(0, gpu).ok()) ModelOf("sm_80", gpu);
    return {};
  }
  if (ModelOf(target, gpu)) return {};
  return Status::InvalidArgument(
      "target: expected an architecture such as sm_90a or a product such as h200, got '" +
      std::string(target) + "'");
}

Status SelectKey(std::string_view key, std::string_view algorithm, std::string_view target,
                 Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(Target(target, &gpu));
  return Select(problem, gpu, algorithm, selection);
}

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const KernelDesc& kernel : Kernels()) names.push_back(kernel.name);
  return names;
}

std::vector<std::string> FamilyNames() {
  std::set<std::string> families;
  for (const KernelDesc& kernel : Kernels()) families.insert(kernel.family);
  return {families.begin(), families.end()};
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  Gpu gpu;
  const Status status = GpuOf(0, &gpu);
  return {{"cuda", JAXCONV_CUDA_VERSION},
          {"architectures", JAXCONV_CUDA_ARCHITECTURES},
          {"device", status.ok() ? gpu.name + " (sm_" + std::to_string(gpu.compute_capability()) +
                                       (gpu.measured ? ", rates measured)" : ", rates assumed)")
                                 : "none: " + status.message()}};
}

}  // namespace

const PlatformInterface& CudaPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,  SelectKey,
      KernelNames,       FamilyNames,       BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
