// Kernel selection and planning on modelled GPUs, without CUDA.
#include "cuda/select.h"

#include <cstdio>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/common/folded_columns.h"
#include "cuda/registry.h"

namespace jaxconv {
namespace {

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

Selection SelectOk(const ConvProblem& problem, const Gpu& gpu,
                   const std::string& algorithm = "native") {
  Selection selection;
  Status status = Select(problem, gpu, algorithm, &selection);
  Expect(status.ok(), problem.ToString() + ": " + status.message());
  return selection;
}

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

bool Takes(const KernelDesc& kernel, const ConvProblem& problem) {
  Plan plan;
  return kernel.op == problem.op && kernel.plan(kernel, problem, Model("h200"), 0, &plan).ok();
}

// Channel counts that are not multiples of 8: few_channels and padded instances refuse float32
// results and groups; padded instances also refuse channel counts that need no padding.
void TestPaddedChannels() {
  for (const char* line :
       {"fprop bf16:bf16:f32 default b1 n1 g1 c3 k64 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1",
        "fprop bf16:bf16:bf16 default b1 n1 g3 c3 k24 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1"}) {
    for (const KernelDesc& kernel : Kernels()) {
      const bool narrow = Contains(kernel.name, "few_channels") || Contains(kernel.name, "_padded");
      Expect(!narrow || !Takes(kernel, Parse(line)), std::string(kernel.name) + " refuses " + line);
    }
  }
  // A PADDED line names an existing tile. If the tile were renamed, its padded instance would
  // vanish silently.
  for (const char* name : {"fprop_igemm_wgmma_bf16_128x256x64_cooperative_padded",
                           "dgrad_igemm_wgmma_f16_256x128x64_cooperative_padded",
                           "wgrad_igemm_wgmma_bf16_192x128x64_cooperative_padded",
                           "fprop_igemm_wgmma_f16_128x64x64_pingpong_padded",
                           "dgrad_igemm_wgmma_bf16_128x128x64_pingpong_padded",
                           "fprop_igemm_wgmma_bf16_256x64x64_swap_ab_padded",
                           "dgrad_igemm_wgmma_f16_256x64x64_swap_ab_filter_row_padded",
                           "fprop_igemm_wgmma_bf16_128x64x64_swap_ab_weight_stationary_padded",
                           "wgrad_igemm_wgmma_f16_192x64x128_filter_row_padded",
                           "wgrad_igemm_wmma_f16_128x128x64_3stage_padded",
                           "dgrad_igemm_wmma_bf16_256x16x64_3stage_padded"}) {
    Expect(FindKernel(name) != nullptr, std::string(name) + " is in the table");
  }
  const KernelDesc* padded = FindKernel("fprop_igemm_wmma_bf16_128x64x64_3stage_padded");
  Expect(padded != nullptr, "the padded rows are in the table");
  if (padded == nullptr) return;
  const auto layer = [](int c, int k) {
    return Parse("fprop bf16:bf16:bf16 default b1 n2 g1 c" + std::to_string(c) + " k" +
                 std::to_string(k) + " i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1");
  };
  Expect(!Takes(*padded, layer(64, 64)), "64 channels need no padding");
  // The copies of x and w have 48 input channels, those of w and y 80 output channels; each takes
  // whole KB.
  Plan plan;
  Expect(padded->plan(*padded, layer(36, 66), Model("h200"), 1, &plan).ok() &&
             plan.workspace_bytes == 12288 + 69632 + 20480,
         "the workspace holds the padded tensors");
}

// Instances with the fused epilogue take only problems with an epilogue; other instances take none.
void TestEpilogues() {
  const Gpu h200 = Model("h200");
  int fused_instances = 0;
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* layer : {"n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
                              "n64 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0"}) {
      const std::string plain =
          std::string("fprop ") + dtype + ":" + dtype + ":" + dtype + " default b1 " + layer;
      const ConvProblem fused = Parse(plain + " scale bias residual relu");
      for (const KernelDesc& kernel : Kernels()) {
        const std::string name = kernel.name;
        const bool ends = name.size() > 6 && name.substr(name.size() - 6) == "_fused";
        Expect(kernel.fused == ends, std::string(kernel.name) + " is named for its epilogue");
        Expect(!Takes(kernel, kernel.fused ? Parse(plain) : fused),
               std::string(kernel.name) + " refuses " + plain);
        fused_instances += kernel.fused && Takes(kernel, fused);
      }
      const Selection chosen = SelectOk(fused, h200), of_plain = SelectOk(Parse(plain), h200);
      Expect(Contains(chosen.instance, "_fused"), chosen.instance + " has an epilogue");
      Expect(!Contains(of_plain.instance, "_fused"), of_plain.instance + " has none");
      Expect(chosen.microseconds > of_plain.microseconds, "the residual takes time");
      Expect(chosen.xla_microseconds > of_plain.xla_microseconds, "so does XLA's second kernel");
      Expect(SelectOk(Parse(plain + " relu pre"), h200).instance != "", plain + " relu pre");
      const Selection counted = SelectOk(Parse(plain + " relu statistics"), h200);
      Expect(counted.instance.empty() && !counted.refusals.empty() &&
                 Contains(counted.refusals[0].reason, "statistics"),
             "no kernel has statistics behind terms, and says so");
      const ConvProblem sums = Parse(plain + " statistics");
      const Selection of_sums = SelectOk(sums, h200);
      if (dtype == std::string("f32")) {
        Expect(of_sums.instance.empty(), "16-bit results have statistics");
        continue;
      }
      Expect(Contains(of_sums.instance, "igemm_wgmma") && of_sums.slices == 1,
             of_sums.instance + " has statistics of whole sums");
      const double more = of_sums.microseconds - of_plain.microseconds;
      const double xla = of_sums.xla_microseconds - of_plain.xla_microseconds;
      Expect(more > 1 && more < xla + 3, "they take less than a pass and a launch of XLA's");
      Plan plan;
      Expect(!MakePlan(*FindKernel(of_sums.instance), sums, h200, 2, &plan).ok(),
             "slices are refused");
      Expect(MakePlan(*FindKernel(of_sums.instance), sums, h200, 0, &plan).ok() &&
                 plan.workspace_bytes < sums.y_elements() / 10,
             "the sums of several tiles share a slot");
    }
  }
  Expect(fused_instances > 50, "fused instances take these layers");
}

// Measured on an H200: a clamping epilogue costs almost nothing; gelu takes a loop over the results.
void TestEpilogueCosts() {
  const Gpu h200 = Model("h200");
  auto added = [&](const std::string& layer, const std::string& epilogue) {
    const std::string plain = "fprop bf16:bf16:bf16 default b1 " + layer;
    return SelectOk(Parse(plain + " " + epilogue), h200).microseconds -
           SelectOk(Parse(plain), h200).microseconds;
  };
  const std::string pointwise = "n64 g1 c256 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0";
  const std::string dense = "n256 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1";
  Expect(added(pointwise, "scale bias relu") < 4, "a cheap one");
  Expect(added(dense, "scale bias relu") < 4, "another");
  Expect(added(dense, "scale bias gelu") > 6, "one in a loop");
}

// Filters stored as krsc run on the same kernels as rsck if these read both layouts, and on no
// others.
void TestFilterLayouts() {
  const Gpu h200 = Model("h200");
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (Op op : {Op::kFprop, Op::kDgrad}) {
      for (const ConvProblem& layer :
           {Layer(op, 64, 56, 64, 64, 3), Layer(op, 64, 56, 64, 256, 1),
            Layer(op, 1, 7, 512, 512, 3), Layer(op, 64, 28, 128, 128, 3),
            Layer(op, 64, 56, 256, 512, 1, 2), Layer(op, 32, 56, 36, 64, 3),
            Layer(op, 64, 224, 3, 64, 7, 2)}) {
        ConvProblem rsck = layer;
        rsck.x_dtype = rsck.w_dtype = rsck.y_dtype = dtype;
        ConvProblem krsc = rsck;
        krsc.filter_layout = FilterLayout::kKrsc;
        for (const KernelDesc& kernel : Kernels()) {
          if (!Takes(kernel, krsc)) continue;
          const std::string name = kernel.name;
          Expect(Contains(name, "igemm_wgmma") || Contains(name, "igemm_wmma") ||
                     Contains(name, "winograd"),
                 name + " takes " + krsc.ToString());
          Expect(Takes(kernel, rsck), name + " refuses " + rsck.ToString());
        }
        if (dtype == DType::kF32 || rsck.c < 64) continue;
        // krsc runs the other operation's kernel; only dgrad's own handles residue classes without
        // taps.
        const bool read = op == Op::kFprop || rsck.taps() > 1 || rsck.stride[2] == 1;
        const std::string choice = SelectOk(rsck, h200).instance;
        Expect((SelectOk(krsc, h200, choice).instance == choice) == read,
               choice + (read ? " takes " : " refuses ") + krsc.ToString());
      }
    }
  }
  auto taken = [](Op op, int filter, DType dtype, const Gpu& gpu, const char* family) {
    ConvProblem krsc = Layer(op, 64, 56, 64, 256, filter);
    krsc.x_dtype = krsc.w_dtype = krsc.y_dtype = dtype;
    krsc.filter_layout = FilterLayout::kKrsc;
    const Selection selection = SelectOk(krsc, gpu, family);
    Expect(selection.workspace_bytes == 0, "no copy of the filter for " + krsc.ToString());
    return !selection.instance.empty();
  };
  const Gpu a100 = Model("a100");
  Expect(taken(Op::kFprop, 3, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: fprop");
  Expect(taken(Op::kDgrad, 1, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: dgrad of one tap");
  Expect(!taken(Op::kDgrad, 3, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: no other dgrad");
  // The wgmma of TF32 reads operands along the reduction (K-major) only.
  Expect(taken(Op::kFprop, 3, DType::kF32, h200, "igemm_wgmma"), "TF32: fprop");
  Expect(!taken(Op::kDgrad, 3, DType::kF32, h200, "igemm_wgmma"), "TF32: no dgrad");
}

// A model with Hopper's rates, but a compute capability that has no wgmma.
Gpu WithoutWgmma() {
  Gpu gpu = Model("h200");
  gpu.cc_minor = 1;
  return gpu;
}

// wgmma exists on sm_90 only.
void TestArchitectures() {
  const ConvProblem problem = Parse(
      "fprop bf16:bf16:bf16 default b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 "
      "p1_1x1_1");
  for (const char* target : {"a100", "b200"}) {
    const std::string name = SelectOk(problem, Model(target)).instance;
    Expect(!name.empty() && !Contains(name, "wgmma"), name + " on " + target);
  }
  const Selection elsewhere = SelectOk(problem, Model("b200"), "igemm_wgmma");
  Expect(
      elsewhere.instance.empty() && !elsewhere.refusals.empty() &&
          elsewhere.refusals[0].reason == "needs compute capability 90 exactly, the device has 100",
      "another architecture is refused with its reason");
}

// With few tiles, the CTAs of a cluster share a tile and need no workspace.
void TestClusters() {
  const Selection selection = SelectOk(
      Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c512 k512 i7x7 f3x3 o7x7 s1x1 l1x1 d1x1 "
            "p1_1x1_1"),
      Model("h200"));
  Expect(Contains(selection.instance, "_cluster") && selection.slices == 8 &&
             selection.workspace_bytes == 0,
         "a cluster of eight CTAs, got " + selection.instance);
}

// Float32 above precision "default" is computed by FMA or as three TF32 products. At "default" it
// is computed in TF32 unless the instance's name says otherwise.
void TestPrecision() {
  for (const char* target : {"a100", "h200"}) {
    const Gpu gpu = Model(target);
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      for (int channels : {8, 512}) {
        ConvProblem problem = Layer(op, 32, 28, channels, channels, 3);
        for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
          problem.precision = precision;
          for (const KernelDesc& kernel : Kernels()) {
            if (kernel.op != op || kernel.dtype != DType::kF32 || kernel.fused) continue;
            const bool tf32 = !kernel.three_tf32 && (Contains(kernel.family, "igemm_wmma") ||
                                                     Contains(kernel.family, "igemm_wgmma") ||
                                                     Contains(kernel.family, "few_channels"));
            Expect(!tf32 || SelectOk(problem, gpu, kernel.name).instance.empty(),
                   std::string(kernel.name) + " multiplies in TF32");
          }
        }
        const std::string three = SelectOk(problem, gpu).instance;
        if (channels == 512) {
          Expect(Contains(three, "_3xtf32"), three + " at HIGHEST");
          Expect(FindKernel(three)->three_tf32, three + " is named so");
        }
        for (const char* algorithm : {"native", "igemm_wmma"}) {
          problem.precision = Precision::kDefault;
          const std::string one = SelectOk(problem, gpu, algorithm).instance;
          Expect(!one.empty() && !Contains(one, "_3xtf32"), one + " at DEFAULT");
        }
        if (Contains(three, "_3xtf32")) {
          Expect(SelectOk(problem, gpu, three).instance == three, three + " by name");
        }
      }
    }
  }
}

void TestTensorCoreRefusals() {
  const Gpu gpu = WithoutWgmma();
  ConvProblem layer = Layer(Op::kFprop, 8, 28, 64, 64, 3);
  auto family = [&](const ConvProblem& problem) {
    const std::string name = SelectOk(problem, gpu).instance;
    return name.find("igemm_wmma") != std::string::npos;
  };
  Expect(family(layer), "float32 at DEFAULT goes to TF32");
  for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
    layer.precision = precision;
    Expect(Contains(SelectOk(layer, gpu).instance, "_3xtf32"),
           "float32 above DEFAULT goes to three TF32 products");
  }
  // The filter's extents need more bits than a pixel's mask has.
  Expect(!family(Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c64 k64 i128 f40 o89 s1 l1 d1 p0_0")),
         "40 taps on one axis are refused");
  Expect(!family(Parse("wgrad bf16:bf16:bf16 default b1 n2 g1 c16 k16 i8x8 f3x3 o13x13 s1x1 l2x2 "
                       "d1x1 p0_0x0_0")),
         "wgrad with lhs_dilation is refused");
  // Few tiles with a long reduction use split-K, also in fprop.
  const Selection deep =
      SelectOk(Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c2048 k256 i7x7 f3x3 o7x7 s1x1 l1x1 "
                     "d1x1 p1_1x1_1"),
               gpu);
  Expect(deep.slices > 1 && deep.workspace_bytes == deep.slices * 7 * 7 * 256 * 4,
         "few tiles and a long reduction are split");
  // An instance that needs more shared memory than the device has is never selected.
  Gpu small = Model("sm_86");
  const Selection fits =
      SelectOk(Parse("fprop bf16:bf16:bf16 default b1 n32 g1 c512 k512 i28x28 f3x3 "
                     "o28x28 s1x1 l1x1 d1x1 p1_1x1_1"),
               small);
  Expect(fits.instance.find("128x256") == std::string::npos, "99 KB do not hold 128x256");
}

// Reasons of instances for groups, which selection seldom reports: other instances take the problem.
void TestRefusalsOfGroups() {
  constexpr const char* kToeplitz = "fprop_depthwise_bf16_8ch_toeplitz_33_wgmma";
  constexpr const char* kGather = "fprop_block_diagonal_bf16_16ch_256px";
  constexpr const char* kWgrad = "wgrad_block_diagonal_bf16_16ch_3x3";
  const struct {
    const char *instance, *key, *reason;
  } rows[] = {
      {kToeplitz,
       "fprop bf16:bf16:bf16 default b1 n1 g12 c12 k12 i33x33 f5x5 o33x33 s1x1 l1x1 d1x1 p2_2x2_2",
       "expected K = C in multiples of 8, got K 12 and C 12"},
      {kToeplitz,
       "fprop bf16:bf16:bf16 default b1 n1 g16 c16 k16 i2x33x33 f1x5x5 o2x33x33 s1x1x1 l1x1x1 "
       "d1x1x1 p0_0x2_2x2_2",
       "expected tensors without a depth"},
      {kToeplitz,
       "fprop bf16:bf16:f32 default b1 n1 g16 c16 k16 i33x33 f5x5 o33x33 s1x1 l1x1 d1x1 p2_2x2_2",
       "stores results of the operands' type"},
      {kToeplitz,
       "fprop bf16:bf16:bf16 default b1 n1 g16 c16 k16 i9x9 f5x5 o17x17 s1x1 l2x2 d1x1 p2_2x2_2",
       "expected inputs without dilation"},
      {kToeplitz,
       "fprop bf16:bf16:bf16 default b1 n1 g16 c16 k16 i33x33 f5x41 o33x33 s1x1 l1x1 d1x1 "
       "p2_2x20_20",
       "columns, got 5x41"},
      {kToeplitz,
       "fprop bf16:bf16:bf16 default b1 n1 g16 c16 k16 i33x33 f5x5 o33x29 s1x1 l1x1 d1x1 p2_2x-1_1",
       "columns on either side of a pixel, got -1 and 5"},
      {kGather,
       "fprop bf16:bf16:bf16 default b1 n1 g4 c16 k32 i9x9 f3x3 o9x9 s1x1 l1x1 d1x1 p1_1x1_1",
       "expected as many output as input channels in a group, got 8 and 4"},
      {kGather,
       "fprop bf16:bf16:bf16 default b1 n1 g2 c64 k64 i9x9 f3x3 o9x9 s1x1 l1x1 d1x1 p1_1x1_1",
       "expected groups of 2 or more channels that divide 16, got 32"},
      {kGather,
       "fprop bf16:bf16:bf16 default b1 n1 g3 c12 k12 i9x9 f3x3 o9x9 s1x1 l1x1 d1x1 p1_1x1_1",
       "expected channels in multiples of 8, got 12"},
      {kWgrad,
       "wgrad bf16:bf16:bf16 default b1 n1 g4 c16 k16 i9x9 f5x5 o9x9 s1x1 l1x1 d1x1 p2_2x2_2",
       "expected a filter of 3x3, got 5x5"},
  };
  for (const auto& row : rows) {
    const KernelDesc* const kernel = FindKernel(row.instance);
    Plan plan;
    const Status status = kernel == nullptr
                              ? Status()
                              : kernel->plan(*kernel, Parse(row.key), Model("h200"), 0, &plan);
    Expect(Contains(status.message(), row.reason),
           std::string(row.instance) + " on " + row.key + ": " + status.message());
  }
}

void TestWorkspace() {
  const Gpu gpu = Model("h200");
  for (Op op : {Op::kFprop, Op::kDgrad}) {
    ConvProblem problem = Layer(op, 64, 28, 128, 128, 3);
    Selection selection = SelectOk(problem, gpu);
    Expect(selection.slices == 1 &&
               selection.workspace_bytes == (op == Op::kFprop ? problem.w_elements() * 4 : 0),
           "in TF32 fprop transposes the filter, and dgrad needs no workspace");
    problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
    selection = SelectOk(problem, gpu);
    Expect(selection.workspace_bytes == 0 && selection.slices == 1,
           "fprop and dgrad need no workspace");
  }
  // The workspace holds the transposed filter and, after it, the partial results.
  const ConvProblem deep = Layer(Op::kFprop, 1, 7, 2048, 256, 3);
  const Selection split = SelectOk(deep, gpu, "fprop_igemm_wgmma_f32_128x128x32_pingpong");
  Expect(split.slices > 1 &&
             split.workspace_bytes == deep.w_elements() * 4 + split.slices * deep.y_elements() * 4,
         "a split fprop in TF32 keeps the filter and the slices");
  for (int c : {64, 256, 512, 1024, 2048}) {
    const ConvProblem problem = Layer(Op::kWgrad, 64, 14, c, c, 3);
    Selection selection = SelectOk(problem, gpu);
    Expect(selection.workspace_bytes <= 64'000'000, "wgrad workspace of at most 64 MB");
    Expect(selection.workspace_bytes ==
               (selection.slices > 1 ? selection.slices * problem.w_elements() * 4 : 0),
           "wgrad workspace is slices * dw");
  }
  Expect(SelectOk(Layer(Op::kWgrad, 64, 56, 64, 64, 3), gpu).slices > 16,
         "a small dw over many pixels is split");
}

void TestAlgorithms() {
  const Gpu gpu = Model("a100");
  const ConvProblem layer = Layer(Op::kFprop, 8, 28, 64, 64, 3);
  Expect(!SelectOk(layer, gpu, "igemm_simt").instance.empty(), "a family is an algorithm");
  const std::string name = "fprop_igemm_simt_f32_64x64x8_vec";
  Expect(SelectOk(layer, gpu, name).instance == name, "an instance is an algorithm");
  Selection other = SelectOk(Layer(Op::kDgrad, 8, 28, 64, 64, 3), gpu, name);
  Expect(other.instance.empty() && other.refusals.size() == 1,
         "an instance of another operation refuses");
  Selection odd = SelectOk(Layer(Op::kFprop, 8, 28, 3, 64, 3), gpu, name);
  Expect(odd.instance.empty() && odd.refusals.size() == 1 &&
             odd.refusals[0].reason == "C/groups 3 is not a multiple of 4",
         "C = 3 is refused with its reason");
  Selection selection;
  Status unknown = Select(layer, gpu, "magic", &selection);
  Expect(unknown.code() == StatusCode::kInvalidArgument &&
             unknown.message().find("igemm_simt") != std::string::npos,
         "an unknown algorithm lists the families");
  Expect(SelectOk(layer, Model("sm_75")).instance.empty(), "sm_75 is refused");
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
    Selection selection = SelectOk(Parse(line), Model("h200"));
    Expect(!selection.instance.empty(), line);
  }
  ConvProblem mixed = Layer(Op::kFprop, 1, 8, 8, 8, 3);
  mixed.x_dtype = DType::kF16;
  Selection selection = SelectOk(mixed, Model("h200"));
  Expect(selection.instance.empty() && !selection.refusals.empty(),
         "unequal operand types are refused");
}

// Refusals list only kernels for the problem's type; 8-bit problems have their own families.
void TestRefusalsByType() {
  const char* packed =
      "fprop s8:s8:s8 default b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1 packed "
      "scale";
  const Selection selection = SelectOk(Parse(packed), Model("h200"));
  Expect(selection.instance.find("fprop_imma_wgmma_s8_") == 0, selection.instance);
  for (const auto& refusal : selection.refusals) {
    Expect(refusal.kernel.find("_s8_") != std::string::npos, refusal.kernel);
  }
  Expect(SelectOk(Parse(packed), Model("a100")).instance.find("fprop_imma_nchw32_s8_") == 0,
         "an A100 has mma.sync");
  Selection family;
  Expect(Select(Parse(packed), Model("h200"), "igemm_simt", &family).ok() &&
             family.instance.empty() && family.refusals.size() == 1 &&
             family.refusals[0].kernel == "igemm_simt" &&
             family.refusals[0].reason == "has no kernel for fprop of s8",
         "a family without kernels of the type says so");
}

void TestOperands() {
  const ConvProblem problem = Layer(Op::kWgrad, 64, 56, 64, 64, 3);
  const Gpu h200 = Model("h200");
  const KernelDesc* kernel = FindKernel(SelectOk(problem, h200).instance);
  Expect(kernel != nullptr, "the selected instance is in the table");
  if (kernel == nullptr) return;
  Plan plan;
  Expect(kernel->plan(*kernel, problem, h200, 0, &plan).ok() && plan.workspace_bytes > 0,
         "a split wgrad has a workspace");
  Plan again;
  Expect(kernel->plan(*kernel, problem, h200, plan.slices, &again).ok() &&
             again.workspace_bytes == plan.workspace_bytes &&
             again.microseconds == plan.microseconds,
         "the slices that were chosen can be asked for");
  Expect(!kernel->plan(*kernel, problem, h200, 1 << 20, &again).ok(), "too many slices");
  alignas(16) char memory[32];
  Operands operands;
  operands.lhs = operands.rhs = operands.out = memory;
  Expect(!CheckOperands(plan, operands).ok(), "a missing workspace is refused");
  operands.workspace = memory;
  operands.workspace_bytes = plan.workspace_bytes;
  Expect(CheckOperands(plan, operands).ok(), "a workspace of the plan's size is accepted");
  operands.lhs = memory + 4;
  Expect(!CheckOperands(plan, operands).ok(), "an unaligned operand is refused");
  Expect(FindKernel("nothing") == nullptr, "an unknown name finds nothing");
}

void TestDeterminism() {
  const ConvProblem problem = Layer(Op::kWgrad, 32, 28, 512, 512, 3);
  Selection first = SelectOk(problem, Model("a100"));
  Selection second = SelectOk(problem, Model("a100"));
  Expect(first.instance == second.instance && first.slices == second.slices,
         "the same problem and device give the same plan");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestPaddedChannels();
  jaxconv::TestEpilogues();
  jaxconv::TestEpilogueCosts();
  jaxconv::TestFilterLayouts();
  jaxconv::TestArchitectures();
  jaxconv::TestClusters();
  jaxconv::TestPrecision();
  jaxconv::TestTensorCoreRefusals();
  jaxconv::TestRefusalsOfGroups();
  jaxconv::TestWorkspace();
  jaxconv::TestAlgorithms();
  jaxconv::TestLastResort();
  jaxconv::TestRefusalsByType();
  jaxconv::TestOperands();
  jaxconv::TestDeterminism();
  std::printf("select_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
