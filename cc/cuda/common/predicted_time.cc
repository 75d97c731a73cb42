#include "cuda/common/predicted_time.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "cuda/common/rates.h"

namespace jaxconv {
namespace {

// All GPUs share these numbers of the H200's file.
#define EXPOSED(share) constexpr double kExposed = share;
#define UNFITTED_US(us) constexpr double kUnfittedUs = us;
#define XLA_US(us) constexpr double kXlaUs = us;
#include "cuda/calibration/h200.def"
constexpr double FixedUs(std::string_view form) {
  return form.substr(0, 3) == "xla" ? kXlaUs : kUnfittedUs;
}
constexpr FormTime Line(std::string_view form, std::string_view operations,
                        std::string_view operands, double sm_share, double dram_share = 1) {
  return {form, operations, operands, sm_share, dram_share, FixedUs(form)};
}
constexpr FormTime Line(std::string_view form, std::string_view operations,
                        std::string_view operands, double sm_share, double dram_share,
                        double fixed_us) {
  return {form, operations, operands, sm_share, dram_share, fixed_us};
}

// The file of all GPUs without their own, for which their rates scale it, and of all forms that a
// GPU's own file lacks.
constexpr std::string_view kScaled = "h200";
struct FittedForm {
  std::string_view gpu;
  FormTime time;
};
constexpr FittedForm kForms[] = {
#define FORM(...) {"h200", Line(__VA_ARGS__)},
#include "cuda/calibration/h200.def"
#define FORM(...) {"h100", Line(__VA_ARGS__)},
#include "cuda/calibration/h100.def"
};

// Forms with too few measured times, and the form whose parameters they take.
struct Like {
  std::string_view form, operations, operands;
  std::string_view like_form, like_operations, like_operands;
};
constexpr Like kLikes[] = {
#define LIKE(...) {__VA_ARGS__},
#include "cuda/calibration/h200.def"
};

// An empty `gpu`: of the first file that has the form.
const FormTime* FittedFormTime(std::string_view gpu, std::string_view form,
                               std::string_view operations, std::string_view operands) {
  for (const FittedForm& line : kForms) {
    if ((gpu.empty() || line.gpu == gpu) && line.time.form == form &&
        line.time.operations == operations && line.time.operands == operands) {
      return &line.time;
    }
  }
  return nullptr;
}

// The product whose file serves a GPU.
std::string_view FileOf(const Gpu& gpu) {
  const bool own = std::any_of(std::begin(kForms), std::end(kForms),
                               [&](const FittedForm& line) { return line.gpu == gpu.product; });
  return own ? gpu.product : kScaled;
}

}  // namespace

double WrittenExcess(double bytes, const Gpu& gpu) {
  return kWrittenExcess * std::max(0.0, bytes - static_cast<double>(gpu.l2_bytes) / 2);
}

double PingpongCycles(double tiles, double multiply, double store) {
  const double both = multiply + store;
  return std::max({tiles * multiply, std::ceil(tiles / 2) * both - store,
                   multiply + std::floor(tiles / 2) * both - store});
}

std::string_view OperandsName(const ConvProblem& problem, bool tf32, bool three_tf32) {
  if (problem.lhs_dtype() != DType::kF32) return "16-bit";
  return three_tf32 ? "3xtf32" : tf32 ? "tf32" : "fp32";
}

std::string_view OperationsName(const ConvProblem& problem) {
  return problem.op == Op::kWgrad ? "wgrad" : "fprop, dgrad";
}

const FormTime* FindFormTime(std::string_view form, std::string_view operations,
                             std::string_view operands, const Gpu& gpu) {
  for (const std::string_view file : {gpu.product, kScaled}) {
    if (const auto* found = FittedFormTime(file, form, operations, operands)) return found;
  }
  for (const Like& like : kLikes) {
    if (like.form == form && like.operations == operations && like.operands == operands) {
      return FindFormTime(like.like_form, like.like_operations, like.like_operands, gpu);
    }
  }
  return FittedFormTime({}, form, operations, operands);
}

FormTime FormTimeOf(std::string_view form, std::string_view operations, std::string_view operands,
                    const Gpu& gpu) {
  const FormTime* found = FindFormTime(form, operations, operands, gpu);
  FormTime named = found == nullptr ? FormTime() : *found;
  named.form = form;
  named.operations = operations;
  named.operands = operands;
  return named;
}

std::string CalibrationOf(const Gpu& gpu) {
  Gpu fitted;
  ModelOf(FileOf(gpu), &fitted);
  const std::string file = std::string(fitted.product) + ".def";
  const double rates[] = {static_cast<double>(gpu.sm_count) / fitted.sm_count,
                          gpu.clock_ghz / fitted.clock_ghz,
                          gpu.dram_bytes_per_us / fitted.dram_bytes_per_us};
  if (std::all_of(std::begin(rates), std::end(rates), [](double rate) { return rate == 1; })) {
    return file + ", fitted to times of this GPU";
  }
  auto times = [](double rate) {
    char text[16];
    std::snprintf(text, sizeof(text), "%.2f", rate);
    return std::string(text);
  };
  const bool same = gpu.compute_capability() == fitted.compute_capability();
  return file + ", scaled by this GPU's rates (" + times(rates[0]) + " x the SMs, " +
         times(rates[1]) + " x the clock, " + times(rates[2]) + " x the memory rate)" +
         (same ? "" : "; no GPU of this architecture was measured");
}

double PredictedMicroseconds(const TimeTerms& terms, const FormTime& form) {
  const double sm[] = {terms.tensor_cores, terms.loads, terms.stores};
  const double dram = terms.dram / form.dram_share;
  double longest = dram, sum = dram;
  for (const double term : sm) {
    longest = std::max(longest, term / form.sm_share);
    sum += term / form.sm_share;
  }
  return form.fixed_us + terms.launch + longest + kExposed * (sum - longest);
}

}  // namespace jaxconv
