// XLA:GPU handlers over the CUDA kernels. A handler looks its plan up and launches: it allocates
// nothing that it has seen before, waits for nothing and tunes nothing, so every one may be
// recorded into a command buffer.
#include <memory>

#include "cuda/common/query_gpu.h"
#include "cuda/launch_table.h"
#include "cuda/normalisation/masked_sums.h"
#include "cuda/normalisation/moments.h"
#include "cuda/normalisation/normalise_add.h"
#include "cuda/passes.h"
#include "cuda/plan_cache.h"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "cuda/pooling/plan.h"
#include "cuda/registry.h"
#include "cuda/select.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

// Several large networks' convolutions, of which each plan takes one to two KB.
constexpr size_t kPlans = 4096;

PlanCache& Plans() {
  static PlanCache& plans = *new PlanCache(kPlans, GpuOfDevice);
  return plans;
}

struct CudaContext {
  void* stream;
  int32_t device;
};

const float* Floats(const Array& array) { return array.data<const float>(); }

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

// FusedArrays and Int8Arrays.
template <class ArraysWithEpilogue>
Status Fused(const CudaContext& context, const ArraysWithEpilogue& arrays,
             const Attributes& attributes) {
  auto bind = [&](const ConvProblem& problem, Operands* operands) {
    if constexpr (std::is_same_v<ArraysWithEpilogue, Int8Arrays>) {
      JAXCONV_RETURN_IF_ERROR(CheckInt8(arrays, problem));
      operands->offset = arrays.offset.template data<const int32_t>();
      operands->residual_scale = Floats(arrays.residual_scale);
    } else {
      JAXCONV_RETURN_IF_ERROR(CheckFused(arrays, attributes, problem));
      operands->pre = arrays.pre.data();
      operands->statistics = arrays.statistics.template data<float>();
    }
    operands->lhs = arrays.x.data(), operands->rhs = arrays.w.data();
    operands->scale = Floats(arrays.scale), operands->bias = Floats(arrays.bias);
    operands->residual = arrays.residual.data(), operands->out = arrays.y.data();
    return Status();
  };
  return Run(context, attributes, arrays.workspace, bind);
}

// A vector of all segments, or one for each.
ChannelNumbers Numbers(const Array& vector) {
  const ffi::AnyBuffer::Dimensions shape = vector.buffer().dimensions();
  return {Floats(vector), shape.size() == 2 ? shape[1] : 0};
}

Status RunNormaliseAdd(const CudaContext& context, const NormaliseAddArrays& arrays,
                       const Attributes& attributes) {
  RowsOfChannels rows;
  Gpu gpu;
  float below;
  JAXCONV_RETURN_IF_ERROR(CheckNormaliseAdd(arrays, &rows));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("below", &below));
  JAXCONV_RETURN_IF_ERROR(GpuOfDevice(context.device, &gpu));
  return LaunchNormaliseAdd(rows.dtype,
                            {rows.rows,
                             rows.channels,
                             2 * gpu.sm_count,  // the kernel's launch bounds
                             {arrays.y.data(), arrays.y2.data()},
                             {Floats(arrays.mean), Floats(arrays.mean2)},
                             {Floats(arrays.scale), Floats(arrays.scale2)},
                             {Floats(arrays.offset), Floats(arrays.offset2)},
                             arrays.shortcut.data(),
                             below,
                             arrays.result.data(),
                             arrays.bits.data<uint8_t>()},
                            context.stream);
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
  JAXCONV_RETURN_IF_ERROR(ParseDerivative(activation, &sums.derivative));
  sums.segments = rows.segments, sums.rows = rows.rows;
  sums.channels = rows.channels, sums.parts = rows.parts;
  sums.gradient = arrays.gradient.data(), sums.gradient2 = arrays.gradient2.data();
  sums.result = arrays.result.data(), sums.bits = arrays.bits.data<const uint8_t>();
  sums.arrays[0] = arrays.y.data(), sums.arrays[1] = arrays.y2.data();
  sums.means[0] = Numbers(arrays.mean), sums.means[1] = Numbers(arrays.mean2);
  sums.scale = Numbers(arrays.scale), sums.offset = Numbers(arrays.offset);
  sums.masked = arrays.masked.data(), sums.sums = arrays.sums.data<float>();
  return LaunchMaskedSums(rows.dtype, sums, context.stream);
}

Status RunMoments(const CudaContext& context, const MomentsArrays& arrays,
                  const Attributes& attributes) {
  RowsOfChannels rows;
  JAXCONV_RETURN_IF_ERROR(CheckMoments(arrays, attributes, &rows));
  return LaunchMoments(rows.dtype,
                       {rows.segments, rows.rows, rows.channels, rows.parts, arrays.y.data(),
                        arrays.moments.data<float>()},
                       context.stream);
}

Status RunMaxPool(const CudaContext& context, const MaxPoolArrays& arrays,
                  const Attributes& attributes) {
  DType dtype;
  Gpu gpu;
  PoolWindows windows;
  JAXCONV_RETURN_IF_ERROR(CheckMaxPool(arrays, attributes, &dtype, &windows));
  JAXCONV_RETURN_IF_ERROR(GpuOfDevice(context.device, &gpu));
  return LaunchMaxPool(dtype,
                       {windows, arrays.x.data(), Floats(arrays.mean), Floats(arrays.scale),
                        Floats(arrays.offset), arrays.maxima.data(), arrays.places.data<uint8_t>(),
                        arrays.operands.data(), pooling::WalkOf(windows, gpu.sm_count)},
                       gpu.compute_capability() == 90, context.stream);
}

Status RunMaxPoolGradient(const CudaContext& context, const MaxPoolGradientArrays& arrays,
                          const Attributes& attributes) {
  DType dtype;
  PoolWindows windows;
  JAXCONV_RETURN_IF_ERROR(CheckMaxPoolGradient(arrays, attributes, &dtype, &windows));
  return LaunchMaxPoolGradient(
      dtype,
      {windows, arrays.dy.data(), arrays.dy2.data(), arrays.places.data<const uint8_t>(),
       arrays.y.data(), Floats(arrays.scale), Floats(arrays.y_scale), Floats(arrays.offset),
       arrays.dx.data()},
      context.stream);
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

template <auto kRun>
void* const kHandler = reinterpret_cast<void*>(Handler<Cuda, kRun>::Call);

std::vector<std::pair<std::string, void*>> Handlers() {
  return {{"jaxconv_fprop", kHandler<Conv<Op::kFprop>>},
          {"jaxconv_dgrad", kHandler<Conv<Op::kDgrad>>},
          {"jaxconv_wgrad", kHandler<Conv<Op::kWgrad>>},
          {"jaxconv_fused", kHandler<Fused<FusedArrays>>},
          {"jaxconv_int8", kHandler<Fused<Int8Arrays>>},
          {"jaxconv_masked_sums", kHandler<RunMaskedSums>},
          {"jaxconv_moments", kHandler<RunMoments>},
          {"jaxconv_normalise_add", kHandler<RunNormaliseAdd>},
          {"jaxconv_max_pool", kHandler<RunMaxPool>},
          {"jaxconv_max_pool_gradient", kHandler<RunMaxPoolGradient>}};
}

Status SelectKey(std::string_view key, std::string_view algorithm, std::string_view target,
                 Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(GpuOfTarget(target, &gpu));
  return Select(problem, gpu, algorithm, selection);
}

Status PlanPassKey(std::string_view key, std::string_view target, PassPlan* plan) {
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(GpuOfTarget(target, &gpu));
  return PlanPass(key, gpu, plan);
}

std::vector<std::pair<std::string, std::string>> BuildInfo() {
  Gpu gpu;
  const Status status = GpuOfDevice(0, &gpu);
  return {{"cuda", JAXCONV_CUDA_VERSION},
          {"architectures", JAXCONV_CUDA_ARCHITECTURES},
          {"device", status.ok() ? gpu.name + " (sm_" + std::to_string(gpu.compute_capability()) +
                                       (gpu.measured ? ", rates measured)" : ", rates assumed)")
                                 : "none: " + status.message()}};
}

}  // namespace

const PlatformInterface& CudaPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,    SelectKey, PlanPassKey,
      KernelNames,       PassNames,         FamilyNames, BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
