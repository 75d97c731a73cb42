// The problems that igemm_wgmma refuses and why, the names of its instances, and the problems whose
// tiles are scheduled dynamically.
#include <cstdio>
#include <string>
#include <utility>

#include "cc/igemm_wgmma_plans.h"

namespace jaxconv::igemm_wgmma {
namespace {

void CheckRefusals() {
  ConvProblem problem;
  problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
  problem.c = 64;
  problem.k = 64;
  problem.in = problem.out = {1, 56, 56};
  const KernelDesc& kernel = KernelNamed(Op::kFprop, "bf16_128x128x64_cooperative");
  if (!Accepts(kernel, problem)) Fail(problem, "refused");
  auto refused = [&](const ConvProblem& changed, const char* why, int64_t slices = 1) {
    Plan plan;
    const Status status = PlanOf(kernel, changed, &plan, slices);
    if (status.ok() || status.message().find(why) == std::string::npos) {
      Fail(changed,
           std::string("expected a refusal with '") + why + "', got '" + status.message() + "'");
    }
  };
  ConvProblem odd = problem;
  odd.c = 60;
  refused(odd, "C/groups 60 is not a multiple of 8");
  ConvProblem thin = problem;
  thin.groups = 2;
  refused(thin, "C/groups 32 is not a multiple of 64");
  ConvProblem strided = problem;
  strided.stride[2] = 9;
  strided.out[2] = 7;
  refused(strided, "a stride of 9");
  ConvProblem wide = problem;
  wide.filter[2] = 3;
  wide.dilation[2] = 200;
  wide.pad_lo[2] = wide.pad_hi[2] = 200;
  refused(wide, "wider than TMA's fields");
  ConvProblem f32 = problem;
  f32.x_dtype = DType::kF32;
  refused(f32, "expected operands of type bf16");
  ConvProblem deep = problem;
  deep.c = 25 * 64;
  refused(deep, "slices: expected 1 to 6, got 7", 7);
  refused(deep, "6 slices of 25 k-blocks leave one empty", 6);
  // At the ends of a row, x meets zeros of dy. For infinite x their product is NaN.
  ConvProblem batched = problem;
  batched.op = Op::kWgrad;
  batched.filter[2] = 3;
  batched.pad_lo[2] = batched.pad_hi[2] = 1;
  const KernelDesc& wgrad_filter_row = KernelNamed(Op::kWgrad, "bf16_192x64x128_filter_row");
  if (!Accepts(wgrad_filter_row, batched)) Fail(batched, "refused in filter-row");
  batched.batch = 2;
  if (Accepts(wgrad_filter_row, batched)) Fail(batched, "batched filters accepted in filter-row");
  // The patches form stores vectors of 16-bit elements. Its columns are folded: a row is a pixel.
  ConvProblem patches = problem;
  patches.op = Op::kDgrad;
  patches.c = 16;
  patches.filter = {1, 4, 1};
  patches.stride[1] = 4;
  patches.in = {1, 56, 14};
  patches.out = {1, 14, 14};
  const KernelDesc& of_patches = KernelNamed(Op::kDgrad, "bf16_128x128x64_pingpong_patches");
  if (!Accepts(of_patches, patches)) Fail(patches, "refused as patches");
  patches.x_dtype = DType::kF32;
  if (Accepts(of_patches, patches)) Fail(patches, "float32 results accepted as patches");
  const KernelDesc& tf32 = KernelNamed(Op::kFprop, "f32_128x256");
  f32.w_dtype = f32.y_dtype = DType::kF32;
  if (!Accepts(tf32, f32)) Fail(f32, "refused");
  for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
    f32.precision = precision;
    if (Accepts(tf32, f32)) Fail(f32, "accepted, though TF32 is too coarse");
  }
  ConvProblem krsc = problem;
  krsc.filter_layout = FilterLayout::kKrsc;
  for (Op op : {Op::kFprop, Op::kDgrad}) {
    krsc.op = op;
    for (const KernelDesc& any : AllKernels()) {
      if (any.op != op || any.dtype != DType::kBF16) continue;
      // An instance takes the problem with either layout or with none.
      ConvProblem rsck = krsc;
      rsck.filter_layout = FilterLayout::kRsck;
      if (Accepts(any, krsc) != Accepts(any, rsck)) Fail(krsc, any.name);
    }
  }
  krsc.op = Op::kFprop;
  krsc.batch = 2;
  refused(krsc, "krsc of one group and one batch only");
  krsc.batch = 1;
  krsc.c = 48;
  refused(krsc, "C/groups 48 of a filter stored as krsc is not a multiple of 32");
  krsc.c = 64;
  krsc.op = Op::kDgrad;
  krsc.filter[2] = 3;
  krsc.pad_lo[2] = krsc.pad_hi[2] = 1;
  for (auto [k, taken] : {std::pair{64, true}, {40, true}, {32, false}}) {
    krsc.k = k;
    if (Accepts(KernelNamed(Op::kDgrad, "bf16_128x128"), krsc) != taken) {
      Fail(krsc, "K where the last k-block's rows are few");
    }
  }
  ConvProblem large = problem;
  large.k = 128;
  large.filter[2] = 3;
  large.pad_lo[2] = large.pad_hi[2] = 1;
  if (Accepts(KernelNamed(Op::kFprop, "_swap_ab_weight_stationary"), large)) {
    Fail(large, "a filter too large to stay was accepted");
  }
}

// An instance's name contains its tile and its k-block.
void CheckNames() {
  for (const KernelDesc& kernel : AllKernels()) {
    const auto& instance = *static_cast<const Instance*>(kernel.instance);
    const bool wgrad_filter_row = kernel.op == Op::kWgrad && instance.Is(kFilterRow);
    const int64_t k_block =
        wgrad_filter_row ? WgradRowPixels(kernel.dtype) : KBlockElements(kernel.dtype);
    const std::string start = std::string(Name(kernel.op)) + "_igemm_wgmma_" + Name(kernel.dtype) +
                              "_" + std::to_string(instance.tile_m) + "x" +
                              std::to_string(instance.tile_n) + "x" + std::to_string(k_block) + "_";
    if (std::string(kernel.name).compare(0, start.size(), start) != 0 || kernel.min_cc != 90 ||
        kernel.max_cc != 90) {
      std::printf("FAIL %s: expected %s..., of sm_90 alone\n", kernel.name, start.c_str());
      ++failures;
    }
  }
}

// Tiles are scheduled dynamically, by counters that are reset before the launch, where memory
// bandwidth is the limit and there are many tiles.
void CheckDynamic() {
  for (const char* part : {"bf16_64x256x64_pointwise_c128", "bf16_256x64x64_pointwise_swap_ab",
                           "bf16_128x128x64_pointwise"}) {
    for (const bool many : {false, true}) {
      for (const int64_t channels : {64, 128, 1024}) {
        ConvProblem problem;
        problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
        problem.n = many ? 256 : 64;
        problem.c = problem.k = channels;
        problem.in = problem.out = {1, 56, 56};
        Plan plan;
        if (!PlanOf(KernelNamed(Op::kFprop, part), problem, &plan).ok()) continue;
        // Dynamic scheduling needs many bytes, few operations a byte, and tiles of 32 KB or more.
        const auto& instance =
            *static_cast<const Instance*>(KernelNamed(Op::kFprop, part).instance);
        const int64_t tile_bytes =
            instance.tile_m * 4 * channels / CeilDiv(channels, instance.tile_n);
        const bool dynamic = 2 * problem.x_elements() * 2 >= 200'000'000 && channels < 200 &&
                             tile_bytes >= 32 * 1024;
        if (dynamic != (plan.workspace_bytes > 0) ||
            dynamic != plan.As<LaunchParams>().resets_counters) {
          Fail(problem, std::string(part) +
                            ": scheduled dynamically where it should not be, or "
                            "not where it should");
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxconv::igemm_wgmma

int main() {
  using namespace jaxconv::igemm_wgmma;
  CheckNames();
  CheckRefusals();
  CheckDynamic();
  std::printf("igemm_wgmma_refusals_test: %d failures\n", failures);
  return failures != 0;
}
