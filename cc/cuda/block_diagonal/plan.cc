#include "cuda/block_diagonal/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>

#include "cuda/block_diagonal/instance.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/block_diagonal/rows_plan.h"
#include "cuda/block_diagonal/runs_plan.h"
#include "cuda/common/instances.h"
#include "cuda/common/rates.h"

namespace jaxconv::block_diagonal {

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/true));
  if (problem.op == Op::kWgrad && problem.filter_layout != FilterLayout::kRsck) {
    return Status::Unimplemented(std::string("stores filter gradients as rsck, got ") +
                                 Name(problem.filter_layout));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  const int64_t group = problem.c_per_group();
  if (problem.k_per_group() != group) {
    return Status::Unimplemented("expected as many output as input channels in a group, got " +
                                 std::to_string(problem.k_per_group()) + " and " +
                                 std::to_string(group));
  }
  if (group < 2 || instance.block % group != 0) {
    return Status::Unimplemented("expected groups of 2 or more channels that divide " +
                                 std::to_string(instance.block) + ", got " + std::to_string(group));
  }
  if (problem.c % 8 != 0) {
    return Status::Unimplemented("expected channels in multiples of 8, got " +
                                 std::to_string(problem.c));
  }
  if (instance.wgrad() && !instance.parts() &&
      (problem.filter[1] != instance.rows || problem.filter[2] != instance.columns)) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.rows) + "x" +
                                 std::to_string(instance.columns) + ", got " +
                                 std::to_string(problem.filter[1]) + "x" +
                                 std::to_string(problem.filter[2]));
  }
  return {};
}

void DescribeOperands(const ConvProblem& problem, Params* params) {
  DescribeAxes(problem, params);
  params->channels = static_cast<int32_t>(problem.c);
  params->gathered_channels = static_cast<int32_t>(problem.c);
  params->repeat = FastDivmod(1);
  params->vector = 1;
  const int64_t group = problem.c_per_group(), taps = problem.taps();
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
  const bool dgrad = problem.op == Op::kDgrad;
  const int64_t c_stride = krsc ? 1 : problem.k, k_stride = krsc ? taps * group : 1;
  params->group = static_cast<int32_t>(group);
  while (int64_t{1} << params->group_log2 < group) ++params->group_log2;
  params->tap_stride = krsc ? group : group * problem.k;
  params->reduction_stride = dgrad ? k_stride : c_stride;
  params->channel_stride = dgrad ? c_stride : k_stride;
  params->group_stride = group * k_stride;
}

double DramBytes(const Instance& instance, const ConvProblem& problem, const Gpu& gpu) {
  const auto width = static_cast<double>(instance.element_bytes);
  const double x = width * static_cast<double>(problem.x_elements());
  const double y = width * static_cast<double>(problem.y_elements());
  const double written = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : 0;
  return x + y + WrittenExcess(written, gpu);
}

namespace {

constexpr int64_t kChunks = kTileBytes / 16;  // of a pixel

// As in CutIntoSlices.
constexpr int64_t kMinItemsOfSlice = 4;

int64_t Taps(const Params& params) {
  return int64_t{params.axis[0].taps} * params.axis[1].taps * params.axis[2].taps;
}

int64_t StagePixels(const Instance& instance, const Params& params) {
  // wgrad reads dy in units of 16 positions.
  return params.box_pixels + (instance.wgrad() ? CeilDiv(params.tile_pixels, 16) * 16 : 0);
}

int64_t StageBytes(const Instance& instance, const Params& params) {
  const int64_t box = int64_t{params.tile_images} * params.axis[1].box * params.box_row_bytes;
  return box + (instance.wgrad() ? CeilDiv(params.tile_pixels, 16) * 16 * kPixelBytes : 0);
}

int64_t SharedBytes(const Instance& instance, const Params& params) {
  const int64_t stages = 2 * StageBytes(instance, params);
  const int64_t tables = kPlaceBytes * (2 * kPositions + params.box_pixels + 1) / 16 * 16;
  if (!instance.wgrad()) {
    return stages + Taps(params) * kTileBytes * instance.block + tables;
  }
  const int64_t sums = instance.rows * instance.columns * instance.channels() * instance.block;
  return std::max(stages + kPixelBytes + tables, sums * int64_t{sizeof(float)});
}

// Products of m16n8k16 of a warp for a tile and one depth tap (wgrad: one part).
double ProductsOfWarp(const Instance& instance, const Params& params) {
  // Blocks of 16 positions in the longest strip.
  const auto blocks =
      static_cast<double>(CeilDiv(CeilDiv(params.tile_pixels, kMmaRows), instance.strips()));
  const auto columns = static_cast<double>(instance.block / kMmaColumns);
  const auto products = static_cast<double>(ProductsOf(instance.three_tf32));
  if (instance.wgrad()) {
    const auto taps = static_cast<double>(instance.rows *
                                          std::min<int64_t>(instance.columns, params.axis[2].taps));
    // In float32 two products cover 16 positions.
    const double steps = instance.element_bytes == kFloatBytes ? 2 : 1;
    return blocks * taps * steps * products * columns;
  }
  const double taps = static_cast<double>(params.axis[1].taps) * params.axis[2].taps;
  const auto steps =
      static_cast<double>(instance.block) / static_cast<double>(instance.step_channels());
  return blocks * taps * steps * products * columns;
}

// Wavefronts of shared memory for the same work, in cycles of an SM.
double Wavefronts(const Instance& instance, const Params& params) {
  const auto copies = static_cast<double>(StagePixels(instance, params));
  // ldmatrix of a tap: one wavefront for a chunk of eight positions, whose pixels lie in different
  // banks if the stride is odd.
  const int64_t shared = std::gcd(params.axis[2].stride, 8);
  const auto walked = static_cast<double>(CeilDiv(params.tile_pixels, kMmaColumns) * kChunks);
  const double box = walked * static_cast<double>(shared);
  if (instance.wgrad()) {
    const auto taps = static_cast<double>(instance.rows *
                                          std::min<int64_t>(instance.columns, params.axis[2].taps));
    // Each 16 channels c need all channels k of their block.
    return copies + taps * box + walked * static_cast<double>(instance.block) / kMmaRows;
  }
  const double taps = static_cast<double>(params.axis[1].taps) * params.axis[2].taps;
  const auto warps =
      static_cast<double>(instance.channels() / instance.block *
                          std::min(instance.strips(), CeilDiv(params.tile_pixels, kMmaRows)));
  // B of a warp and tap: block^2 elements.
  const auto bytes = static_cast<double>(instance.block * instance.block * instance.element_bytes);
  return copies + taps * (box + warps * bytes / kSharedBytesPerCycle);
}

// One tile and one depth tap on one of the GPU's SMs, divided by their number; `ctas_of_sm` CTAs on
// each SM.
TimeTerms TermsOfTile(const Instance& instance, const Params& params, int64_t ctas_of_sm,
                      const Gpu& gpu) {
  const double alone = ctas_of_sm == 1 ? kAlone : 1;
  const double cycles = gpu.sm_count * gpu.cycles_per_us();
  TimeTerms terms;
  terms.tensor_cores = alone * ProductsOfWarp(instance, params) * kWarps * kProductsOfMma /
                       gpu.mma_sync_per_clock / cycles;
  // The boxes of neighbouring tiles overlap in L2.
  const double l2 = static_cast<double>(StagePixels(instance, params) * kChunks * kChunkBytes) /
                    (gpu.dram_bytes_per_us * kL2Rate);
  terms.loads = std::max(l2, alone * Wavefronts(instance, params) / cycles);
  return terms;
}

// Microseconds of a CTA of gather.cuh for reading a filter, with a wait for every few taps.
double MicrosecondsOfFilter(const Params& params, const Gpu& gpu) {
  constexpr int64_t kTapsOfWait = 3;
  constexpr double kCyclesOfWait = 1000;
  const int64_t pairs = params.group / 2, warps_of_tap = std::min<int64_t>(pairs, kWarps);
  const int64_t taps_of_warp = CeilDiv(Taps(params) * warps_of_tap, kWarps);
  const int64_t waits = pairs / warps_of_tap * CeilDiv(taps_of_warp, kTapsOfWait);
  return static_cast<double>(waits) * kCyclesOfWait / gpu.cycles_per_us();
}

// Whether no smaller tile divides `out` into equally few tiles.
bool Even(int64_t tile, int64_t out) { return CeilDiv(out, CeilDiv(out, tile)) == tile; }

// Chooses the tile with the smallest time. images: of one filter. items: the number of channel
// tiles, images and depths for each tile.
Status ShapeTile(const Instance& instance, const Gpu& gpu, const FormTime& form, int64_t images,
                 int64_t items, int64_t parts, Params* params) {
  FormTime of_tile_time = form;
  of_tile_time.fixed_us = 0;
  const int64_t most = instance.wgrad() ? kPositions : instance.strips() * instance.blocks_m * 16;
  double least = HUGE_VAL;
  int64_t fewest_bytes = INT64_MAX;
  Params best;
  const int64_t rows = params->axis[1].out, columns = params->axis[2].out;
  for (int64_t tile_columns = 1; tile_columns <= std::min(most, columns); ++tile_columns) {
    if (!Even(tile_columns, columns) && tile_columns % 8 != 0) continue;
    for (int64_t tile_rows = std::min(most / tile_columns, rows); tile_rows > 0; --tile_rows) {
      if (!Even(tile_rows, rows)) continue;
      Params shape = *params;
      if (!ShapeBox(tile_rows, tile_columns, instance.parts() ? 1 : params->axis[1].taps, &shape)) {
        continue;
      }
      const int64_t box_columns = shape.axis[2].box, behind = (tile_columns - box_columns) & 7;
      shape.box_row_bytes = static_cast<int32_t>(box_columns * kPixelBytes + behind * 16);
      const int64_t positions = tile_rows * tile_columns;
      const int64_t tiles = shape.axis[1].tiles.divisor * int64_t{shape.axis[2].tiles.divisor};
      // Several images need a tile of whole maps, and a box without zeros between its rows.
      const bool several = tiles == 1 && shape.axis[1].in_dilation.divisor == 1 &&
                           shape.axis[2].in_dilation.divisor == 1;
      for (int64_t of_tile = 1; of_tile == 1 || (several && of_tile * positions <= most);
           of_tile *= 2) {
        if (images % of_tile != 0 || of_tile * shape.axis[1].box > INT16_MAX) break;
        shape.tile_images = static_cast<int32_t>(of_tile);
        shape.tile_pixels = static_cast<int32_t>(of_tile * positions);
        shape.box_pixels = static_cast<int32_t>(of_tile * shape.axis[1].box * box_columns);
        const int64_t bytes = SharedBytes(instance, shape);
        fewest_bytes = std::min(fewest_bytes, bytes);
        const int64_t ctas = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
        if (ctas == 0) break;
        // The SMs with the most tiles end last; with short slices some SMs have none.
        const int64_t resident = gpu.sm_count * ctas, all = items / of_tile * tiles;
        const int64_t slices = std::max<int64_t>(1, all / parts / kMinItemsOfSlice);
        const int64_t busy = instance.wgrad() ? std::min(resident, parts * slices) : resident;
        const double work =
            PredictedMicroseconds(TermsOfTile(instance, shape, ctas, gpu), of_tile_time) *
            static_cast<double>(CeilDiv(all, busy) * resident);
        if (work >= least) continue;
        least = work;
        best = shape;
      }
    }
  }
  if (least == HUGE_VAL) {
    if (fewest_bytes == INT64_MAX) {
      return Status::Unimplemented("the window is wider than 32,767 pixels");
    }
    return RefuseSharedBytes("two boxes and the filter need", fewest_bytes, gpu);
  }
  *params = best;
  return {};
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  if (instance.stages > 0) return MakeRowsPlan(kernel, problem, gpu, slices, plan);
  if (instance.runs()) return MakeRunsPlan(kernel, problem, gpu, slices, plan);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  plan->form = FormTimeOf("block_diagonal", OperationsName(problem),
                          OperandsName(problem, /*tf32=*/true, instance.three_tf32), gpu);
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  DescribeOperands(problem, &params);
  const int64_t row_parts =
      instance.parts() ? params.axis[1].taps * CeilDiv(params.axis[2].taps, instance.columns) : 1;
  // What CTAs of wgrad divide besides the positions.
  const int64_t parts = CeilDiv(params.channels, instance.channels()) * params.axis[0].taps *
                        row_parts * problem.batch;
  const int64_t images = problem.n * params.axis[0].out;
  const int64_t items =
      images *
      (instance.wgrad() ? parts : CeilDiv(params.channels, instance.channels()) * problem.batch);
  JAXCONV_RETURN_IF_ERROR(ShapeTile(instance, gpu, plan->form, problem.n, items, parts, &params));
  params.stage_bytes = static_cast<int32_t>(StageBytes(instance, params));
  launch->shared_bytes = SharedBytes(instance, params);
  JAXCONV_RETURN_IF_ERROR(CountItems(problem, instance.channels(), &params));
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, launch->shared_bytes, gpu);
  const int64_t resident = gpu.sm_count * ctas_of_sm;
  const double l2_bytes_per_us = gpu.dram_bytes_per_us * kL2Rate;
  int64_t tiles;
  double beside = 0;
  if (instance.wgrad()) {
    // At most as many CTAs as run at once: a second wave would take as long as the first.
    const int64_t at_once = std::max(parts, resident / parts * parts);
    JAXCONV_RETURN_IF_ERROR(
        CutIntoSlices(problem, parts, at_once, slices, &params, &launch->ctas, plan));
    launch->out_elements = problem.w_elements();
    tiles = CeilDiv(params.items, plan->slices) * CeilDiv(launch->ctas, resident) * resident;
    // The sums of slices are stored and read.
    beside = gpu.launch_us + 2 * static_cast<double>(plan->workspace_bytes) / l2_bytes_per_us;
  } else {
    JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
    launch->ctas = ShareItems(resident, &params);
    tiles = CeilDiv(params.items, launch->ctas) * resident * params.axis[0].taps;
    beside = MicrosecondsOfFilter(params, gpu);
  }
  launch->out_dtype = problem.output_dtype();
  plan->terms = TermsOfTile(instance, params, ctas_of_sm, gpu);
  plan->terms.tensor_cores *= static_cast<double>(tiles);
  plan->terms.loads *= static_cast<double>(tiles);
  plan->terms.dram = DramBytes(instance, problem, gpu) / gpu.dram_bytes_per_us;
  plan->terms.launch = gpu.launch_us + beside;
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->kernel = &kernel;
  plan->params = std::move(launch);
  return {};
}

// A form's line of kernels.def, from its arguments.
constexpr Instance GatherLine(int64_t block, int64_t blocks_m, int64_t ctas_per_sm,
                              bool three_tf32 = false) {
  Instance line{block, ctas_per_sm, three_tf32};
  line.blocks_m = blocks_m;
  return line;
}
constexpr Instance RunsLine(int64_t block, int64_t run_rows, int64_t ctas_per_sm,
                            int64_t stride = 2, bool three_tf32 = false) {
  Instance line{block, ctas_per_sm, three_tf32};
  line.run_rows = run_rows, line.stride = stride;
  return line;
}
constexpr Instance RowsLine(int64_t block, int64_t stages) {
  Instance line = RunsLine(block, /*run_rows=*/1, /*ctas_per_sm=*/1, /*stride=*/1);
  line.stages = stages;
  return line;
}
constexpr Instance PhasesLine(int64_t block, int64_t dy_rows, int64_t ctas_per_sm,
                              bool three_tf32 = false) {
  Instance line = RunsLine(block, dy_rows, ctas_per_sm, /*stride=*/2, three_tf32);
  line.phases = true;
  return line;
}
constexpr Instance WgradLine(int64_t block, int64_t rows, int64_t columns, int64_t ctas_per_sm,
                             bool three_tf32 = false) {
  Instance line{block, ctas_per_sm, three_tf32};
  line.rows = rows, line.columns = columns;
  return line;
}
constexpr Instance WgradRunsLine(int64_t block, int64_t run_rows, bool three_tf32 = false) {
  Instance line = WgradLine(block, /*rows=*/3, /*columns=*/3, /*ctas_per_sm=*/1, three_tf32);
  line.run_rows = run_rows;
  return line;
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define ELEMENT_BYTES_BF16_F16 2
#define ELEMENT_BYTES_F32 4
#define KERNEL(ops, types, variant, header, form, arguments)                       \
  JAXCONV_ADD_KERNELS(all, ops, types, block_diagonal, variant, instance.min_cc(), \
                      instance.max_cc(), MakePlan, Instance,                       \
                      (form##Line arguments).OfElements(ELEMENT_BYTES_##types))
#include "cuda/block_diagonal/kernels.def"
  for (KernelDesc& kernel : all) {
    kernel.three_tf32 = static_cast<const Instance*>(kernel.instance)->three_tf32;
  }
  return all;
}

}  // namespace jaxconv::block_diagonal
