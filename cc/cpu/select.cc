// The table of the CPU kernels, the choice between them, and the cache of their plans.
#include "cpu/select.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <tuple>

#include "cpu/few_pixels.h"
#include "cpu/gemm_wgrad.h"
#include "cpu/onednn.h"
#include "cpu/plan.h"
#include "cpu/plan_cache.h"

namespace jaxconv::cpu {
namespace {

constexpr const char* kFamilies[] = {"onednn",     "gemm",        "depthwise", "few_outputs",
                                     "few_pixels", "small_groups"};  // in the order of enum class
                                                                     // Family

// In order of preference.
constexpr KernelDesc kKernels[] = {
    {"wgrad_depthwise_f32", Op::kWgrad, DType::kF32, Family::kDepthwise},
    {"wgrad_depthwise_bf16", Op::kWgrad, DType::kBF16, Family::kDepthwise},
    {"wgrad_depthwise_f16", Op::kWgrad, DType::kF16, Family::kDepthwise},
    {"wgrad_gemm_f32", Op::kWgrad, DType::kF32, Family::kGemm},
    {"wgrad_gemm_f16", Op::kWgrad, DType::kF16, Family::kGemm},
    {"fprop_few_pixels_f32", Op::kFprop, DType::kF32, Family::kFewPixels},
    {"fprop_few_outputs_f32", Op::kFprop, DType::kF32, Family::kFewOutputs},
    {"fprop_small_groups_f32", Op::kFprop, DType::kF32, Family::kSmallGroups},
    {"fprop_onednn_f32", Op::kFprop, DType::kF32, Family::kOnednn},
    {"fprop_onednn_f32_no_brgemm", Op::kFprop, DType::kF32, Family::kOnednn, false},
    {"fprop_onednn_bf16", Op::kFprop, DType::kBF16, Family::kOnednn},
    {"fprop_onednn_bf16_no_brgemm", Op::kFprop, DType::kBF16, Family::kOnednn, false},
    {"fprop_onednn_f16", Op::kFprop, DType::kF16, Family::kOnednn},
    {"fprop_onednn_f16_no_brgemm", Op::kFprop, DType::kF16, Family::kOnednn, false},
    {"fprop_onednn_s8", Op::kFprop, DType::kS8, Family::kOnednn},
    {"fprop_onednn_u8", Op::kFprop, DType::kU8, Family::kOnednn},
    {"dgrad_small_groups_f32", Op::kDgrad, DType::kF32, Family::kSmallGroups},
    {"dgrad_onednn_f32", Op::kDgrad, DType::kF32, Family::kOnednn},
    {"dgrad_onednn_f32_no_brgemm", Op::kDgrad, DType::kF32, Family::kOnednn, false},
    {"dgrad_onednn_bf16", Op::kDgrad, DType::kBF16, Family::kOnednn},
    {"dgrad_onednn_bf16_no_brgemm", Op::kDgrad, DType::kBF16, Family::kOnednn, false},
    {"dgrad_onednn_f16", Op::kDgrad, DType::kF16, Family::kOnednn},
    {"dgrad_onednn_f16_no_brgemm", Op::kDgrad, DType::kF16, Family::kOnednn, false},
    {"wgrad_onednn_f32", Op::kWgrad, DType::kF32, Family::kOnednn},
    {"wgrad_onednn_bf16", Op::kWgrad, DType::kBF16, Family::kOnednn},
    {"wgrad_onednn_f16", Op::kWgrad, DType::kF16, Family::kOnednn},
};

// Null if there is none.
const KernelDesc* FindKernel(std::string_view name) {
  auto found = std::find_if(std::begin(kKernels), std::end(kKernels),
                            [&](const KernelDesc& kernel) { return name == kernel.name; });
  return found == std::end(kKernels) ? nullptr : found;
}

using PlanKey = std::tuple<std::string, std::string, int64_t>;  // problem key, instance, slices

PlanCache<PlanKey, Plan>& Plans() {
  // A plan takes about 10 KB, and its generated code up to 100 KB a primitive; a network has at
  // most a few hundred different convolutions.
  static auto* const plans = new PlanCache<PlanKey, Plan>(256);
  return *plans;
}

// oneDNN 3.2 never frees the brgemm kernels that it generates: 4 to 16 KB for each new convolution
// shape. This is negligible for a few networks, but grows without limit in a program whose shapes
// never repeat. After this many problems, oneDNN's other implementations (instances *_no_brgemm)
// compute new problems; earlier problems keep theirs, so that compiling a program again gives the
// same bits.
constexpr size_t kMaxBrgemmProblems = 4096;

class BrgemmProblems {
 public:
  // Whether a plan with brgemm kernels may be made for the problem.
  bool Admits(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    return keys_.size() < capacity_ || keys_.count(key) > 0;
  }

  void Insert(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(key);
  }

  void SetCapacity(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
    keys_.clear();
  }

 private:
  std::mutex mutex_;
  size_t capacity_ = kMaxBrgemmProblems;
  std::set<std::string> keys_;
};

// Whether the kernel has an instance without brgemm. Weight gradients generate almost no brgemm
// kernels; for 8-bit operands oneDNN's other implementations are wrong (docs/notes/cpu.md).
bool HasVariant(const KernelDesc& kernel) {
  const bool floating = kernel.dtype != DType::kS8 && kernel.dtype != DType::kU8;
  return kernel.family == Family::kOnednn && kernel.op != Op::kWgrad && floating;
}

BrgemmProblems& WithBrgemm() {
  static auto* const problems = new BrgemmProblems();
  return *problems;
}

bool HasBrgemm(const Plan& plan) {
  const std::vector<ConvPrimitive>& all = plan.primitives.convolutions;
  return std::any_of(all.begin(), all.end(),
                     [](const ConvPrimitive& each) { return UsesBrgemm(each.implementation); });
}

// Unimplemented if the kernel does not accept the problem, or if oneDNN offers an implementation
// but fails to generate its code (s8, three axes, one output channel, AMX: the filter's reorder).
Status FindPlan(const ConvProblem& problem, const KernelDesc& kernel, int64_t slices,
                std::shared_ptr<const Plan>* plan) {
  PlanKey key(problem.ToString(), kernel.name, slices);
  *plan = Plans().Find(key);
  if (*plan != nullptr) return {};
  Status status = CatchErrors([&]() -> Status {
    SingleThreaded single_threaded;
    auto made = std::make_shared<Plan>();
    JAXCONV_RETURN_IF_ERROR(MakePlan(kernel, problem, slices, made.get()));
    *plan = Plans().Insert(key, made);
    return {};
  });
  return status.ok() ? status : Status::Unimplemented(status.message());
}

// Whether oneDNN has a dedicated kernel for this depthwise weight gradient; it has one for few
// filter sizes and paddings.
bool OnednnHasDepthwiseKernel(const ConvProblem& problem, DType dtype, int64_t slices) {
  for (const KernelDesc& kernel : kKernels) {
    if (kernel.family != Family::kOnednn || kernel.op != problem.op || kernel.dtype != dtype) {
      continue;
    }
    std::shared_ptr<const Plan> plan;
    return FindPlan(problem, kernel, slices, &plan).ok() &&
           !plan->primitives.convolutions.empty() &&
           plan->primitives.convolutions[0].implementation.find("_dw") != std::string::npos;
  }
  return false;
}

// Fails if oneDNN is as fast as the family. For depthwise weight gradients the plan decides.
Status Pays(const ConvProblem& problem, Family family, int64_t threads) {
  if (family == Family::kGemm) {
    return GemmWgradPays(problem, ChooseSlices(problem, Family::kOnednn, threads));
  }
  if (family == Family::kFewPixels) return FewPixelsPays(problem);
  const RegionKernel* own = RegionKernelOf(family);
  return own != nullptr ? own->pays(problem) : Status();
}

// Predicted microseconds of the kernel and of XLA's convolution.
struct Times {
  double kernel = 0, xla = 0;
};

// Nonzero where XLA is faster, as measured (docs/notes/cpu.md).
Times WhereXlaIsFaster(const ConvProblem& p, Family family) {
  const Spatial ones{1, 1, 1}, zeros{0, 0, 0};
  if (p.op != Op::kFprop || p.x_dtype != DType::kF32 || p.groups != 1 || p.batch != 1 ||
      p.lhs_dilation != ones) {
    return {};
  }
  const auto flops = static_cast<double>(p.flops());
  // In a pointwise convolution below this size, the call overhead decides: XLA computes the matrix
  // product without a custom call. From twice as many operations on, the two are equally fast.
  constexpr int64_t kFewOperations = 256 << 10;
  constexpr double kOperationsPerMicrosecond = 100e3;
  if (p.filter == ones && p.stride == ones && p.pad_lo == zeros && p.pad_hi == zeros &&
      p.flops() <= kFewOperations) {
    const double work = flops / kOperationsPerMicrosecond;
    return {1.6 + work, 0.7 + work};
  }
  // Sums of few terms from few input channels: storing the output decides. oneDNN stores 64
  // channels at a time, which share a few cache sets if rows are a multiple of 2 KB. For outputs
  // larger than the caches the limit is higher. With an epilogue XLA stores the output more than
  // once.
  constexpr int64_t kFewTerms = 40, kFewTermsOfLarge = 80, kLarge = 16 << 20;
  constexpr double kDense = 200e3, kStored = 11e3, kStoredInBlocks = 7e3;  // per microsecond
  const int64_t output = p.y_elements() * ByteWidth(p.y_dtype);
  const bool few = p.taps() * p.c <= (output >= kLarge ? kFewTermsOfLarge : kFewTerms);
  if (family == Family::kOnednn && p.c <= 4 && few && p.k % 512 == 0 && p.epilogue.Plain()) {
    const auto bytes = static_cast<double>(output);
    const double work = flops / kDense;
    return {work + bytes / kStoredInBlocks, work + bytes / kStored};
  }
  return {};
}

std::string Microseconds(double value) {
  const int64_t tenths = std::llround(value * 10);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " us";
}

}  // namespace

Status Select(const ConvProblem& problem, std::string_view algorithm, int64_t threads,
              Selection* selection) {
  *selection = {};
  bool is_auto = algorithm == "auto" || algorithm == "native";
  const KernelDesc* named = FindKernel(algorithm);
  auto family = std::find(std::begin(kFamilies), std::end(kFamilies), algorithm);
  if (!is_auto && named == nullptr && family == std::end(kFamilies)) {
    return Status::InvalidArgument("algorithm: '" + std::string(algorithm) +
                                   "' is no kernel of the CPU");
  }
  const std::string key = problem.ToString();
  const bool brgemm = WithBrgemm().Admits(key);
  for (const KernelDesc& kernel : kKernels) {
    if (named != nullptr) {
      if (&kernel != named) continue;
    } else {
      if (HasVariant(kernel) && kernel.brgemm != brgemm) continue;
      if (!is_auto && kFamilies[static_cast<int>(kernel.family)] != algorithm) continue;
      // Kernels of other operations and types would only lengthen the list of refusals.
      if (kernel.op != problem.op || kernel.dtype != problem.lhs_dtype()) continue;
    }
    int64_t slices = ChooseSlices(problem, kernel.family, threads);
    std::shared_ptr<const Plan> plan;
    Status status;
    if (is_auto) status = Pays(problem, kernel.family, threads);
    if (status.ok()) status = FindPlan(problem, kernel, slices, &plan);
    if (status.ok() && is_auto && kernel.family == Family::kDepthwise &&
        OnednnHasDepthwiseKernel(problem, kernel.dtype, slices)) {
      status = Status::Unimplemented("oneDNN has a depthwise kernel for this filter and padding");
    }
    if (!status.ok()) {
      selection->refusals.push_back({kernel.name, status.message()});
      continue;
    }
    if (named == nullptr && HasVariant(kernel) && HasBrgemm(*plan)) WithBrgemm().Insert(key);
    selection->refusals.clear();
    selection->instance = kernel.name;
    selection->slices = slices;
    selection->workspace_bytes = plan->workspace_bytes;
    const Times times = WhereXlaIsFaster(problem, kernel.family);
    selection->microseconds = times.kernel;
    selection->xla_microseconds = times.xla;
    if (algorithm == "auto" && selection->xla_microseconds > 0) {
      selection->refusals = {{"xla", "predicted " + Microseconds(selection->xla_microseconds) +
                                         ", " + kernel.name + " " +
                                         Microseconds(selection->microseconds) +
                                         "; algorithm=\"native\" takes the kernel"}};
      selection->instance.clear();
      selection->slices = 1;
      selection->workspace_bytes = 0;
    }
    return {};
  }
  if (selection->refusals.empty()) {
    selection->refusals.push_back(
        {std::string(algorithm), std::string("no CPU kernel for ") + Name(problem.op) + " of " +
                                     Name(problem.lhs_dtype()) + " operands"});
  }
  return {};
}

Status SelectForKey(std::string_view key, std::string_view algorithm, std::string_view /*target*/,
                    Selection* selection) {
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  return Select(problem, algorithm, Cores(), selection);
}

Status FindPlan(std::string_view key, std::string_view instance, int64_t slices,
                std::shared_ptr<const Plan>* plan) {
  *plan = Plans().Find(std::tuple(key, instance, slices));
  if (*plan != nullptr) return {};
  ConvProblem problem;
  JAXCONV_RETURN_IF_ERROR(ConvProblem::Parse(key, &problem));
  const KernelDesc* kernel = FindKernel(instance);
  if (kernel == nullptr) {
    return Status::InvalidArgument(
        "instance: '" + std::string(instance) +
        "' is no kernel of the CPU; a program that another version of jaxconv exported may name "
        "one. Run it with that version, or export it again");
  }
  if (slices < 1) {
    return Status::InvalidArgument("slices: expected at least 1, got " + std::to_string(slices));
  }
  Status status = FindPlan(problem, *kernel, slices, plan);
  if (status.ok()) return {};
  return {status.code(),
          std::string(instance) + ": " + status.message() + " (" + std::string(key) + ")"};
}

const ConvProblem& ProblemOf(const Plan& plan) { return plan.problem; }

std::vector<std::string> FamilyNames() { return {std::begin(kFamilies), std::end(kFamilies)}; }

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const KernelDesc& kernel : kKernels) names.push_back(kernel.name);
  return names;
}

void SetMaxBrgemmProblems(size_t count) { WithBrgemm().SetCapacity(count); }
void SetPlanCapacity(size_t capacity) { Plans().SetCapacity(capacity); }
size_t PlanCount() { return Plans().size(); }

}  // namespace jaxconv::cpu
