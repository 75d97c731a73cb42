#include "cuda/few_channels/rows_plan.h"

#include <algorithm>
#include <memory>
#include <string>

#include "cuda/common/predicted_time.h"
#include "cuda/common/rates.h"
#include "cuda/few_channels/plan.h"

namespace jaxconv::few_channels {
namespace {

constexpr int64_t kMaxGridY = 65535;
// Cycles of an SM for a row of x that passes through registers: that producers copy, whose sums of
// z are added and stored, or that is spread. Fitted (docs/notes/few_channels.md).
constexpr double kRowCycles = 600;

int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -CeilDiv(-a, b); }

Status CheckRows(const RowsInstance& instance, const ConvProblem& problem) {
  if (problem.c > 4) return Status::Unimplemented("expected at most 4 input channels");
  if (problem.k % 8 != 0) {
    return Status::Unimplemented("K " + std::to_string(problem.k) + " is not a multiple of 8");
  }
  if (problem.filter[1] != instance.filter_rows || problem.filter[2] != instance.filter_columns) {
    return Status::Unimplemented("expected a filter of " + std::to_string(instance.filter_rows) +
                                 "x" + std::to_string(instance.filter_columns));
  }
  for (int a = 1; a < 3; ++a) {
    if (problem.stride[a] != instance.stride || problem.dilation[a] != 1) {
      return Status::Unimplemented("expected strides of " + std::to_string(instance.stride) +
                                   " and no dilation");
    }
  }
  if (problem.op == Op::kDgrad) {
    if (problem.k <= kRowChannels) return {};
    return Status::Unimplemented("expected at most " + std::to_string(kRowChannels) +
                                 " output channels");
  }
  if (problem.in[2] * problem.c % 8 != 0) {
    return Status::Unimplemented("expected rows of x of a multiple of 8 elements");
  }
  const Epilogue& epilogue = problem.epilogue;
  const bool computed = epilogue.activation <= Activation::kRelu6 || IsSwish(epilogue.activation);
  if (epilogue.residual || epilogue.pre || !computed) {
    return Status::Unimplemented("expected an epilogue of scale, bias and a clamp or swish");
  }
  return {};
}

// Sets shared memory, the grid and the predicted time, for rows of `row` cycles each.
template <class Params>
Status Finish(const ConvProblem& problem, const Gpu& gpu, int64_t parts, TimeTerms row,
              Params* params, Plan* plan) {
  if (params->shared_bytes > gpu.smem_per_block_optin) {
    return Status::Unimplemented("a CTA needs " + std::to_string(params->shared_bytes) +
                                 " bytes of shared memory");
  }
  params->grid_y = parts * problem.batch;
  if (params->grid_y > kMaxGridY) return Status::Unimplemented("too many batches for the grid");
  params->grid_x = std::clamp<int64_t>(gpu.sm_count / params->grid_y, 1, params->units);
  const int64_t waves = CeilDiv(params->grid_x * params->grid_y, gpu.sm_count);
  const double rows =
      static_cast<double>(waves * CeilDiv(params->units, params->grid_x)) / gpu.cycles_per_us();
  const double bytes =
      2.0 * static_cast<double>(problem.x_elements() + problem.w_elements() + problem.y_elements());
  plan->terms = {rows * row.tensor_cores, rows * row.loads, rows * row.stores,
                 bytes / gpu.dram_bytes_per_us, gpu.launch_us};
  plan->form = FormTimeOf("few_channels rows", OperationsName(problem), "16-bit", gpu);
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->slices = 1;
  return {};
}

// Cycles of wgmma for a product of 64 channels, `columns` pixels and 16 elements.
double ProductCycles(int64_t columns, const Gpu& gpu) {
  return static_cast<double>(kWgmmaRows * columns * kWgmmaReduced) / gpu.wgmma_per_clock;
}

}  // namespace

Status PlanRowPairs(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                    int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const RowPairsInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  JAXCONV_RETURN_IF_ERROR(CheckImages(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(CheckRows(instance, problem));
  if (slices < 0 || slices > 1) {
    return Status::InvalidArgument("slices: expected 1, got " + std::to_string(slices));
  }
  auto params = std::make_shared<PairsParams>();
  params->images = static_cast<int32_t>(problem.batch * problem.n);
  params->batch_images = static_cast<int32_t>(problem.n);
  params->w_batch = problem.w_elements() / problem.batch;
  params->c = static_cast<int32_t>(problem.c);
  params->k = static_cast<int32_t>(problem.k);
  params->in_rows = static_cast<int32_t>(problem.in[1]);
  params->in_columns = static_cast<int32_t>(problem.in[2]);
  params->dy_rows = static_cast<int32_t>(problem.out[1]);
  params->dy_columns = static_cast<int32_t>(problem.out[2]);
  params->pad_rows = static_cast<int32_t>(problem.pad_lo[1]);
  params->pad_columns = static_cast<int32_t>(problem.pad_lo[2]);
  // Pair a consists of row 2 a - pad and the row before it.
  const int64_t row = FloorDiv(problem.pad_lo[1] + 1, 2);
  const int64_t rows = FloorDiv(problem.in[1] + problem.pad_lo[1], 2) - row + 1;
  const int64_t column = FloorDiv(problem.pad_lo[2] + 1, 2);
  const int64_t columns = FloorDiv(problem.in[2] + problem.pad_lo[2], 2) - column + 1;
  params->first_row = static_cast<int32_t>(row);
  params->first_pair_column = static_cast<int32_t>(column);
  params->pair_columns = static_cast<int32_t>(columns);
  // One strip if all columns of dy fit. Otherwise a strip has the columns of dy that its windows
  // reach.
  const int64_t reach = instance.filter_columns / 2;
  const bool one = problem.out[2] <= kRowPixels && columns <= 128 && column - reach >= -kZLead &&
                   column + columns - 1 < kZPitch - kZLead;
  const int64_t most = kRowPixels - reach;
  const int64_t strips = one ? 1 : CeilDiv(columns, most);
  params->strips = FastDivmod(strips);
  params->strip_columns = static_cast<int32_t>(CeilDiv(columns, strips));
  params->first_column = static_cast<int32_t>(one ? 0 : column - reach);
  params->out_rows = FastDivmod(rows);
  params->units = static_cast<int32_t>(params->batch_images * strips * rows);
  params->whole_words = problem.pad_lo[2] % 2 != 0 && problem.in[2] * problem.c % 2 == 0 ? 1 : 0;
  params->shared_bytes =
      kPairSlots * kRowPixels * 128 + kRowConsumers * kZFloats * int64_t{sizeof(float)};
  TimeTerms of_row;
  const double products = static_cast<double>(instance.filter_rows + 1) * 2;
  of_row.tensor_cores = products * ProductCycles(kRowPixels, gpu);
  of_row.stores = 2 * kRowCycles;
  JAXCONV_RETURN_IF_ERROR(Finish(problem, gpu, 1, of_row, params.get(), plan));
  plan->kernel = &kernel;
  plan->params = std::move(params);
  return {};
}

Status PlanRows(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const RowsInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  JAXCONV_RETURN_IF_ERROR(CheckImages(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(CheckRows(instance, problem));
  if (slices < 0 || slices > 1) {
    return Status::InvalidArgument("slices: expected 1, got " + std::to_string(slices));
  }
  auto params = std::make_shared<RowsParams>();
  params->images = static_cast<int32_t>(problem.batch * problem.n);
  params->batch_images = static_cast<int32_t>(problem.n);
  params->c = static_cast<int32_t>(problem.c);
  params->k = static_cast<int32_t>(problem.k);
  params->in_rows = static_cast<int32_t>(problem.in[1]);
  params->row_elements = static_cast<int32_t>(problem.in[2] * problem.c);
  params->out_columns = static_cast<int32_t>(problem.out[2]);
  params->pad_rows = static_cast<int32_t>(problem.pad_lo[1]);
  params->pad_columns = static_cast<int32_t>(problem.pad_lo[2]);
  params->out_rows = FastDivmod(problem.out[1]);
  const int64_t strips = CeilDiv(problem.out[2], instance.pixels());
  params->strips = FastDivmod(strips);
  params->units = static_cast<int32_t>(params->batch_images * strips * problem.out[1]);
  const int64_t parts = CeilDiv(problem.k, kRowChannels);
  params->column_parts = FastDivmod(parts);
  params->w_batch = problem.w_elements() / problem.batch;
  // All strips begin at the same position within a chunk, because kStripPixels pixels are whole
  // chunks.
  params->lead = static_cast<int32_t>((8 - problem.pad_lo[2] * problem.c % 8) % 8);
  const int64_t pairs = int64_t{instance.planes()} * instance.plane_chunks();
  params->raw_chunks = static_cast<int32_t>(CeilDiv(params->lead + pairs * 2 * problem.c + 2, 8));
  params->epilogue = EpilogueParams(problem.epilogue);
  params->shared_bytes =
      instance.first_bytes() + int64_t{instance.ring_pairs()} * 2 * instance.row_bytes() +
      int64_t{instance.producers()} * instance.raw_pairs() * 32 * params->raw_chunks;
  const int64_t products = instance.filter_rows * ((instance.filter_columns + 3) / 4);
  TimeTerms of_row;
  of_row.tensor_cores = static_cast<double>(products) * ProductCycles(instance.pixels(), gpu);
  of_row.loads = kRowCycles * static_cast<double>(instance.stride) / 2;
  JAXCONV_RETURN_IF_ERROR(Finish(problem, gpu, parts, of_row, params.get(), plan));
  plan->kernel = &kernel;
  plan->params = std::move(params);
  return {};
}

namespace {

Status CheckWindows(const RowWindowsInstance& instance, const ConvProblem& problem) {
  if (problem.filter[1] != instance.filter_rows || problem.stride[1] != instance.stride) {
    return Status::Unimplemented("expected " + std::to_string(instance.filter_rows) +
                                 " filter rows and a stride of " + std::to_string(instance.stride));
  }
  if (problem.filter[2] * problem.c > instance.row_planes * 8) {
    return Status::Unimplemented("C S is " + std::to_string(problem.filter[2] * problem.c) +
                                 ", expected at most " + std::to_string(instance.row_planes * 8));
  }
  for (int a = 1; a < 3; ++a) {
    if (problem.dilation[a] != 1) return Status::Unimplemented("expected no dilation");
  }
  if (problem.in[2] * problem.c % 8 != 0) {
    return Status::Unimplemented("expected rows of x of a multiple of 8 elements");
  }
  return {};
}

// Divides a row of y into strips of 64, 112 or 128 pixels, as few in all as possible, whose rows of
// x fit into a box of TMA.
Status DivideIntoStrips(const RowWindowsInstance& instance, const ConvProblem& problem,
                        WindowsParams* params) {
  constexpr int64_t kBoxWords = 256, kWordElements = 4;
  // Copies begin at multiples of 16 bytes inside x. If x begins with padding, the first strip is
  // copied to 128 bytes behind the place of other strips, which begin 64 elements earlier.
  constexpr int64_t kGapElements = 64, kGapBytes = 128;
  const int64_t first = -problem.pad_lo[2] * problem.c, step = problem.stride[2] * problem.c;
  const int64_t begin = first < 0 ? -kGapElements : first / 8 * 8, lead = first - begin;
  if (lead < 0) return Status::Unimplemented("expected at most 64 elements of padding in a row");
  int64_t least = 0;
  for (const int64_t pixels : {128, 112, 64}) {
    const int64_t elements = lead + (pixels - 1) * step + params->row_elements;
    const int64_t words = CeilDiv(elements, 2 * kWordElements) * 2;
    if (pixels > instance.most_pixels() || words > kBoxWords) continue;
    const int64_t strips = CeilDiv(problem.out[2], pixels);
    if (least > 0 && strips * pixels >= least) continue;
    least = strips * pixels;
    params->strips = FastDivmod(strips);
    params->pixels = static_cast<int32_t>(pixels);
    params->first_word = static_cast<int32_t>(begin / kWordElements);
    params->strip_words = static_cast<int32_t>(pixels * step / kWordElements);
    params->lead_bytes = static_cast<int32_t>(lead * 2);
    params->left_elements = static_cast<int32_t>(std::max<int64_t>(0, -first));
    params->step_bytes = static_cast<int32_t>(step * 2);
    params->raw_row_bytes = static_cast<int32_t>(words * 8);
    params->raw_group_bytes = static_cast<int32_t>(
        CeilDiv(params->raw_row_bytes * instance.stride + kGapBytes, 128) * 128);
  }
  if (least > 0) return {};
  return Status::Unimplemented("the windows of 64 pixels are wider than a box of TMA");
}

}  // namespace

Status PlanRowWindows(const KernelDesc& kernel, const ConvProblem& problem, const Gpu& gpu,
                      int64_t slices, Plan* plan) {
  const auto& instance = *static_cast<const RowWindowsInstance*>(kernel.instance);
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem, /*tf32=*/false));
  JAXCONV_RETURN_IF_ERROR(CheckImages(kernel, problem));
  JAXCONV_RETURN_IF_ERROR(CheckWindows(instance, problem));
  auto params = std::make_shared<WindowsParams>();
  params->images = static_cast<int32_t>(problem.batch * problem.n);
  params->batch_images = static_cast<int32_t>(problem.n);
  params->out_elements = problem.w_elements();
  params->w_batch = problem.w_elements() / problem.batch;
  params->k = static_cast<int32_t>(problem.k);
  params->row_elements = static_cast<int32_t>(problem.filter[2] * problem.c);
  params->x_rows = static_cast<int32_t>(problem.in[1]);
  params->x_row_words = static_cast<int32_t>(problem.in[2] * problem.c / 4);
  params->out_columns = static_cast<int32_t>(problem.out[2]);
  params->pad_rows = static_cast<int32_t>(problem.pad_lo[1]);
  params->out_rows = FastDivmod(problem.out[1]);
  JAXCONV_RETURN_IF_ERROR(DivideIntoStrips(instance, problem, params.get()));
  const int64_t strips = params->strips.divisor, pixels = params->pixels;
  params->units = static_cast<int32_t>(params->batch_images * strips * problem.out[1]);
  const int64_t parts = CeilDiv(problem.k, instance.consumers * kRowChannels);
  params->column_parts = FastDivmod(parts);
  const int64_t group_bytes = pixels * 16 * instance.row_planes * instance.stride;
  // The last windows' words of a plane reach beyond the last row.
  constexpr int64_t kBeyondBytes = 64;
  params->shared_bytes =
      pixels * 128 * instance.gradient_rows * instance.consumers +
      group_bytes * (RowWindowsInstance::kGroups + instance.window_groups() - 1) +
      int64_t{params->raw_group_bytes} * RowWindowsInstance::kRawGroups + kBeyondBytes;
  // A row of y: its products, or the latency of spreading a group of rows of x.
  const int64_t product = std::max(instance.columns() / 2, 16 + instance.columns() / 4);
  TimeTerms of_row;
  of_row.tensor_cores = std::max(static_cast<double>(pixels / kWgmmaReduced * product), kRowCycles);
  JAXCONV_RETURN_IF_ERROR(Finish(problem, gpu, parts, of_row, params.get(), plan));
  if (slices < 0 || slices > params->units) {
    return Status::InvalidArgument("slices: expected 1 to " + std::to_string(params->units) +
                                   ", got " + std::to_string(slices));
  }
  if (slices > 0) params->grid_x = slices;
  plan->kernel = &kernel;
  plan->slices = params->grid_x;
  plan->workspace_bytes = plan->slices * problem.w_elements() * int64_t{sizeof(float)};
  plan->terms.launch +=
      gpu.launch_us + 2 * static_cast<double>(plan->workspace_bytes) /
                          (kPartialBytesPerCycle * gpu.sm_count * gpu.cycles_per_us());
  plan->microseconds = PredictedMicroseconds(plan->terms, plan->form);
  plan->params = std::move(params);
  return {};
}

}  // namespace jaxconv::few_channels
