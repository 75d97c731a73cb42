// Kernel selection on faked devices, without CUDA: this file supplies the launches.
#include "cuda/select/select.h"

#include <cstdio>
#include <string>

#include "cuda/kernels/filter_transpose.h"
#include "cuda/kernels/igemm_simt.h"
#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/igemm_wmma.h"
#include "cuda/kernels/igemm_wmma_patch.h"
#include "cuda/kernels/padded_channels.h"
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

template <Op kOp, DType kType, WmmaTileId kTile>
Status LaunchIgemmWmma(const IgemmWmmaParams&, int64_t, void*) {
  ++launches;
  return {};
}
#define JAXCONV_STUB(op, type, tile)                                                           \
  template Status LaunchIgemmWmma<op, type, WmmaTileId::tile>(const IgemmWmmaParams&, int64_t, \
                                                              void*)
#define JAXCONV_STUBS_OF_TYPE(op, type)  \
  JAXCONV_STUB(op, type, k128x256);      \
  JAXCONV_STUB(op, type, k256x128);      \
  JAXCONV_STUB(op, type, k128x128);      \
  JAXCONV_STUB(op, type, k256x64);       \
  JAXCONV_STUB(op, type, k128x64);       \
  JAXCONV_STUB(op, type, k64x64);        \
  JAXCONV_STUB(op, type, k256x16);       \
  JAXCONV_STUB(op, type, k128x64Half);   \
  JAXCONV_STUB(op, type, k256x16ThinB);  \
  JAXCONV_STUB(op, type, k128x64Narrow); \
  JAXCONV_STUB(op, type, k128x16Narrow)
#define JAXCONV_STUBS(op)                 \
  JAXCONV_STUBS_OF_TYPE(op, DType::kF32); \
  JAXCONV_STUBS_OF_TYPE(op, DType::kF16); \
  JAXCONV_STUBS_OF_TYPE(op, DType::kBF16)
JAXCONV_STUBS(Op::kFprop);
JAXCONV_STUBS(Op::kDgrad);
JAXCONV_STUBS(Op::kWgrad);
#undef JAXCONV_STUBS
#undef JAXCONV_STUBS_OF_TYPE
#undef JAXCONV_STUB

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmma(const IgemmWgmmaParams&, const WgmmaOperands&, void*) {
  ++launches;
  return {};
}
#define JAXCONV_STUB(op, type, tile)                                                     \
  template Status LaunchIgemmWgmma<op, type, WgmmaTileId::tile>(const IgemmWgmmaParams&, \
                                                                const WgmmaOperands&, void*)
#define JAXCONV_STUBS(tile)                     \
  JAXCONV_STUB(Op::kFprop, DType::kBF16, tile); \
  JAXCONV_STUB(Op::kFprop, DType::kF16, tile);  \
  JAXCONV_STUB(Op::kFprop, DType::kF32, tile);  \
  JAXCONV_STUB(Op::kDgrad, DType::kBF16, tile); \
  JAXCONV_STUB(Op::kDgrad, DType::kF16, tile);  \
  JAXCONV_STUB(Op::kDgrad, DType::kF32, tile)
JAXCONV_STUBS(k128x256);
JAXCONV_STUBS(k256x128);
JAXCONV_STUBS(k128x320);
JAXCONV_STUBS(k128x192);
JAXCONV_STUBS(k192x128);
JAXCONV_STUBS(k128x128);
JAXCONV_STUBS(k128x128Pingpong);
JAXCONV_STUBS(k192x128Pingpong);
JAXCONV_STUBS(k128x64Pingpong);
JAXCONV_STUBS(k128x128PingpongRows);
JAXCONV_STUBS(k256x64Columns);
JAXCONV_STUBS(k256x64ColumnsRows);
JAXCONV_STUBS(k224x64ColumnsRows);
JAXCONV_STUBS(k192x64ColumnsResident);
JAXCONV_STUBS(k128x64ColumnsResident);
JAXCONV_STUBS(k64x256PingpongOneTap);
JAXCONV_STUBS(k64x256PingpongOneTapC128);
JAXCONV_STUBS(k128x128PingpongOneTap);
JAXCONV_STUBS(k256x64ColumnsOneTap);
JAXCONV_STUBS(k128x64PingpongResidentF32);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x256);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x256);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k256x128);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k256x128);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x320);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x320);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x192);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x192);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k192x128);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k192x128);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x128);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x128);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x128Pingpong);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x128Pingpong);
JAXCONV_STUB(Op::kWgrad, DType::kBF16, k128x64Pingpong);
JAXCONV_STUB(Op::kWgrad, DType::kF16, k128x64Pingpong);
JAXCONV_STUB(Op::kWgrad, DType::kF32, k128x256Mma);
JAXCONV_STUB(Op::kWgrad, DType::kF32, k256x128Mma);
JAXCONV_STUB(Op::kWgrad, DType::kF32, k128x64Mma);
#undef JAXCONV_STUBS
#undef JAXCONV_STUB

template <DType kType, PatchTileId kTile>
Status LaunchPatch(const PatchParams&, int64_t, int64_t, int64_t, void*) {
  ++launches;
  return {};
}
#define JAXCONV_STUB(tile)                                                                  \
  template Status LaunchPatch<DType::kF16, PatchTileId::tile>(const PatchParams&, int64_t,  \
                                                              int64_t, int64_t, void*);     \
  template Status LaunchPatch<DType::kBF16, PatchTileId::tile>(const PatchParams&, int64_t, \
                                                               int64_t, int64_t, void*)
JAXCONV_STUB(kFprop);
JAXCONV_STUB(kDgrad16);
JAXCONV_STUB(kDgrad24);
JAXCONV_STUB(kDgrad48);
JAXCONV_STUB(kWgrad32);
JAXCONV_STUB(kWgrad64);
JAXCONV_STUB(kWgrad192);
#undef JAXCONV_STUB

Status LaunchPitchedCopies(const PitchedCopy&, const PitchedCopy&, void*) {
  ++launches;
  return {};
}

template <Op kOp, DType kType, WgmmaTileId kTile>
Status LaunchIgemmWgmmaCluster(const IgemmWgmmaParams&, const WgmmaOperands&, void*) {
  ++launches;
  return {};
}
#define JAXCONV_STUB(op, type)                                                              \
  template Status LaunchIgemmWgmmaCluster<Op::op, DType::type, WgmmaTileId::k64x64Cluster>( \
      const IgemmWgmmaParams&, const WgmmaOperands&, void*)
JAXCONV_STUB(kFprop, kBF16);
JAXCONV_STUB(kFprop, kF16);
JAXCONV_STUB(kDgrad, kBF16);
JAXCONV_STUB(kDgrad, kF16);
#undef JAXCONV_STUB

Status LaunchWgmmaDrawReset(int32_t*, void*) {
  ++launches;
  return {};
}

template <DType kType>
Status LaunchWgmmaWgradRows(const IgemmWgmmaParams&, const WgmmaOperands&, void*) {
  ++launches;
  return {};
}
template Status LaunchWgmmaWgradRows<DType::kBF16>(const IgemmWgmmaParams&, const WgmmaOperands&,
                                                   void*);
template Status LaunchWgmmaWgradRows<DType::kF16>(const IgemmWgmmaParams&, const WgmmaOperands&,
                                                  void*);

Status LaunchFilterTranspose(const void*, int64_t, int64_t, int64_t, void*, void*) {
  ++launches;
  return {};
}

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

// At precision "highest", which only igemm_simt serves.
void ExpectChoice(ConvProblem problem, const std::string& instance) {
  problem.precision = Precision::kHighest;
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

// A problem without its operation and dtypes, and what each operation takes.
struct Choices {
  const char* line;
  const char* fprop;
  const char* dgrad;
  const char* wgrad;
};

template <typename Choice>
const char* Of(const Choice& choice, Op op) {
  return op == Op::kFprop ? choice.fprop : op == Op::kDgrad ? choice.dgrad : choice.wgrad;
}

// Channel counts that are not multiples of 8 on an H200: few channels go through patches, others
// are padded for a row that copies 16 bytes, or a row with narrow copies takes them.
void TestNarrowChoices() {
  static const Choices kChoices[] = {
      {"b1 n64 g1 c3 k64 i224x224 f7x7 o112x112 s2x2 l1x1 d1x1 p3_3x3_3", "_128x64_patch",
       "_256x24_patch", "_192x64_patch"},
      {"b1 n32 g1 c3 k64 i112x112 f3x3 o112x112 s1x1 l1x1 d1x1 p1_1x1_1", "_128x64_patch",
       "_256x16_patch", "_32x64_patch"},
      {"b1 n32 g1 c36 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1", "_padded", "_padded",
       "_192x64x128_rows_padded"},
      {"b1 n32 g1 c100 k128 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1", "_padded", "_padded",
       "_padded"},
      {"b1 n32 g1 c64 k10 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1", "_padded", "_padded",
       "_192x64x128_rows_padded"},
  };
  for (const Choices& choice : kChoices) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      const ConvProblem problem =
          Parse(std::string(Name(op)) + " bf16:bf16:bf16 default " + choice.line);
      const std::string instance = SelectOk(problem, PortableTarget(9, 0)).instance;
      const std::string end = Of(choice, op);
      Expect(instance.size() > end.size() &&
                 instance.compare(instance.size() - end.size(), end.size(), end) == 0,
             problem.ToString() + ": expected an end of " + end + ", got " + instance);
    }
  }
  // What float32 results and groups cannot have, and what needs no padding.
  for (const char* line :
       {"fprop bf16:bf16:f32 default b1 n1 g1 c3 k64 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1",
        "fprop bf16:bf16:bf16 default b1 n1 g3 c3 k24 i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1"}) {
    for (const KernelRow& row : KernelTable()) {
      const bool narrow = row.name.find("_patch") != std::string::npos ||
                          row.name.find("_padded") != std::string::npos;
      Expect(!narrow || !row.can_implement(Parse(line)).ok(), row.name + " refuses " + line);
    }
  }
  // The list of tiles that are padded for names them: one renamed would lose its row in silence.
  for (const char* name :
       {"fprop_igemm_wgmma_bf16_128x256x64_padded", "dgrad_igemm_wgmma_f16_256x128x64_padded",
        "wgrad_igemm_wgmma_bf16_192x128x64_padded",
        "fprop_igemm_wgmma_f16_128x64x64_pingpong_padded",
        "dgrad_igemm_wgmma_bf16_128x128x64_pingpong_padded",
        "fprop_igemm_wgmma_bf16_256x64x64_columns_padded",
        "dgrad_igemm_wgmma_f16_256x64x64_columns_rows_padded",
        "fprop_igemm_wgmma_bf16_128x64x64_columns_resident_padded",
        "wgrad_igemm_wgmma_f16_192x64x128_rows_padded",
        "wgrad_igemm_wmma_f16_128x128x64_3stage_padded",
        "dgrad_igemm_wmma_bf16_256x16x64_3stage_padded"}) {
    Expect(FindKernel(name) != nullptr, std::string(name) + " is in the table");
  }
  const KernelRow* padded = FindKernel("fprop_igemm_wmma_bf16_128x64x64_3stage_padded");
  Expect(padded != nullptr, "the padded rows are in the table");
  if (padded == nullptr) return;
  const auto layer = [](int c, int k) {
    return Parse("fprop bf16:bf16:bf16 default b1 n2 g1 c" + std::to_string(c) + " k" +
                 std::to_string(k) + " i8x8 f3x3 o8x8 s1x1 l1x1 d1x1 p1_1x1_1");
  };
  Expect(!padded->can_implement(layer(64, 64)).ok(), "64 channels need no padding");
  // x and w with 48 channels, y with 80, each in whole KB.
  Expect(padded->workspace_bytes(layer(36, 66), 1) == 12288 + 69632 + 20480,
         "the workspace holds the padded tensors");
}

// Filters stored as krsc: the same kernels as of rsck where they read both, and no others.
void TestFilterLayouts() {
  const DeviceInfo h200 = PortableTarget(9, 0);
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
        for (const KernelRow& row : KernelTable()) {
          if (row.op != op || !row.can_implement(krsc).ok()) continue;
          Expect((row.family == "igemm_wgmma" || row.family == "igemm_wmma") &&
                     row.name.find("_patch") == std::string::npos,
                 row.name + " takes " + krsc.ToString());
          Expect(row.can_implement(rsck).ok(), row.name + " refuses " + rsck.ToString());
        }
        if (dtype == DType::kF32 || rsck.c < 64) continue;
        // Phases without taps are only dgrad's own kernel's business.
        const bool read = op == Op::kFprop || rsck.taps() > 1 || rsck.stride[2] == 1;
        const std::string choice = SelectOk(rsck, h200).instance;
        Expect((SelectOk(krsc, h200, choice).instance == choice) == read,
               choice + (read ? " takes " : " refuses ") + krsc.ToString());
      }
    }
  }
  auto taken = [](Op op, int filter, DType dtype, const DeviceInfo& device, const char* family) {
    ConvProblem krsc = Layer(op, 64, 56, 64, 256, filter);
    krsc.x_dtype = krsc.w_dtype = krsc.y_dtype = dtype;
    krsc.filter_layout = FilterLayout::kKrsc;
    const Selection selection = SelectOk(krsc, device, family);
    Expect(selection.workspace_bytes == 0, "no copy of the filter for " + krsc.ToString());
    return !selection.instance.empty();
  };
  const DeviceInfo a100 = PortableTarget(8, 0);
  Expect(taken(Op::kFprop, 3, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: fprop");
  Expect(taken(Op::kDgrad, 1, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: dgrad of one tap");
  Expect(!taken(Op::kDgrad, 3, DType::kBF16, a100, "igemm_wmma"), "igemm_wmma: no other dgrad");
  // TF32 multiplies lines along the reduction.
  Expect(taken(Op::kFprop, 3, DType::kF32, h200, "igemm_wgmma"), "TF32: fprop");
  Expect(!taken(Op::kDgrad, 3, DType::kF32, h200, "igemm_wgmma"), "TF32: no dgrad");
}

// The choice for every layer of the benchmark's set "all" in bfloat16, on an H200.
// Hopper's rates without Hopper's own family: a capability that no GPU has.
DeviceInfo WithoutWgmma() { return PortableTarget(9, 1); }

void TestTensorCoreChoices() {
  struct Choice {
    const char* layer;
    const char* line;  // what follows the dtypes and the precision
    const char* fprop;
    const char* dgrad;
    const char* wgrad;
  };
  static const Choice kChoices[] = {
      {"r50_stem", "b1 n64 g1 c3 k64 i224x224 f7x7 o112x112 s2x2 l1x1 d1x1 p3_3x3_3",
       "128x64_patch", "256x24_patch", "192x64_patch"},
      {"r50_56_1x1a", "b1 n64 g1 c64 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "256x64x32_4stage", "256x64x32_4stage", "64x64x64_3stage"},
      {"r50_56_3x3", "b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "64x64x64_3stage"},
      {"r50_56_1x1b", "b1 n64 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "128x256x64_3stage", "256x64x32_4stage", "64x64x64_3stage"},
      {"r50_56_s2", "b1 n64 g1 c128 k128 i56x56 f3x3 o28x28 s2x2 l1x1 d1x1 p1_1x1_1",
       "128x128x64_3stage", "256x128x64_3stage", "128x128x64_3stage"},
      {"r50_28_3x3", "b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x128x64_3stage", "128x128x64_3stage", "128x128x64_3stage"},
      {"r50_14_3x3", "b1 n64 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "128x256x64_3stage"},
      {"r50_7_3x3", "b1 n64 g1 c512 k512 i7x7 f3x3 o7x7 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x256x64_3stage", "128x256x64_3stage", "128x256x64_3stage"},
      {"r50_ds_1x1s2", "b1 n64 g1 c256 k512 i56x56 f1x1 o28x28 s2x2 l1x1 d1x1 p0_0x0_0",
       "128x256x64_3stage", "128x256x64_3stage", "128x64x64_3stage"},
      {"vgg_112", "b1 n32 g1 c128 k128 i112x112 f3x3 o112x112 s1x1 l1x1 d1x1 p1_1x1_1",
       "256x128x64_3stage", "256x128x64_3stage", "128x128x64_3stage"},
      {"vgg_28", "b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x256x64_3stage", "128x256x64_3stage", "128x256x64_3stage"},
      {"seed_224", "b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "64x64x64_3stage"},
      {"seed_480", "b1 n1 g1 c64 k64 i480x480 f3x3 o480x480 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "64x64x64_3stage"},
      {"seed_960", "b1 n1 g1 c64 k64 i960x960 f3x3 o960x960 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "128x64x64_3stage"},
      {"unet_64", "b1 n4 g1 c320 k320 i64x64 f3x3 o64x64 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x64x64_3stage", "128x64x64_3stage", "256x128x64_3stage"},
      {"vae_512", "b1 n1 g1 c128 k128 i512x512 f3x3 o512x512 s1x1 l1x1 d1x1 p1_1x1_1",
       "256x128x64_3stage", "256x128x64_3stage", "128x128x64_3stage"},
      {"convnext_dw", "b1 n64 g96 c96 k96 i56x56 f7x7 o56x56 s1x1 l1x1 d1x1 p3_3x3_3",
       "128x16x64_3stage_narrow", "128x16x64_3stage_narrow", "128x16x64_3stage_narrow"},
      {"mobile_dw", "b1 n64 g512 c512 k512 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1",
       "igemm_simt_bf16_128x32x8_scalar", "igemm_simt_bf16_128x32x8_scalar",
       "128x16x64_3stage_narrow"},
      {"resnext_g32", "b1 n64 g32 c128 k128 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
       "128x16x64_3stage_narrow", "128x16x64_3stage_narrow", "128x64x64_3stage_half"},
      {"deeplab_d2", "b1 n16 g1 c256 k256 i64x64 f3x3 o64x64 s1x1 l1x1 d2x2 p2_2x2_2",
       "128x256x64_3stage", "128x256x64_3stage", "128x256x64_3stage"},
      {"audio_1d", "b1 n16 g1 c512 k512 i3000 f3 o3000 s1 l1 d1 p1_1", "128x256x64_3stage",
       "128x256x64_3stage", "128x256x64_3stage"},
      {"video_3d",
       "b1 n2 g1 c128 k128 i16x56x56 f3x3x3 o16x56x56 s1x1x1 l1x1x1 d1x1x1 p1_1x1_1x1_1",
       "256x128x64_3stage", "256x128x64_3stage", "256x128x64_3stage"},
  };
  for (const Choice& choice : kChoices) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      const ConvProblem problem =
          Parse(std::string(Name(op)) + " bf16:bf16:bf16 default " + choice.line);
      const Selection selection = SelectOk(problem, WithoutWgmma());
      const std::string tile = Of(choice, op);
      const std::string expected =
          std::string(Name(op)) + (tile[0] == 'i' ? "_" + tile : "_igemm_wmma_bf16_" + tile);
      Expect(selection.instance == expected,
             std::string(choice.layer) + ": expected " + expected + ", got " + selection.instance);
      Expect(selection.workspace_bytes <= 64'000'000,
             std::string(choice.layer) + ": a workspace of at most 64 MB");
    }
  }
}

void TestWgmmaChoices() {
  static const Choices kChoices[] = {
      {"b1 n64 g1 c64 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_256x64x64_columns_one_tap", "wgmma_bf16_256x64x64_columns_one_tap",
       "wgmma_bf16_128x64x64_pingpong"},
      {"b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_128x64x64_columns_resident", "wgmma_bf16_128x64x64_columns_resident",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n64 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_64x256x64_pingpong_one_tap_c128", "wgmma_bf16_256x64x64_columns_one_tap",
       "wgmma_bf16_128x128x64"},
      {"b1 n64 g1 c128 k128 i56x56 f3x3 o28x28 s2x2 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_192x128x64_pingpong", "wgmma_bf16_192x128x64_pingpong", "wgmma_bf16_192x128x64"},
      {"b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_192x128x64_pingpong", "wgmma_bf16_192x128x64_pingpong",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n64 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_192x128x64_pingpong", "wgmma_bf16_192x128x64_pingpong",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n64 g1 c512 k512 i7x7 f3x3 o7x7 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_128x192x64"},
      {"b1 n64 g1 c256 k512 i56x56 f1x1 o28x28 s2x2 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_64x256x64_pingpong_one_tap", "wgmma_bf16_192x128x64_pingpong",
       "wgmma_bf16_128x128x64"},
      {"b1 n32 g1 c128 k128 i112x112 f3x3 o112x112 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_256x64x64_columns_rows", "wgmma_bf16_256x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1", "wgmma_bf16_128x256x64",
       "wgmma_bf16_128x256x64", "wgmma_bf16_192x64x128_rows"},
      {"b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_128x64x64_columns_resident", "wgmma_bf16_128x64x64_columns_resident",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n1 g1 c64 k64 i480x480 f3x3 o480x480 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_128x64x64_columns_resident", "wgmma_bf16_128x64x64_columns_resident",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n1 g1 c64 k64 i960x960 f3x3 o960x960 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_192x64x64_columns_resident", "wgmma_bf16_192x64x64_columns_resident",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n4 g1 c320 k320 i64x64 f3x3 o64x64 s1x1 l1x1 d1x1 p1_1x1_1", "wgmma_bf16_128x320x64",
       "wgmma_bf16_128x320x64", "wgmma_bf16_192x64x128_rows"},
      {"b1 n1 g1 c128 k128 i512x512 f3x3 o512x512 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n16 g1 c256 k256 i64x64 f3x3 o64x64 s1x1 l1x1 d2x2 p2_2x2_2",
       "wgmma_bf16_256x64x64_columns_rows", "wgmma_bf16_256x64x64_columns_rows",
       "wgmma_bf16_128x256x64"},
      {"b1 n16 g1 c512 k512 i3000 f3 o3000 s1 l1 d1 p1_1", "wgmma_bf16_256x64x64_columns_rows",
       "wgmma_bf16_256x64x64_columns_rows", "wgmma_bf16_192x64x128_rows"},
      {"b1 n2 g1 c128 k128 i16x56x56 f3x3x3 o16x56x56 s1x1x1 l1x1x1 d1x1x1 p1_1x1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      // Few maps of few pixels: a tile for every SM and no more.
      {"b1 n32 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n16 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      // 1x1 layers of many bytes and few operations, whose tiles are drawn.
      {"b1 n256 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_64x256x64_pingpong_one_tap_c128", "wgmma_bf16_256x64x64_columns_one_tap",
       "wgmma_bf16_128x256x64"},
      {"b1 n256 g1 c256 k128 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_128x128x64_pingpong_one_tap", "wgmma_bf16_64x256x64_pingpong_one_tap_c128",
       "wgmma_bf16_128x128x64"},
      {"b1 n256 g1 c512 k128 i28x28 f1x1 o28x28 s1x1 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_192x128x64_pingpong", "wgmma_bf16_64x256x64_pingpong_one_tap_c128",
       "wgmma_bf16_128x128x64"},
      {"b1 n256 g1 c256 k512 i56x56 f1x1 o28x28 s2x2 l1x1 d1x1 p0_0x0_0",
       "wgmma_bf16_64x256x64_pingpong_one_tap", "wgmma_bf16_192x128x64_pingpong",
       "wgmma_bf16_128x256x64"},
      // Few output channels without a filter that resides: more than 64 channels in, groups,
      // phases.
      {"b1 n8 g1 c128 k64 i128x128 f3x3 o128x128 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_256x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n64 g2 c128 k128 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_bf16_224x64x64_columns_rows", "wgmma_bf16_224x64x64_columns_rows",
       "wgmma_bf16_192x64x128_rows"},
      {"b1 n32 g1 c64 k64 i112x112 f7x7 o56x56 s2x2 l1x1 d1x1 p3_3x3_3",
       "wgmma_bf16_256x64x64_columns", "wgmma_bf16_256x64x64_columns_rows",
       "wgmma_bf16_128x64x64_pingpong"},
  };
  for (const Choices& choice : kChoices) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      const ConvProblem problem =
          Parse(std::string(Name(op)) + " bf16:bf16:bf16 default " + choice.line);
      const std::string tile = Of(choice, op);
      const std::string expected = std::string(Name(op)) + "_igemm_" + tile;
      const Selection selection = SelectOk(problem, PortableTarget(9, 0));
      Expect(selection.instance == expected,
             problem.ToString() + ": expected " + expected + ", got " + selection.instance);
      Expect(selection.workspace_bytes <= 64'000'000, "a workspace of at most 64 MB");
      // Its instructions exist on no other architecture.
      for (const DeviceInfo& other : {PortableTarget(8, 0), PortableTarget(10, 0)}) {
        const std::string name = SelectOk(problem, other).instance;
        Expect(!name.empty() && name.find("wgmma") == std::string::npos,
               problem.ToString() + ": " + name + " on sm_" +
                   std::to_string(other.compute_capability()));
      }
    }
  }
  Selection elsewhere;
  Expect(
      Select(Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c64 k64 i8 f1 o8 s1 l1 d1 p0_0"),
             PortableTarget(10, 0), "igemm_wgmma", &elsewhere)
              .ok() &&
          elsewhere.instance.empty() && !elsewhere.refusals.empty() &&
          elsewhere.refusals[0].reason == "needs compute capability 90 exactly, the device has 100",
      "another architecture is refused with its reason");
}

// Few tiles: a cluster shares one, and needs no workspace.
void TestClusterChoices() {
  struct Choice {
    const char* line;
    int64_t fprop_slices, dgrad_slices;
  };
  static const Choice kChoices[] = {
      {"b1 n1 g1 c64 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0", 1, 1},
      {"b1 n1 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1", 1, 1},
      {"b1 n1 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0", 1, 1},
      {"b1 n1 g1 c128 k128 i56x56 f3x3 o28x28 s2x2 l1x1 d1x1 p1_1x1_1", 4, 1},
      {"b1 n1 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1", 4, 4},
      {"b1 n1 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1", 6, 6},
      {"b1 n1 g1 c512 k512 i7x7 f3x3 o7x7 s1x1 l1x1 d1x1 p1_1x1_1", 8, 8},
  };
  for (const Choice& choice : kChoices) {
    for (Op op : {Op::kFprop, Op::kDgrad}) {
      const ConvProblem problem =
          Parse(std::string(Name(op)) + " bf16:bf16:bf16 default " + choice.line);
      const int64_t slices = op == Op::kFprop ? choice.fprop_slices : choice.dgrad_slices;
      const Selection selection = SelectOk(problem, PortableTarget(9, 0));
      Expect(selection.instance == std::string(Name(op)) + "_igemm_wgmma_bf16_64x64x64_cluster" &&
                 selection.slices == slices && selection.workspace_bytes == 0,
             problem.ToString() + ": expected a cluster of " + std::to_string(slices) + ", got " +
                 selection.instance + " and " + std::to_string(selection.slices));
    }
  }
}

void TestTf32Choices() {
  static const Choices kChoices[] = {
      {"b1 n64 g1 c64 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0", "wgmma_f32_256x128x32",
       "wgmma_f32_256x128x32", "wgmma_f32_128x64x32_mma"},
      {"b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x64x32_pingpong_resident", "wgmma_f32_128x64x32_pingpong_resident",
       "wmma_f32_64x64x32_3stage"},
      {"b1 n64 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0", "wgmma_f32_256x128x32",
       "wgmma_f32_256x128x32", "wgmma_f32_128x256x32_mma"},
      {"b1 n64 g1 c128 k128 i56x56 f3x3 o28x28 s2x2 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x128x32_pingpong", "wgmma_f32_128x128x32_pingpong",
       "wgmma_f32_256x128x32_mma"},
      {"b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x128x32_pingpong", "wgmma_f32_128x128x32_pingpong",
       "wgmma_f32_256x128x32_mma"},
      {"b1 n64 g1 c256 k256 i14x14 f3x3 o14x14 s1x1 l1x1 d1x1 p1_1x1_1", "wgmma_f32_192x128x32",
       "wgmma_f32_192x128x32", "wgmma_f32_128x256x32_mma"},
      {"b1 n64 g1 c512 k512 i7x7 f3x3 o7x7 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x128x32_pingpong_rows", "wgmma_f32_128x128x32_pingpong_rows",
       "wgmma_f32_128x256x32_mma"},
      {"b1 n64 g1 c256 k512 i56x56 f1x1 o28x28 s2x2 l1x1 d1x1 p0_0x0_0", "wgmma_f32_128x256x32",
       "wgmma_f32_128x256x32", "wgmma_f32_128x256x32_mma"},
      {"b1 n32 g1 c128 k128 i112x112 f3x3 o112x112 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x128x32_pingpong_rows", "wgmma_f32_128x128x32_pingpong_rows",
       "wgmma_f32_256x128x32_mma"},
      {"b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1", "wgmma_f32_128x256x32",
       "wgmma_f32_128x256x32", "wgmma_f32_128x256x32_mma"},
      {"b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x64x32_pingpong_resident", "wgmma_f32_128x64x32_pingpong_resident",
       "wgmma_f32_128x64x32_mma"},
      {"b1 n1 g1 c64 k64 i480x480 f3x3 o480x480 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x64x32_pingpong_resident", "wgmma_f32_128x64x32_pingpong_resident",
       "wmma_f32_64x64x32_3stage"},
      {"b1 n1 g1 c64 k64 i960x960 f3x3 o960x960 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x64x32_pingpong_resident", "wgmma_f32_128x64x32_pingpong_resident",
       "wmma_f32_128x64x32_3stage"},
      {"b1 n4 g1 c320 k320 i64x64 f3x3 o64x64 s1x1 l1x1 d1x1 p1_1x1_1", "wgmma_f32_128x320x32",
       "wgmma_f32_128x320x32", "wgmma_f32_256x128x32_mma"},
      {"b1 n1 g1 c128 k128 i512x512 f3x3 o512x512 s1x1 l1x1 d1x1 p1_1x1_1",
       "wgmma_f32_128x128x32_pingpong_rows", "wgmma_f32_128x128x32_pingpong_rows",
       "wgmma_f32_256x128x32_mma"},
      {"b1 n16 g1 c256 k256 i64x64 f3x3 o64x64 s1x1 l1x1 d2x2 p2_2x2_2",
       "wgmma_f32_128x128x32_pingpong_rows", "wgmma_f32_128x128x32_pingpong_rows",
       "wgmma_f32_128x256x32_mma"},
      {"b1 n16 g1 c512 k512 i3000 f3 o3000 s1 l1 d1 p1_1", "wgmma_f32_128x128x32_pingpong_rows",
       "wgmma_f32_128x128x32_pingpong_rows", "wgmma_f32_128x256x32_mma"},
      {"b1 n2 g1 c128 k128 i16x56x56 f3x3x3 o16x56x56 s1x1x1 l1x1x1 d1x1x1 p1_1x1_1x1_1",
       "wgmma_f32_256x128x32", "wgmma_f32_256x128x32", "wgmma_f32_256x128x32_mma"},
  };
  for (const Choices& choice : kChoices) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      ConvProblem problem = Parse(std::string(Name(op)) + " f32:f32:f32 default " + choice.line);
      const std::string expected = std::string(Name(op)) + "_igemm_" + Of(choice, op);
      const Selection selection = SelectOk(problem, PortableTarget(9, 0));
      Expect(selection.instance == expected,
             problem.ToString() + ": expected " + expected + ", got " + selection.instance);
      for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
        problem.precision = precision;
        const std::string name = SelectOk(problem, PortableTarget(9, 0)).instance;
        Expect(name.find("igemm_simt") != std::string::npos,
               problem.ToString() + ": " + name + " multiplies in TF32");
      }
    }
  }
}

void TestTensorCoreRefusals() {
  const DeviceInfo device = WithoutWgmma();
  ConvProblem layer = Layer(Op::kFprop, 8, 28, 64, 64, 3);
  auto family = [&](const ConvProblem& problem) {
    const std::string name = SelectOk(problem, device).instance;
    return name.find("igemm_wmma") != std::string::npos;
  };
  Expect(family(layer), "float32 at DEFAULT goes to TF32");
  for (Precision precision : {Precision::kHigh, Precision::kHighest}) {
    layer.precision = precision;
    Expect(!family(layer), "float32 above DEFAULT stays float32");
  }
  // The filter's extents outgrow the bits of a pixel.
  Expect(!family(Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c64 k64 i128 f40 o89 s1 l1 d1 p0_0")),
         "40 taps on one axis are refused");
  Expect(!family(Parse("wgrad bf16:bf16:bf16 default b1 n2 g1 c16 k16 i8x8 f3x3 o13x13 s1x1 l2x2 "
                       "d1x1 p0_0x0_0")),
         "wgrad with lhs_dilation is refused");
  // A few tiles of a long reduction: split-K, in fprop too.
  const Selection deep =
      SelectOk(Parse("fprop bf16:bf16:bf16 default b1 n1 g1 c2048 k256 i7x7 f3x3 o7x7 s1x1 l1x1 "
                     "d1x1 p1_1x1_1"),
               device);
  Expect(deep.slices > 1 && deep.workspace_bytes == deep.slices * 7 * 7 * 256 * 4,
         "few tiles and a long reduction are split");
  // An instance that needs more shared memory than the device has is never chosen by itself.
  DeviceInfo small = PortableTarget(8, 6);
  const Selection fits =
      SelectOk(Parse("fprop bf16:bf16:bf16 default b1 n32 g1 c512 k512 i28x28 f3x3 "
                     "o28x28 s1x1 l1x1 d1x1 p1_1x1_1"),
               small);
  Expect(fits.instance.find("128x256") == std::string::npos, "99 KB do not hold 128x256");
}

void TestWorkspace() {
  const DeviceInfo device = PortableTarget(9, 0);
  for (Op op : {Op::kFprop, Op::kDgrad}) {
    ConvProblem problem = Layer(op, 64, 28, 128, 128, 3);
    Selection selection = SelectOk(problem, device);
    Expect(selection.slices == 1 &&
               selection.workspace_bytes == (op == Op::kFprop ? problem.w_elements() * 4 : 0),
           "in TF32 fprop transposes the filter, and dgrad needs no workspace");
    problem.x_dtype = problem.w_dtype = problem.y_dtype = DType::kBF16;
    selection = SelectOk(problem, device);
    Expect(selection.workspace_bytes == 0 && selection.slices == 1,
           "fprop and dgrad need no workspace");
  }
  // The transposed filter comes before the partial results.
  const ConvProblem deep = Layer(Op::kFprop, 1, 7, 2048, 256, 3);
  const Selection split = SelectOk(deep, device, "fprop_igemm_wgmma_f32_128x128x32_pingpong");
  Expect(split.slices > 1 &&
             split.workspace_bytes == deep.w_elements() * 4 + split.slices * deep.y_elements() * 4,
         "a split fprop in TF32 keeps the filter and the slices");
  for (int c : {64, 256, 512, 1024, 2048}) {
    const ConvProblem problem = Layer(Op::kWgrad, 64, 14, c, c, 3);
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
  jaxconv::TestTensorCoreChoices();
  jaxconv::TestWgmmaChoices();
  jaxconv::TestClusterChoices();
  jaxconv::TestTf32Choices();
  jaxconv::TestNarrowChoices();
  jaxconv::TestFilterLayouts();
  jaxconv::TestTensorCoreRefusals();
  jaxconv::TestWorkspace();
  jaxconv::TestAlgorithms();
  jaxconv::TestLastResort();
  jaxconv::TestLaunchChecks();
  jaxconv::TestDeterminism();
  std::printf("select_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
