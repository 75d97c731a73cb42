// Kernel selection on faked devices, without CUDA: this file supplies the launches.
#include "cuda/select/select.h"

#include <cstdio>
#include <string>

#include "cuda/kernels/igemm_simt.h"
#include "cuda/select/kernel_table.h"

namespace jaxconv {

int launches = 0;

template <Op kOp, DType kType>
Status LaunchIgemmSimt(SimtTileId, const IgemmParams&, int64_t, void*) {
  ++launches;
  return {};
}
#define JAXCONV_STUB(op)                                                                    \
  template Status LaunchIgemmSimt<op, DType::kF32>(SimtTileId, const IgemmParams&, int64_t, \
                                                   void*);                                  \
  template Status LaunchIgemmSimt<op, DType::kF16>(SimtTileId, const IgemmParams&, int64_t, \
                                                   void*);                                  \
  template Status LaunchIgemmSimt<op, DType::kBF16>(SimtTileId, const IgemmParams&, int64_t, void*)
JAXCONV_STUB(Op::kFprop);
JAXCONV_STUB(Op::kDgrad);
JAXCONV_STUB(Op::kWgrad);
#undef JAXCONV_STUB

Status LaunchSplitkReduce(const float*, int64_t, int64_t, void*, DType, void*) {
  ++launches;
  return {};
}

namespace {

int failures = 0;

void Expect(bool condition, const std::string& what) {
  if (condition) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

ConvProblem Parse(const std::string& line) {
  ConvProblem problem;
  Status status = ConvProblem::Parse(line, &problem);
  Expect(status.ok(), line + ": " + status.message());
  return problem;
}

// A square 2-D layer with padding filter / 2.
ConvProblem Layer(Op op, int n, int size, int c, int k, int filter, int stride = 1) {
  ConvProblem problem;
  problem.op = op;
  problem.n = n;
  problem.c = c;
  problem.k = k;
  for (int a = 1; a < 3; ++a) {
    problem.in[a] = size;
    problem.filter[a] = filter;
    problem.stride[a] = stride;
    problem.pad_lo[a] = problem.pad_hi[a] = filter / 2;
    problem.out[a] = OutputExtent(size, filter, stride, 1, 1, filter / 2, filter / 2);
  }
  return problem;
}

Selection SelectOk(const ConvProblem& problem, const DeviceInfo& device,
                   const std::string& algorithm = "auto") {
  Selection selection;
  Status status = Select(problem, device, algorithm, &selection);
  Expect(status.ok(), problem.ToString() + ": " + status.message());
  return selection;
}

void ExpectChoice(const ConvProblem& problem, const std::string& instance) {
  Selection selection = SelectOk(problem, PortableTarget(9, 0));
  Expect(selection.instance == instance,
         problem.ToString() + ": expected " + instance + ", got " + selection.instance);
}

void TestPinnedChoices() {
  ExpectChoice(Layer(Op::kFprop, 64, 56, 64, 64, 3), "fprop_igemm_simt_f32_128x64x8_vec_wide");
  ExpectChoice(Layer(Op::kDgrad, 64, 56, 64, 64, 3), "dgrad_igemm_simt_f32_128x64x8_vec_wide");
  ExpectChoice(Layer(Op::kWgrad, 64, 56, 64, 64, 3), "wgrad_igemm_simt_f32_64x64x8_vec");
  ExpectChoice(Layer(Op::kFprop, 64, 28, 128, 128, 3), "fprop_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kDgrad, 64, 28, 128, 128, 3), "dgrad_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kWgrad, 64, 28, 128, 128, 3), "wgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kFprop, 64, 14, 256, 256, 3), "fprop_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kDgrad, 64, 14, 256, 256, 3), "dgrad_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kWgrad, 64, 14, 256, 256, 3), "wgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kFprop, 64, 56, 64, 256, 1), "fprop_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kDgrad, 64, 56, 64, 256, 1), "dgrad_igemm_simt_f32_128x64x8_vec_wide");
  ExpectChoice(Layer(Op::kWgrad, 64, 56, 64, 256, 1), "wgrad_igemm_simt_f32_64x64x8_vec");
  ExpectChoice(Layer(Op::kFprop, 64, 224, 3, 64, 7, 2), "fprop_igemm_simt_f32_128x64x8_scalar");
  ExpectChoice(Layer(Op::kDgrad, 64, 224, 3, 64, 7, 2), "dgrad_igemm_simt_f32_128x32x8_scalar");
  ExpectChoice(Layer(Op::kWgrad, 64, 224, 3, 64, 7, 2), "wgrad_igemm_simt_f32_128x64x8_scalar");
  ExpectChoice(Layer(Op::kFprop, 32, 112, 128, 128, 3), "fprop_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kDgrad, 32, 112, 128, 128, 3), "dgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kWgrad, 32, 112, 128, 128, 3), "wgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kFprop, 32, 28, 512, 512, 3), "fprop_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kDgrad, 32, 28, 512, 512, 3), "dgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kWgrad, 32, 28, 512, 512, 3), "wgrad_igemm_simt_f32_128x128x8_vec_wide");
  ExpectChoice(Layer(Op::kFprop, 4, 64, 320, 320, 3), "fprop_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kDgrad, 4, 64, 320, 320, 3), "dgrad_igemm_simt_f32_128x64x8_vec");
  ExpectChoice(Layer(Op::kWgrad, 4, 64, 320, 320, 3), "wgrad_igemm_simt_f32_64x64x8_vec");
}

void TestWorkspace() {
  const DeviceInfo device = PortableTarget(9, 0);
  for (Op op : {Op::kFprop, Op::kDgrad}) {
    Selection selection = SelectOk(Layer(op, 64, 28, 128, 128, 3), device);
    Expect(selection.workspace_bytes == 0 && selection.slices == 1,
           "fprop and dgrad need no workspace");
  }
  for (int c : {64, 256, 512, 1024, 2048}) {
    ConvProblem problem = Layer(Op::kWgrad, 64, 14, c, c, 3);
    Selection selection = SelectOk(problem, device);
    Expect(selection.workspace_bytes <= 64'000'000, "wgrad workspace of at most 64 MB");
    Expect(selection.workspace_bytes ==
               (selection.slices > 1 ? selection.slices * problem.w_elements() * 4 : 0),
           "wgrad workspace is slices * dw");
  }
  Expect(SelectOk(Layer(Op::kWgrad, 64, 56, 64, 64, 3), device).slices > 16,
         "a small dw over many pixels is split");
}

void TestAlgorithms() {
  const DeviceInfo device = PortableTarget(8, 0);
  const ConvProblem layer = Layer(Op::kFprop, 8, 28, 64, 64, 3);
  Expect(!SelectOk(layer, device, "igemm_simt").instance.empty(), "a family is an algorithm");
  const std::string name = "fprop_igemm_simt_f32_64x64x8_vec";
  Expect(SelectOk(layer, device, name).instance == name, "an instance is an algorithm");
  Selection other = SelectOk(Layer(Op::kDgrad, 8, 28, 64, 64, 3), device, name);
  Expect(other.instance.empty() && other.refusals.size() == 1,
         "an instance of another operation refuses");
  Selection odd = SelectOk(Layer(Op::kFprop, 8, 28, 3, 64, 3), device, name);
  Expect(odd.instance.empty() && odd.refusals.size() == 1 &&
             odd.refusals[0].reason == "C/groups 3 is not a multiple of 4",
         "C = 3 is refused with its reason");
  Selection selection;
  Status unknown = Select(layer, device, "magic", &selection);
  Expect(unknown.code() == StatusCode::kInvalidArgument &&
             unknown.message().find("igemm_simt") != std::string::npos,
         "an unknown algorithm lists the families");
  Expect(SelectOk(layer, PortableTarget(7, 5)).instance.empty(), "sm_75 is refused");
}

// The kernel of last resort takes everything.
void TestLastResort() {
  const char* lines[] = {
      "fprop f32:f32:f32 default b1 n1 g1 c1 k1 i1 f1 o1 s1 l1 d1 p0_0",
      "dgrad bf16:bf16:bf16 default b3 n2 g5 c5 k10 i9x7 f3x2 o4x5 s2x1 l1x1 d1x2 p0_0x0_0",
      "wgrad f16:f32:f16 default b1 n2 g1 c3 k7 i5x5x5 f2x2x2 o8x8x8 s1x1x1 l2x2x2 d1x1x1 "
      "p0_0x0_0x0_0",
      "fprop f16:f16:f32 default b2 n1 g4 c4 k4 i8x8 f3x3 o4x4 s1x1 l1x1 d1x1 p-1_-1x-1_-1",
  };
  for (const char* line : lines) {
    Selection selection = SelectOk(Parse(line), PortableTarget(9, 0));
    Expect(!selection.instance.empty(), line);
  }
  ConvProblem mixed = Layer(Op::kFprop, 1, 8, 8, 8, 3);
  mixed.x_dtype = DType::kF16;
  Selection selection = SelectOk(mixed, PortableTarget(9, 0));
  Expect(selection.instance.empty() && !selection.refusals.empty(),
         "unequal operand types are refused");
}

void TestLaunchChecks() {
  const ConvProblem problem = Layer(Op::kWgrad, 64, 56, 64, 64, 3);
  Selection selection = SelectOk(problem, PortableTarget(9, 0));
  const KernelRow* row = FindKernel(selection.instance);
  Expect(row != nullptr, "the selected instance is in the table");
  if (row == nullptr) return;
  KernelArgs args;
  args.slices = selection.slices;
  Expect(!row->launch(problem, args).ok() && launches == 0, "a missing workspace is refused");
  alignas(16) char memory[16];
  args.lhs = args.rhs = args.out = args.workspace = memory;
  args.workspace_bytes = selection.workspace_bytes;
  Expect(row->launch(problem, args).ok() && launches == 2, "split-K launches two kernels");
  args.lhs = memory + 4;
  Expect(!row->launch(problem, args).ok(), "an unaligned operand is refused");
  Expect(FindKernel("nothing") == nullptr, "an unknown name finds nothing");
}

void TestDeterminism() {
  const ConvProblem problem = Layer(Op::kWgrad, 32, 28, 512, 512, 3);
  Selection first = SelectOk(problem, PortableTarget(8, 0));
  Selection second = SelectOk(problem, PortableTarget(8, 0));
  Expect(first.instance == second.instance && first.slices == second.slices,
         "the same problem and device give the same plan");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestPinnedChoices();
  jaxconv::TestWorkspace();
  jaxconv::TestAlgorithms();
  jaxconv::TestLastResort();
  jaxconv::TestLaunchChecks();
  jaxconv::TestDeterminism();
  std::printf("select_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
