// Chooses a oneDNN implementation and a filter layout for every region.
#include "cpu/primitives.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

#include "cpu/onednn_bugs.h"

namespace jaxconv::cpu {
namespace {

using dnnl::memory;

// The largest channel block of any of oneDNN's filter layouts.
constexpr int64_t kChannelBlock = 64;

memory::dims SpatialDims(const ConvProblem& p, const Spatial& value) {
  return memory::dims(value.begin() + (3 - p.rank), value.end());
}

memory::dims TensorDims(const ConvProblem& p, int64_t channels, const Spatial& spatial) {
  memory::dims dims{p.n, channels};
  for (int64_t extent : SpatialDims(p, spatial)) dims.push_back(extent);
  return dims;
}

memory::dims FilterDims(const ConvProblem& p) {
  memory::dims dims{p.k_per_group(), p.c_per_group()};
  if (p.groups > 1) dims.insert(dims.begin(), p.groups);
  for (int64_t extent : SpatialDims(p, p.filter)) dims.push_back(extent);
  return dims;
}

memory::format_tag ChannelsLast(int rank) {
  return rank == 1   ? memory::format_tag::nwc
         : rank == 2 ? memory::format_tag::nhwc
                     : memory::format_tag::ndhwc;
}

// The caller's filter, (spatial, C / groups, K) or (K, spatial, C / groups). Its output channels
// are the input channels of the transposed convolution.
memory::desc PlainFilter(const Geometry& g, DType dtype) {
  const ConvProblem& p = g.p;
  int64_t caller_k = g.transposed ? p.c : p.k;
  int64_t caller_c_per_group = g.transposed ? p.k_per_group() : p.c_per_group();
  const bool krsc = p.filter_layout == FilterLayout::kKrsc;
  const int64_t to_next_k = krsc ? p.taps() * caller_c_per_group : 1;
  const int64_t to_next_c = krsc ? 1 : caller_k;
  memory::dims strides;
  if (p.groups > 1) strides.push_back(caller_k / p.groups * to_next_k);
  strides.push_back(g.transposed ? to_next_c : to_next_k);
  strides.push_back(g.transposed ? to_next_k : to_next_c);
  size_t first = strides.size();
  int64_t tap = krsc ? caller_c_per_group : caller_k * caller_c_per_group;
  for (int a = 2; a >= 3 - p.rank; --a) {
    strides.insert(strides.begin() + first, tap);
    tap *= p.filter[a];
  }
  return memory::desc(FilterDims(p), ToDnnl(dtype), strides);
}

bool Contains(const std::string& name, const char* word) {
  return name.find(word) != std::string::npos;
}

class Maker {
 public:
  Maker(const Geometry& geometry, DType operand, DType result, bool brgemm, int64_t tasks,
        Primitives* made)
      : geometry_(geometry),
        operand_(operand),
        result_(result),
        brgemm_(brgemm),
        tasks_(tasks),
        wgrad_(geometry.p.op == Op::kWgrad),
        plain_(PlainFilter(geometry, wgrad_                  ? DType::kF32
                                     : operand == DType::kU8 ? DType::kS8
                                                             : operand)),
        any_(FilterDims(geometry.p), plain_.get_data_type(), memory::format_tag::any),
        made_(made) {}

  // Adds a primitive for one region's convolution.
  Status Add(const ConvProblem& sub) {
    std::optional<ConvPrimitive> primitive;
    if (made_->convolutions.empty()) {
      primitive = WithPlainFilter(sub);
      plain_filter_ = primitive.has_value();
    } else if (plain_filter_) {
      bool gemm = Contains(made_->convolutions[0].implementation, "gemm");
      primitive = Make(sub, plain_, gemm);
      if (!primitive) {
        return Status::Unimplemented(
            "no oneDNN implementation with plain filters for one of the regions");
      }
    } else if (!made_->packed.empty()) {
      primitive = Make(sub, made_->packed[0].desc, false);
    }
    if (!primitive) primitive = Make(sub, any_, false);
    if (!primitive) {
      return Status::Unimplemented("oneDNN " + LibraryVersion() +
                                   " has only its reference implementation, or one that fails");
    }
    if (wgrad_) {
      primitive->unpack = MakeReorder(primitive->w, plain_, false);
      primitive->unpack_and_add = MakeReorder(primitive->w, plain_, true);
    } else if (!plain_filter_) {
      primitive->packed = Pack(primitive->w);
    }
    made_->convolutions.push_back(std::move(*primitive));
    return {};
  }

 private:
  // A float32 primitive that reads the plain filter without packing, if it is as fast as one with
  // oneDNN's own layout.
  std::optional<ConvPrimitive> WithPlainFilter(const ConvProblem& sub) const {
    const ConvProblem& p = geometry_.p;
    if (operand_ != DType::kF32 || p.groups != 1) return {};
    if (p.op == Op::kFprop && !geometry_.transposed) {
      // Use it if the output channels of a filter row fit in a few cache lines; if there are too
      // few pixels for packing to pay; or for few input channels on one axis, because the
      // implementation that reads their packed filters writes 64 channels at a time, which share a
      // few cache sets in rows of 2 KB (512 channels). Only brgconv reads plain filters
      // efficiently.
      bool few_pixels = sub.n * sub.out_pixels() * tasks_ < 256;
      bool few_inputs = p.rank == 1 && p.c <= 4;
      if (p.k > 128 && !few_pixels && !few_inputs) return {};
      std::optional<ConvPrimitive> made = Make(sub, plain_, false);
      return made && UsesBrgemm(made->implementation) ? made : std::nullopt;
    }
    // The direct kernels fill vectors with input channels; the matrix product (im2col) does not.
    return p.op == Op::kDgrad && p.c < 8 ? Make(sub, plain_, true) : std::nullopt;
  }

  // A primitive of the first suitable implementation, if there is one.
  std::optional<ConvPrimitive> Make(const ConvProblem& p, const memory::desc& filter,
                                    bool want_gemm) const {
    using dnnl::algorithm;
    if (LookupCrashes(p, operand_)) return {};
    const dnnl::engine& engine = CpuEngine();
    auto operand = ToDnnl(operand_), result = ToDnnl(result_);
    auto any = memory::format_tag::any, plain = ChannelsLast(p.rank);
    memory::dims x_dims = TensorDims(p, p.c, p.in), y_dims = TensorDims(p, p.k, p.out);
    memory::dims strides = SpatialDims(p, p.stride), dilation = SpatialDims(p, p.dilation);
    for (int64_t& d : dilation) --d;
    memory::dims pad_lo = SpatialDims(p, p.pad_lo), pad_hi = SpatialDims(p, p.pad_hi);
    memory::desc x(x_dims, p.op == Op::kDgrad ? result : operand, plain);
    memory::desc y(y_dims, p.op == Op::kFprop ? result : operand, plain);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    attr.set_fpmath_mode(dnnl::fpmath_mode::strict);

    ConvPrimitive made;
    auto take = [&](auto& pd) {
      while (pd) {
        std::string name = pd.impl_info_str();
        bool reference = name.rfind("ref", 0) == 0;
        const bool will_do =
            want_gemm ? Contains(name, "gemm") : !reference && !IsWrong(name, p, operand_);
        if (will_do && (brgemm_ || !UsesBrgemm(name))) {
          made.implementation = name;
          made.clear_scratch = ReadsUnwrittenScratch(p, operand_);
          made.primitive = dnnl::primitive(pd);
          made.scratch = pd.scratchpad_desc();
          return true;
        }
        if (!pd.next_impl()) break;
      }
      return false;
    };
    if (p.op == Op::kFprop) {
      dnnl::convolution_forward::primitive_desc pd(engine, dnnl::prop_kind::forward_inference,
                                                   algorithm::convolution_direct, x, filter, y,
                                                   strides, dilation, pad_lo, pad_hi, attr, true);
      if (!take(pd)) return {};
      made.x = pd.src_desc(), made.w = pd.weights_desc(), made.y = pd.dst_desc();
      return made;
    }
    // oneDNN's gradients require the forward primitive as a hint and do not use it.
    dnnl::convolution_forward::primitive_desc hint(
        engine, dnnl::prop_kind::forward_training, algorithm::convolution_direct,
        memory::desc(x_dims, operand, any), memory::desc(FilterDims(p), operand, any),
        memory::desc(y_dims, operand, any), strides, dilation, pad_lo, pad_hi,
        dnnl::primitive_attr(), true);
    if (!hint) return {};
    if (p.op == Op::kDgrad) {
      dnnl::convolution_backward_data::primitive_desc pd(engine, algorithm::convolution_direct, x,
                                                         filter, y, strides, dilation, pad_lo,
                                                         pad_hi, hint, attr, true);
      if (!take(pd)) return {};
      made.x = pd.diff_src_desc(), made.w = pd.weights_desc(), made.y = pd.diff_dst_desc();
      return made;
    }
    dnnl::convolution_backward_weights::primitive_desc pd(engine, algorithm::convolution_direct, x,
                                                          filter, y, strides, dilation, pad_lo,
                                                          pad_hi, hint, attr, true);
    if (!take(pd)) return {};
    made.x = pd.src_desc(), made.w = pd.diff_weights_desc(), made.y = pd.diff_dst_desc();
    return made;
  }

  // The index of the packed filter of this layout.
  int Pack(const memory::desc& desc) {
    for (size_t i = 0; i < made_->packed.size(); ++i) {
      if (made_->packed[i].desc == desc) return static_cast<int>(i);
    }
    PackedFilter packed;
    packed.desc = desc;
    packed.bytes = AlignUp(static_cast<int64_t>(desc.get_size()));
    packed.parts = PackingReorders(desc);
    made_->packed.push_back(std::move(packed));
    return static_cast<int>(made_->packed.size()) - 1;
  }

  // Reorders from the plain filter, divided along groups or output channels so that several tasks
  // share the work.
  std::vector<Reorder> PackingReorders(const memory::desc& to) const {
    const ConvProblem& p = geometry_.p;
    int64_t extent = p.groups > 1 ? p.groups : p.k;
    int64_t blocks = CeilDiv(extent, kChannelBlock);
    int64_t parts = std::min(tasks_, blocks);
    std::vector<Reorder> reorders;
    // The compensation that an s8 filter carries cannot be computed by parts.
    bool whole = parts < 2 || p.batch >= tasks_ || operand_ == DType::kS8 ||
                 static_cast<int64_t>(plain_.get_size()) < kMinPackBytes;
    for (int64_t part = 0; !whole && part < parts; ++part) {
      int64_t begin = part * blocks / parts * kChannelBlock;
      int64_t end = std::min(extent, (part + 1) * blocks / parts * kChannelBlock);
      memory::dims dims = plain_.get_dims(), offsets(dims.size(), 0);
      dims[0] = end - begin;
      offsets[0] = begin;
      memory::desc sub_from = plain_.submemory_desc(dims, offsets, true);
      memory::desc sub_to = to.submemory_desc(dims, offsets, true);
      whole = !sub_from || !sub_to;
      if (!whole) reorders.push_back(MakeReorder(sub_from, sub_to, false));
    }
    if (whole) reorders = {MakeReorder(plain_, to, false)};
    return reorders;
  }

  const Geometry& geometry_;
  const DType operand_, result_;
  const bool brgemm_;
  const int64_t tasks_;
  const bool wgrad_;
  const memory::desc plain_, any_;  // of the filter
  Primitives* made_;
  bool plain_filter_ = false;  // whether the primitives read the plain filter
};

}  // namespace

bool UsesBrgemm(const std::string& implementation) { return Contains(implementation, "brg"); }

Status MakePrimitives(const Geometry& geometry, DType operand, DType result, bool brgemm,
                      Tasks* tasks, Primitives* primitives) {
  // Largest first: the other regions are asked to use its preferred filter layout, so that one
  // packing serves all.
  std::vector<Region*> regions;
  for (auto& task : *tasks) {
    for (Region& region : task) {
      if (region.sub.n > 0) regions.push_back(&region);
    }
  }
  std::stable_sort(regions.begin(), regions.end(), [](const Region* a, const Region* b) {
    return a->sub.y_elements() > b->sub.y_elements();
  });
  Maker maker(geometry, operand, result, brgemm, static_cast<int64_t>(tasks->size()), primitives);
  std::map<std::array<int64_t, 5>, int> made;  // keyed by the fields that distinguish regions
  for (Region* region : regions) {
    int a = geometry.axis;
    const ConvProblem& sub = region->sub;
    std::array<int64_t, 5> key{sub.n, sub.in[a], sub.out[a], sub.pad_lo[a], sub.pad_hi[a]};
    auto [entry, inserted] = made.insert({key, static_cast<int>(primitives->convolutions.size())});
    region->primitive = entry->second;
    if (inserted) JAXCONV_RETURN_IF_ERROR(maker.Add(sub));
  }
  return {};
}

}  // namespace jaxconv::cpu
