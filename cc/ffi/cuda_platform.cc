// XLA:GPU handlers over the CUDA kernels. A handler looks up its plan and launches. It neither
// synchronises nor tunes, and allocates only for a plan that it has not seen before, so every
// handler may be recorded into a command buffer.
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/activation_names.h"
#include "cuda/common/query_gpu.h"
#include "cuda/devices.h"
#include "cuda/elementwise/elementwise.h"
#include "cuda/launch_table.h"
#include "cuda/normalisation/activated_sums.h"
#include "cuda/normalisation/masked_sums.h"
#include "cuda/normalisation/moments.h"
#include "cuda/normalisation/normalise.h"
#include "cuda/normalisation/normalise_add.h"
#include "cuda/normalisation/rows.h"
#include "cuda/passes.h"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "cuda/pooling/plan.h"
#include "cuda/pooling/pooled.h"
#include "cuda/registry.h"
#include "ffi/call.h"
#include "ffi/platform.h"

namespace jaxconv {
namespace {

struct CudaContext {
  void* stream;
  int32_t device;
};

const float* Floats(const Array& array) { return array.data<const float>(); }

// Finds the plan of a call, calls `check` to compare the call with the planned problem, and
// launches.
template <class Check>
Status Run(const CudaContext& context, const Attributes& attributes, const Array& workspace,
           Operands* operands, const Check& check) {
  PlanKey key;
  key.device = context.device;
  std::shared_ptr<const PlannedCall> planned;
  JAXCONV_RETURN_IF_ERROR(
      attributes.Get("instance", &key.instance, "problem", &key.problem, "slices", &key.slices));
  JAXCONV_RETURN_IF_ERROR(FindPlan(key, &planned));
  JAXCONV_RETURN_IF_ERROR(check(planned->problem));
  operands->workspace = workspace.buffer().untyped_data();
  operands->workspace_bytes = static_cast<int64_t>(workspace.buffer().size_bytes());
  JAXCONV_RETURN_IF_ERROR(CheckOperands(planned->plan, *operands));
  return FindLaunch(planned->plan.kernel->name)(planned->plan, *operands, context.stream);
}

template <Op kOp>
Status Conv(const CudaContext& context, const ConvArrays& arrays, const Attributes& attributes) {
  Operands operands;
  operands.lhs = arrays.lhs.data(), operands.rhs = arrays.rhs.data();
  operands.out = arrays.out.data();
  return Run(context, attributes, arrays.workspace, &operands, [&](const ConvProblem& problem) {
    return CheckConv(kOp, arrays, attributes, problem);
  });
}

// For FusedArrays and Int8Arrays.
template <class ArraysWithEpilogue>
Status Fused(const CudaContext& context, const ArraysWithEpilogue& arrays,
             const Attributes& attributes) {
  Operands operands;
  operands.lhs = arrays.x.data(), operands.rhs = arrays.w.data();
  operands.scale = Floats(arrays.scale), operands.bias = Floats(arrays.bias);
  operands.residual = arrays.residual.data(), operands.out = arrays.y.data();
  if constexpr (std::is_same_v<ArraysWithEpilogue, Int8Arrays>) {
    operands.offset = arrays.offset.template data<const int32_t>();
    operands.residual_scale = Floats(arrays.residual_scale);
  } else {
    operands.pre = arrays.pre.data();
    operands.statistics = arrays.statistics.template data<float>();
  }
  return Run(context, attributes, arrays.workspace, &operands,
             [&](const ConvProblem& problem) { return CheckFused(arrays, attributes, problem); });
}

// The type of a floating-point array, which is checked later.
DType FloatType(const Array& array) {
  if (array.type() == ffi::DataType::F16) return DType::kF16;
  return array.type() == ffi::DataType::BF16 ? DType::kBF16 : DType::kF32;
}

bool HasFloatType(const Array& array) {
  return array.type() == ffi::DataType::F32 || array.type() == ffi::DataType::F16 ||
         array.type() == ffi::DataType::BF16;
}

// Also uses the attribute "segments", 1 if absent.
Status ReadRows(const Array& array, const Attributes& attributes, RowsOfChannels* rows) {
  int64_t segments = 1;
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("segments", &segments));
  if (!rows->Set(FloatType(array), array.dimensions(), segments)) {
    return Mismatch(array.name(), "expected elements along two to seven axes, the leading one in " +
                                      std::to_string(segments) + " equal segments, got shape " +
                                      ToText(array.dimensions()));
  }
  return CheckEach({{rows->whole, true, {array}}});
}

ChannelNumbers Numbers(const Array& vector) {
  const Dimensions shape = vector.dimensions();
  return {Floats(vector), shape.size() == 2 ? shape[1] : 0};
}

Status ReadActivation(const Attributes& attributes, Activation* activation) {
  std::string_view name;
  JAXCONV_RETURN_IF_ERROR(attributes.Get("activation", &name));
  if (ParseActivation(name, activation)) return {};
  return Mismatch("activation", "'" + std::string(name) + "' is none");
}

// Vectors that may be absent, and that may be one for each segment.
Status CheckVectors(const RowsOfChannels& rows, std::initializer_list<Array> vectors) {
  for (const Array& vector : vectors) {
    JAXCONV_RETURN_IF_ERROR(
        CheckEach({{rows.NumbersOf(vector.dimensions()), vector.present(), {vector}}}));
  }
  return {};
}

Status RunNormalise(const CudaContext& context, const NormaliseArrays& arrays,
                    const Attributes& attributes) {
  RowsOfChannels rows;
  Normalise layer = {};
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(ReadRows(arrays.y, attributes, &rows));
  JAXCONV_RETURN_IF_ERROR(CheckVectors(rows, {arrays.mean, arrays.scale, arrays.offset}));
  JAXCONV_RETURN_IF_ERROR(CheckEach({{rows.whole, true, {arrays.z}}}));
  JAXCONV_RETURN_IF_ERROR(ReadActivation(attributes, &layer.activation));
  JAXCONV_RETURN_IF_ERROR(GpuOfDevice(context.device, &gpu));
  layer.segments = rows.segments, layer.rows = rows.rows, layer.channels = rows.channels;
  layer.ctas = normalisation::kNormaliseCtas * gpu.sm_count;
  layer.y = arrays.y.data(), layer.z = arrays.z.data();
  layer.mean = Numbers(arrays.mean), layer.scale = Numbers(arrays.scale);
  layer.offset = Numbers(arrays.offset);
  return LaunchNormalise(rows.whole.dtype, layer, context.stream);
}

Status RunNormaliseAdd(const CudaContext& context, const NormaliseAddArrays& arrays,
                       const Attributes& attributes) {
  RowsOfChannels rows;
  NormaliseAdd sum = {};
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(ReadRows(arrays.y, attributes, &rows));
  const bool two = arrays.y2.present();
  JAXCONV_RETURN_IF_ERROR(
      CheckEach({{rows.whole, two, {arrays.y2}},
                 {rows.whole, !two, {arrays.shortcut}},
                 {rows.vector, true, {arrays.mean, arrays.scale, arrays.offset}},
                 {rows.vector, two, {arrays.mean2, arrays.scale2, arrays.offset2}},
                 {rows.whole, true, {arrays.result}},
                 {rows.bits, true, {arrays.bits}}}));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("below", &sum.below));
  JAXCONV_RETURN_IF_ERROR(GpuOfDevice(context.device, &gpu));
  sum.rows = rows.rows, sum.channels = rows.channels;
  sum.ctas = 2 * gpu.sm_count;  // matches the kernel's launch bounds
  sum.arrays[0] = arrays.y.data(), sum.arrays[1] = arrays.y2.data();
  sum.means[0] = Floats(arrays.mean), sum.means[1] = Floats(arrays.mean2);
  sum.scales[0] = Floats(arrays.scale), sum.scales[1] = Floats(arrays.scale2);
  sum.offsets[0] = Floats(arrays.offset), sum.offsets[1] = Floats(arrays.offset2);
  sum.shortcut = arrays.shortcut.data(), sum.result = arrays.result.data();
  sum.bits = arrays.bits.data<uint8_t>();
  return LaunchNormaliseAdd(rows.whole.dtype, sum, context.stream);
}

Status RunMaskedSums(const CudaContext& context, const MaskedSumsArrays& arrays,
                     const Attributes& attributes) {
  RowsOfChannels rows;
  MaskedSums sums = {};
  std::string_view activation = kDerivativeNames[0];
  int64_t values = 0;  // whether the sum with the activation's value is asked for
  JAXCONV_RETURN_IF_ERROR(ReadRows(arrays.gradient, attributes, &rows));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("values", &values));
  const bool one = arrays.y.present(), two = one && arrays.y2.present();
  const int64_t kinds = 1 + one + two + (values != 0);
  const bool by_result = arrays.result.present(), by_bits = !by_result && arrays.bits.present();
  const bool affine = !by_result && !by_bits && arrays.scale.present();
  JAXCONV_RETURN_IF_ERROR(CheckEach(
      {{rows.whole, arrays.gradient2.present(), {arrays.gradient2}},
       {rows.whole, by_result, {arrays.result}},
       {rows.bits, by_bits, {arrays.bits}},
       {rows.whole, one, {arrays.y}},
       {rows.whole, two, {arrays.y2}},
       {rows.NumbersOf(arrays.mean.dimensions()), one, {arrays.mean}},
       {rows.NumbersOf(arrays.mean2.dimensions()), two, {arrays.mean2}},
       {rows.NumbersOf(arrays.scale.dimensions()), affine, {arrays.scale}},
       {rows.NumbersOf(arrays.offset.dimensions()), affine, {arrays.offset}},
       {rows.whole, arrays.masked.present(), {arrays.masked}},
       {rows.PartsOf(arrays.sums.dimensions(), kinds, &sums.parts), true, {arrays.sums}}}));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("above", &sums.above, "below", &sums.below));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("activation", &activation));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("slope", &sums.slope));
  JAXCONV_RETURN_IF_ERROR(ParseDerivative(activation, &sums.derivative));
  if (values != 0) {
    sums.activation = ActivationOf(sums.derivative);
    if (sums.activation == Activation::kNone) {
      return Mismatch("values",
                      "no kernel has the activation of '" + std::string(activation) + "'");
    }
  }
  sums.segments = rows.segments, sums.rows = rows.rows, sums.channels = rows.channels;
  sums.gradient = arrays.gradient.data(), sums.gradient2 = arrays.gradient2.data();
  sums.result = arrays.result.data(), sums.bits = arrays.bits.data<const uint8_t>();
  sums.arrays[0] = arrays.y.data(), sums.arrays[1] = arrays.y2.data();
  sums.means[0] = Numbers(arrays.mean), sums.means[1] = Numbers(arrays.mean2);
  sums.scale = Numbers(arrays.scale), sums.offset = Numbers(arrays.offset);
  sums.masked = arrays.masked.data(), sums.sums = arrays.sums.data<float>();
  return LaunchMaskedSums(rows.whole.dtype, sums, context.stream);
}

Status RunMoments(const CudaContext& context, const MomentsArrays& arrays,
                  const Attributes& attributes) {
  RowsOfChannels rows;
  int64_t parts;
  JAXCONV_RETURN_IF_ERROR(ReadRows(arrays.y, attributes, &rows));
  JAXCONV_RETURN_IF_ERROR(
      CheckEach({{rows.PartsOf(arrays.moments.dimensions(), 3, &parts), true, {arrays.moments}}}));
  return LaunchMoments(rows.whole.dtype,
                       {rows.segments, rows.rows, rows.channels, parts, arrays.y.data(),
                        arrays.moments.data<float>()},
                       context.stream);
}

Status RunActivatedSums(const CudaContext& context, const ActivatedSumsArrays& arrays,
                        const Attributes& attributes) {
  RowsOfChannels rows;
  ActivatedSums sums = {};
  std::string_view derivative = kDerivativeNames[0];
  JAXCONV_RETURN_IF_ERROR(ReadRows(arrays.y, attributes, &rows));
  JAXCONV_RETURN_IF_ERROR(attributes.GetIf("derivative", &derivative));
  JAXCONV_RETURN_IF_ERROR(ParseDerivative(derivative, &sums.derivative));
  const int64_t kinds = sums.derivative == Derivative::kNone ? 1 : 3;
  JAXCONV_RETURN_IF_ERROR(CheckVectors(rows, {arrays.mean, arrays.scale, arrays.offset}));
  JAXCONV_RETURN_IF_ERROR(CheckEach(
      {{rows.PartsOf(arrays.sums.dimensions(), kinds, &sums.parts), true, {arrays.sums}}}));
  JAXCONV_RETURN_IF_ERROR(ReadActivation(attributes, &sums.activation));
  JAXCONV_RETURN_IF_ERROR(attributes.Get("slope", &sums.slope));
  sums.segments = rows.segments, sums.rows = rows.rows, sums.channels = rows.channels;
  sums.y = arrays.y.data(), sums.sums = arrays.sums.data<float>();
  sums.mean = Numbers(arrays.mean), sums.scale = Numbers(arrays.scale);
  sums.offset = Numbers(arrays.offset);
  return LaunchActivatedSums(rows.whole.dtype, sums, context.stream);
}

// Reads the windows from a pooled array, an array of windows, and the attributes: sizes, strides
// and leading padding along one to three spatial axes.
Status ReadPooled(const Array& x, const Array& y, const Attributes& attributes, Pooled* pooled) {
  const Dimensions from = x.dimensions(), to = y.dimensions();
  const size_t axes = from.size() < 2 ? 0 : from.size() - 2;
  if (axes < 1 || axes > kPoolAxes || !x.present()) {
    return Mismatch(x.name(),
                    "expected elements and one to three spatial axes, got shape " + ToText(from));
  }
  Axes sizes, strides, padding;
  JAXCONV_RETURN_IF_ERROR(
      attributes.Get("sizes", &sizes, "strides", &strides, "padding", &padding));
  for (const Axes& each : {sizes, strides, padding}) {
    if (each.size() == axes) continue;
    return Mismatch("sizes, strides, padding",
                    "expected " + std::to_string(axes) + " numbers, got " + ToText(each));
  }
  if (to.size() != from.size() || !y.present()) {
    return Mismatch(y.name(),
                    std::string("expected the axes of ") + x.name() + ", got shape " + ToText(to));
  }
  pooled->Set(FloatType(x), Extents::Of(from), Extents::Of(to), sizes, strides, padding);
  return CheckEach({{pooled->whole, true, {x}}});
}

Status RunMaxPool(const CudaContext& context, const MaxPoolArrays& arrays,
                  const Attributes& attributes) {
  Pooled pool;
  Gpu gpu;
  JAXCONV_RETURN_IF_ERROR(ReadPooled(arrays.x, arrays.maxima, attributes, &pool));
  const bool affine = arrays.mean.present(), places = arrays.places.present();
  JAXCONV_RETURN_IF_ERROR(
      CheckEach({{pool.vector, affine, {arrays.mean, arrays.scale, arrays.offset}},
                 {pool.of_windows, true, {arrays.maxima}},
                 {pool.places, places, {arrays.places}},
                 {pool.of_windows, places && arrays.operands.present(), {arrays.operands}}}));
  JAXCONV_RETURN_IF_ERROR(GpuOfDevice(context.device, &gpu));
  return LaunchMaxPool(pool.whole.dtype,
                       {pool.windows, arrays.x.data(), Floats(arrays.mean), Floats(arrays.scale),
                        Floats(arrays.offset), arrays.maxima.data(), arrays.places.data<uint8_t>(),
                        arrays.operands.data(), pooling::WalkOf(pool.windows, gpu.sm_count)},
                       gpu.compute_capability() == 90, context.stream);
}

Status RunMaxPoolGradient(const CudaContext& context, const MaxPoolGradientArrays& arrays,
                          const Attributes& attributes) {
  Pooled pool;
  JAXCONV_RETURN_IF_ERROR(ReadPooled(arrays.dx, arrays.dy, attributes, &pool));
  const bool affine = arrays.y.present();
  JAXCONV_RETURN_IF_ERROR(
      CheckEach({{pool.of_windows, true, {arrays.dy}},
                 {pool.of_windows, arrays.dy2.present(), {arrays.dy2}},
                 {pool.places, true, {arrays.places}},
                 {pool.whole, affine, {arrays.y}},
                 {pool.vector, affine, {arrays.scale, arrays.y_scale, arrays.offset}}}));
  return LaunchMaxPoolGradient(
      pool.whole.dtype,
      {pool.windows, arrays.dy.data(), arrays.dy2.data(), arrays.places.data<const uint8_t>(),
       arrays.y.data(), Floats(arrays.scale), Floats(arrays.y_scale), Floats(arrays.offset),
       arrays.dx.data()},
      context.stream);
}

// The numbers of an attribute, in order.
class Numbers64 {
 public:
  explicit Numbers64(const Axes& values) : values_(values) {}

  // The next number if it is in 0 ... below - 1, else -1 from now on.
  int64_t Next(int64_t below) {
    if (at_ >= values_.size() || values_[at_] < 0 || values_[at_] >= below) failed_ = true;
    return failed_ ? -1 : values_[at_++];
  }
  bool failed() const { return failed_; }
  bool AtEnd() const { return !failed_ && at_ == values_.size(); }

 private:
  const Axes& values_;
  size_t at_ = 0;
  bool failed_ = false;
};

// "functions": for each function its operands, its constants, their bits, its steps, and op and
// values of each. "results": for each result its function and the operands of the call.
Status ReadElementwise(const ElementwiseArrays& arrays, const Attributes& attributes,
                       Elementwise* work) {
  Axes functions, results;
  JAXCONV_RETURN_IF_ERROR(attributes.Get("functions", &functions, "results", &results));
  const auto mismatch = [](const char* name) {
    return Mismatch(name, "they describe no elementwise functions of this version of jaxconv");
  };
  Numbers64 code(functions), of(results);
  for (work->functions = 0; !code.AtEnd() && !code.failed(); ++work->functions) {
    if (work->functions == kElementwiseFunctions) return mismatch("functions");
    ElementwiseFunction& function = work->function[work->functions];
    function.operands = static_cast<uint8_t>(code.Next(kElementwiseOperands + 1));
    function.constants = static_cast<uint8_t>(code.Next(kElementwiseConstants + 1));
    if (code.failed()) break;
    for (int i = 0; i < function.constants; ++i) {
      const auto bits = static_cast<uint32_t>(code.Next(int64_t{1} << 32));
      std::memcpy(&function.constant[i], &bits, sizeof(bits));
    }
    function.steps = static_cast<uint8_t>(code.Next(kElementwiseSteps + 1));
    if (code.failed()) break;
    for (int i = 0; i < function.steps; ++i) {
      const int64_t values = function.operands + function.constants + i;
      const auto op = code.Next(static_cast<int64_t>(std::size(kElementwiseNames)));
      function.step[i] = {static_cast<ElementwiseOp>(op), static_cast<uint8_t>(code.Next(values)),
                          static_cast<uint8_t>(code.Next(values))};
    }
    if (function.operands == 0 && function.constants == 0) return mismatch("functions");
    if (function.steps == 0 && function.operands != 1) return mismatch("functions");
  }
  if (code.failed()) return mismatch("functions");
  if (arrays.results() > kElementwiseResults) return mismatch("results");
  for (work->results = 0; work->results < arrays.results(); ++work->results) {
    ElementwiseResult& result = work->of[work->results];
    const Array array = arrays.Result(work->results);
    const int64_t function = of.Next(work->functions), elements = array.buffer().element_count();
    if (of.failed() || elements >= int64_t{1} << 31 || !HasFloatType(array)) {
      return mismatch("results");
    }
    result.function = static_cast<uint8_t>(function);
    result.result = array.buffer().untyped_data(), result.type = FloatType(array);
    result.elements = static_cast<uint32_t>(elements), result.one_number = 0;
    for (int i = 0; i < work->function[function].operands; ++i) {
      const int64_t at = of.Next(arrays.operands());
      if (of.failed()) return mismatch("results");
      const Array operand = arrays.Operand(at);
      if (!HasFloatType(operand)) return mismatch("results");
      const int64_t numbers = operand.buffer().element_count();
      if (numbers != elements && numbers != 1) {
        return Mismatch("operand", "expected " + std::to_string(elements) +
                                       " numbers or one, got " + ToText(operand.dimensions()));
      }
      result.operand[i] = operand.buffer().untyped_data();
      result.operand_type[i] = FloatType(operand);
      if (numbers == 1) result.one_number |= 1 << i;
    }
  }
  return of.AtEnd() ? Status() : mismatch("results");
}

Status RunElementwise(const CudaContext& context, const ElementwiseArrays& arrays,
                      const Attributes& attributes) {
  Elementwise work;
  JAXCONV_RETURN_IF_ERROR(ReadElementwise(arrays, attributes, &work));
  return LaunchElementwise(&work, context.stream);
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
          {"jaxconv_activated_sums", kHandler<RunActivatedSums>},
          {"jaxconv_normalise", kHandler<RunNormalise>},
          {"jaxconv_normalise_add", kHandler<RunNormaliseAdd>},
          {"jaxconv_elementwise", kHandler<RunElementwise>},
          {"jaxconv_max_pool", kHandler<RunMaxPool>},
          {"jaxconv_max_pool_gradient", kHandler<RunMaxPoolGradient>}};
}

}  // namespace

const PlatformInterface& CudaPlatform() {
  static const PlatformInterface* const platform = new PlatformInterface{
      XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, Handlers,    SelectForTarget, PlanPassForTarget,
      KernelNames,       PassNames,         FamilyNames, BuildInfo,
  };
  return *platform;
}

}  // namespace jaxconv
