// Runs kernel instances in the emulator and compares them with the definition (cc/naive_conv.h).
//
//     run_kernels INSTANCE PROBLEM [seed=N] [slices=N] [sms=N] [float] [tolerance=X] [weight=N]
//         [offset=N] [lhs=FILE rhs=FILE out=FILE]
//
// PROBLEM is a problem key (ConvProblem::ToString). Operands are small integers, and the result
// must be exact, or within `tolerance` of the largest element. The options:
//     float      operands are uniform in [-1, 1); prints the error against float64
//     weight     above 1: operands are -1, 0 and 1, those of the second one times the weight. A
//                multiple of the denominators of Winograd's filter transform makes that exact
//                (F(4, 3): 15 for each transformed axis)
//     offset     is added to all operands
//     lhs, rhs   files with the operands' bytes (also packed or prepared filters); the result is
//                written to the file `out` and not compared
// For a problem with an epilogue, scale, bias and residual are multiples of a quarter, and the
// residual contains NaN and infinities. Activations that are not exact may differ by their
// rounding; statistics are compared with those of the expected result in double. Results and
// workspace are initialised to NaN. Exit status: 1 if the result differs, 2 if the instance refuses
// the problem, 3 if the emulator stops the kernel.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cc/epilogue_reference.h"
#include "cc/naive_conv.h"
#include "core/conv_problem.h"
#include "cuda/common/folded_columns.h"
#include "cuda/common/kernel.h"
#include "cuda/common/query_gpu.h"
#include "cuda/launch_table.h"
#include "cuda/registry.h"
#include "emulator.h"
#include "round.h"

namespace jaxconv {
namespace {

class Buffer {
 public:
  explicit Buffer(int64_t bytes) : data_(emulator::Allocate(static_cast<size_t>(bytes), 16)) {}
  ~Buffer() { emulator::Free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_;
};

double Rounded(double value, DType dtype) {
  if (dtype == DType::kF16) return emulator::Float16::Value(emulator::Float16::Round(value));
  if (dtype == DType::kBF16) return emulator::Bfloat16::Value(emulator::Bfloat16::Round(value));
  return static_cast<float>(value);
}
void Put(unsigned char* data, int64_t i, DType dtype, double value) {
  if (dtype == DType::kF32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(data + 4 * i, &narrow, 4);
    return;
  }
  const uint16_t bits =
      dtype == DType::kF16 ? emulator::Float16::Round(value) : emulator::Bfloat16::Round(value);
  std::memcpy(data + 2 * i, &bits, 2);
}
double Get(const unsigned char* data, int64_t i, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + 4 * i, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + 2 * i, 2);
  return dtype == DType::kF16 ? emulator::Float16::Value(bits) : emulator::Bfloat16::Value(bits);
}

struct Options {
  uint32_t seed = 0;
  int64_t slices = 0;
  int sms = 2;
  bool floats = false;
  double tolerance = 0;
  int weight = 1;
  int offset = 0;
  std::string lhs, rhs, out;  // files
};

bool Transfer(const std::string& path, const char* mode, unsigned char* data, int64_t bytes) {
  std::FILE* const file = std::fopen(path.c_str(), mode);
  if (file == nullptr) return false;
  const auto count = static_cast<size_t>(bytes);
  const size_t done =
      *mode == 'r' ? std::fread(data, 1, count, file) : std::fwrite(data, 1, count, file);
  const bool at_end = *mode != 'r' || std::fgetc(file) == EOF;
  return std::fclose(file) == 0 && done == count && at_end;
}

int64_t Elements(const Extents& extents) {
  int64_t product = 1;
  for (size_t i = 0; i < extents.rank; ++i) product *= extents.values[i];
  return product;
}

// Returns whether `statistics` are those of `y`, the result before rounding.
bool CheckStatistics(const ConvProblem& problem, const std::vector<double>& y,
                     const Buffer& statistics) {
  const auto rows = static_cast<double>(y.size()) / static_cast<double>(problem.k);
  for (int64_t k = 0; k < problem.k; ++k) {
    double mean = 0, squares = 0;
    for (size_t i = k; i < y.size(); i += problem.k) mean += Rounded(y[i], problem.y_dtype) / rows;
    for (size_t i = k; i < y.size(); i += problem.k) {
      squares += std::pow(Rounded(y[i], problem.y_dtype) - mean, 2);
    }
    const double deviation = std::sqrt(squares / rows);
    const double got[2] = {Get(statistics.data(), k, DType::kF32),
                           Get(statistics.data(), problem.k + k, DType::kF32)};
    if (std::fabs(got[0] - mean) <= 3e-7 * (std::fabs(mean) + deviation) &&
        std::fabs(got[1] - squares) <= 1e-6 * squares) {
      continue;  // NaN differs
    }
    std::printf("statistics of channel %lld: %.9g and %.9g, expected %.9g and %.9g\n",
                static_cast<long long>(k), got[0], got[1], mean, squares);
    return false;
  }
  return true;
}

// Compares the results of an epilogue with those of the expected sums `values`.
int CheckFused(const KernelDesc& kernel, const ConvProblem& problem, const Options& options,
               const Plan& plan, const Buffer& out, const Buffer& pre, const Buffer& statistics,
               const std::vector<double>& scale, const std::vector<double>& bias,
               const std::vector<double>& residual, std::vector<double>* values) {
  const Epilogue& terms = problem.epilogue;
  const DType type = problem.output_dtype();
  const auto same = [](double a, double b, double tolerance) {
    return std::isnan(b) ? std::isnan(a) : a == b || std::fabs(a - b) <= tolerance;
  };
  int64_t differ = 0, first = -1;
  for (int64_t i = 0; i < static_cast<int64_t>(values->size()); ++i) {
    const int64_t channel = i % problem.k;
    double t = (*values)[i] * scale[channel] + bias[channel];
    if (terms.residual) t += residual[i];
    const double y = ActivateReference(terms.activation, terms.negative_slope, t);
    const bool exact = ExactActivation(terms.activation);
    const bool right = same(Get(out.data(), i, type), exact ? Rounded(y, type) : y,
                            exact ? 0 : ActivationTolerance(type, t, y)) &&
                       (!terms.pre || same(Get(pre.data(), i, type), Rounded(t, type), 0));
    (*values)[i] = y;
    if (!right && differ++ == 0) first = i;
  }
  if (differ > 0) {
    std::printf("WRONG %s seed %u slices %lld: %lld differ, first at %lld (%g, expected %g)\n",
                kernel.name, options.seed, static_cast<long long>(plan.slices),
                static_cast<long long>(differ), static_cast<long long>(first),
                Get(out.data(), first, type), (*values)[first]);
    return 1;
  }
  if (terms.statistics && !CheckStatistics(problem, *values, statistics)) {
    std::printf("WRONG %s seed %u: statistics\n", kernel.name, options.seed);
    return 1;
  }
  std::printf("OK %s seed %u slices %lld\n", kernel.name, options.seed,
              static_cast<long long>(plan.slices));
  return 0;
}

int RunOne(const KernelDesc& kernel, const ConvProblem& problem, const Options& options) {
  Gpu gpu;
  if (!QueryGpu(0, &gpu).ok()) return 3;
  gpu.sm_count = options.sms;  // persistent CTAs process several tiles
  Plan plan;
  if (Status status = MakePlan(kernel, problem, gpu, options.slices, &plan); !status.ok()) {
    std::printf("REFUSED %s: %s\n", kernel.name, status.message().c_str());
    return 2;
  }
  const int64_t x = Elements(problem.Shape(Role::kX)), w = Elements(problem.Shape(Role::kW));
  const int64_t y = Elements(problem.Shape(Role::kY));
  const int64_t lhs = problem.op == Op::kDgrad ? y : x, rhs = problem.op == Op::kWgrad ? y : w;
  const int64_t out = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  const DType lhs_type = problem.lhs_dtype(), rhs_type = problem.rhs_dtype();
  const DType out_type = problem.output_dtype();
  emulator::SetSeed(options.seed);
  const Buffer lhs_buffer(lhs * ByteWidth(lhs_type));
  const Buffer rhs_buffer(rhs * ByteWidth(rhs_type));
  const Buffer out_buffer(out * ByteWidth(out_type));
  const Buffer workspace(plan.workspace_bytes);
  std::mt19937 random(options.seed + 1);
  const int most = options.weight > 1 ? 1 : 4;
  const auto fill = [&](const Buffer& buffer, int64_t elements, DType dtype, int factor) {
    std::vector<double> values(elements);
    for (int64_t i = 0; i < elements; ++i) {
      const int integer = static_cast<int>(random() / 256 % (2 * most + 1)) - most;
      const double value =
          options.offset + factor * (options.floats ? random() / 2147483648.0 - 1 : integer);
      values[i] = Rounded(value, dtype);
      Put(buffer.data(), i, dtype, value);
    }
    return values;
  };
  const std::vector<double> lhs_values = fill(lhs_buffer, lhs, lhs_type, 1);
  const std::vector<double> rhs_values = fill(rhs_buffer, rhs, rhs_type, options.weight);
  const bool given = !options.out.empty();
  if (given && (!Transfer(options.lhs, "rb", lhs_buffer.data(), lhs * ByteWidth(lhs_type)) ||
                !Transfer(options.rhs, "rb", rhs_buffer.data(), rhs * ByteWidth(rhs_type)))) {
    std::printf("expected files of %lld and %lld elements\n", static_cast<long long>(lhs),
                static_cast<long long>(rhs));
    return 3;
  }
  const Epilogue& terms = problem.epilogue;
  const bool fused = !terms.Plain();
  const Buffer scale_buffer(fused ? problem.k * 4 : 0), bias_buffer(fused ? problem.k * 4 : 0);
  const Buffer residual_buffer(terms.residual ? out * ByteWidth(out_type) : 0);
  const Buffer pre_buffer(terms.pre ? out * ByteWidth(out_type) : 0);
  const Buffer statistics_buffer(terms.statistics ? problem.k * 8 : 0);
  std::vector<double> scale(problem.k, 1), bias(problem.k, 0), residual(terms.residual ? out : 0);
  const auto quarters = [&](const Buffer& buffer, DType dtype, std::vector<double>* values) {
    for (size_t i = 0; i < values->size(); ++i) {
      (*values)[i] = (static_cast<int>(random() / 256 % 25) - 12) * 0.25;
      Put(buffer.data(), static_cast<int64_t>(i), dtype, (*values)[i]);
    }
  };
  if (terms.scale != ScaleKind::kNone) quarters(scale_buffer, DType::kF32, &scale);
  if (terms.bias) quarters(bias_buffer, DType::kF32, &bias);
  quarters(residual_buffer, out_type, &residual);
  if (out > 2 * problem.k && terms.residual) {
    const auto put = [&](int64_t i, double value) {
      residual[i] = value;
      Put(residual_buffer.data(), i, out_type, value);
    };
    put(1, NAN);
    put(problem.k, INFINITY);
    put(2 * problem.k, -INFINITY);
  }
  Operands operands;
  if (terms.scale != ScaleKind::kNone) {
    operands.scale = reinterpret_cast<const float*>(scale_buffer.data());
  }
  if (terms.bias) operands.bias = reinterpret_cast<const float*>(bias_buffer.data());
  if (terms.residual) operands.residual = residual_buffer.data();
  if (terms.pre) operands.pre = pre_buffer.data();
  if (terms.statistics) operands.statistics = reinterpret_cast<float*>(statistics_buffer.data());
  operands.lhs = lhs_buffer.data();
  operands.rhs = rhs_buffer.data();
  operands.out = out_buffer.data();
  operands.workspace = plan.workspace_bytes > 0 ? workspace.data() : nullptr;
  operands.workspace_bytes = plan.workspace_bytes;
  Status status = CheckOperands(plan, operands);
  const LaunchFunction launch = FindLaunch(plan.kernel->name);
  if (launch == nullptr) emulator::Fail("%s is not built in", plan.kernel->name);
  if (status.ok()) status = launch(plan, operands, nullptr);
  if (!status.ok()) {
    std::printf("FAILED %s: %s\n", kernel.name, status.message().c_str());
    return 3;
  }
  if (given) {
    const bool written = Transfer(options.out, "wb", out_buffer.data(), out * ByteWidth(out_type));
    return written ? 0 : 3;
  }
  std::vector<double> expected = NaiveConv(problem, lhs_values, rhs_values);
  if (fused) {
    return CheckFused(kernel, problem, options, plan, out_buffer, pre_buffer, statistics_buffer,
                      scale, bias, residual, &expected);
  }
  double largest = 0, worst = 0, squares = 0, error_squares = 0;
  int64_t differ = 0, first = -1;
  for (double value : expected) largest = std::max(largest, std::fabs(value));
  for (int64_t i = 0; i < out; ++i) {
    const double got = Get(out_buffer.data(), i, out_type);
    const double exact = options.floats ? expected[i] : Rounded(expected[i], out_type);
    const double error = std::fabs(got - exact);
    worst = std::max(worst, error);
    squares += exact * exact;
    error_squares += error * error;
    if (options.floats && options.tolerance == 0 ? std::isfinite(got)
                                                 : error <= options.tolerance * largest) {
      continue;  // NaN differs
    }
    if (differ++ == 0) first = i;
  }
  if (differ > 0) {
    std::printf(
        "WRONG %s seed %u slices %lld: %lld of %lld differ, first at %lld (%g, expected %g)\n",
        kernel.name, options.seed, static_cast<long long>(plan.slices),
        static_cast<long long>(differ), static_cast<long long>(out), static_cast<long long>(first),
        Get(out_buffer.data(), first, out_type), expected[first]);
    return 1;
  }
  std::printf("OK %s seed %u slices %lld", kernel.name, options.seed,
              static_cast<long long>(plan.slices));
  if (options.floats || options.tolerance > 0) {
    std::printf(": largest error %.3g, rms error %.3g, of rms %.4g and largest %.4g", worst,
                std::sqrt(error_squares / out), std::sqrt(squares / out), largest);
  }
  std::printf("\n");
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 3) {
    std::printf("run_kernels INSTANCE PROBLEM [option...]; see the head of this source\n");
    return 3;
  }
  Options options;
  for (int i = 3; i < argc; ++i) {
    const std::string argument = argv[i], name = argument.substr(0, argument.find('='));
    const char* value = argv[i] + std::min(argument.size(), name.size() + 1);
    if (name == "seed") {
      options.seed = std::atoi(value);
    } else if (name == "slices") {
      options.slices = std::atoll(value);
    } else if (name == "sms") {
      options.sms = std::atoi(value);
    } else if (name == "float") {
      options.floats = true;
    } else if (name == "tolerance") {
      options.tolerance = std::atof(value);
    } else if (name == "offset") {
      options.offset = std::atoi(value);
    } else if (name == "weight") {
      options.weight = std::atoi(value);
    } else if (name == "lhs" || name == "rhs" || name == "out") {
      (name == "lhs" ? options.lhs : name == "rhs" ? options.rhs : options.out) = value;
    } else {
      std::printf("unknown argument %s\n", argv[i]);
      return 3;
    }
  }
  const KernelDesc* kernel = FindKernel(argv[1]);
  if (kernel == nullptr) {
    std::printf("no kernel instance %s\n", argv[1]);
    return 3;
  }
  ConvProblem problem;
  if (Status status = ConvProblem::Parse(argv[2], &problem); !status.ok()) {
    std::printf("%s: %s\n", argv[2], status.message().c_str());
    return 3;
  }
  return RunOne(*kernel, problem, options);
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
