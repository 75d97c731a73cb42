// One class runs a plan; its methods are in the order of the stages.
#include "cpu/execution.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cpu/convert.h"
#include "cpu/copied_images.h"
#include "cpu/depthwise_wgrad.h"
#include "cpu/few_pixels.h"
#include "cpu/float_epilogue.h"
#include "cpu/gemm_wgrad.h"
#include "cpu/onednn.h"
#include "cpu/plan.h"
#include "cpu/requantize.h"

namespace jaxconv::cpu {
namespace {

// A smaller array is copied before a second thread has woken up.
constexpr int64_t kMinElementsPerTask = 32 << 10;

class Execution {
 public:
  Execution(const Plan& plan, const void* lhs, const void* rhs, const EpilogueTerms& terms,
            void* out, char* workspace, const ParallelFor& parallel_for)
      : plan_(plan),
        p_(plan.geometry.p),
        problem_(plan.problem),
        wgrad_(plan.problem.op == Op::kWgrad),
        operand_width_(ByteWidth(plan.compute_dtype)),
        result_width_(ByteWidth(plan.result_dtype)),
        filter_elements_(plan.problem.w_elements() / plan.problem.batch),
        lhs_(lhs),
        rhs_(rhs),
        terms_(terms),
        out_(out),
        workspace_(workspace),
        parallel_for_(parallel_for) {}

  Status Run() {
    JAXCONV_RETURN_IF_ERROR(ConvertOperands());
    result_ = plan_.result_offset >= 0 ? workspace_ + plan_.result_offset : out_;
    // The caller's x and y; the transposed convolution swaps them.
    const void* x = problem_.op == Op::kDgrad ? result_ : lhs_;
    const void* y = wgrad_ ? rhs_ : problem_.op == Op::kDgrad ? lhs_ : result_;
    if (plan_.geometry.transposed) std::swap(x, y);
    x_ = static_cast<const char*>(x);
    y_ = static_cast<const char*>(y);
    if (!wgrad_) {
      w_ = static_cast<const char*>(rhs_);
      JAXCONV_RETURN_IF_ERROR(ReverseFilter());
      JAXCONV_RETURN_IF_ERROR(PackFilters());
      JAXCONV_RETURN_IF_ERROR(SumFilters());
    }
    JAXCONV_RETURN_IF_ERROR(Each(plan_.slices, [&](int64_t task) {
      if (plan_.family == Family::kGemm) {
        return GemmWgradTask(p_, task, plan_.slices, Floats(x_), Floats(y_), Floats(Scratch(task)),
                             static_cast<float*>(result_));
      }
      if (plan_.family == Family::kFewPixels) {
        FewPixels(p_, task, plan_.slices, Floats(x_), Floats(w_), Floats(Scratch(task)),
                  FewPixelsPartial(task));
        return Status();
      }
      return wgrad_ ? WgradTask(task) : DataTask(task);
    }));
    JAXCONV_RETURN_IF_ERROR(AddFewPixels());
    JAXCONV_RETURN_IF_ERROR(ReducePartials());
    return Finish();
  }

 private:
  // Runs body(0) .. body(tasks - 1) with single-threaded primitives; returns the first failure.
  template <typename Body>
  Status Each(int64_t tasks, const Body& body) {
    auto run = [&](int64_t task) {
      return CatchErrors([&] {
        SingleThreaded single_threaded;
        return body(task);
      });
    };
    if (tasks == 1) return run(0);
    std::vector<Status> statuses(tasks);
    parallel_for_(tasks, [&](int64_t task) { statuses[task] = run(task); });
    for (Status& status : statuses) {
      if (!status.ok()) return std::move(status);
    }
    return {};
  }

  // body(begin, end) over [0, count), in at most as many ranges as the plan has tasks.
  template <typename Body>
  Status EachRange(int64_t count, const Body& body) {
    int64_t tasks = std::clamp<int64_t>(count / kMinElementsPerTask, 1, plan_.slices);
    return Each(tasks, [&](int64_t task) -> Status {
      body(task * count / tasks, (task + 1) * count / tasks);
      return {};
    });
  }

  Status ConvertOperands() {
    auto convert = [&](int64_t offset, DType dtype, int64_t count, const void** operand) -> Status {
      if (offset < 0) return {};
      const void* from = *operand;
      float* to = Floats(workspace_ + offset);
      *operand = to;
      return EachRange(count,
                       [&](int64_t begin, int64_t end) { ToFloat(dtype, from, to, begin, end); });
    };
    int64_t x = problem_.x_elements(), w = problem_.w_elements(), y = problem_.y_elements();
    JAXCONV_RETURN_IF_ERROR(
        convert(plan_.lhs_offset, problem_.lhs_dtype(), problem_.op == Op::kDgrad ? y : x, &lhs_));
    return convert(plan_.rhs_offset, problem_.rhs_dtype(), wgrad_ ? y : w, &rhs_);
  }

  // body(from, to, elements) for every tap of every filter, in elements: `to` counts backwards.
  template <typename Body>
  void EachReversedTap(const Body& body) const {
    int64_t taps = p_.taps(), elements = filter_elements_ / taps;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t t = 0; t < taps; ++t) {
        body((b * taps + t) * elements, (b * taps + taps - 1 - t) * elements, elements);
      }
    }
  }

  // Writes the filter in the order in which the kernel reads it.
  Status ReverseFilter() {
    if (plan_.reversed_offset < 0) return {};
    char* reversed = workspace_ + plan_.reversed_offset;
    if (const RegionKernel* own = plan_.region_kernel; own != nullptr) {
      for (int64_t b = 0; b < p_.batch; ++b) {
        own->pack(p_, Floats(w_) + b * filter_elements_,
                  Floats(reversed) + b * own->packed_elements(p_));
      }
      w_ = reversed;
      return {};
    }
    EachReversedTap([&](int64_t from, int64_t to, int64_t elements) {
      std::memcpy(reversed + to * operand_width_, w_ + from * operand_width_,
                  elements * operand_width_);
    });
    w_ = reversed;
    return {};
  }

  Status PackFilters() {
    for (const PackedFilter& packed : plan_.primitives.packed) {
      int64_t parts = static_cast<int64_t>(packed.parts.size());
      int64_t all = parts * p_.batch;
      int64_t tasks =
          problem_.w_elements() * operand_width_ < kMinPackBytes ? 1 : std::min(all, plan_.slices);
      JAXCONV_RETURN_IF_ERROR(Each(tasks, [&](int64_t task) -> Status {
        for (int64_t i = task * all / tasks; i < (task + 1) * all / tasks; ++i) {
          int64_t b = i / parts;
          cpu::Run(packed.parts[i % parts], w_ + b * filter_elements_ * operand_width_,
                   workspace_ + packed.offset + b * packed.bytes, Scratch(task));
        }
        return {};
      }));
    }
    return {};
  }

  // Computes the offsets of all independent convolutions.
  Status SumFilters() {
    if (plan_.offsets_offset < 0) return {};
    const int64_t blocks = OffsetBlocks(p_), all = blocks * p_.batch;
    const int64_t tasks = problem_.w_elements() < kMinPackBytes ? 1 : std::min(all, plan_.slices);
    const auto* w = static_cast<const char*>(rhs_);
    return Each(tasks, [&](int64_t task) -> Status {
      for (int64_t i = task * all / tasks; i < (task + 1) * all / tasks; ++i) {
        const int64_t b = i / blocks;
        MakeOffsets(p_, w + b * filter_elements_, i % blocks, Offsets(b));
      }
      return {};
    });
  }

  // A task of fprop or dgrad.
  Status DataTask(int64_t task) {
    bool fprop = p_.op == Op::kFprop;
    int64_t x_width = fprop ? operand_width_ : result_width_;
    int64_t y_width = fprop ? result_width_ : operand_width_;
    for (const Region& region : plan_.tasks[task]) {
      if (plan_.region_kernel != nullptr) {
        ComputeRegion(task, region);
        FollowWithEpilogue(task, region);
        continue;
      }
      const char* x = x_ + region.x_offset * x_width;
      const char* y = y_ + region.y_offset * y_width;
      if (plan_.sums_offset >= 0) (fprop ? y : x) = Sums(task);
      if (region.primitive < 0) {
        std::memset(const_cast<char*>(fprop ? y : x), 0, region.zero_elements * result_width_);
        FollowWithEpilogue(task, region);
        continue;
      }
      if (plan_.copies) {
        char* copy = workspace_ + plan_.copy_offset + task * plan_.copy_stride;
        CopyImages(region.images_to_copy, plan_.flips, x, copy);
        x = copy;
      }
      const ConvPrimitive& primitive = plan_.primitives.convolutions[region.primitive];
      const char* w = w_ + region.batch * filter_elements_ * operand_width_;
      if (primitive.packed >= 0) {
        const PackedFilter& packed = plan_.primitives.packed[primitive.packed];
        w = workspace_ + packed.offset + region.batch * packed.bytes;
      }
      cpu::Run(primitive.primitive,
               {{fprop ? DNNL_ARG_SRC : DNNL_ARG_DIFF_SRC, Memory(primitive.x, x)},
                {fprop ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, Memory(primitive.y, y)},
                {DNNL_ARG_WEIGHTS, Memory(primitive.w, w)},
                {DNNL_ARG_SCRATCHPAD, Memory(primitive.scratch, Scratch(task))}});
      if (plan_.flips) {
        SubtractOffsets(p_, Offsets(region.batch), OutputElements(plan_, region) / p_.k,
                        const_cast<char*>(y));
      }
      FollowWithEpilogue(task, region);
    }
    return {};
  }

  // The first task writes the result directly.
  float* FewPixelsPartial(int64_t task) const {
    if (task == 0) return static_cast<float*>(result_);
    return Floats(workspace_ + plan_.products_offset + (task - 1) * plan_.sums_stride);
  }

  Status AddFewPixels() {
    if (plan_.family != Family::kFewPixels || plan_.slices == 1) return {};
    float* y = FewPixelsPartial(0);
    return EachRange(p_.y_elements(), [&](int64_t begin, int64_t end) {
      for (int64_t task = 1; task < plan_.slices; ++task) {
        const float* partial = FewPixelsPartial(task);
        for (int64_t i = begin; i < end; ++i) y[i] += partial[i];
      }
    });
  }

  void ComputeRegion(int64_t task, const Region& region) const {
    const RegionKernel& kernel = *plan_.region_kernel;
    const int64_t x = p_.in_pixels() * p_.c, y = p_.out_pixels() * p_.k;  // of one image
    const bool fprop = p_.op == Op::kFprop;
    for (int64_t i = region.image; i < region.image + region.images; ++i) {
      kernel.compute(p_, fprop ? Floats(x_) + i * x : Floats(y_) + i * y,
                     Floats(w_) + region.batch * kernel.packed_elements(p_),
                     static_cast<float*>(result_) + i * (fprop ? y : x), region.row_begin,
                     region.row_end, Floats(Scratch(task)));
    }
  }

  // Applies the epilogue to the sums of a region.
  void FollowWithEpilogue(int64_t task, const Region& region) const {
    const bool fprop = p_.op == Op::kFprop;  // otherwise the transposed convolution's x is the
                                             // output
    const int64_t begin = fprop ? region.y_offset : region.x_offset;
    const int64_t count = OutputElements(plan_, region);
    if (plan_.requantizes) {
      cpu::Requantize(problem_, terms_, reinterpret_cast<const int32_t*>(Sums(task)), begin, count,
                      out_);
    } else if (plan_.finishes) {
      const bool in_place = plan_.sums_offset < 0;
      const float* sums = in_place ? static_cast<const float*>(out_) + begin : Floats(Sums(task));
      if (!in_place || !problem_.epilogue.StatisticsAlone()) {
        FinishSums(problem_, terms_, sums, begin, count, out_);
      }
      if (plan_.moments_offset < 0) return;
      const int64_t number = plan_.first_region[task] + (&region - plan_.tasks[task].data());
      Moments(problem_, out_, begin, count, RegionMoments(number));
    }
  }

  double* RegionMoments(int64_t number) const {
    return reinterpret_cast<double*>(workspace_ + plan_.moments_offset +
                                     number * plan_.moments_stride);
  }

  // Merges into the statistics of the first region.
  void MergeStatistics() const {
    if (plan_.moments_offset < 0) return;
    const int64_t k = problem_.k;
    double* merged = RegionMoments(0);
    int64_t pixels = 0, number = 0;
    for (const std::vector<Region>& task : plan_.tasks) {
      for (const Region& region : task) {
        const int64_t count = OutputElements(plan_, region) / k;
        if (number > 0) MergeMoments(k, pixels, RegionMoments(number), count, merged);
        pixels += count;
        ++number;
      }
    }
    for (int64_t i = 0; i < 2 * k; ++i) terms_.statistics[i] = static_cast<float>(merged[i]);
  }

  // Every partial sum is written even if no region of the task adds to it.
  Status WgradTask(int64_t task) {
    auto region = plan_.tasks[task].begin();
    for (const Partial& partial : plan_.partials[task]) {
      float* sum = PartialSum(partial);
      bool empty = true;
      auto clear = [&] {
        if (empty) std::memset(sum, 0, filter_elements_ * sizeof(float));
        empty = false;
      };
      for (; region != plan_.tasks[task].end() && region->batch == partial.batch; ++region) {
        if (plan_.family == Family::kDepthwise) {
          clear();
          AddDepthwise(*region, sum);
        } else if (region->primitive >= 0) {
          AddPrimitive(task, *region, sum, empty);
          empty = false;
        }
      }
      clear();
    }
    return {};
  }

  void AddDepthwise(const Region& region, float* sum) const {
    for (int64_t i = region.image; i < region.image + region.images; ++i) {
      DepthwiseWgradAdd(p_, Floats(x_) + i * p_.in_pixels() * p_.c,
                        Floats(y_) + i * p_.out_pixels() * p_.k, sum, region.row_begin,
                        region.row_end);
    }
  }

  void AddPrimitive(int64_t task, const Region& region, float* sum, bool overwrite) {
    const ConvPrimitive& primitive = plan_.primitives.convolutions[region.primitive];
    char* own = workspace_ + plan_.unpack_offset + task * plan_.unpack_stride;
    if (primitive.clear_scratch) std::memset(Scratch(task), 0, primitive.scratch.get_size());
    cpu::Run(primitive.primitive,
             {{DNNL_ARG_SRC, Memory(primitive.x, x_ + region.x_offset * operand_width_)},
              {DNNL_ARG_DIFF_DST, Memory(primitive.y, y_ + region.y_offset * operand_width_)},
              {DNNL_ARG_DIFF_WEIGHTS, Memory(primitive.w, own)},
              {DNNL_ARG_SCRATCHPAD, Memory(primitive.scratch, Scratch(task))}});
    cpu::Run(overwrite ? primitive.unpack : primitive.unpack_and_add, own, sum, Scratch(task));
  }

  Status ReducePartials() {
    std::vector<std::pair<float*, const float*>> sums;  // destination, source
    for (const auto& task : plan_.partials) {
      for (const Partial& partial : task) {
        if (partial.offset < 0) continue;
        sums.push_back({PartialSum({partial.batch, -1}), PartialSum(partial)});
      }
    }
    if (sums.empty()) return {};
    return EachRange(filter_elements_, [&](int64_t begin, int64_t end) {
      for (auto [into, from] : sums) {
        for (int64_t i = begin; i < end; ++i) into[i] += from[i];
      }
    });
  }

  Status Finish() {
    if (plan_.family == Family::kFewPixels && plan_.finishes) {
      const float* sums = FewPixelsPartial(0);
      FinishSums(problem_, terms_, sums, 0, problem_.y_elements(), out_);
      if (plan_.moments_offset >= 0) {
        Moments(problem_, out_, 0, problem_.y_elements(), RegionMoments(0));
      }
    }
    MergeStatistics();
    if (plan_.result_offset < 0) return {};
    const float* result = static_cast<const float*>(result_);
    DType dtype = problem_.output_dtype();
    if (wgrad_ && plan_.geometry.transposed) {
      EachReversedTap([&](int64_t from, int64_t to, int64_t elements) {
        FromFloat(dtype, result + from, static_cast<char*>(out_) + to * ByteWidth(dtype), 0,
                  elements);
      });
      return {};
    }
    int64_t count = wgrad_                      ? problem_.w_elements()
                    : problem_.op == Op::kDgrad ? problem_.x_elements()
                                                : problem_.y_elements();
    return EachRange(
        count, [&](int64_t begin, int64_t end) { FromFloat(dtype, result, out_, begin, end); });
  }

  static float* Floats(char* data) { return reinterpret_cast<float*>(data); }
  static const float* Floats(const char* data) { return reinterpret_cast<const float*>(data); }

  char* Sums(int64_t task) const {
    return workspace_ + plan_.sums_offset + task * plan_.sums_stride;
  }

  uint32_t* Offsets(int64_t batch) const {
    return reinterpret_cast<uint32_t*>(workspace_ + plan_.offsets_offset) + batch * p_.k;
  }

  char* Scratch(int64_t task) const {
    return workspace_ + plan_.scratch_offset + task * plan_.scratch_stride;
  }

  float* PartialSum(const Partial& partial) const {
    if (partial.offset >= 0) return Floats(workspace_ + partial.offset);
    return static_cast<float*>(result_) + partial.batch * filter_elements_;
  }

  const Plan& plan_;
  const ConvProblem& p_;        // the computed problem
  const ConvProblem& problem_;  // the caller's problem
  const bool wgrad_;
  const int64_t operand_width_, result_width_;  // bytes of an element
  const int64_t filter_elements_;               // of one independent convolution
  const void* lhs_;
  const void* rhs_;
  const EpilogueTerms& terms_;
  void* out_;
  char* workspace_;
  const ParallelFor& parallel_for_;
  void* result_ = nullptr;
  const char* x_ = nullptr;
  const char* y_ = nullptr;
  const char* w_ = nullptr;
};

// XLA's allocator returns a large workspace to the system after every run. Touching 27 MB again
// costs 7000 page faults, about 1 ms; with huge pages 14 page faults. A failure is harmless.
void AdviseHugePages([[maybe_unused]] char* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

Status Execute(const Plan& plan, const void* lhs, const void* rhs, const EpilogueTerms& terms,
               void* out, void* workspace, int64_t workspace_bytes,
               const ParallelFor& parallel_for) {
  // A program exported by an older version has the workspace size of that version's plan.
  std::unique_ptr<char[]> own;
  if (workspace_bytes < plan.workspace_bytes) {
    own.reset(new (std::nothrow) char[plan.workspace_bytes]);
    if (own == nullptr) {
      return Status::Internal("workspace: no memory of " + std::to_string(plan.workspace_bytes) +
                              " bytes");
    }
    workspace = own.get();
  }
  auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace));
  char* aligned = static_cast<char*>(workspace) + (AlignUp(address) - address);
  AdviseHugePages(aligned, plan.workspace_bytes);
  return Execution(plan, lhs, rhs, terms, out, aligned, parallel_for).Run();
}

Status Execute(const Plan& plan, const void* lhs, const void* rhs, void* out, void* workspace,
               int64_t workspace_bytes, const ParallelFor& parallel_for) {
  if (!plan.problem.epilogue.Plain()) {
    return Status::InvalidArgument("problem: expected a plain epilogue, got " +
                                   plan.problem.ToString());
  }
  return Execute(plan, lhs, rhs, EpilogueTerms(), out, workspace, workspace_bytes, parallel_for);
}

}  // namespace jaxconv::cpu
