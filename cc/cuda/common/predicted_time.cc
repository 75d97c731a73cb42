#include "cuda/common/predicted_time.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>

#include "cuda/common/rates.h"

namespace jaxconv {
namespace {

// An H200's; other GPUs scale it by their rates.
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
constexpr FormTime kForms[] = {
#define FORM(...) Line(__VA_ARGS__),
#include "cuda/calibration/h200.def"
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
                             std::string_view operands) {
  const auto found = std::find_if(std::begin(kForms), std::end(kForms), [&](const FormTime& line) {
    return line.form == form && line.operations == operations && line.operands == operands;
  });
  if (found != std::end(kForms)) return &*found;
  for (const Like& like : kLikes) {
    if (like.form == form && like.operations == operations && like.operands == operands) {
      return FindFormTime(like.like_form, like.like_operations, like.like_operands);
    }
  }
  return nullptr;
}

FormTime FormTimeOf(std::string_view form, std::string_view operations, std::string_view operands) {
  const FormTime* found = FindFormTime(form, operations, operands);
  FormTime named = found == nullptr ? FormTime() : *found;
  named.form = form;
  named.operations = operations;
  named.operands = operands;
  return named;
}

std::string CalibrationOf(const Gpu& gpu) {
  if (gpu.measured) return "h200.def, fitted to times of this GPU";
  Gpu h200;
  ModelOf("h200", &h200);
  auto times = [](double rate, double of_h200) {
    char text[16];
    std::snprintf(text, sizeof(text), "%.2f", rate / of_h200);
    return std::string(text);
  };
  const bool same = gpu.compute_capability() == h200.compute_capability();
  return std::string("h200.def, scaled by this GPU's rates (") +
         times(gpu.sm_count, h200.sm_count) + " x the SMs, " +
         times(gpu.clock_ghz, h200.clock_ghz) + " x the clock, " +
         times(gpu.dram_bytes_per_us, h200.dram_bytes_per_us) + " x the memory rate)" +
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
