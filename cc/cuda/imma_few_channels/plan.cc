#include "cuda/imma_few_channels/plan.h"

#include <algorithm>
#include <memory>
#include <string>

#include "cuda/common/halo_box.h"
#include "cuda/common/instances.h"
#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/imma_few_channels/params.h"

namespace jaxconv::imma_few_channels {
namespace {

// The arguments of a line of kernels.def, in their order.
struct Instance {
  int64_t rows, stride, ctas_per_sm;
};

// The approximate number of blocks of 16 pixels in a tile: 8 for each warp.
constexpr int64_t kTileBlocks = 32, kMaxBlocksAcross = 8;
// Two halo tiles; four CTAs fit on an SM.
constexpr int64_t kSharedBytes = 48 << 10;

Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem) {
  JAXCONV_RETURN_IF_ERROR(CheckInt8Types(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  if (problem.batch != 1) return Refuse("one batch", problem.batch);
  if (problem.groups != 1) return Refuse("one group", problem.groups);
  if (problem.c != 4) return Refuse("4 channels", problem.c);
  if (problem.k % 8 != 0) return Refuse("K in multiples of 8", problem.k);
  if (problem.rank > 2) return Refuse("at most two axes", problem.rank);
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation != 1) return Refuse("no lhs_dilation", dilation);
  }
  if (problem.filter[1] > instance.rows) {
    return Refuse("at most " + std::to_string(instance.rows) + " rows of taps", problem.filter[1]);
  }
  if (problem.filter[2] > kMaxFilterColumns) {
    return Refuse("at most " + std::to_string(kMaxFilterColumns) + " columns of taps",
                  problem.filter[2]);
  }
  if (instance.stride > 0 && (problem.stride[2] != instance.stride || problem.dilation[2] != 1)) {
    return Status::Unimplemented("expected stride " + std::to_string(instance.stride) +
                                 " and no dilation along the columns");
  }
  return {};
}

Axis MakeAxis(const ConvProblem& problem, int a) {
  Axis axis;
  axis.in = static_cast<int32_t>(problem.in[a]);
  axis.out = static_cast<int32_t>(problem.out[a]);
  axis.taps = static_cast<int32_t>(problem.filter[a]);
  axis.stride = static_cast<int32_t>(problem.stride[a]);
  axis.dilation = static_cast<int32_t>(problem.dilation[a]);
  axis.pad = static_cast<int32_t>(problem.pad_lo[a]);
  return axis;
}

// Shapes the tile of `tile_rows` rows; returns its bytes of shared memory.
int64_t ShapeTile(const ConvProblem& problem, int64_t tile_rows, Params* params) {
  const Axis &rows = params->rows, &columns = params->columns;
  const int64_t blocks = CeilDiv(columns.out, kBlockPixels);
  const int64_t across = CeilDiv(blocks, kMaxBlocksAcross);
  const int64_t blocks_across = CeilDiv(blocks, across);
  const int64_t down = CeilDiv(rows.out, tile_rows), parts = CeilDiv(problem.k, kChannels);
  params->tile_rows = static_cast<int32_t>(tile_rows);
  params->blocks_across = FastDivmod(blocks_across);
  params->parts = FastDivmod(parts);
  params->across = FastDivmod(across);
  params->down = FastDivmod(down);
  const int64_t pixels = params->lead + (blocks_across * kBlockPixels - 1) * columns.stride +
                         int64_t{kMaxFilterColumns - 1} * columns.dilation + 1;
  const int64_t halo_rows =
      (tile_rows - 1) * rows.stride + int64_t{rows.taps - 1} * rows.dilation + 1;
  params->halo_copies = static_cast<int32_t>(CeilDiv(pixels, kCopyPixels));
  params->halo_rows = static_cast<int32_t>(halo_rows);
  params->tiles =
      static_cast<int32_t>(std::min<int64_t>(problem.n * down * across * parts, int64_t{1} << 30));
  return kTermsBytes + 2 * halo_rows * CeilDiv(pixels, kCopyPixels) * 16;
}

// Issue slots of a row of taps (loads, their addresses, products), counted in the compiled code.
constexpr double kTapsSlots = 9;

TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Gpu& gpu,
                  const Params& params, int64_t ctas_of_sm, int64_t ctas) {
  const double blocks = static_cast<double>(params.tile_rows) * params.blocks_across.divisor;
  const double tensor = blocks * static_cast<double>(instance.rows) * kBlockPixels * kChannels *
                        kLanes / (2 * gpu.mma_sync_per_clock);
  const double copies = static_cast<double>(params.halo_rows) *
                        static_cast<double>(CeilDiv(params.halo_copies, kLanes)) *
                        (params.vector ? 1 : kCopyPixels);
  const double slots = blocks * (static_cast<double>(instance.rows) * kTapsSlots +
                                 kBlockPixels * kChannels / kLanes * kRequantizeInstructions) +
                       copies * kCopyInstructions;
  const double issue = slots / kSchedulers;
  const double rounds = static_cast<double>(CeilDiv(params.tiles, ctas));
  const double resident = static_cast<double>(CeilDiv(ctas, gpu.sm_count));
  const double tiles = rounds * std::min<double>(resident, static_cast<double>(ctas_of_sm));
  TimeTerms terms;
  terms.tensor_cores = tiles * tensor / gpu.cycles_per_us();
  terms.loads = tiles * issue / gpu.cycles_per_us();
  terms.dram = Int8Bytes(problem) / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  return terms;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(Check(kernel, instance, problem));
  JAXCONV_RETURN_IF_ERROR(RequireOneSlice(slices));
  auto launch = std::make_shared<LaunchParams>();
  Params& params = launch->kernel;
  params.rows = MakeAxis(problem, 1);
  params.columns = MakeAxis(problem, 2);
  params.lead = -params.columns.pad & (kCopyPixels - 1);
  params.vector = params.columns.in % kCopyPixels == 0;
  params.channels = static_cast<int32_t>(problem.k);
  params.w_row = static_cast<int32_t>(problem.packed_row());
  params.requantize = MakeRequantizeParams(problem);
  // Fewer rows if the halo tiles are large, or if SMs would have no tile.
  const int64_t across = std::min<int64_t>(CeilDiv(problem.out[2], kBlockPixels), kMaxBlocksAcross);
  int64_t tile_rows = std::clamp<int64_t>(kTileBlocks / std::max<int64_t>(across, 1), 1,
                                          std::max<int64_t>(problem.out[1], 1));
  int64_t bytes = ShapeTile(problem, tile_rows, &params);
  while (tile_rows > 1 &&
         (bytes > kSharedBytes || params.tiles < gpu.sm_count * instance.ctas_per_sm)) {
    bytes = ShapeTile(problem, tile_rows /= 2, &params);
  }
  const int64_t ctas_of_sm = CtasOfSm(instance.ctas_per_sm, bytes, gpu);
  if (ctas_of_sm == 0) {
    return Refuse(std::to_string(bytes) + " bytes of shared memory", gpu.smem_per_block_optin);
  }
  if (params.tiles == 1 << 30) return Refuse("less than 2^30 tiles", params.tiles);
  const int64_t parts = params.parts.divisor;
  const int64_t resident = std::max<int64_t>(gpu.sm_count * ctas_of_sm / parts, 1) * parts;
  launch->ctas = static_cast<int32_t>(std::min<int64_t>(params.tiles, resident));
  launch->shared_bytes = static_cast<int32_t>(bytes);
  plan->kernel = &kernel;
  plan->slices = 1;
  plan->terms = TermsOf(instance, problem, gpu, params, ctas_of_sm, launch->ctas);
  plan->form = FormTimeOf("imma_few_channels", OperationsName(problem), "8-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->params = std::move(launch);
  return {};
}

}  // namespace

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                                     \
  JAXCONV_ADD_KERNELS(all, ops, types, imma_few_channels, variant, 80, 1000, MakePlan, Instance, \
                      JAXCONV_UNPACK arguments)
#include "cuda/imma_few_channels/kernels.def"
  return all;
}

}  // namespace jaxconv::imma_few_channels
