// Makes plans: which problems a kernel accepts, how its work is divided into tasks, and where its
// intermediate arrays lie in the workspace.
#include "cpu/plan.h"

#include <algorithm>
#include <string>

#include "cpu/copied_images.h"
#include "cpu/depthwise_wgrad.h"
#include "cpu/few_outputs.h"
#include "cpu/few_pixels.h"
#include "cpu/gemm_wgrad.h"
#include "cpu/onednn_bugs.h"
#include "cpu/small_groups.h"

namespace jaxconv::cpu {
namespace {

// A second task takes a few microseconds to start, which pays only above this much work. A byte
// counts as 16 operations, about the machine balance of an AVX-512 core.
constexpr int64_t kOperationsPerTask = 4 << 20;
constexpr int64_t kOperationsPerByte = 16;
// The limit of all tasks' partial weight gradients together; a large filter gets fewer tasks.
constexpr int64_t kMaxPartialBytes = 256 << 20;

bool Is8Bits(DType dtype) { return dtype == DType::kS8 || dtype == DType::kU8; }

bool IsFloat16(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

int64_t TensorBytes(const ConvProblem& p) {
  return p.x_elements() * ByteWidth(p.x_dtype) + p.w_elements() * ByteWidth(p.w_dtype) +
         p.y_elements() * ByteWidth(p.y_dtype);
}

// oneDNN's weight gradients read a whole region once for each pair of 16-channel blocks, so a
// region should stay in a cache. Each region also unpacks the filter, which is negligible from 2048
// pixels on.
int64_t MaxRegionRows(const Geometry& g) {
  const ConvProblem& p = g.p;
  constexpr int64_t kMinPixels = 2048, kMaxBytes = 2 << 20;
  int64_t rows = DividedRows(g);
  int64_t row_pixels = p.out_pixels() / rows;
  int64_t row_bytes =
      (p.y_elements() + p.x_elements()) / (p.batch * p.n * rows) * ByteWidth(p.x_dtype);
  int64_t fitting = std::max(CeilDiv(kMinPixels, row_pixels), kMaxBytes / row_bytes);
  return std::clamp<int64_t>(fitting, 1, rows);
}

// The largest region whose sums, 512 KB, stay in L2 until the epilogue reads them.
constexpr int64_t kMaxSums = 128 << 10;

// The form of the operands that the kernel reads.
enum class Operands {
  kNative,
  kFloats,   // 16-bit operands as float32
  kCopied,   // 8-bit images with their padding
  kFlipped,  // s8 images with their padding, as u8
};

// Copies with padding may be at most this many times as large as the largest tensor.
constexpr int64_t kMaxCopyGrowth = 4;

// On CPUs without a product of two s8 numbers, oneDNN adds 128 to every number that its kernels
// read, and its reorder of the filter takes 1 ns an element. From this many terms of a sum on,
// flipping the signs of s8 images is cheaper. Time with flipped images over native images (one
// core, ResNet-50's layers, 1 to 16 images): 0.2 to 1.0 from 512 terms on, 0.7 to 1.4 below.
constexpr int64_t kFlippedTerms = 512;

bool MultipliesSigned() {
  return IsaHas(dnnl::cpu_isa::avx512_core_amx) || IsaHas(dnnl::cpu_isa::avx2_vnni_2);
}

Status CheckTypes(const KernelDesc& kernel, const ConvProblem& p) {
  if (kernel.op != p.op) return Status::Unimplemented(std::string("computes ") + Name(kernel.op));
  const bool int8 = Is8Bits(kernel.dtype);
  const DType second = int8 ? DType::kS8 : kernel.dtype;
  if (p.lhs_dtype() != kernel.dtype || p.rhs_dtype() != second) {
    return Status::Unimplemented(std::string("takes ") + Name(kernel.dtype) +
                                 (second == kernel.dtype ? "" : " and s8") + " operands, got " +
                                 Name(p.lhs_dtype()) + " and " + Name(p.rhs_dtype()));
  }
  const DType output = p.output_dtype();
  if (!int8 && output != kernel.dtype && output != DType::kF32) {
    return Status::Unimplemented(std::string("gives ") + Name(kernel.dtype) +
                                 (IsFloat16(kernel.dtype) ? " or f32" : "") +
                                 " results, asked for " + Name(output));
  }
  if (int8 && !IsaHas(dnnl::cpu_isa::avx512_core_vnni) && !IsaHas(dnnl::cpu_isa::avx2_vnni)) {
    return Status::Unimplemented(std::string("without VNNI (this is ") + IsaName() +
                                 ") oneDNN adds products of 8-bit operands in 16 bits, which may "
                                 "saturate");
  }
  return {};
}

// Whether a tap of the filter lies in the padding for all windows.
bool HasTapOfPaddingAlone(const ConvProblem& p) {
  for (int a = 0; a < 3; ++a) {
    const int64_t step = p.lhs_dilation[a], extent = (p.in[a] - 1) * step + 1;
    for (int64_t tap = 0; tap < p.filter[a]; ++tap) {
      const int64_t at = tap * p.dilation[a] - p.pad_lo[a];  // for the first window
      const int64_t first = at >= 0 ? 0 : (-at + p.stride[a] - 1) / p.stride[a];
      bool meets = false;
      for (int64_t o = first; o < std::min(p.out[a], first + step) && !meets; ++o) {
        const int64_t place = at + o * p.stride[a];
        meets = place < extent && place % step == 0;
      }
      if (!meets) return true;
    }
  }
  return false;
}

Status CheckOwnKernel(const KernelDesc& kernel, const Geometry& g) {
  const ConvProblem& p = g.p;
  if (kernel.family == Family::kDepthwise) {
    if (!DepthwiseWgradRuns()) return Status::Unimplemented("needs AVX-512");
    if (p.groups != p.c || p.groups != p.k) {
      return Status::Unimplemented("takes one input and one output channel per group, got " +
                                   std::to_string(p.c_per_group()) + " and " +
                                   std::to_string(p.k_per_group()));
    }
  }
  if (kernel.family == Family::kFewPixels) JAXCONV_RETURN_IF_ERROR(CheckFewPixels(p));
  if (g.transposed) return Status::Unimplemented("the input is dilated");
  const RegionKernel* own = RegionKernelOf(kernel.family);
  return own != nullptr ? own->check(p) : Status();
}

class Planner {
 public:
  explicit Planner(Plan* plan)
      : plan_(*plan), problem_(plan->problem), wgrad_(plan->problem.op == Op::kWgrad) {}

  Status Make(const KernelDesc& kernel, Operands operands) {
    const bool native = operands != Operands::kFloats;
    JAXCONV_RETURN_IF_ERROR(MakeGeometry(problem_, &plan_.geometry));
    const Geometry& g = plan_.geometry;
    plan_.family = kernel.family;
    plan_.flips = operands == Operands::kFlipped;
    plan_.copies = plan_.flips || operands == Operands::kCopied;
    if (plan_.copies && g.transposed) return Status::Unimplemented("the input is dilated");
    plan_.compute_dtype = plan_.flips ? DType::kU8 : native ? kernel.dtype : DType::kF32;
    plan_.finishes = !Is8Bits(kernel.dtype) && !problem_.epilogue.Plain();
    plan_.result_dtype = Is8Bits(kernel.dtype)                 ? DType::kS32
                         : wgrad_ || !native || plan_.finishes ? DType::kF32
                                                               : problem_.output_dtype();
    plan_.requantizes = plan_.result_dtype == DType::kS32 &&
                        (problem_.y_dtype != DType::kS32 || !problem_.epilogue.Plain());
    ReserveCopies(native);
    bool onednn = kernel.family == Family::kOnednn;
    JAXCONV_RETURN_IF_ERROR(onednn ? RequireTrustedWindow(g.p) : CheckOwnKernel(kernel, g));
    if (const RegionKernel* own = RegionKernelOf(kernel.family); own != nullptr) {
      plan_.region_kernel = own;
      const int64_t packed = problem_.batch * own->packed_elements(problem_);
      plan_.reversed_offset = Reserve(packed * ByteWidth(DType::kF32));
      plan_.scratch_stride = AlignUp(own->scratch_bytes(problem_));
      plan_.scratch_offset = Reserve(plan_.scratch_stride * plan_.slices);
    }
    if (kernel.family == Family::kGemm) {
      plan_.scratch_stride = AlignUp(GemmWgradScratchBytes(g.p, plan_.slices));
      plan_.scratch_offset = Reserve(plan_.scratch_stride * plan_.slices);
    } else if (kernel.family == Family::kFewPixels) {
      // For every task its gathered data, then its sums; the first task's sums are the result.
      plan_.scratch_stride = AlignUp(FewPixelsScratchBytes(g.p));
      plan_.scratch_offset = Reserve(plan_.scratch_stride * plan_.slices);
      plan_.sums_stride = AlignUp(FewPixelsPartialBytes(g.p));
      plan_.products_offset = Reserve(plan_.sums_stride * (plan_.slices - 1));
    } else {
      int64_t rows = DividedRows(g), images = g.p.n;
      if (wgrad_ && onednn) rows = MaxRegionRows(g);
      if (plan_.requantizes || plan_.finishes || plan_.copies) {
        const int64_t image = problem_.y_elements() / (problem_.batch * problem_.n);
        rows = std::clamp<int64_t>(kMaxSums / (image / rows), 1, rows);
        images = std::max<int64_t>(1, kMaxSums / image);
      }
      plan_.tasks = MakeTasks(g, plan_.slices, rows, images);
      const bool in_place = plan_.finishes && problem_.y_dtype == DType::kF32;
      if ((plan_.requantizes || plan_.finishes) && !in_place) ReserveSums();
      if (plan_.copies) JAXCONV_RETURN_IF_ERROR(ReserveCopiedImages());
      if (onednn) {
        JAXCONV_RETURN_IF_ERROR(MakePrimitives(g, plan_.compute_dtype, plan_.result_dtype,
                                               kernel.brgemm, &plan_.tasks, &plan_.primitives));
        ReserveForPrimitives();
      }
      if (wgrad_) ReservePartials();
    }
    if (problem_.epilogue.statistics) ReserveMoments();
    if (plan_.workspace_bytes > 0) plan_.workspace_bytes += kAlignment;
    return {};
  }

 private:
  int64_t Reserve(int64_t bytes) {
    int64_t offset = plan_.workspace_bytes;
    plan_.workspace_bytes += AlignUp(bytes);
    return offset;
  }

  void ReserveCopies(bool native) {
    int64_t x = problem_.x_elements(), w = problem_.w_elements(), y = problem_.y_elements();
    int64_t f32 = ByteWidth(DType::kF32);
    if (!native) {
      plan_.lhs_offset = Reserve((problem_.op == Op::kDgrad ? y : x) * f32);
      plan_.rhs_offset = Reserve((wgrad_ ? y : w) * f32);
    }
    bool transposed = plan_.geometry.transposed;
    if (transposed && !wgrad_) {
      plan_.reversed_offset = Reserve(w * ByteWidth(plan_.compute_dtype));
    }
    if (plan_.requantizes || plan_.finishes) return;
    if (plan_.result_dtype != problem_.output_dtype() || (transposed && wgrad_)) {
      int64_t elements = problem_.op == Op::kFprop ? y : problem_.op == Op::kDgrad ? x : w;
      plan_.result_offset = Reserve(elements * ByteWidth(plan_.result_dtype));
    }
  }

  // The regions become convolutions of their copies.
  Status ReserveCopiedImages() {
    const ConvProblem& p = plan_.geometry.p;
    const int64_t whole = WithoutPadding(p).x_elements();
    const int64_t largest = std::max({p.x_elements(), p.w_elements(), p.y_elements()});
    if (whole > kMaxCopyGrowth * largest) {
      return Status::Unimplemented("exact sums need the images with their padding, " +
                                   std::to_string(whole) + " elements, more than " +
                                   std::to_string(kMaxCopyGrowth) + " times the largest tensor");
    }
    int64_t elements = 0;
    for (std::vector<Region>& task : plan_.tasks) {
      for (Region& region : task) {
        if (region.sub.n == 0) continue;
        region.images_to_copy = region.sub;
        region.sub = WithoutPadding(region.sub);
        elements = std::max(elements, region.sub.x_elements());
      }
    }
    plan_.copy_stride = AlignUp(elements);
    plan_.copy_offset = Reserve(plan_.copy_stride * plan_.slices);
    if (plan_.flips) plan_.offsets_offset = Reserve(p.batch * p.k * ByteWidth(DType::kS32));
    return {};
  }

  void ReserveForPrimitives() {
    for (PackedFilter& packed : plan_.primitives.packed) {
      packed.offset = Reserve(packed.bytes * plan_.geometry.p.batch);
    }
    auto need = [](int64_t* bytes, const dnnl::memory::desc& desc) {
      *bytes = std::max(*bytes, AlignUp(static_cast<int64_t>(desc.get_size())));
    };
    for (const PackedFilter& packed : plan_.primitives.packed) {
      for (const Reorder& part : packed.parts) need(&plan_.scratch_stride, part.scratch);
    }
    for (const ConvPrimitive& primitive : plan_.primitives.convolutions) {
      need(&plan_.scratch_stride, primitive.scratch);
      if (!wgrad_) continue;
      need(&plan_.scratch_stride, primitive.unpack.scratch);
      need(&plan_.scratch_stride, primitive.unpack_and_add.scratch);
      need(&plan_.unpack_stride, primitive.w);
    }
    plan_.scratch_offset = Reserve(plan_.scratch_stride * plan_.slices);
    plan_.unpack_offset = Reserve(plan_.unpack_stride * plan_.slices);
  }

  void ReserveSums() {
    int64_t largest = 0;
    for (const std::vector<Region>& task : plan_.tasks) {
      for (const Region& region : task) {
        largest = std::max(largest, OutputElements(plan_, region));
      }
    }
    plan_.sums_stride = AlignUp(largest * ByteWidth(DType::kS32));
    plan_.sums_offset = Reserve(plan_.sums_stride * plan_.slices);
  }

  // Moments for each region; for all pixels at once if there are no regions.
  void ReserveMoments() {
    int64_t regions = 0;
    for (const std::vector<Region>& task : plan_.tasks) {
      plan_.first_region.push_back(regions);
      regions += static_cast<int64_t>(task.size());
    }
    plan_.moments_stride = AlignUp(2 * problem_.k * static_cast<int64_t>(sizeof(double)));
    plan_.moments_offset = Reserve(plan_.moments_stride * std::max<int64_t>(regions, 1));
  }

  // The first task of an independent convolution writes the result directly.
  void ReservePartials() {
    int64_t filter_bytes = problem_.w_elements() / problem_.batch * ByteWidth(DType::kF32);
    int64_t next_batch = 0;
    for (const std::vector<Region>& task : plan_.tasks) {
      std::vector<Partial> partials;
      for (const Region& region : task) {
        if (!partials.empty() && partials.back().batch == region.batch) continue;
        bool first = region.batch >= next_batch;
        next_batch = region.batch + 1;
        partials.push_back({region.batch, first ? -1 : Reserve(filter_bytes)});
      }
      plan_.partials.push_back(std::move(partials));
    }
  }

  Plan& plan_;
  const ConvProblem& problem_;
  const bool wgrad_;
};

}  // namespace

const RegionKernel* RegionKernelOf(Family family) {
  return family == Family::kFewOutputs    ? &kFewOutputs
         : family == Family::kSmallGroups ? &kSmallGroups
                                          : nullptr;
}

Status MakePlan(const KernelDesc& kernel, const ConvProblem& problem, int64_t slices, Plan* plan) {
  // Not for reversed taps: the reversal assumes that taps are the outermost axes.
  const bool krsc = problem.filter_layout == FilterLayout::kKrsc && Is8Bits(kernel.dtype) &&
                    problem.lhs_dilation == Spatial{1, 1, 1};
  if (!krsc) JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  JAXCONV_RETURN_IF_ERROR(problem.RequireChannelsLast());
  JAXCONV_RETURN_IF_ERROR(CheckTypes(kernel, problem));
  auto make = [&](Operands operands) {
    *plan = Plan();
    plan->problem = problem;
    plan->slices = slices;
    return Planner(plan).Make(kernel, operands);
  };
  if (Is8Bits(kernel.dtype)) {
    const bool s8 = kernel.dtype == DType::kS8;
    const int64_t terms = problem.taps() * problem.c_per_group();
    if (s8 && !MultipliesSigned() && terms >= kFlippedTerms && make(Operands::kFlipped).ok()) {
      return {};
    }
    const Status status = make(Operands::kNative);
    if (status.ok() || make(Operands::kCopied).ok()) return {};
    return s8 && make(Operands::kFlipped).ok() ? Status() : status;
  }
  if (!IsFloat16(kernel.dtype)) return make(Operands::kNative);
  // On CPUs without 16-bit instructions oneDNN emulates them, slower than float32; on others it has
  // only reference code for some geometries.
  bool instructions = IsaHas(kernel.dtype == DType::kF16 ? dnnl::cpu_isa::avx512_core_fp16
                                                         : dnnl::cpu_isa::avx512_core_bf16);
  // oneDNN 3.2's weight gradient in bfloat16 does not write taps that lie only in the padding.
  if (problem.op == Op::kWgrad && HasTapOfPaddingAlone(problem)) return make(Operands::kFloats);
  if (kernel.family == Family::kOnednn && instructions && make(Operands::kNative).ok()) return {};
  return make(Operands::kFloats);
}

int64_t OutputElements(const Plan& plan, const Region& region) {
  const ConvProblem& p = plan.problem;
  const int64_t row = p.y_elements() / (p.batch * p.n * DividedRows(plan.geometry));
  return region.images * (region.row_end - region.row_begin) * row;
}

int64_t ChooseSlices(const ConvProblem& p, Family family, int64_t threads) {
  int64_t work = p.flops() + kOperationsPerByte * TensorBytes(p);
  int64_t slices = std::clamp<int64_t>(work / kOperationsPerTask, 1, std::max<int64_t>(threads, 1));
  if (family == Family::kGemm) return GemmWgradTasks(p, slices);
  if (family == Family::kFewPixels) return std::min(slices, p.taps() * p.c);
  int axis = 3 - p.rank;
  // The transposed convolution swaps the rows of x and y; the smaller number serves both.
  int64_t rows = p.op == Op::kWgrad || p.lhs_dilation != Spatial{1, 1, 1}
                     ? std::min(p.in[axis], p.out[axis])
                 : p.op == Op::kDgrad ? CeilDiv(p.in[axis], p.stride[axis])
                                      : p.out[axis];
  slices = std::min(slices, p.batch * p.n * rows);
  if (p.op == Op::kWgrad) {
    int64_t partial = 2 * p.w_elements() / p.batch * ByteWidth(DType::kF32);
    slices = std::min(slices, std::max<int64_t>(1, kMaxPartialBytes / partial));
  }
  return slices;
}

}  // namespace jaxconv::cpu
