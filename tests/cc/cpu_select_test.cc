// Selection among the CPU kernels and the caches behind it: calls that no selection wrote,
// workspaces, concurrent executions, the limits on plans and on oneDNN's brgemm kernels.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/cpu_runs.h"
#include "cpu/onednn.h"
#include "cpu/plan.h"
#include "cpu/primitives.h"
#include "cpu/select.h"

namespace jaxconv {
namespace {

void CheckSelect() {
  ConvProblem p = Geometry2d(4, 56, 56, 64, 64, 3, 3, 1, 1);
  p.out = p.in;
  Selection s;
  EXPECT(cpu::Select(p, "winograd_of_elsewhere", 2, &s).code() == StatusCode::kInvalidArgument, "");
  for (const char* algorithm : {"auto", "onednn", "fprop_onednn_f32"}) {
    EXPECT(cpu::Select(p, algorithm, 2, &s).ok() && s.instance == "fprop_onednn_f32", algorithm);
    EXPECT(s.slices == 2, algorithm);
  }
  p.filter_layout = FilterLayout::kKrsc;  // the plan of the rsck problem is cached
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.filter_layout = FilterLayout::kRsck;
  EXPECT(cpu::Select(p, "wgrad_onednn_f32", 2, &s).ok() && s.instance.empty(), "");
  EXPECT(cpu::Select(p, "depthwise", 2, &s).ok() && s.instance.empty() && !s.refusals.empty(), "");
  p.op = Op::kDgrad;
  SetTypes(Op::kDgrad, {DType::kS8, DType::kS32}, &p);
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty() && !s.refusals.empty(), "");
}

// Problems on which oneDNN is slow (other kernels are chosen) or XLA is faster.
void CheckSmallProblems() {
  struct {
    ConvProblem p;
    const char* chosen;
  } const cases[] = {
      {Geometry2d(4, 32, 32, 64, 3, 7, 7, 1, 3), "fprop_few_outputs_f32"},
      {Geometry2d(4, 32, 32, 64, 1, 3, 3, 1, 1), "fprop_few_outputs_f32"},
      {Geometry2d(4, 32, 32, 64, 16, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 7, 7, 256, 128, 7, 7, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(256, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_onednn_f32"},
      {Geometry2d(64, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 8, 8, 512, 100, 4, 4, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 8, 8, 64, 100, 4, 4, 1, 0), "fprop_onednn_f32"},
      {Geometry2d(1, 7, 7, 512, 512, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 16, 16, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 16), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 1, 1, 1, 0, 8), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 4), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 1, 1, 1, 0, 4), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 2), "fprop_onednn_f32"},
  };
  const bool avx512 = __builtin_cpu_supports("avx512f");
  Selection s;
  for (auto [p, chosen] : cases) {
    for (int a = 0; a < 3; ++a) p.out[a] = p.pad_lo[a] > 0 ? p.in[a] : p.in[a] - p.filter[a] + 1;
    const std::string expected = avx512 ? chosen : "fprop_onednn_f32";
    for (const char* algorithm : {"auto", "native"}) {
      EXPECT(cpu::Select(p, algorithm, 2, &s).ok() && s.instance == expected,
             p.ToString() + ": " + s.instance);
    }
  }
  ConvProblem p = Geometry2d(4, 8, 8, 16, 16, 1, 1, 1, 0);
  p.out = p.in;
  EXPECT(cpu::Select(p, "native", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  EXPECT(s.xla_microseconds > 0 && s.xla_microseconds < s.microseconds, p.ToString());
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty() && s.xla_microseconds > 0 &&
             s.microseconds > s.xla_microseconds && s.refusals.size() == 1 &&
             s.refusals[0].reason.find("predicted 2.0 us, fprop_onednn_f32 2.9 us") == 0,
         s.refusals.empty() ? "" : s.refusals[0].reason);
  // Layers with few input channels whose output pixels take a multiple of 2 KB are left to XLA,
  // unless they have an epilogue.
  p = Geometry2d(1, 24, 24, 3, 512, 3, 3, 1, 1);
  p.out = p.in;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.epilogue.bias = true;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(4, 1, 4000, 1, 512, 1, 10, 5, 0);
  p.rank = 1, p.stride[1] = 1, p.out = {1, 1, 799};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p = Geometry2d(1, 224, 224, 3, 1024, 16, 16, 16, 0);  // long sums
  p.out = {1, 14, 14};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(4, 1, 3200, 2, 512, 1, 25, 1, 0);
  p.rank = 1, p.out = {1, 1, 3176};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.n = 1;  // 6.5 MB of output
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(1, 24, 24, 3, 576, 3, 3, 1, 1);
  p.out = p.in;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
}

// Weight gradients as matrix products: chosen where each of oneDNN's tasks would have few pixels,
// and exact for any number of tasks, which share channels and taps.
void CheckGemmWgrad(std::mt19937* random) {
  Selection s;
  auto chosen = [&](int64_t n, int64_t side, int64_t c, int64_t k, int64_t threads) {
    ConvProblem p = Geometry2d(n, side, side, c, k, 1, 1, 1, 0);
    p.out = p.in;
    p.op = Op::kWgrad;
    return cpu::Select(p, "auto", threads, &s).ok() ? s.instance : "";
  };
  EXPECT(chosen(4, 1, 512, 1000, 16) == "wgrad_gemm_f32", s.instance);
  EXPECT(chosen(32, 7, 512, 512, 16) == "wgrad_gemm_f32", s.instance);
  EXPECT(chosen(32, 7, 512, 512, 1) == "wgrad_onednn_f32", s.instance);
  EXPECT(chosen(4, 28, 64, 64, 16) == "wgrad_onednn_f32", s.instance);
  EXPECT(chosen(4, 1, 512, 16, 16) == "wgrad_onednn_f32", s.instance);

  ConvProblem row = Geometry2d(4, 1, 1000, 64, 64, 1, 9, 1, 0);
  row.rank = 1;
  row.out = row.in;
  row.pad_lo[2] = row.pad_hi[2] = 4;
  row.op = Op::kWgrad;
  EXPECT(cpu::Select(row, "auto", 8, &s).ok() && s.instance == "wgrad_gemm_f32" && s.slices == 8,
         s.instance + " in " + std::to_string(s.slices));

  ConvProblem grouped = Geometry2d(2, 5, 6, 70, 10, 3, 2, 1, 1);
  grouped.groups = 2, grouped.batch = 2;
  grouped.out = {1, 5, 7};
  ConvProblem few = Geometry2d(1, 1, 300, 3, 5, 1, 7, 1, 0);
  few.rank = 1;
  few.out = {1, 1, 294};
  row.n = 1, row.c = 130, row.in[2] = row.out[2] = 200;
  for (ConvProblem p : {row, grouped, few}) {
    p.op = Op::kWgrad;
    const Data data = MakeData(p, random);
    for (int64_t slices : {1, 2, 3, 7, 8, 11, 16, 64}) {
      std::shared_ptr<const cpu::Plan> plan;
      EXPECT(cpu::FindPlan(p.ToString(), "wgrad_gemm_f32", slices, &plan).ok(), p.ToString());
      s.instance = "wgrad_gemm_f32", s.slices = slices;
      s.workspace_bytes = plan->workspace_bytes;
      std::vector<char> out;
      EXPECT(RunInstance(p, s, data, &out).ok() && out == data.expected,
             p.ToString() + " in " + std::to_string(slices));
    }
  }
}

void CheckWorkspace(std::mt19937* random) {
  ConvProblem p = Geometry2d(2, 14, 14, 32, 64, 3, 3, 1, 1);
  p.out = p.in;
  p.op = Op::kWgrad;
  Data data = MakeData(p, random);
  Selection s;
  EXPECT(cpu::Select(p, "onednn", 2, &s).ok() && s.workspace_bytes > 0, p.ToString());
  std::vector<char> out(data.expected.size()), workspace(s.workspace_bytes + 4);
  // A program that another version compiled passes the workspace size of that version's plan.
  Status status = Run(p, s, data, out.data(), workspace.data(), s.workspace_bytes - 1);
  EXPECT(status.ok() && out == data.expected, "small workspace: " + status.message());
  std::fill(out.begin(), out.end(), 0);
  // The workspace needs no alignment.
  status = Run(p, s, data, out.data(), workspace.data() + 4, s.workspace_bytes);
  EXPECT(status.ok() && out == data.expected, "unaligned workspace: " + status.message());
}

// Calls that selection never writes: invalid slices, instances and keys.
void CheckCalls() {
  ConvProblem p = Geometry2d(2, 14, 14, 32, 64, 3, 3, 1, 1);
  p.out = p.in;
  std::shared_ptr<const cpu::Plan> plan;
  auto code = [&](const std::string& key, const char* instance, int64_t slices) {
    return cpu::FindPlan(key, instance, slices, &plan).code();
  };
  std::string key = p.ToString();
  EXPECT(code(key, "fprop_onednn_f32", 2) == StatusCode::kOk && plan != nullptr, key);
  EXPECT(cpu::ProblemOf(*plan).ToString() == key, key);
  EXPECT(code(key, "fprop_onednn_f32", 0) == StatusCode::kInvalidArgument, "no task");
  EXPECT(code(key, "no_such_instance", 1) == StatusCode::kInvalidArgument, "no instance");
  EXPECT(code("fprop", "fprop_onednn_f32", 1) == StatusCode::kInvalidArgument, "no key");
  EXPECT(code(key, "dgrad_onednn_f32", 1) == StatusCode::kUnimplemented && plan == nullptr, key);
}

// Several executions at once, with a cache so small that plans are evicted while in use.
void CheckConcurrency(std::mt19937* random) {
  cpu::SetPlanCapacity(2);
  struct Job {
    ConvProblem p;
    Selection s;
    Data data;
  };
  std::vector<Job> jobs;
  for (int64_t k : {16, 32, 48, 64}) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      Job job;
      job.p = Geometry2d(3, 12, 12, 32, k, 3, 3, 1, 1);
      job.p.out = job.p.in;
      job.p.op = op;
      job.data = MakeData(job.p, random);
      EXPECT(cpu::Select(job.p, "auto", 2, &job.s).ok(), job.p.ToString());
      jobs.push_back(std::move(job));
    }
  }
  std::vector<int> wrong(6, 0);
  RunOnThreads(6, [&](int64_t thread) {
    for (int i = 0; i < 40; ++i) {
      const Job& job = jobs[(thread * 5 + i) % jobs.size()];
      std::vector<char> out;
      Status status = RunInstance(job.p, job.s, job.data, &out);
      wrong[thread] += !status.ok() || out != job.data.expected;
    }
  });
  for (int count : wrong) EXPECT(count == 0, std::to_string(count) + " wrong concurrent results");
  EXPECT(cpu::PlanCount() <= 2, std::to_string(cpu::PlanCount()) + " plans");
  cpu::SetPlanCapacity(256);
}

bool TakesBrgemm(const ConvProblem& p) {
  Selection s;
  std::shared_ptr<const cpu::Plan> plan;
  EXPECT(cpu::Select(p, "onednn", 2, &s).ok() && !s.instance.empty(), p.ToString());
  EXPECT(cpu::FindPlan(p.ToString(), s.instance, s.slices, &plan).ok(), p.ToString());
  const bool may = s.instance.find("no_brgemm") == std::string::npos;
  const std::vector<cpu::ConvPrimitive>& made = plan->primitives.convolutions;
  const bool has = std::any_of(made.begin(), made.end(), [](const cpu::ConvPrimitive& each) {
    return cpu::UsesBrgemm(each.implementation);
  });
  EXPECT(may || !has, p.ToString() + " has brgemm kernels");
  return has;
}

// oneDNN never frees brgemm kernels, so the first problems up to a limit get them and keep them.
void CheckBrgemmProblems() {
  cpu::SetMaxBrgemmProblems(2);
  std::vector<bool> first, again;
  std::vector<ConvProblem> problems;
  for (int64_t k : {24, 40, 56, 72}) {
    problems.push_back(Geometry2d(2, 13, 13, 32, k, 3, 3, 1, 1));
    problems.back().out = problems.back().in;
  }
  for (const ConvProblem& p : problems) first.push_back(TakesBrgemm(p));
  for (const ConvProblem& p : problems) again.push_back(TakesBrgemm(p));
  const bool has = cpu::IsaHas(dnnl::cpu_isa::avx2);
  EXPECT((first == std::vector<bool>{has, has, false, false}), "the first two problems");
  EXPECT(first == again, "a problem that was met before");
  Selection s;
  EXPECT(
      cpu::Select(problems[3], "fprop_onednn_f32", 2, &s).ok() && s.instance == "fprop_onednn_f32",
      "an instance that is named");
  cpu::SetMaxBrgemmProblems(4096);
}

}  // namespace
}  // namespace jaxconv

int main() {
  using namespace jaxconv;
  std::mt19937 random(20240607);
  CheckSelect();
  CheckSmallProblems();
  CheckGemmWgrad(&random);
  CheckWorkspace(&random);
  CheckCalls();
  CheckBrgemmProblems();
  CheckConcurrency(&random);
  std::printf(failures == 0 ? "PASSED\n" : "FAILED: %d\n", failures);
  return failures != 0;
}
