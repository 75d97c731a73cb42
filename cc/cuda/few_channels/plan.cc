#include "cuda/few_channels/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/common/instances.h"
#include "cuda/common/rates.h"
#include "cuda/few_channels/cost.h"
#include "cuda/few_channels/params.h"
#include "cuda/few_channels/rows_plan.h"

namespace jaxconv::few_channels {
namespace {

// With 16-bit elements at least two CTAs fit on an SM of an H100 (228 KB), and at least one on an
// SM of an A100 (164 KB). float32 may take twice as much.
constexpr int64_t kMaxSharedBytes = 100 * 1024;
constexpr int64_t kMaxHaloElements = kMaxSharedBytes / 2;
constexpr int64_t kReservedBytesOfCta = 1024;
constexpr int64_t kMaxWorkspaceBytes = 64'000'000;
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kMostChunkChannels = 16;

int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

Axis MakeAxis(const ConvProblem& problem, int a) {
  Axis axis;
  axis.in = static_cast<int32_t>(problem.in[a]);
  axis.out = static_cast<int32_t>(problem.out[a]);
  axis.filter = static_cast<int32_t>(problem.filter[a]);
  axis.stride = static_cast<int32_t>(problem.stride[a]);
  // With one tap the dilation has no meaning.
  axis.dilation = static_cast<int32_t>(problem.filter[a] > 1 ? problem.dilation[a] : 1);
  axis.pad = static_cast<int32_t>(problem.pad_lo[a]);
  return axis;
}

Status HaloTooLarge() {
  return Status::Unimplemented("a tile's halo has more than " + std::to_string(kMaxHaloElements) +
                               " elements");
}

// The bytes of `elements` in shared memory, doubled if `twice`; the banks of the two copies differ
// by half.
Status SetHaloBytes(int64_t elements, int64_t width, bool twice, Params* params) {
  if (elements > kMaxHaloElements) return HaloTooLarge();
  const int64_t bytes = RoundUp(elements * width + 16, 128);
  params->copy_bytes = static_cast<int32_t>(twice ? bytes + 64 : 0);
  params->halo_bytes = static_cast<int32_t>(RoundUp(params->copy_bytes + bytes, 128));
  return {};
}

// The number of k-blocks of a warp for each part of the next halo.
int32_t BlocksOfFetch(int64_t k_blocks, const Params& params) {
  constexpr int64_t kPairsOfFetch = int64_t{kPairsInFlight} * kThreads;
  return static_cast<int32_t>(CeilDiv(k_blocks, CeilDiv(params.halo_pairs, kPairsOfFetch)));
}

// The number of wavefronts of a warp's load of words: `lanes` groups of lanes that are `step` words
// apart, each with `words` neighbouring words.
int BankConflicts(int64_t lanes, int64_t words, int64_t step) {
  std::array<std::set<int64_t>, 32> of_bank;
  size_t most = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    for (int64_t word = 0; word < words; ++word) {
      const int64_t at = lane * step + word;
      std::set<int64_t>& bank = of_bank[at % 32];
      bank.insert(at);
      most = std::max(most, bank.size());
    }
  }
  return static_cast<int>(most);
}

// float32: chooses the distance between the pixels of lanes (SpreadPixel), within one block of 16
// pixels in wgrad, and within two in fprop if they are neighbours.
void SpreadPixels(bool wgrad, Tiling* tiling) {
  Params& params = tiling->params;
  const int64_t window = int64_t{params.columns.stride} * params.c;
  const int32_t most = wgrad || params.log2_across > 0 ? 2 : 1;
  tiling->conflicts = 32;
  for (int32_t log2 = 0; log2 <= most; ++log2) {
    const int conflicts =
        wgrad ? BankConflicts(4, 8, window << log2) : BankConflicts(8, 4, window << log2);
    if (conflicts >= tiling->conflicts) continue;
    tiling->conflicts = conflicts;
    params.log2_spread = log2;
  }
}

// fprop and wgrad: the shape of a tile of `pixels` pixels with the fewest copies in total.
Status ShapeTile(const ConvProblem& problem, int64_t pixels, bool by_chunks, Tiling* tiling) {
  Params& params = tiling->params;
  int64_t row_elements = 0;
  double least = HUGE_VAL;
  for (int32_t log2_across = 0; log2_across <= 3; ++log2_across) {
    const int64_t columns = int64_t{16} << log2_across, rows = pixels / columns;
    const int64_t halo_rows =
        (rows - 1) * params.rows.stride + (params.rows.filter - 1) * params.rows.dilation + 1;
    const int64_t halo_columns = (columns - 1) * params.columns.stride +
                                 (params.columns.filter - 1) * params.columns.dilation + 1;
    if (std::max({halo_rows, halo_columns, problem.c}) > kMaxHaloElements) continue;
    const int64_t down = CeilDiv(params.rows.out, rows);
    const int64_t across = CeilDiv(params.columns.out, columns);
    const int64_t elements = halo_rows * halo_columns * problem.c;
    const double work = static_cast<double>(down * across) * static_cast<double>(elements);
    if (work >= least) continue;
    least = work;
    params.log2_across = log2_across;
    params.tile_rows = static_cast<int32_t>(rows);
    params.tile_columns = static_cast<int32_t>(columns);
    params.halo_rows = static_cast<int32_t>(halo_rows);
    row_elements = halo_columns * problem.c;
    params.tiles_down = FastDivmod(down);
    params.tiles_across = FastDivmod(across);
    tiling->halo_elements = elements;
  }
  if (least == HUGE_VAL || tiling->halo_elements > kMaxHaloElements) return HaloTooLarge();
  // The first column of a tile is a multiple of 16, so all tiles begin at the same position within
  // a pair and within a chunk.
  const bool words = tiling->width == 4;  // or pairs of 16-bit elements
  params.word_copies = words && !by_chunks;
  if (words) SpreadPixels(problem.op == Op::kWgrad, tiling);
  const int64_t unit = (by_chunks ? 16 : 4) / tiling->width;
  const int64_t first = -params.columns.pad * problem.c;
  params.halo_lead = static_cast<int32_t>(first - FloorDiv(first, unit) * unit);
  params.halo_words = params.columns.in * problem.c % 2 == 0;
  const int64_t pairs = CeilDiv(row_elements + params.halo_lead, unit);
  params.halo_row_divmod = FastDivmod(pairs);
  params.halo_pairs = static_cast<int32_t>(params.halo_rows * pairs);
  params.rows_per_pass = static_cast<int32_t>(kThreads / pairs);
  params.pairs_per_pass = static_cast<int32_t>(kThreads % pairs);
  return {};
}

// Copies by chunks need rows of x of whole chunks, and windows an even number of elements apart, so
// that all begin in the same half of a word. Pixels must have few channels: eight pixels that are
// 128 bytes apart share banks.
Status CheckChunks(const Params& params, int64_t width) {
  if (params.c > kMostChunkChannels) {
    return Status::Unimplemented("copies of 16 bytes: expected at most " +
                                 std::to_string(kMostChunkChannels) + " channels, got " +
                                 std::to_string(params.c));
  }
  const bool whole_words = width == 4 || params.columns.stride * params.c % 2 == 0;
  if (params.columns.in * params.c * width % 16 == 0 && whole_words) return {};
  return Status::Unimplemented(
      "copies of 16 bytes: expected rows of a multiple of 8 elements, and windows an even number "
      "of elements apart");
}

// Whether the halo tile is copied by chunks of 16 bytes. 16-bit instances with _chunks do so or
// refuse; float32 instances do so if they can.
Status ChooseChunks(const Instance& instance, const Tiling& tiling, bool* by_chunks) {
  *by_chunks = instance.by_chunks;
  if (tiling.width == 4) {
    *by_chunks = CheckChunks(tiling.params, tiling.width).ok();
    return {};
  }
  return instance.by_chunks ? CheckChunks(tiling.params, tiling.width) : Status();
}

// The runs of neighbouring elements of a window.
Status MakeRuns(bool by_chunks, int64_t width, Params* params) {
  const bool whole_rows = params->columns.dilation == 1;
  if (!whole_rows && width == 2 && params->c % 2 != 0) {
    return Status::Unimplemented("a dilated filter row of an odd number of channels");
  }
  params->runs_of_row = whole_rows ? 1 : params->columns.filter;
  params->runs = params->rows.filter * params->runs_of_row;
  params->run_elements = whole_rows ? params->columns.filter * params->c : params->c;
  // If all windows begin in the middle of a pair, runs begin with the first half of this pair.
  params->run_lead = by_chunks && width == 2 ? params->halo_lead % 2 : 0;
  params->words_of_run = FastDivmod(CeilDiv((params->run_lead + params->run_elements) * width, 4));
  return {};
}

// k-blocks of 8 words; three TF32 products process them in runs of two.
int64_t BlocksOfRuns(const Tiling& tiling, int64_t k_blocks) {
  return tiling.three_tf32 ? RoundUp(k_blocks, 2) : k_blocks;
}

Status TileFprop(const Instance& instance, const ConvProblem& problem, Tiling* tiling) {
  Params& params = tiling->params;
  const int64_t width = tiling->width;
  bool by_chunks = false;
  JAXCONV_RETURN_IF_ERROR(ChooseChunks(instance, *tiling, &by_chunks));
  JAXCONV_RETURN_IF_ERROR(ShapeTile(problem, instance.extent, by_chunks, tiling));
  JAXCONV_RETURN_IF_ERROR(MakeRuns(by_chunks, width, &params));
  const int64_t words = int64_t{params.runs} * params.words_of_run.divisor;
  params.k_blocks = static_cast<int32_t>(BlocksOfRuns(*tiling, CeilDiv(words, 8)));
  params.blocks_per_fetch = BlocksOfFetch(params.k_blocks, params);
  params.pitch =
      static_cast<int32_t>(params.halo_row_divmod.divisor * (by_chunks ? 16 : 4) / width);
  const bool odd = params.halo_lead != 0 || params.columns.stride * problem.c % 2 != 0;
  JAXCONV_RETURN_IF_ERROR(SetHaloBytes(int64_t{params.halo_rows} * params.pitch, width,
                                       odd && !by_chunks && width == 2, &params));
  // The filter and its table, two halo tiles, and the outputs of every warp.
  const bool staged = width == 2 || !problem.epilogue.Plain();
  tiling->shared_bytes = int64_t{params.k_blocks} * (kFilterBlockBytes + 64) +
                         2 * int64_t{params.halo_bytes} +
                         (staged ? kThreads / 32 * kStagingBytes : 0);
  const int64_t parts = CeilDiv(problem.k, kTileChannels);
  params.column_parts = FastDivmod(parts);
  tiling->grid_y = parts * problem.batch;
  return {};
}

// wgrad: the halo tile sorted by channel and by the column modulo the stride.
Status SortHalo(const ConvProblem& problem, Params* params) {
  const Axis& columns = params->columns;
  const int64_t most =
      params->tile_columns - 1 + int64_t{columns.filter - 1} * columns.dilation / columns.stride;
  // 4 words more than a multiple of 8, so that neighbouring rows of the filter have few bank
  // conflicts.
  params->pitch = static_cast<int32_t>((most + 2 + 7) / 16 * 16 + 8);
  bool odd = false;
  for (int64_t s = 0; s < columns.filter && !odd; ++s) {
    odd = s * columns.dilation / columns.stride % 2 != 0;
  }
  const int64_t row_elements = problem.c * columns.stride * params->pitch;
  const int64_t elements = params->halo_rows * row_elements;
  JAXCONV_RETURN_IF_ERROR(SetHaloBytes(elements, 2, odd, params));
  // Beyond the last row, from whichever row it is addressed.
  params->halo_spare = static_cast<int32_t>(row_elements - 1);
  return {};
}

Status TileWgrad(const Instance& instance, const ConvProblem& problem, Tiling* tiling) {
  Params& params = tiling->params;
  const int64_t width = tiling->width;
  bool by_chunks = false;
  JAXCONV_RETURN_IF_ERROR(ChooseChunks(instance, *tiling, &by_chunks));
  JAXCONV_RETURN_IF_ERROR(ShapeTile(problem, kTilePixels, by_chunks, tiling));
  int64_t rows = problem.taps() * problem.c;
  const bool as_in_x = by_chunks || width == 4;
  if (as_in_x) {
    if (width == 2) {
      JAXCONV_RETURN_IF_ERROR(MakeRuns(by_chunks, width, &params));
      rows = 2 * int64_t{params.runs} * params.words_of_run.divisor;
    }
    params.pitch =
        static_cast<int32_t>(params.halo_row_divmod.divisor * (by_chunks ? 16 : 4) / width);
    JAXCONV_RETURN_IF_ERROR(
        SetHaloBytes(int64_t{params.halo_rows} * params.pitch, width, /*twice=*/false, &params));
  } else {
    JAXCONV_RETURN_IF_ERROR(SortHalo(problem, &params));
  }
  tiling->shared_bytes = 2 * (int64_t{kTilePixels} * kTileChannels * width + params.halo_bytes) +
                         (as_in_x ? 0 : int64_t{params.halo_row_divmod.divisor} * 4);
  const int64_t column_parts = CeilDiv(problem.k, kTileChannels);
  const int64_t row_parts = CeilDiv(rows, instance.extent);
  params.column_parts = FastDivmod(column_parts);
  params.row_parts = FastDivmod(row_parts);
  params.out_elements = problem.w_elements();
  params.blocks_per_fetch = BlocksOfFetch(kTilePixels / 16 / instance.warps_k, params);
  tiling->grid_y = column_parts * row_parts * problem.batch;
  return {};
}

Status TileDgrad(const Instance& instance, const ConvProblem& problem, Tiling* tiling) {
  Params& params = tiling->params;
  const Axis &rows = params.rows, &columns = params.columns;
  if (columns.filter * problem.c > instance.extent) {
    return Status::Unimplemented("C S is " + std::to_string(columns.filter * problem.c) +
                                 ", expected at most " + std::to_string(instance.extent));
  }
  const int64_t first_row = -FloorDiv((rows.filter - 1) * rows.dilation - rows.pad, rows.stride);
  const int64_t first_column =
      -FloorDiv((columns.filter - 1) * columns.dilation - columns.pad, columns.stride);
  double least = HUGE_VAL;
  for (int32_t log2_across = 0; log2_across <= 3; ++log2_across) {
    const int64_t block_rows = 16 >> log2_across, pixels = int64_t{16} << log2_across;
    // If a warp has several rows, they are four apart.
    if (log2_across < 2 && 4 % rows.stride != 0) continue;
    const int64_t tile_rows = block_rows / rows.stride * rows.stride;
    // The columns of dx that need no pixels of dy outside `pixels`.
    const int64_t most =
        ((pixels + first_column) * columns.stride - columns.pad) / columns.stride * columns.stride;
    if (tile_rows == 0 || (pixels + first_column) * columns.stride - columns.pad < columns.stride) {
      continue;
    }
    const int64_t halo_rows = FloorDiv(block_rows - 1 + rows.pad, rows.stride) - first_row + 1;
    if (halo_rows > kMaxHaloElements) continue;
    const int64_t across = CeilDiv(columns.in, most);
    const int64_t tile_columns = RoundUp(CeilDiv(columns.in, across), columns.stride);
    const int64_t down = CeilDiv(rows.in, tile_rows);
    const double work =
        static_cast<double>(down * across) * static_cast<double>(kDgradPixels + halo_rows * pixels);
    if (work >= least) continue;
    least = work;
    params.log2_across = log2_across;
    params.tile_rows = static_cast<int32_t>(tile_rows);
    params.tile_columns = static_cast<int32_t>(tile_columns);
    params.halo_rows = static_cast<int32_t>(halo_rows);
    params.tiles_down = FastDivmod(down);
    params.tiles_across = FastDivmod(across);
    tiling->halo_elements = halo_rows * pixels * (128 / tiling->width);
  }
  if (least == HUGE_VAL) return Status::Unimplemented("strides and filter fit no tile");
  if (tiling->halo_elements > kMaxHaloElements) return HaloTooLarge();
  params.first_row = static_cast<int32_t>(first_row);
  params.first_column = static_cast<int32_t>(first_column);
  params.row_period = rows.stride / std::gcd(rows.dilation, rows.stride);
  params.column_period = columns.stride / std::gcd(columns.dilation, columns.stride);
  params.k_blocks =
      static_cast<int32_t>(BlocksOfRuns(*tiling, CeilDiv(problem.k * tiling->width, 32)));
  const int64_t blocks_n = instance.extent / 8;
  const int64_t z_pitch = DgradPitch(static_cast<int>(instance.extent));
  const int64_t z_bytes = kDgradPixels * z_pitch * 4;
  // Pixels of dy between the terms of a sum; more than a tile has if each sum has one term.
  const int64_t term_pixels = int64_t{columns.dilation} * params.column_period / columns.stride;
  params.z_step = static_cast<int32_t>(params.column_period * problem.c - term_pixels * z_pitch);
  params.halo_bytes =
      static_cast<int32_t>(std::max(tiling->halo_elements * tiling->width, z_bytes));
  tiling->shared_bytes = params.halo_bytes +
                         int64_t{rows.filter} * params.k_blocks * blocks_n * 256 +
                         params.tile_columns * problem.c * 8;
  tiling->grid_y = problem.batch;
  return {};
}

// Narrow outputs at stride 1. With the filter reversed, fprop to few channels is the dgrad of a
// problem with few input channels, and dgrad from few channels is its fprop. wgrad exchanges x and
// dy.
Status Mirror(const ConvProblem& problem, ConvProblem* mirrored) {
  *mirrored = problem;
  mirrored->op = problem.op == Op::kFprop   ? Op::kDgrad
                 : problem.op == Op::kDgrad ? Op::kFprop
                                            : Op::kWgrad;
  mirrored->epilogue = {};
  std::swap(mirrored->x_dtype, mirrored->y_dtype);
  std::swap(mirrored->c, mirrored->k);
  std::swap(mirrored->in, mirrored->out);
  for (int a = 0; a < 3; ++a) {
    if (problem.stride[a] != 1) return Status::Unimplemented("narrow outputs of a stride");
    const int64_t reach = (problem.filter[a] - 1) * problem.dilation[a];
    mirrored->pad_lo[a] = reach - problem.pad_lo[a];
    mirrored->pad_hi[a] = reach - problem.pad_hi[a];
  }
  return {};
}

Status MakeTiling(const Instance& instance, const ConvProblem& problem, const Gpu& gpu,
                  Tiling* tiling) {
  Params& params = tiling->params;
  params.rows = MakeAxis(problem, 1);
  params.columns = MakeAxis(problem, 2);
  params.c = static_cast<int32_t>(problem.c);
  params.k = static_cast<int32_t>(problem.k);
  params.k_vector = problem.k * tiling->width % 16 == 0;
  const int64_t x = problem.x_elements() / problem.batch;
  const int64_t w = problem.w_elements() / problem.batch;
  const int64_t y = problem.y_elements() / problem.batch;
  params.lhs_batch = problem.op == Op::kDgrad ? y : x;
  params.rhs_batch = problem.op == Op::kWgrad ? y : w;
  params.out_batch = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  params.c_divmod = FastDivmod(problem.c);
  params.row_stride_divmod = FastDivmod(problem.stride[1]);
  params.column_stride_divmod = FastDivmod(problem.stride[2]);
  JAXCONV_RETURN_IF_ERROR(problem.op == Op::kFprop   ? TileFprop(instance, problem, tiling)
                          : problem.op == Op::kDgrad ? TileDgrad(instance, problem, tiling)
                                                     : TileWgrad(instance, problem, tiling));
  const int64_t most_bytes =
      std::min(kMaxSharedBytes * tiling->width / 2, gpu.smem_per_block_optin);
  if (tiling->shared_bytes > most_bytes) {
    return Status::Unimplemented("a tile needs " + std::to_string(tiling->shared_bytes) +
                                 " bytes of shared memory, expected at most " +
                                 std::to_string(most_bytes));
  }
  if (tiling->grid_y > kMaxGridY) return Status::Unimplemented("too many batches for the grid");
  params.tiles =
      static_cast<int32_t>(problem.n * params.tiles_down.divisor * params.tiles_across.divisor);
  return {};
}

// The number of CTAs that fit on an SM.
int64_t CtasOfSm(const Instance& instance, const Tiling& tiling, const Gpu& gpu) {
  return std::min(instance.ctas_per_sm, (gpu.smem_per_block_optin + kReservedBytesOfCta) /
                                            (tiling.shared_bytes + kReservedBytesOfCta));
}

// wgrad stores sums to the workspace even with one slice, so that there is only one form of store.
int64_t WorkspaceBytes(const ConvProblem& problem, int64_t slices) {
  return problem.op == Op::kWgrad ? slices * problem.w_elements() * int64_t{sizeof(float)} : 0;
}

TimeTerms TermsOf(const Instance& instance, const ConvProblem& problem, const Gpu& gpu,
                  const Tiling& tiling, int64_t epilogue_bytes, int64_t ctas) {
  const int64_t resident = CtasOfSm(instance, tiling, gpu);
  const int64_t active = std::min(resident, CeilDiv(ctas * tiling.grid_y, gpu.sm_count));
  const int64_t waves = CeilDiv(ctas * tiling.grid_y, gpu.sm_count * resident);
  const TileCycles tile = CyclesOfTile(instance, problem, tiling, gpu);
  const double rounds = static_cast<double>(CeilDiv(tiling.params.tiles, ctas) * waves);
  // Tiles of all CTAs of an SM; one CTA alone does not hide the latency of a tile.
  const double tiles = rounds * static_cast<double>(active);
  const double waits = active > 1 ? 0 : rounds * kTileLatency;
  const double bytes =
      static_cast<double>(tiling.width) *
          static_cast<double>(problem.x_elements() + problem.w_elements() + problem.y_elements()) +
      static_cast<double>(epilogue_bytes);
  TimeTerms terms;
  terms.tensor_cores = (tiles * tile.tensor_cores + waits) / gpu.cycles_per_us();
  terms.loads = tiles * tile.loads / gpu.cycles_per_us();
  terms.dram = bytes / gpu.dram_bytes_per_us;
  terms.launch = gpu.launch_us;
  if (problem.op == Op::kWgrad) {
    terms.launch +=
        gpu.launch_us + 2 * static_cast<double>(WorkspaceBytes(problem, ctas)) /
                            (kPartialBytesPerCycle * gpu.sm_count * gpu.cycles_per_us());
  }
  return terms;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& asked, const Gpu& gpu, int64_t slices,
                Plan* plan) {
  const auto& instance = *static_cast<const Instance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, asked, /*tf32=*/true));
  ConvProblem problem = asked;
  if (instance.Narrow(kernel.op)) JAXCONV_RETURN_IF_ERROR(Mirror(asked, &problem));
  JAXCONV_RETURN_IF_ERROR(CheckImages(kernel, problem));
  Tiling tiling;
  tiling.three_tf32 = kernel.three_tf32;
  tiling.width = ByteWidth(kernel.dtype);
  JAXCONV_RETURN_IF_ERROR(MakeTiling(instance, problem, gpu, &tiling));
  const bool wgrad = problem.op == Op::kWgrad;
  const int64_t tiles = tiling.params.tiles;
  const int64_t most_slices = wgrad ? tiles : 1;
  if (slices < 0 || slices > most_slices) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(most_slices) +
                                   ", got " + std::to_string(slices));
  }
  // As many CTAs as fit on the GPU at a time.
  const int64_t slots = gpu.sm_count * CtasOfSm(instance, tiling, gpu) / tiling.grid_y;
  int64_t ctas = std::clamp<int64_t>(slots, 1, tiles);
  if (wgrad) {
    const int64_t most = kMaxWorkspaceBytes / WorkspaceBytes(problem, 1);
    ctas = slices > 0 ? slices : std::max<int64_t>(1, std::min(ctas, most));
  }
  auto launch = std::make_shared<LaunchParams>();
  launch->kernel = tiling.params;
  launch->kernel.epilogue = EpilogueParams(asked.epilogue);
  launch->shared_bytes = tiling.shared_bytes;
  launch->grid_x = ctas;
  launch->grid_y = tiling.grid_y;
  plan->kernel = &kernel;
  plan->slices = wgrad ? ctas : 1;
  plan->workspace_bytes = WorkspaceBytes(problem, plan->slices);
  plan->terms = TermsOf(instance, problem, gpu, tiling, EpilogueBytes(asked), ctas);
  plan->form = FormTimeOf("few_channels", Name(problem.op),
                          OperandsName(problem, /*tf32=*/true, kernel.three_tf32), gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->params = std::move(launch);
  return {};
}

// SM cycles of an output for silu in float32. Fitted to fused stems. In the rows forms scale, bias
// and a clamp hide behind the next row's loads: 3x3/2 with relu6 on 256 images takes 113.4 us,
// without 110.7.
constexpr double kWideSiluCycles = 1;

PlanFunction PlanOf(const Instance&) { return MakePlan; }
PlanFunction PlanOf(const RowsInstance&) { return PlanRows; }
PlanFunction PlanOf(const RowPairsInstance&) { return PlanRowPairs; }
PlanFunction PlanOf(const RowWindowsInstance&) { return PlanRowWindows; }
// The last and first compute capability of an instance.
int LastOf(const Instance&) { return 1000; }
int LastOf(const RowsInstance&) { return 90; }
int LastOf(const RowWindowsInstance&) { return 90; }
int FirstOf(const Instance&) { return 80; }
int FirstOf(const RowsInstance&) { return 90; }
int FirstOf(const RowWindowsInstance&) { return 90; }

template <Form kForm, bool kThreeTf32 = false>
struct InstanceOf : Instance {
  template <typename... Arguments>
  constexpr InstanceOf(Arguments... arguments) : Instance{arguments...} {
    form = kForm, three_tf32 = kThreeTf32;
  }
};
using FpropInstance = InstanceOf<Form::kFprop>;
using DgradInstance = InstanceOf<Form::kDgrad>;
using WgradInstance = InstanceOf<Form::kWgrad>;
using NarrowWgradInstance = InstanceOf<Form::kNarrowWgrad>;
using Fprop3xTf32Instance = InstanceOf<Form::kFprop, true>;
using Dgrad3xTf32Instance = InstanceOf<Form::kDgrad, true>;
using Wgrad3xTf32Instance = InstanceOf<Form::kWgrad, true>;
using NarrowWgrad3xTf32Instance = InstanceOf<Form::kNarrowWgrad, true>;

}  // namespace

Status CheckImages(const KernelDesc& kernel, const ConvProblem& problem) {
  if (problem.output_dtype() != kernel.dtype) {
    return Status::Unimplemented(std::string("expected an output of type ") + Name(kernel.dtype) +
                                 ", got " + Name(problem.output_dtype()));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (problem.groups != 1) return Status::Unimplemented("expected one group");
  if (problem.in[0] != 1 || problem.filter[0] != 1 || problem.out[0] != 1) {
    return Status::Unimplemented("expected at most two spatial axes");
  }
  for (int64_t dilation : problem.lhs_dilation) {
    if (dilation != 1) return Status::Unimplemented("expected no lhs_dilation");
  }
  const int64_t vector = 16 / ByteWidth(kernel.dtype);
  if (problem.op != Op::kFprop && problem.k % vector != 0) {
    return Status::Unimplemented("K " + std::to_string(problem.k) + " is not a multiple of " +
                                 std::to_string(vector));
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  const int64_t reach = problem.in[2] + problem.out[2] * problem.stride[2] +
                        problem.filter[2] * problem.dilation[2] + std::abs(problem.pad_lo[2]);
  if (problem.in_pixels() * problem.c >= int64_t{1} << 31 || reach * problem.c >= int64_t{1}
                                                                                      << 31) {
    return Status::Unimplemented("an image, or a row with its padding, of 2^31 elements");
  }
  return {};
}

std::vector<KernelDesc> Kernels() {
  std::vector<KernelDesc> all;
#define KERNEL(ops, types, variant, header, form, arguments)                                       \
  JAXCONV_ADD_KERNELS(all, ops, types, few_channels, variant, FirstOf(instance), LastOf(instance), \
                      PlanOf(instance), form##Instance, JAXCONV_UNPACK arguments)
#define FUSED(...)
#include "cuda/few_channels/kernels.def"
  for (KernelDesc& kernel : all) {
    EpilogueCost& cost = kernel.epilogue_cost;
    cost.of_products = kernel.plan != PlanRows;
    cost.clamps = EpilogueCost::kStraightCycles;
    if (ByteWidth(kernel.dtype) == kFloatBytes) cost.activation = kWideSiluCycles;
    if (kernel.plan == PlanRows) cost.clamps = 0, cost.swish = EpilogueCost::kLoopCycles;
    if (kernel.plan != MakePlan) continue;
    kernel.three_tf32 = static_cast<const Instance*>(kernel.instance)->three_tf32;
  }
  return all;
}

}  // namespace jaxconv::few_channels
