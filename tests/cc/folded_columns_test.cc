// Which problems are folded; a kernel's plan is the faster of both forms for any number of slices.
#include "cuda/common/folded_columns.h"

#include <cstdio>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "core/conv_problem.h"
#include "cuda/common/gpu.h"
#include "cuda/registry.h"

namespace {

using jaxconv::ConvProblem;
using jaxconv::Expect;
using jaxconv::failures;
using jaxconv::Parse;

std::string Folded(const std::string& key) {
  ConvProblem folded;
  return jaxconv::FoldColumns(Parse(key), &folded) ? folded.ToString() : "";
}

void ExpectWhatIsFolded() {
  const std::string types = "bf16:bf16:bf16 default b1 ";
  for (const std::string op : {"fprop ", "dgrad ", "wgrad "}) {
    Expect(Folded(op + types + "n2 g1 c3 k16 i32x48 f4x4 o8x12 s4x4 l1x1 d1x1 p0_0x0_0") ==
               op + types + "n2 g1 c12 k16 i32x12 f4x1 o8x12 s4x1 l1x1 d1x1 p0_0x0_0",
           op + "of patches");
  }
  Expect(
      Folded("fprop " + types + "n2 g1 c3 k16 i33x48 f5x4 o31x12 s1x4 l1x1 d1x1 p1_1x0_0 krsc") ==
          "fprop " + types + "n2 g1 c12 k16 i33x12 f5x1 o31x12 s1x1 l1x1 d1x1 p1_1x0_0 krsc",
      "rows that overlap");
  Expect(Folded("fprop " + types + "n2 g1 c3 k16 i48 f16 o3 s16 l1 d1 p0_0") ==
             "fprop " + types + "n2 g1 c48 k16 i3 f1 o3 s1 l1 d1 p0_0",
         "rank 1");
  for (const std::string rest : {
           "n2 g1 c3 k16 i32x49 f4x4 o8x12 s4x4 l1x1 d1x1 p0_0x0_0",  // a pixel is left over
           "n2 g1 c3 k16 i32x48 f4x4 o8x12 s4x4 l1x1 d1x1 p0_0x1_0",  // padding
           "n2 g1 c3 k16 i32x48 f4x3 o8x12 s4x4 l1x1 d1x1 p0_0x0_0",  // gaps between the windows
           "n2 g1 c3 k16 i32x48 f4x1 o8x48 s4x1 l1x1 d1x1 p0_0x0_0",  // one column
           "n2 g2 c6 k16 i32x48 f4x4 o8x12 s4x4 l1x1 d1x1 p0_0x0_0",  // groups
       }) {
    Expect(Folded("fprop " + types + rest).empty(), rest + " is folded");
  }
}

std::string FoldedRows(const std::string& key) {
  ConvProblem folded;
  return jaxconv::FoldRows(Parse(key), &folded) ? folded.ToString() : "";
}

void ExpectWhichRowsAreFolded() {
  const std::string types = "bf16:bf16:bf16 default b1 ";
  for (const std::string op : {"fprop ", "dgrad ", "wgrad "}) {
    Expect(FoldedRows(op + types + "n2 g1 c12 k16 i32x12 f4x1 o8x12 s4x1 l1x1 d1x1 p0_0x0_0") ==
               op + types + "n16 g1 c12 k16 i4x12 f4x1 o1x12 s1x1 l1x1 d1x1 p0_0x0_0",
           op + "of patches");
  }
  Expect(
      FoldedRows("fprop " + types +
                 "n2 g1 c8 k16 i3x8x9 f1x2x3 o3x4x7 s1x2x1 l1x1x1 d1x1x1 p0_0x0_0x0_0") ==
          "fprop " + types + "n24 g1 c8 k16 i1x2x9 f1x2x3 o1x1x7 s1x1x1 l1x1x1 d1x1x1 p0_0x0_0x0_0",
      "behind a depth without windows");
  Expect(
      FoldedRows("fprop " + types +
                 "n2 g1 c8 k16 i4x8x9 f2x2x3 o2x4x7 s2x2x1 l1x1x1 d1x1x1 p0_0x0_0x0_0") ==
          "fprop " + types + "n4 g1 c8 k16 i2x8x9 f2x2x3 o1x4x7 s1x2x1 l1x1x1 d1x1x1 p0_0x0_0x0_0",
      "the depth alone");
  for (const std::string rest : {
           "n2 g1 c12 k16 i33x12 f4x1 o8x12 s4x1 l1x1 d1x1 p0_0x0_0",   // a row is left over
           "n2 g1 c12 k16 i30x12 f4x1 o8x12 s4x1 l1x1 d1x1 p2_0x0_0",   // padding
           "n2 g1 c12 k16 i30x12 f2x1 o8x12 s4x1 l1x1 d1x1 p0_0x0_0",   // gaps between the windows
           "n2 g1 c12 k16 i32x12 f1x1 o32x12 s1x1 l1x1 d1x1 p0_0x0_0",  // one row
           "n2 g1 c12 k16 i4x12 f4x1 o1x12 s4x1 l1x1 d1x1 p0_0x0_0",    // one window
       }) {
    Expect(FoldedRows("fprop " + types + rest).empty(), rest + " has folded rows");
  }
  // Folded rows make several images of one, but image_scale has one scale for each of n images.
  Expect(FoldedRows("fprop s8:s8:f32 default b1 n2 g1 c32 k32 i32x12 f4x1 o8x12 s4x1 l1x1 d1x1 "
                    "p0_0x0_0 image_scale")
             .empty(),
         "images with scales of their own");
}

// Selection predicts with the kernel's own number of slices; a call passes that number explicitly.
void ExpectTheSamePlanForAnySlices() {
  const jaxconv::Gpu gpu = jaxconv::Model("h200");
  int folded = 0;
  for (const std::string op : {"fprop ", "dgrad ", "wgrad "}) {
    for (const std::string shape :
         {"c3 k96 i224x224 f4x4 o56x56 s4x4", "c96 k192 i56x56 f2x2 o28x28 s2x2",
          "c3 k768 i224x224 f16x16 o14x14 s16x16"}) {
      const ConvProblem problem =
          Parse(op + "bf16:bf16:bf16 default b1 n64 g1 " + shape + " l1x1 d1x1 p0_0x0_0");
      for (const auto& kernel : jaxconv::Kernels()) {
        ConvProblem columns, rows;
        Expect(FoldColumns(problem, &columns) && FoldRows(columns, &rows), shape);
        jaxconv::Plan plan, again, plain, of_rows;
        if (kernel.op != problem.op || kernel.min_cc > 90 || kernel.max_cc < 90 ||
            !MakePlan(kernel, problem, gpu, 0, &plan).ok()) {
          continue;
        }
        Expect(MakePlan(kernel, problem, gpu, plan.slices, &again).ok() &&
                   again.workspace_bytes == plan.workspace_bytes &&
                   again.microseconds == plan.microseconds,
               std::string(kernel.name) + ": another plan for the slices it chose");
        const bool takes = kernel.plan(kernel, problem, gpu, 0, &plain).ok();
        Expect(!takes || plan.microseconds <= plain.microseconds,
               std::string(kernel.name) + ": slower than unfolded");
        Expect(!kernel.plan(kernel, rows, gpu, 0, &of_rows).ok() ||
                   plan.microseconds <= of_rows.microseconds,
               std::string(kernel.name) + ": slower than with folded rows");
        if (!takes || plan.microseconds < plain.microseconds) ++folded;
      }
    }
  }
  Expect(folded > 100, "instances that fold: " + std::to_string(folded));
}

}  // namespace

int main() {
  ExpectWhatIsFolded();
  ExpectWhichRowsAreFolded();
  ExpectTheSamePlanForAnySlices();
  std::printf("folded_columns_test: %d failures\n", failures);
  return failures > 0;
}
