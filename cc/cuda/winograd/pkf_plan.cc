#include "cuda/winograd/pkf_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/rates.h"
#include "cuda/winograd/four_stage_plan.h"
#include "cuda/winograd/pkf_params.h"

namespace jaxconv::winograd {
namespace {

// Shared memory that CUDA reserves for each CTA.
constexpr int64_t kReservedBytesOfCta = 1024;
// Cycles in which an SM issues the input transform of kTransformChannels of a tile
// (input_transform.cuh: 392 and 1064 warp instructions, four a cycle).
constexpr int64_t kTransformChannels = 64;
double TransformCycles(int32_t m) { return m == 2 ? 98 : 266; }

Status CheckOffsets(const LaunchParams& launch) {
  const Geometry& g = launch.geometry;
  // Byte offsets in a point row of U have 32 bits, element offsets in a row of the input 31.
  const int64_t point_row = int64_t{2} * launch.alpha() * g.out_channels() * g.red;
  if (point_row > std::numeric_limits<uint32_t>::max()) {
    return Status::Unimplemented("expected less than 2^32 bytes of U for a row of points, got " +
                                 std::to_string(point_row));
  }
  const int64_t row = int64_t{g.in_w} * g.in_channels();
  if (row > std::numeric_limits<int32_t>::max()) {
    return Status::Unimplemented("expected less than 2^31 elements in a row of the input, got " +
                                 std::to_string(row));
  }
  return {};
}

}  // namespace

Status PlanPkfShmem(const Instance& instance, const Gpu& gpu, LaunchParams* launch,
                    TimeTerms* terms) {
  JAXCONV_RETURN_IF_ERROR(CheckOffsets(*launch));
  const Geometry& g = launch->geometry;
  const int64_t alpha = launch->alpha(), tb_m = instance.tile_m, tb_n = instance.tile_n;
  const int64_t shared =
      FusedInputBytes(alpha, tb_m, g.red) + ExchangeBytes(alpha, tb_m, tb_n) + OriginBytes(tb_m);
  if (shared > gpu.smem_per_block_optin) {
    return Status::Unimplemented(
        "V of " + std::to_string(tb_m) + " tiles and " + std::to_string(g.red) +
        " channels takes " + std::to_string(shared) + " bytes of shared memory, expected at most " +
        std::to_string(gpu.smem_per_block_optin));
  }
  const int64_t ctas_of_sm =
      std::min<int64_t>(instance.ctas_per_sm, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                                                  (shared + kReservedBytesOfCta));
  const int64_t blocks = CeilDiv(g.tiles, tb_m) * g.groups, column_blocks = CeilDiv(g.cols, tb_n);
  // As many parts as fill the GPU once, all but the last of equal length.
  const int64_t wanted = std::min(column_blocks, CeilDiv(ctas_of_sm * gpu.sm_count, blocks));
  const int64_t blocks_of_part = CeilDiv(column_blocks, wanted);
  const int64_t parts = CeilDiv(column_blocks, blocks_of_part);
  launch->column_parts = static_cast<int32_t>(parts);
  launch->chunk_tiles = g.tiles;
  PlaceWorkspace(/*has_v=*/false, /*has_m=*/false, launch);

  // Cycles of a CTA: the transform, then the blocks of columns. A block takes the longest of: its
  // MMAs; its fragments from shared memory and L1 plus the exchange; U from L2.
  const double k_blocks = static_cast<double>(launch->points() * CeilDiv(g.red, kBlockChannels));
  const double l2_bytes_per_cycle = gpu.dram_bytes_per_cycle() * kL2Rate / gpu.sm_count;
  const double row_bytes = kBlockChannels * 2;
  const double mma = k_blocks * tb_m * tb_n * kBlockChannels / gpu.mma_sync_per_clock;
  const double near =
      (k_blocks * (tb_m + tb_n) * row_bytes + 2 * alpha * launch->m * tb_m * tb_n * kFloatBytes) /
      kSharedBytesPerCycle;
  const double far = k_blocks * tb_n * row_bytes / l2_bytes_per_cycle;
  const double cycles =
      TransformCycles(launch->m) * tb_m * static_cast<double>(CeilDiv(g.red, kTransformChannels)) +
      static_cast<double>(blocks_of_part) * std::max({mma, near, far});
  const int64_t waves = CeilDiv(blocks * parts, ctas_of_sm * gpu.sm_count) * ctas_of_sm;
  const double bytes = 2 * static_cast<double>(launch->in_elements) +
                       static_cast<double>(launch->out_is_f32 ? kFloatBytes : 2) * g.images *
                           g.out_h * g.out_w * g.out_channels() +
                       static_cast<double>(FilterBytes(*launch));
  terms->tensor_cores = static_cast<double>(waves) * cycles / gpu.cycles_per_us();
  terms->dram = bytes / gpu.dram_bytes_per_us;
  terms->launch = FilterMicroseconds(*launch, gpu) + gpu.launch_us;
  return {};
}

}  // namespace jaxconv::winograd
