#include "cuda/igemm_wmma/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cuda/common/instances.h"
#include "cuda/igemm_wmma/cost.h"
#include "cuda/igemm_wmma/params.h"

namespace jaxconv::igemm_wmma {
namespace {

// A line of kernels.def.
struct Instance {
  bool three_tf32;
  int64_t tile_m, tile_n, tile_k_bytes, warps_m, warps_n, stages, ctas_per_sm;
  int64_t a_copy, b_copy;  // bytes; 0: any

  bool narrow() const { return a_copy != 16 || b_copy != 16; }
  TileCost cost() const {
    TileCost cost;
    cost.tile_m = tile_m;
    cost.tile_n = tile_n;
    cost.tile_k_bytes = tile_k_bytes;
    cost.warps_m = warps_m;
    cost.warps_n = warps_n;
    cost.ctas_per_sm = ctas_per_sm;
    cost.products = three_tf32 ? 3 : 1;
    // The stages, and the row, pixel and tap tables.
    cost.shared_bytes = stages * (tile_m + tile_n) * tile_k_bytes + (a_copy == 0 ? 7168 : 3072);
    return cost;
  }
};

// Named after the forms in kernels.def.
constexpr bool kThreeTf32OfMultistage = false, kThreeTf32OfMultistage3xTf32 = true;

// Partial results of split-K take at most this much workspace.
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
// A shorter slice spends more time on filling the pipeline than on its sum.
constexpr int64_t kMinBlocksPerSlice = 4;
constexpr int64_t kMaxSlices = 512;
constexpr int64_t kMaxTiles = (int64_t{1} << 31) / kMaxSlices - 1;
// So that the bytes of a pixel and of a filter row fit in 32 bits.
constexpr int64_t kMaxChannels = int64_t{1} << 28;
// Bit 31 of a GatherPixel marks a tap that does not exist.
constexpr int64_t kMaxTapBits = 31;

int64_t OutputElements(const ConvProblem& problem) {
  return problem.op == Op::kFprop   ? problem.y_elements()
         : problem.op == Op::kDgrad ? problem.x_elements()
                                    : problem.w_elements();
}

int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return slices > 1 ? slices * OutputElements(problem) * int64_t{sizeof(float)} : 0;
}

// The widest copy that divides `channels` elements evenly.
int32_t CopyBytes(int64_t channels, int64_t element_bytes) {
  int64_t bytes = 16;
  while (channels * element_bytes % bytes != 0) bytes /= 2;
  return static_cast<int32_t>(bytes);
}

// Bytes of a copy of an instance. Copies of any width, chosen at run time, take the time of 4 bytes
// or less.
int64_t BytesOfCopy(int64_t of_instance, int32_t at_run_time) {
  constexpr int64_t kMostOfAny = 4;
  return of_instance > 0 ? of_instance : std::min<int64_t>(kMostOfAny, at_run_time);
}

// The instance whose device code reads the problem's filter: same line and type, operation
// KernelOp. Null if there is none.
const KernelDesc* KernelThatReads(const KernelDesc& kernel, const ConvProblem& problem) {
  const Op op = KernelOp(problem);
  if (op == kernel.op) return &kernel;
  static const std::vector<KernelDesc> kernels = Kernels();
  for (const KernelDesc& other : kernels) {
    if (other.instance == kernel.instance && other.op == op && other.dtype == kernel.dtype) {
      return &other;
    }
  }
  return nullptr;
}

// Whether the kernels can read a filter stored as krsc.
Status CheckKrsc(const ConvProblem& problem, const KernelDesc* reader) {
  JAXCONV_RETURN_IF_ERROR(CheckKrscLines(problem));
  if (reader == nullptr) {
    return Status::Unimplemented("this tile reads filters stored as rsck, got krsc");
  }
  if (problem.op == Op::kDgrad && (problem.taps() > 1 || problem.stride != Spatial{1, 1, 1})) {
    // fprop's kernel reads the taps as one matrix; a krsc filter is one matrix only if it is
    // pointwise.
    return Status::Unimplemented("dgrad reads filters stored as krsc of one tap and stride 1 only");
  }
  if (problem.taps() * problem.c_per_group() > kMaxChannels) {
    return Status::Unimplemented("more than 2^28 elements of a filter for one output channel");
  }
  return {};
}

Status RequireMultiple(const char* what, int64_t value, int64_t copy_bytes, DType dtype) {
  const int64_t width = copy_bytes == 0 ? 1 : copy_bytes / ByteWidth(dtype);
  if (value % width == 0) return {};
  return Status::Unimplemented(std::string(what) + " " + std::to_string(value) +
                               " is not a multiple of " + std::to_string(width));
}

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem,
             const Gpu& gpu, const KernelDesc* reader) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/true));
  if (problem.output_dtype() == DType::kF32 && instance.narrow()) {
    return Status::Unimplemented("copies of less than 16 bytes serve 16-bit results only, got f32");
  }
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  if (krsc) JAXCONV_RETURN_IF_ERROR(CheckKrsc(problem, reader));
  if (problem.op != Op::kDgrad) {
    JAXCONV_RETURN_IF_ERROR(
        RequireMultiple("C/groups", problem.c_per_group(), instance.a_copy, kernel.dtype));
  }
  if (problem.op != Op::kFprop || !krsc) {
    JAXCONV_RETURN_IF_ERROR(
        RequireMultiple("K/groups", problem.k_per_group(), instance.b_copy, kernel.dtype));
  }
  if (std::max(problem.c, problem.k) > kMaxChannels) {
    return Status::Unimplemented("more than 2^28 channels");
  }
  const TileCost tile = instance.cost();
  if (ResidentCtas(tile, gpu) == 0) {
    return RefuseSharedBytes("a tile needs", tile.shared_bytes, gpu);
  }
  return {};
}

// Taps of a stride residue class.
struct Taps {
  int64_t most = 1;    // taps of the largest class
  double average = 0;  // over the classes
  int64_t bits = 0;    // bits of a tap mask: the sum of the largest class's extents
};

Taps CountTaps(const ConvProblem& problem, const ImplicitGemm& gemm) {
  Taps taps;
  taps.average = static_cast<double>(problem.taps());
  for (const GatherAxis& axis : gemm.axis) {
    const int64_t count = axis.Phase(0).tap_count;
    taps.bits += count;
    taps.most *= count;
    taps.average /= axis.tap_period;
  }
  return taps;
}

Status CheckTaps(const Instance& instance, const ConvProblem& problem, const ImplicitGemm& gemm,
                 const Taps& taps) {
  if (problem.op == Op::kWgrad && !gemm.Dense()) {
    return Status::Unimplemented("wgrad with lhs_dilation is left to igemm_simt");
  }
  if (taps.bits > kMaxTapBits) {
    return Status::Unimplemented("the filter's extents add up to " + std::to_string(taps.bits) +
                                 ", expected at most " + std::to_string(kMaxTapBits));
  }
  if (instance.a_copy != 0 && problem.op != Op::kWgrad && taps.most > kMaxTableTaps) {
    return Status::Unimplemented(std::to_string(taps.most) + " taps, expected at most " +
                                 std::to_string(kMaxTableTaps));
  }
  if (KernelOp(problem) == Op::kFprop && !gemm.Dense() && instance.warps_m * instance.warps_n > 4) {
    return Status::Unimplemented("fprop with lhs_dilation is left to tiles of four warps");
  }
  return {};
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  const KernelDesc* const reader = KernelThatReads(kernel, problem);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem, gpu, reader));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  JAXCONV_RETURN_IF_ERROR(MakeImplicitGemm(problem, &params.gemm));
  const ImplicitGemm& gemm = params.gemm;
  const Taps taps = CountTaps(problem, gemm);
  JAXCONV_RETURN_IF_ERROR(CheckTaps(instance, problem, gemm, taps));
  const bool wgrad = problem.op == Op::kWgrad, dgrad = problem.op == Op::kDgrad;
  const int64_t element_bytes = ByteWidth(problem.lhs_dtype());
  const int64_t tile_k = instance.tile_k_bytes / element_bytes;
  const int64_t n_tiles = CeilDiv(gemm.gemm_n, instance.tile_n);
  const int64_t m_tiles = CeilDiv(gemm.gemm_m, instance.tile_m);
  const int64_t batch_groups = gemm.batches * gemm.groups;
  const int64_t tiles = n_tiles * m_tiles * batch_groups * (wgrad ? 1 : gemm.phases);
  if (tiles > kMaxTiles) {
    return Status::Unimplemented("the grid has " + std::to_string(tiles) +
                                 " tiles, expected less than 2^22");
  }
  // k-blocks of the longest reduction. At least one, even if no tap hits the source: zeros must be
  // written.
  const int64_t blocks = std::max<int64_t>(
      1, CeilDiv(wgrad ? gemm.reduce_pixels : taps.most * gemm.reduce_channels, tile_k));
  const double average_blocks =
      wgrad ? static_cast<double>(blocks)
            : std::max(1.0, taps.average * gemm.reduce_channels / static_cast<double>(tile_k));
  const int64_t most_slices = std::min(blocks, kMaxSlices);
  if (slices < 0 || slices > most_slices) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most_slices) +
                                   ", got " + std::to_string(slices));
  }
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  params.a_copy_bytes =
      CopyBytes(dgrad ? problem.k_per_group() : problem.c_per_group(), element_bytes);
  params.b_copy_bytes =
      CopyBytes(krsc ? problem.c_per_group() : problem.k_per_group(), element_bytes);

  const TileCost tile = instance.cost();
  plan->form = FormTimeOf("igemm_wmma", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/true, instance.three_tf32), gpu);
  auto terms = [&](int64_t count) {
    TiledWork work;
    work.element_bytes = element_bytes;
    work.ctas = tiles * count;
    work.a_copy_bytes = BytesOfCopy(instance.a_copy, params.a_copy_bytes);
    work.b_copy_bytes = BytesOfCopy(instance.b_copy, params.b_copy_bytes);
    work.blocks = count == 1 ? average_blocks : std::ceil(average_blocks / count);
    work.dram_bytes = static_cast<double>(problem.x_elements() * ByteWidth(problem.x_dtype) +
                                          problem.w_elements() * ByteWidth(problem.w_dtype) +
                                          problem.y_elements() * ByteWidth(problem.y_dtype) +
                                          EpilogueBytes(problem));
    work.partial_bytes = static_cast<double>(WorkspaceBytes(problem, count));
    work.unaligned_output = count == 1 && (gemm.gemm_n % 8 != 0 || gemm.out_channels % 8 != 0);
    return TermsOf(tile, work, gpu);
  };
  const int64_t most = std::min(
      {blocks / kMinBlocksPerSlice,
       kMaxWorkspaceBytes / (OutputElements(problem) * int64_t{sizeof(float)}), kMaxSlices});
  plan->slices = slices == 0 ? FastestSlices(most, blocks, plan->form, terms) : slices;
  plan->terms = terms(plan->slices);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = reader;
  plan->workspace_bytes = WorkspaceBytes(problem, plan->slices);
  const bool split = plan->slices > 1;
  params.out_is_f32 = split || problem.output_dtype() == DType::kF32;
  const int64_t out_width = params.out_is_f32 ? 4 : 8;
  params.out_vector = gemm.gemm_n % out_width == 0 && gemm.out_channels % out_width == 0;
  params.all_taps = KernelOp(problem) == Op::kFprop && gemm.Dense();
  params.n_tiles = FastDivmod(n_tiles);
  params.m_tiles = FastDivmod(m_tiles);
  params.batch_groups = FastDivmod(batch_groups);
  params.slices = FastDivmod(plan->slices);
  params.blocks_per_slice = static_cast<int32_t>(CeilDiv(blocks, plan->slices));
  params.epilogue = EpilogueParams(problem.epilogue);
  params.slice_elements = split ? OutputElements(problem) : 0;
  launch->ctas = tiles * plan->slices;
  launch->out_dtype = problem.output_dtype();
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                              \
  JAXCONV_ADD_KERNELS(all, ops, types, igemm_wmma, variant, 80, 1000, MakePlan, Instance, \
                      kThreeTf32Of##form, JAXCONV_UNPACK arguments)
#define PADDED(...)
#define FUSED(...)
#include "cuda/igemm_wmma/kernels.def"
  for (KernelDesc& kernel : all) {
    kernel.three_tf32 = static_cast<const Instance*>(kernel.instance)->three_tf32;
  }
  return all;
}

}  // namespace jaxconv::igemm_wmma
