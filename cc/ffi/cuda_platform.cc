// XLA:GPU handlers over the CUDA kernels. A handler looks its plan up and launches: it allocates
// nothing that it has seen before, waits for nothing and tunes nothing, so every one may be
// recorded into a command buffer.
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "cuda/batch_norm/masked_sums.h"
#include "cuda/batch_norm/moments.h"
#include "cuda/batch_norm/normalise_add.h"
#include "cuda/common/query_gpu.h"
#include "cuda/launch_table.h"
#include "cuda/plan_cache.h"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "cuda/registry.h"
#include "cuda/select.h"
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

struct CudaContext {
  void* stream;
  int32_t device;
};

// Finds the plan of a call, lets `bind` check the call against the planned problem and set its
// operands, and launches. The workspace is the same in every call.
template <class Bind>
Status Run(const CudaContext& context, const Attributes& attributes, const Array& workspace,
           const Bind& bind) {
  PlanAttributes named;
  std::shared_ptr<const PlannedCall> planned;
  JAXCONV_RETURN_IF_ERROR(named.Read(attributes));
  JAXCONV_RETURN_IF_ERROR(
      Plans().Find({named.problem, named.instance, named.slices, context.device}, &planned));
  Operands operands;
  operands.workspace = workspace.buffer().untyped_data();
  operands.workspace_bytes = static_cast<int64_t>(workspace.buffer().size_bytes());
  JAXCONV_RETURN_IF_ERROR(bind(planned->problem, &operands));
  JAXCONV_RETURN_IF_ERROR(CheckOperands(planned->plan, operands));
  return FindLaunch(planned->plan.kernel->name)(planned->plan, operands, context.stream);
}

template <Op kOp>
Status Conv(const CudaContext& context, const ConvArrays& arrays, const Attributes& attributes) {
  auto bind = [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckConv(kOp, arrays, attributes, problem));
    operands->lhs = arrays.lhs.data();
    operands->rhs = arrays.rhs.data();
    operands->out = arrays.out.data();
    return Status();
  };
  return Run(context, attributes, arrays.workspace, bind);
}

// The operands and terms that FusedArrays and Int8Arrays share.
template <class ArraysWithEpilogue>
void SetOperandsAndTerms(const ArraysWithEpilogue& arrays, Operands* operands) {
  operands->lhs = arrays.x.data();
  operands->rhs = arrays.w.data();
  operands->scale = arrays.scale.template data<const float>();
  operands->bias = arrays.bias.template data<const float>();
  operands->residual = arrays.residual.data();
  operands->out = arrays.y.data();
}

Status Fused(const CudaContext& context, const FusedArrays& arrays, const Attributes& attributes) {
  auto bind = [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckFused(arrays, attributes, problem));
    SetOperandsAndTerms(arrays, operands);
    operands->pre = arrays.pre.data();
    operands->statistics = arrays.statistics.data<float>();
    return Status();
  };
  return Run(context, attributes, arrays.workspace, bind);
}

Status Int8(const CudaContext& context, const Int8Arrays& arrays, const Attributes& attributes) {
  auto bind = [&](const ConvProblem& problem, Operands* operands) {
    JAXCONV_RETURN_IF_ERROR(CheckInt8(arrays, problem));
    SetOperandsAndTerms(arrays, operands);
    operands->offset = arrays.offset.data<const int32_t>();
    operands->residual_scale = arrays.residual_scale.data<const float>();
    return Status();
  };
  return Run(context, attributes, arrays.workspace, bind);
}

Status RunNormaliseAdd(const CudaContext& context, const NormaliseAddArrays& arrays,
                       const Attributes& attributes) {
  RowsOfChannels rows;
  Gpu gpu;
  NormaliseAdd sum = {};
  JAXCONV_RETURN_IF_ERROR(CheckNormaliseAdd(arrays, &rows));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("below", &sum.below));
  JAXCONV_RETURN_IF_ERROR(GpuOf(context.device, &gpu));
  sum.rows = rows.rows, sum.channels = rows.channels;
  sum.ctas = 2 * gpu.sm_count;  // the kernel's launch bounds
  sum.arrays[0] = arrays.y.data();
  sum.arrays[1] = arrays.y2.data();
  sum.shortcut = arrays.shortcut.data();
  sum.means[0] = arrays.mean.data<const float>();
  sum.means[1] = arrays.mean2.data<const float>();
  sum.scales[0] = arrays.scale.data<const float>();
  sum.scales[1] = arrays.scale2.data<const float>();
  sum.offsets[0] = arrays.offset.data<const float>();
  sum.offsets[1] = arrays.offset2.data<const float>();
  sum.result = arrays.result.data();
  sum.bits = arrays.bits.data<uint8_t>();
  return LaunchNormaliseAdd(rows.dtype, sum, context.stream);
}

Status RunMaskedSums(const CudaContext& context, const MaskedSumsArrays& arrays,
                     const Attributes& attributes) {
  RowsOfChannels rows;
  MaskedSums sums = {};
  std::string_view activation = kDerivativeNames[0];
  JAXCONV_RETURN_IF_ERROR(CheckMaskedSums(arrays, attributes, &rows));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("above", &sums.above));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("below", &sums.below));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("activation", &activation));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("slope", &sums.slope));
  if (!ParseDerivative(activation, &sums.derivative)) {
    return Status::Unimplemented("activation: no kernel has the derivative of '" +
                                 std::string(activation) + "'");
  }
  const ffi::AnyBuffer::Dimensions parts = arrays.sums.buffer().dimensions();
  sums.segments = rows.segments, sums.rows = rows.rows, sums.channels = rows.channels;
  sums.parts = parts[parts.size() - 3];
  sums.gradient = arrays.gradient.data();
  sums.gradient2 = arrays.gradient2.data();
  sums.result = arrays.result.data();
  sums.bits = arrays.bits.data<const uint8_t>();
  sums.arrays[0] = arrays.y.data();
  sums.arrays[1] = arrays.y2.data();
  sums.means[0] = NumbersOf(arrays.mean);
  sums.means[1] = NumbersOf(arrays.mean2);
  sums.scale = NumbersOf(arrays.scale);
  sums.offset = NumbersOf(arrays.offset);
  sums.masked = arrays.masked.data();
  sums.sums = arrays.sums.data<float>();
  return LaunchMaskedSums(rows.dtype, sums, context.stream);
}

Status RunMoments(const CudaContext& context, const MomentsArrays& arrays,
                  const Attributes& attributes) {
  RowsOfChannels rows;
  JAXCONV_RETURN_IF_ERROR(CheckMoments(arrays, attributes, &rows));
  const ffi::AnyBuffer::Dimensions parts = arrays.moments.buffer().dimensions();
  return LaunchMoments(rows.dtype,
                       {rows.segments, rows.rows, rows.channels, parts[parts.size() - 3],
                        arrays.y.data(), arrays.moments.data<float>()},
                       context.stream);
}

Status RunMaxPool(const CudaContext& context, const MaxPoolArrays& arrays,
                  const Attributes& attributes) {
  DType dtype;
  Gpu gpu;
  MaxPool pool = {};
  JAXCONV_RETURN_IF_ERROR(CheckMaxPool(arrays, attributes, &dtype, &pool.windows));
  JAXCONV_RETURN_IF_ERROR(GpuOf(context.device, &gpu));
  pool.x = arrays.x.data();
  pool.mean = arrays.mean.data<const float>();
  pool.scale = arrays.scale.data<const float>();
  pool.offset = arrays.offset.data<const float>();
  pool.maxima = arrays.maxima.data();
  pool.places = arrays.places.data<uint8_t>();
  pool.operands = arrays.operands.data();
  return LaunchMaxPool(dtype, pool, gpu.compute_capability() == 90, context.stream);
}

Status RunMaxPoolGradient(const CudaContext& context, const MaxPoolGradientArrays& arrays,
                          const Attributes& attributes) {
  DType dtype;
  MaxPoolGradient gradient = {};
  JAXCONV_RETURN_IF_ERROR(CheckMaxPoolGradient(arrays, attributes, &dtype, &gradient.windows));
  gradient.dy = arrays.dy.data();
  gradient.dy2 = arrays.dy2.data();
  gradient.places = arrays.places.data<const uint8_t>();
  gradient.y = arrays.y.data();
  gradient.scale = arrays.scale.data<const float>();
  gradient.y_scale = arrays.y_scale.data<const float>();
  gradient.offset = arrays.offset.data<const float>();
  gradient.dx = arrays.dx.data();
  return LaunchMaxPoolGradient(dtype, gradient, context.stream);
}

struct Cuda {
  using Context = const CudaContext&;

  // PlatformStream decodes to any pointer type; the kernels take the stream as void*, and this file
  // needs no CUDA header.
  template <class Run>
  static auto Bind(Run run) {
    return ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<void*>>()
        .Ctx<ffi::DeviceOrdinal>()
        .RemainingArgs()
        .RemainingRets()
        .Attrs()
        .To([run](void* stream, int32_t device,
                  auto... call) { return run({stream, device}, call...); },
            {ffi::Traits::kCmdBufferCompatible});
  }
};

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", reinterpret_cast<void*>(Handler<Cuda, Conv<Op::kFprop>>::Call)},
          {"jaxconv_dgrad", reinterpret_cast<void*>(Handler<Cuda, Conv<Op::kDgrad>>::Call)},
          {"jaxconv_wgrad", reinterpret_cast<void*>(Handler<Cuda, Conv<Op::kWgrad>>::Call)},
          {"jaxconv_fused", reinterpret_cast<void*>(Handler<Cuda, Fused>::Call)},
          {"jaxconv_int8", reinterpret_cast<void*>(Handler<Cuda, Int8>::Call)},
          {"jaxconv_masked_sums", reinterpret_cast<void*>(Handler<Cuda, RunMaskedSums>::Call)},
          {"jaxconv_moments", reinterpret_cast<void*>(Handler<Cuda, RunMoments>::Call)},
          {"jaxconv_normalise_add", reinterpret_cast<void*>(Handler<Cuda, RunNormaliseAdd>::Call)},
          {"jaxconv_max_pool", reinterpret_cast<void*>(Handler<Cuda, RunMaxPool>::Call)},
          {"jaxconv_max_pool_gradient",
           reinterpret_cast<void*>(Handler<Cuda, RunMaxPoolGradient>::Call)}};
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
