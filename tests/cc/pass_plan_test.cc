// Plans of passes: how they split rows, what they refuse, and the table passes.tsv of plans for the
// passes of networks on several GPUs. A line has GPU, key, kernel (or "none: " and the reason),
// parts, predicted microseconds. A change of a plan or of the cost model shows there.
//
//     pass_plan_test            compares
//     pass_plan_test --write    writes the table anew for its keys
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cc/expect.h"
#include "cuda/common/gpu.h"
#include "cuda/normalisation/plan.h"
#include "cuda/passes.h"
#include "cuda/pooling/plan.h"

namespace jaxconv {
namespace {

constexpr const char* kGpus[] = {"a100", "l40s", "h100", "h200"};

std::string TableName() {
  const std::string file = __FILE__;
  return file.substr(0, file.rfind('/') + 1) + "passes.tsv";
}

PassPlan PlanFor(const std::string& target, const std::string& key) {
  Gpu gpu;
  PassPlan plan;
  Expect(ModelOf(target, &gpu), target + " is a target");
  const Status status = PlanPass(key, gpu, &plan);
  Expect(status.ok(), key + ": " + status.message());
  return plan;
}

std::string LineOf(const std::string& target, const std::string& key) {
  const PassPlan plan = PlanFor(target, key);
  char numbers[64];
  std::snprintf(numbers, sizeof(numbers), "\t%lld\t%.1f", static_cast<long long>(plan.parts),
                plan.microseconds);
  return target + "\t" + key + "\t" + (plan.kernel.empty() ? "none: " + plan.reason : plan.kernel) +
         numbers;
}

std::vector<std::string> Lines() {
  std::vector<std::string> lines;
  std::ifstream file(TableName());
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> Fields(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream stream(line);
  for (std::string field; std::getline(stream, field, '\t');) fields.push_back(field);
  return fields;
}

void Write() {
  std::vector<std::string> keys;
  std::set<std::string> seen;
  for (const std::string& line : Lines()) {
    // A line with only a key adds that key.
    const std::vector<std::string> fields = Fields(line);
    const std::string key = fields.size() > 1 ? fields[1] : line;
    if (seen.insert(key).second) keys.push_back(key);
  }
  std::ofstream file(TableName());
  for (const std::string& key : keys) {
    for (const char* gpu : kGpus) file << LineOf(gpu, key) << '\n';
  }
}

void Compare() {
  std::set<std::string> passes, planned;
  for (const std::string& line : Lines()) {
    const std::vector<std::string> fields = Fields(line);
    Expect(fields.size() == 5, "five fields: " + line);
    if (fields.size() != 5) continue;
    const std::string now = LineOf(fields[0], fields[1]);
    const std::vector<std::string> found = Fields(now);
    const double was = std::atof(fields[4].c_str()), is = std::atof(found[4].c_str());
    const bool close = was == is || (is < 1.25 * was && was < 1.25 * is);
    Expect(fields[2] == found[2] && fields[3] == found[3] && close,
           "passes.tsv has " + line + "\n     planned is    " + now);
    planned.insert(fields[1].substr(0, fields[1].find(' ')));
  }
  for (const PassKernel& kernel : PassKernels()) passes.insert(kernel.pass);
  Expect(passes == planned, "passes.tsv has lines of every pass");
}

void TestCuts() {
  // The number of parts decides the bits of the sums in exported programs, so it is fixed.
  Expect(PartsOfRows(1, 256 * 112 * 112, 64) == 264, "parts of a large array");
  Expect(PartsOfRows(1, 256 * 7 * 7, 2048) == 33, "parts of eight slices of channels");
  Expect(PartsOfRows(1, 64, 64) == 1, "one part of few rows");
  for (const int64_t segments : {1, 2, 32, 5000}) {
    for (const int64_t rows : {1, 49, 3136, 262144}) {
      for (const int64_t channels : {8, 72, 2048, 65536}) {
        const int64_t parts = PartsOfRows(segments, rows, channels);
        Expect(CheckCut(segments, rows, channels, parts).ok(), "a cut that is taken");
        // No part of moments is empty.
        const int64_t block = normalisation::RowsOfThread("moments", DType::kBF16) *
                              int64_t{ChannelThreads(channels).steps};
        Expect(parts == 1 || parts * block <= rows, "rows in every part");
      }
    }
  }
}

void TestRefusals() {
  const auto reason = [](const char* key, const char* said) {
    const PassPlan plan = PlanFor("h200", key);
    Expect(plan.kernel.empty() && plan.reason.find(said) != std::string::npos,
           std::string(key) + ": " + plan.kernel + plan.reason);
  };
  reason("moments s8 r64 c64", "expected float32, float16 or bfloat16, got s8");
  reason("moments bf16 r64 c60", "expected a multiple of 8 channels, got 60");
  reason("activated_sums bf16 r64 c64 activation:softsign", "activation 'softsign'");
  reason("activated_sums bf16 r64 c64", "activation ''");
  reason("elementwise f32 n257 b1000", "expected 1 to 256 results, got 257");
  reason("masked_sums bf16 r64 c64 g3 y1", "expected one or two gradients and arrays, got 3");
  reason("masked_sums bf16 r64 c64 g1 y2 affine activation:silu", "got 1 and 2");
  reason("masked_sums bf16 r64 c64 g1 y1 affine activation:softsign", "derivative of 'softsign'");
  reason("masked_sums bf16 r64 c64 g1 y1 result activation:silu", "expected scale and offset");
  reason("masked_sums bf16 r64 c64 g1 y1 affine activation:elu values", "expected sums alone");
  reason("masked_sums bf16 r64 c64 g1 y1 affine activation:silu values stores", "sums alone");
  reason("masked_sums bf16 r64 c64 g2 y1 affine activation:silu values", "got 2 and 1");
  reason("activated_sums bf16 r64 c64 activation:silu derivative:gelu", "the derivative of 'silu'");
  reason("max_pool bf16 b1 c64 i32x32 f8x8 o25x25 s1x1 p0x0", "at most 49 elements");
  reason("max_pool bf16 b1 c64 i32x32 f16x2 o17x2 s1x20 p0x0 places", "expected places below 255");
  Gpu gpu;
  PassPlan plan;
  ModelOf("h200", &gpu);
  for (const char* key :
       {"", "moments", "sums bf16 r64 c64", "max_pool bf16 b1 c8 i4x4 f2x2 o2x2"}) {
    Expect(PlanPass(key, gpu, &plan).code() == StatusCode::kInvalidArgument,
           std::string("a key that cannot be read: ") + key);
  }
}

void TestNames() {
  std::set<std::string> names;
  for (const PassKernel& kernel : PassKernels()) names.insert(kernel.name);
  Expect(names.size() == PassKernels().size(), "names differ");
  // Every form of pooling has a kernel for every walk.
  PoolWindows w;
  w.batch = 1, w.channels = 8;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t size : {1, 2, 3, 4, 7}) {
      for (const int64_t stride : {1, 2, 3}) {
        w.SetAxis(0, 2, 32, size, 8, stride, 0), w.SetAxis(1, 2, 32, size, 8, stride, 0);
        for (int form = 0; form < 8; ++form) {
          const bool affine = form & 1, places = form & 2, two = form & 4;
          const PassForm pool = pooling::FormOfPool(w, dtype, affine, places, two ? 1 : 4);
          const PassForm back = pooling::FormOfGradient(w, two, affine);
          Expect(FindForm(PassKernels(), "max_pool", dtype, pool) != nullptr &&
                     FindForm(PassKernels(), "max_pool_gradient", dtype, back) != nullptr,
                 "a kernel of every form");
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--write") {
    jaxconv::Write();
    return 0;
  }
  jaxconv::Compare();
  jaxconv::TestCuts();
  jaxconv::TestRefusals();
  jaxconv::TestNames();
  std::printf("pass_plan_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
