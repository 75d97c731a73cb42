#include "cuda/normalisation/plan.h"

#include <algorithm>
#include <climits>
#include <string>
#include <string_view>

#include "core/activation_names.h"
#include "cuda/normalisation/derivative.h"

namespace jaxconv {
namespace {

// CTAs of one sum: two for each SM of an H200. Several segments have four times as many, so that
// the last wave is a small part of the total.
constexpr int64_t kCtas = 264, kCtasOfSegments = 4 * kCtas;
// The fewest rows that each thread adds.
constexpr int64_t kLeastRows = 8;
// The fewest elements for `normalise`. XLA computes vectors in the pass itself; for a call it stores
// them, which takes one or two launches of 2 us each, about the time that the call saves.
constexpr int64_t kLeastNormalised = 4'000'000;
// The largest grid extents along y and x.
constexpr int64_t kMaxParts = 65535, kMaxSlices = (int64_t{1} << 31) - 1;

}  // namespace

ChannelThreads::ChannelThreads(int64_t channels) {
  const int64_t vectors = std::max<int64_t>(channels / kChannelsOfThread, 1);
  lanes = static_cast<int>(std::min<int64_t>(vectors, kMaxLanes));
  steps = kPassThreads / lanes;
  slices = (vectors + lanes - 1) / lanes;
}

ChannelThreads ChannelThreads::Even(int64_t channels) {
  ChannelThreads even(channels);
  const int64_t vectors = std::max<int64_t>(channels / kChannelsOfThread, 1);
  even.lanes = static_cast<int>(CeilDiv(vectors, even.slices));
  even.steps = kPassThreads / even.lanes;
  return even;
}

int64_t PartsOfRows(int64_t segments, int64_t rows, int64_t channels) {
  const ChannelThreads threads(channels);
  const int64_t ctas = segments == 1 ? kCtas : kCtasOfSegments;
  const int64_t most = rows / (kLeastRows * threads.steps);
  return std::max<int64_t>(1, std::min(ctas / (threads.slices * segments), most));
}

Status CheckCut(int64_t segments, int64_t rows, int64_t channels, int64_t parts) {
  if (channels < kChannelsOfThread || channels % kChannelsOfThread != 0) {
    return Status::Unimplemented("expected a multiple of 8 channels, got " +
                                 std::to_string(channels));
  }
  if (rows < 1 || segments < 1 || parts < 1 || parts > kMaxParts ||
      ChannelThreads(channels).slices * segments > kMaxSlices) {
    return Status::Unimplemented("expected rows in 1 to 65535 parts, got " + std::to_string(rows) +
                                 " rows in " + std::to_string(parts) + " parts of " +
                                 std::to_string(segments) + " segments");
  }
  return {};
}

namespace normalisation {
namespace {

// The kernel form for a key, and its cost for each element: the arrays that it reads or writes, and
// whether it moves bits.
struct Form {
  PassForm form = {};
  int64_t arrays = 0;
  bool bits = false;
};

Status FormOfSums(const PassKey& key, Form* found) {
  const int64_t gradients = key.Number('g', 1), arrays = key.Number('y', 0);
  MaskBy::Kind told = key.Has("result")   ? MaskBy::kResult
                      : key.Has("affine") ? MaskBy::kAffine
                      : key.Has("bits")   ? MaskBy::kBits
                                          : MaskBy::kNone;
  const std::string_view activation = key.Behind("activation:");
  Derivative derivative = Derivative::kNone;
  if (!activation.empty()) {
    JAXCONV_RETURN_IF_ERROR(ParseDerivative(activation, &derivative));
    if (told != MaskBy::kAffine) {
      return Status::Unimplemented("expected scale and offset for a derivative");
    }
    told = MaskBy::kDerivative;
  }
  if (key.Has("values")) {
    if (ActivationOf(derivative) == Activation::kNone || key.Has("stores")) {
      return Status::Unimplemented("expected sums alone, and an activation with its derivative");
    }
    told = MaskBy::kActivation;
  }
  found->form = {told, static_cast<int>(gradients), static_cast<int>(arrays)};
  found->arrays = gradients + arrays + (told == MaskBy::kResult) + key.Has("stores");
  found->bits = told == MaskBy::kBits;
  return {};
}

// Unimplemented if the kernels have no activation of this name, or not with this derivative, which
// may be empty.
Status CheckActivation(std::string_view name, std::string_view of_derivative) {
  Activation activation;
  if (!ParseActivation(name, &activation) || activation == Activation::kNone) {
    return Status::Unimplemented("no kernel has the activation '" + std::string(name) + "'");
  }
  if (of_derivative.empty()) return {};
  Derivative derivative;
  JAXCONV_RETURN_IF_ERROR(ParseDerivative(of_derivative, &derivative));
  if (ActivationOf(derivative) == activation) return {};
  return Status::Unimplemented("expected the derivative of '" + std::string(name) + "', got '" +
                               std::string(of_derivative) + "'");
}

}  // namespace

Status CheckExponential(Activation activation) {
  for (const Activation each : {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu,
                                Activation::kSigmoid, Activation::kTanh}) {
    if (activation == each) return {};
  }
  return Status::Unimplemented("XLA's pass is as fast: '" +
                               std::string(kActivationNames[static_cast<int>(activation)]) +
                               "' takes no exponential");
}

const std::vector<PassKernel>& Kernels() {
  static const std::vector<PassKernel> kernels = {
#define JAXCONV_PASS_FAMILY "normalisation"
#define PASS(pass, types, variant, form) JAXCONV_PASS_KERNELS(pass, types, variant, false, form)
#include "cuda/normalisation/kernels.def"
#undef PASS
  };
  return kernels;
}

int RowsOfThread(std::string_view pass, DType dtype, bool derivatives) {
  for (const PassKernel& kernel : Kernels()) {
    const bool same = kernel.pass == pass && kernel.dtype == dtype;
    if (same && kernel.form[1] == static_cast<int>(derivatives)) return kernel.form[0];
  }
  return 0;
}

Status PlanOf(const PassKey& key, const Gpu& gpu, PassPlan* plan) {
  const int64_t segments = key.Number('s', 1), rows = key.Number('r', 0);
  const int64_t channels = key.Number('c', 0);
  const bool wide = key.dtype() == DType::kF32, adds = key.pass() == "normalise_add";
  const bool normalises = key.pass() == "normalise";
  Form form;
  if (key.pass() == "masked_sums") {
    JAXCONV_RETURN_IF_ERROR(FormOfSums(key, &form));
  } else if (adds) {
    form = {{static_cast<int>(key.Number('y', 1)), key.Has("bounded")}, 3, true};
  } else {
    const std::string_view derivative = key.Behind("derivative:");
    if (key.pass() == "activated_sums" || normalises) {
      JAXCONV_RETURN_IF_ERROR(CheckActivation(key.Behind("activation:"), derivative));
    }
    if (normalises) {
      Activation activation = Activation::kNone;
      ParseActivation(key.Behind("activation:"), &activation);
      JAXCONV_RETURN_IF_ERROR(CheckExponential(activation));
      if (wide) return Status::Unimplemented("XLA's pass over float32 arrays is as fast");
      if (segments * rows * channels < kLeastNormalised) {
        return Status::Unimplemented("XLA's pass over few elements is as fast");
      }
    }
    const bool derivatives = !derivative.empty();
    form = {{RowsOfThread(key.pass(), key.dtype(), derivatives), derivatives}, 1 + normalises};
  }
  JAXCONV_RETURN_IF_ERROR(CheckCut(segments, rows, channels, 1));
  const PassKernel* const kernel = FindForm(Kernels(), key.pass(), key.dtype(), form.form);
  if (kernel == nullptr) {
    return Status::Unimplemented("expected one or two gradients and arrays, got " +
                                 std::to_string(key.Number('g', 1)) + " and " +
                                 std::to_string(key.Number('y', 0)));
  }
  plan->kernel = kernel->name;
  const ChannelThreads threads(channels);
  PassCost cost;
  const double elements =
      static_cast<double>(segments) * static_cast<double>(rows) * static_cast<double>(channels);
  cost.bytes =
      elements * (static_cast<double>(form.arrays) * ByteWidth(wide ? DType::kF32 : DType::kBF16) +
                  static_cast<double>(form.bits) / CHAR_BIT);
  if (adds || normalises) {
    if (normalises) cost.ctas_of_sm = kNormaliseCtas;
    cost.ctas = cost.ctas_of_sm * gpu.sm_count;
  } else {
    plan->parts = PartsOfRows(segments, rows, channels);
    plan->block_rows = form.form[0] * threads.steps;
    cost.ctas = plan->parts * segments * threads.slices;
  }
  // At most as many CTAs as rows of threads.
  const int64_t blocks = (rows + threads.steps - 1) / threads.steps;
  cost.ctas = std::min(cost.ctas, blocks * segments * threads.slices);
  plan->microseconds = PassMicroseconds(cost, gpu);
  return {};
}

}  // namespace normalisation
}  // namespace jaxconv
