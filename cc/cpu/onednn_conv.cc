// How a call runs, stage by stage; a stage is skipped where it has nothing to do:
//
//   1 convert   16-bit operands that oneDNN has no kernel for become float32 copies
//   2 mirror    the filter's taps are reversed (dilated inputs, below)
//   3 pack      the filter goes into the layout that the primitives want
//   4 convolve  every task runs its pieces: runs of whole images, or some rows of one image
//   5 reduce    weight gradients: the tasks' partial sums are added in the order of the tasks
//   6 finish    a float32 result is rounded to the output's type, a mirrored one turned back
//
// Cutting. The rows (outermost spatial axis) of all images form one sequence, cut into as many
// equal runs as there are tasks; a run is a head of one image, whole images, and a tail. So one
// image serves any number of threads, and five images on two threads are no three against two.
//
// Dilated inputs. With stride 1, i * lhs_dilation = p + r * dilation - pad_lo reads, with the taps
// counted backwards, as p = i * lhs_dilation + r' * dilation - ((R - 1) * dilation - pad_lo): an
// ordinary strided convolution from y to x. The forward operation is its data gradient, the data
// gradient is its forward operation, and the weight gradient is its own with the operands
// exchanged.
#include "cpu/onednn_conv.h"

#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <optional>
#include <unordered_map>
#include <utility>

#include "cpu/convert.h"
#include "cpu/depthwise_wgrad.h"
#include "cpu/plan_cache.h"

namespace jaxconv::cpu {
namespace {

using dnnl::memory;

enum class Kind { kOnednn, kGemm, kDepthwise };
constexpr const char* kFamilies[] = {"onednn", "gemm", "depthwise"};

struct Row {
  const char* name;
  Op op;
  DType dtype;  // of both operands
  Kind kind;
};

// In order of preference.
constexpr Row kRows[] = {
    {"wgrad_depthwise_f32", Op::kWgrad, DType::kF32, Kind::kDepthwise},
    {"wgrad_depthwise_bf16", Op::kWgrad, DType::kBF16, Kind::kDepthwise},
    {"wgrad_depthwise_f16", Op::kWgrad, DType::kF16, Kind::kDepthwise},
    {"wgrad_gemm_f32", Op::kWgrad, DType::kF32, Kind::kGemm},
    {"wgrad_gemm_f16", Op::kWgrad, DType::kF16, Kind::kGemm},
    {"fprop_onednn_f32", Op::kFprop, DType::kF32, Kind::kOnednn},
    {"fprop_onednn_bf16", Op::kFprop, DType::kBF16, Kind::kOnednn},
    {"fprop_onednn_f16", Op::kFprop, DType::kF16, Kind::kOnednn},
    {"fprop_onednn_s8", Op::kFprop, DType::kS8, Kind::kOnednn},
    {"dgrad_onednn_f32", Op::kDgrad, DType::kF32, Kind::kOnednn},
    {"dgrad_onednn_bf16", Op::kDgrad, DType::kBF16, Kind::kOnednn},
    {"dgrad_onednn_f16", Op::kDgrad, DType::kF16, Kind::kOnednn},
    {"wgrad_onednn_f32", Op::kWgrad, DType::kF32, Kind::kOnednn},
    {"wgrad_onednn_bf16", Op::kWgrad, DType::kBF16, Kind::kOnednn},
    {"wgrad_onednn_f16", Op::kWgrad, DType::kF16, Kind::kOnednn},
};

constexpr int64_t kAlignment = 64;  // a cache line, and what oneDNN's vector loads like
// A second task costs a few microseconds of hand-over; below this much work it does not pay. Bytes
// are weighed as 16 operations each, about the machine balance of one AVX-512 core.
constexpr int64_t kOperationsPerTask = 4 << 20;
// Partial weight gradients of all tasks together: more threads than fit wait.
constexpr int64_t kMaxPartialBytes = 256 << 20;
// Below this a filter is packed by one task: the reorder takes as long as handing it over.
constexpr int64_t kMinPackBytes = 128 << 10;

// wgrad_gemm: rows of dy this long feed a matrix product straight from x; shorter ones are gathered
// first, so many pixels at a time that x, dy and a tap's sums share the second-level cache.
constexpr int64_t kLongRow = 192;
constexpr int64_t kGatheredPixels = 256;
// Up to this many pixels of dy, packing and adding the partial sums of a large filter costs
// oneDNN's weight gradient more than gathering: 7x7, 4 images, 512 channels.
constexpr int64_t kFewPixels = 512;

int64_t CeilDiv(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
int64_t AlignUp(int64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

const dnnl::engine& CpuEngine() {
  static const dnnl::engine* const engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

dnnl::stream& ThreadStream() {
  thread_local dnnl::stream stream(CpuEngine());
  return stream;
}

// oneDNN bakes the number of threads into a primitive when it is made and asks again when it runs;
// both read the calling thread's OpenMP setting, which is put back afterwards.
class SingleThreaded {
 public:
  SingleThreaded() : previous_(omp_get_max_threads()) {
    if (previous_ != 1) omp_set_num_threads(1);
  }
  ~SingleThreaded() {
    if (previous_ != 1) omp_set_num_threads(previous_);
  }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int previous_;
};

const char* IsaName() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx2_vnni:
      return "avx2_vnni";
    case dnnl::cpu_isa::avx2_vnni_2:
      return "avx2_vnni_2";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_fp16:
      return "avx512_core_fp16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "avx512_core_amx";
    case dnnl::cpu_isa::avx512_core_amx_fp16:
      return "avx512_core_amx_fp16";
    default:
      return "unknown";
  }
}

// oneDNN's values of these are sets of bits, a superset for every instruction set that contains
// another.
bool IsaHas(dnnl::cpu_isa isa) {
  auto bits = static_cast<unsigned>(isa);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & bits) == bits;
}

memory::data_type ToDnnl(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return memory::data_type::f32;
    case DType::kF16:
      return memory::data_type::f16;
    case DType::kBF16:
      return memory::data_type::bf16;
    case DType::kS8:
      return memory::data_type::s8;
    case DType::kS32:
      return memory::data_type::s32;
  }
  return memory::data_type::undef;
}

bool IsFloat16(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// The convolution that is computed: the caller's, or its mirror image (head of the file).
struct Geometry {
  ConvProblem p;
  bool mirrored = false;
  int axis = 1;  // of the rows: the outermost spatial one
};

Geometry Mirror(const Geometry& geometry) {
  const ConvProblem& p = geometry.p;
  Geometry mirror = geometry;
  ConvProblem& m = mirror.p;
  m.op = p.op == Op::kFprop ? Op::kDgrad : p.op == Op::kDgrad ? Op::kFprop : Op::kWgrad;
  std::swap(m.c, m.k);
  std::swap(m.in, m.out);
  std::swap(m.x_dtype, m.y_dtype);
  std::swap(m.stride, m.lhs_dilation);
  for (int a = 0; a < 3; ++a) {
    int64_t reach = (p.filter[a] - 1) * p.dilation[a];
    m.pad_lo[a] = reach - p.pad_lo[a];
    m.pad_hi[a] = (m.out[a] - 1) * m.stride[a] + reach + 1 - m.in[a] - m.pad_lo[a];
  }
  mirror.mirrored = true;
  return mirror;
}

std::string OnAxis(const ConvProblem& p, int axis) {
  return " on spatial axis " + std::to_string(axis - (3 - p.rank));
}

// An empty string, or why no kernel here takes the problem's geometry.
std::string PlanGeometry(const ConvProblem& problem, Geometry* geometry) {
  geometry->p = problem;
  geometry->axis = 3 - problem.rank;
  const Spatial ones{1, 1, 1};
  if (problem.lhs_dilation != ones) {
    if (problem.stride != ones) {
      return "the input is dilated and the stride is not 1: no oneDNN primitive does both";
    }
    *geometry = Mirror(*geometry);
  }
  const ConvProblem& p = geometry->p;
  for (int a = 0; a < 3; ++a) {
    // The rows may be cropped by moving a pointer, where no gradient of cropped rows is due.
    if (a == geometry->axis && p.op != Op::kDgrad) continue;
    const char* side = p.pad_lo[a] < 0 ? "low" : p.pad_hi[a] <= -p.stride[a] ? "high" : nullptr;
    if (side == nullptr) continue;
    int64_t value = p.pad_lo[a] < 0 ? p.pad_lo[a] : p.pad_hi[a];
    return std::string(side) + " padding " + std::to_string(value) + OnAxis(p, a) +
           (geometry->mirrored ? " (of the mirrored convolution)" : "") +
           " is negative: oneDNN cannot crop";
  }
  int64_t largest = std::max({p.x_elements(), p.w_elements(), p.y_elements()});
  if (largest >= int64_t{1} << 31) {
    return "a tensor of " + std::to_string(largest) +
           " elements: kernels here are only verified below 2^31";
  }
  return "";
}

// Part of one image or several whole images of one of the independent convolutions.
struct Piece {
  int primitive = -1;  // none: the output rows of this piece are zero
  int64_t batch = 0;
  int64_t x_offset = 0;  // in elements
  int64_t y_offset = 0;
  int64_t zero_elements = 0;
  ConvProblem sub;    // with the piece's n, rows and row padding
  int64_t image = 0;  // kDepthwise: rows [row_begin, row_end) of `images` images
  int64_t images = 1;
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

using Tasks = std::vector<std::vector<Piece>>;

// The rows that are cut: of the operation's output, and of y for the weight gradient.
int64_t CutRows(const Geometry& g) {
  return g.p.op == Op::kDgrad ? g.p.in[g.axis] : g.p.out[g.axis];
}

// Rows [begin, end) of one image of the convolution as a convolution of its own.
void CutPiece(const Geometry& g, int64_t begin, int64_t end, Piece* piece) {
  const ConvProblem& p = g.p;
  int a = g.axis;
  int64_t stride = p.stride[a], pad = p.pad_lo[a];
  int64_t reach = (p.filter[a] - 1) * p.dilation[a];
  int64_t x_begin, x_end, y_begin, y_end;
  if (p.op == Op::kDgrad) {
    x_begin = begin, x_end = end;
    y_begin = std::max<int64_t>(0, CeilDiv(begin + pad - reach, stride));
    y_end = std::min(p.out[a], FloorDiv(end - 1 + pad, stride) + 1);
  } else {
    y_begin = begin, y_end = end;
    x_begin = std::max<int64_t>(0, begin * stride - pad);
    x_end = std::min(p.in[a], (end - 1) * stride + reach + 1 - pad);
  }
  int64_t x_row = p.c, y_row = p.k;
  for (int axis = a + 1; axis < 3; ++axis) x_row *= p.in[axis], y_row *= p.out[axis];
  piece->sub = p;
  piece->sub.batch = 1;
  piece->sub.n = 1;
  piece->x_offset = (piece->image * p.in[a] + x_begin) * x_row;
  piece->y_offset = (piece->image * p.out[a] + y_begin) * y_row;
  if (x_begin >= x_end || y_begin >= y_end) {
    bool dgrad = p.op == Op::kDgrad;
    piece->zero_elements = p.op == Op::kWgrad ? 0 : (end - begin) * (dgrad ? x_row : y_row);
    piece->sub.n = 0;
    return;
  }
  piece->sub.in[a] = x_end - x_begin;
  piece->sub.out[a] = y_end - y_begin;
  piece->sub.pad_lo[a] = pad + x_begin - y_begin * stride;
  piece->sub.pad_hi[a] =
      (piece->sub.out[a] - 1) * stride + reach + 1 - piece->sub.in[a] - piece->sub.pad_lo[a];
}

// Pieces have at most `max_rows` rows of an image, where that is less than all of them.
Tasks CutTasks(const Geometry& g, int64_t slices, int64_t max_rows) {
  const ConvProblem& p = g.p;
  int a = g.axis;
  int64_t rows = CutRows(g);
  int64_t images = p.batch * p.n;
  int64_t total = images * rows;
  // Whole images run together where their rows lie as one primitive expects them.
  bool by_image = p.pad_lo[a] < 0 || p.pad_hi[a] <= -p.stride[a] || max_rows < rows;
  // Cuts are rounded to an eighth of a task's rows: fewer different pieces, at most 12 % imbalance.
  int64_t quantum = std::clamp<int64_t>(total / (slices * 8), 1, rows);
  // A data gradient is cut where an output row's window begins, so that no piece has negative
  // padding.
  int64_t step = p.op == Op::kDgrad ? p.stride[a] : 1;
  int64_t phase = p.op == Op::kDgrad ? p.pad_lo[a] % step : 0;
  auto cut = [&](int64_t task) -> std::pair<int64_t, int64_t> {  // image, row
    if (task == slices) return {images, 0};
    int64_t at = task * total / slices;
    int64_t image = at / rows, row = at % rows;
    row = (row + quantum / 2) / quantum * quantum;
    if (row == 0) return {image, 0};
    row = (row + phase + step / 2) / step * step - phase;
    if (row <= 0) return {image, 0};
    if (row >= rows) return {image + 1, 0};
    return {image, row};
  };
  int64_t x_image = p.in_pixels() * p.c, y_image = p.out_pixels() * p.k;
  Tasks tasks(slices);
  for (int64_t task = 0; task < slices; ++task) {
    auto [image, row] = cut(task);
    auto [last_image, last_row] = cut(task + 1);
    while (image < last_image || (image == last_image && row < last_row)) {
      Piece piece;
      piece.image = image;
      piece.batch = image / p.n;
      if (row > 0 || image == last_image || by_image) {
        int64_t end = image == last_image ? last_row : rows;
        // Equal parts, each at most max_rows.
        end = row + CeilDiv(end - row, CeilDiv(end - row, max_rows));
        piece.row_begin = row;
        piece.row_end = end;
        CutPiece(g, row, end, &piece);
        row = end;
        if (row == rows) ++image, row = 0;
      } else {
        piece.images = std::min(last_image, (piece.batch + 1) * p.n) - image;
        piece.row_end = rows;
        piece.sub = p;
        piece.sub.batch = 1;
        piece.sub.n = piece.images;
        piece.x_offset = image * x_image;
        piece.y_offset = image * y_image;
        image += piece.images;
      }
      tasks[task].push_back(piece);
    }
  }
  return tasks;
}

// oneDNN's weight gradients pass over the whole piece once per pair of 16-channel blocks: a piece
// should stay in a cache. But each piece costs an unpacking of the filter, which 2048 pixels make
// negligible.
int64_t MaxPieceRows(const Geometry& g, Kind kind) {
  const ConvProblem& p = g.p;
  int64_t rows = CutRows(g);
  if (p.op != Op::kWgrad || kind != Kind::kOnednn) return rows;
  constexpr int64_t kMinPixels = 2048, kMaxBytes = 2 << 20;
  int64_t row_pixels = p.out_pixels() / rows;
  int64_t row_bytes =
      (p.y_elements() + p.x_elements()) / (p.batch * p.n * rows) * ByteWidth(p.x_dtype);
  int64_t fitting = std::max(CeilDiv(kMinPixels, row_pixels), kMaxBytes / row_bytes);
  return std::clamp<int64_t>(fitting, 1, rows);
}

// A reorder with a scratchpad of the caller's: one of the library's own belongs to the thread that
// made the primitive, and concurrent executions overwrite each other in it.
struct Reorder {
  dnnl::reorder primitive;
  memory::desc from, to, scratch;
};

// What a oneDNN primitive of one shape needs to run.
struct ConvPrimitive {
  dnnl::primitive primitive;
  memory::desc x, w, y, scratch;
  std::string implementation;
  bool clears_scratch = false;
  int packed = -1;                 // fprop, dgrad: which packed filter it reads
  Reorder unpack, unpack_and_add;  // wgrad: from its own layout into a plain partial sum
};

// One filter layout and the reorders that produce it, each from a part of the plain filter.
struct PackedFilter {
  memory::desc desc;
  int64_t offset = 0;  // in the workspace
  int64_t bytes = 0;   // of one independent convolution's filter
  std::vector<Reorder> parts;
};

// Where a task puts its sum of one independent convolution's weight gradient.
struct Partial {
  int64_t batch = 0;
  int64_t offset = -1;  // in the workspace; -1: the result itself
};

struct Plan {
  Kind kind = Kind::kOnednn;
  Geometry geometry;
  int64_t slices = 1;
  bool converted = false;             // stage 1 runs, on both operands
  DType compute_dtype = DType::kF32;  // of both operands in stage 4
  DType result_dtype = DType::kF32;   // of what stage 4 or 5 writes
  bool plain_filter = false;          // the primitives read the filter as it is
  std::vector<ConvPrimitive> primitives;
  std::vector<PackedFilter> packed;
  Tasks tasks;
  std::vector<std::vector<Partial>> partials;  // by task
  // Workspace offsets; -1: not there.
  int64_t lhs_offset = -1, rhs_offset = -1, mirror_offset = -1, result_offset = -1;
  int64_t unpack_offset = -1, unpack_stride = 0;  // wgrad: the primitive's own layout, by task
  int64_t scratch_offset = -1, scratch_stride = 0;
  int64_t workspace_bytes = 0;

  int64_t Reserve(int64_t bytes) {
    int64_t offset = workspace_bytes;
    workspace_bytes += AlignUp(bytes);
    return offset;
  }
};

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

// (spatial, C / groups, K) of the caller's convolution, whose output channels are the mirror's
// inputs.
memory::desc PlainFilter(const Geometry& g, DType dtype) {
  const ConvProblem& p = g.p;
  int64_t caller_k = g.mirrored ? p.c : p.k;
  int64_t caller_c_per_group = g.mirrored ? p.k_per_group() : p.c_per_group();
  memory::dims strides;
  if (p.groups > 1) strides.push_back(caller_k / p.groups);
  strides.push_back(g.mirrored ? caller_k : 1);
  strides.push_back(g.mirrored ? 1 : caller_k);
  size_t first = strides.size();
  int64_t tap = caller_k * caller_c_per_group;
  for (int a = 2; a >= 3 - p.rank; --a) {
    strides.insert(strides.begin() + first, tap);
    tap *= p.filter[a];
  }
  return memory::desc(FilterDims(p), ToDnnl(dtype), strides);
}

bool StartsWith(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// Implementations of oneDNN 3.2 that give wrong results, found by the tests' random problems.
bool IsWrong(const std::string& implementation, const ConvProblem& p, DType operands) {
  if (p.op != Op::kWgrad || StartsWith(implementation, "x64:gemm")) return false;
  // Three spatial axes: taps that reach over the front and the back of the input at once.
  if (p.rank == 3 && (p.filter[0] - 1) * p.dilation[0] + 1 > p.in[0]) return true;
  // bf16, 1x1, strided: an incomplete block of input channels.
  bool strided = p.stride != Spatial{1, 1, 1};
  return operands == DType::kBF16 && p.taps() == 1 && strided && p.c_per_group() % 16 != 0;
}

// On CPUs with AMX, oneDNN 3.2 crashes while it looks for an implementation for operands narrower
// than float32: seen where a dilated window is larger than the input on some axis (always with one
// element there; what else it takes is not known).
bool LookupCrashes(const ConvProblem& p, DType operands) {
  if (operands == DType::kF32 || !IsaHas(dnnl::cpu_isa::avx512_core_amx)) return false;
  for (int a = 0; a < 3; ++a) {
    if (p.dilation[a] > 1 && (p.filter[a] - 1) * p.dilation[a] + 1 > p.in[a]) return true;
  }
  return false;
}

// The bf16 weight gradient spreads x by column phase in its scratchpad; with fewer columns than
// phases it multiplies what it has not written, mostly by zero, which does not help against NaN.
bool ReadsUnwrittenScratch(const ConvProblem& p, DType operands) {
  return p.op == Op::kWgrad && operands == DType::kBF16 && p.in[2] <= 2 * p.stride[2];
}

// Fills everything of `made` but the packing; false: oneDNN has no implementation that works but
// its reference.
bool MakePrimitive(const Plan& plan, const ConvProblem& sub, const memory::desc& filter,
                   bool want_gemm, ConvPrimitive* made) {
  using dnnl::algorithm;
  const dnnl::engine& engine = CpuEngine();
  const ConvProblem& p = sub;
  if (LookupCrashes(p, plan.compute_dtype)) return false;
  auto operand = ToDnnl(plan.compute_dtype), result = ToDnnl(plan.result_dtype);
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

  // Takes the first implementation that will do.
  auto take = [&](auto& pd) {
    while (pd) {
      std::string name = pd.impl_info_str();
      bool is_gemm = name.find("gemm") != std::string::npos;
      if (want_gemm ? is_gemm : !StartsWith(name, "ref") && !IsWrong(name, p, plan.compute_dtype)) {
        made->implementation = name;
        made->clears_scratch = ReadsUnwrittenScratch(p, plan.compute_dtype);
        made->primitive = dnnl::primitive(pd);
        made->scratch = pd.scratchpad_desc();
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
    if (!pd || !take(pd)) return false;
    made->x = pd.src_desc(), made->w = pd.weights_desc(), made->y = pd.dst_desc();
    return true;
  }
  // Gradients ask for the forward primitive as a hint; nothing of it is kept.
  dnnl::convolution_forward::primitive_desc hint(
      engine, dnnl::prop_kind::forward_training, algorithm::convolution_direct,
      memory::desc(x_dims, operand, any), memory::desc(FilterDims(p), operand, any),
      memory::desc(y_dims, operand, any), strides, dilation, pad_lo, pad_hi, dnnl::primitive_attr(),
      true);
  if (!hint) return false;
  if (p.op == Op::kDgrad) {
    dnnl::convolution_backward_data::primitive_desc pd(engine, algorithm::convolution_direct, x,
                                                       filter, y, strides, dilation, pad_lo, pad_hi,
                                                       hint, attr, true);
    if (!pd || !take(pd)) return false;
    made->x = pd.diff_src_desc(), made->w = pd.weights_desc(), made->y = pd.diff_dst_desc();
    return true;
  }
  dnnl::convolution_backward_weights::primitive_desc pd(engine, algorithm::convolution_direct, x,
                                                        filter, y, strides, dilation, pad_lo,
                                                        pad_hi, hint, attr, true);
  if (!pd || !take(pd)) return false;
  made->x = pd.src_desc(), made->w = pd.diff_weights_desc(), made->y = pd.diff_dst_desc();
  return true;
}

Reorder MakeReorder(const memory::desc& from, const memory::desc& to, bool add) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (add) {
    dnnl::post_ops sum;
    sum.append_sum();
    attr.set_post_ops(sum);
  }
  dnnl::reorder::primitive_desc pd(CpuEngine(), from, CpuEngine(), to, attr);
  return {dnnl::reorder(pd), from, to, pd.scratchpad_desc()};
}

// Cuts the reorder along groups or output channels, so that several threads share it. 64 channels:
// the largest block of any of oneDNN's layouts.
void MakeParts(const Plan& plan, PackedFilter* packed) {
  const ConvProblem& p = plan.geometry.p;
  memory::desc from = PlainFilter(plan.geometry, plan.compute_dtype);
  constexpr int64_t kBlock = 64;
  int64_t extent = p.groups > 1 ? p.groups : p.k;
  int64_t blocks = CeilDiv(extent, kBlock);
  int64_t parts = std::min(plan.slices, blocks);
  bool whole = parts < 2 || p.batch >= plan.slices || plan.compute_dtype == DType::kS8 ||
               static_cast<int64_t>(from.get_size()) < kMinPackBytes;
  for (int64_t part = 0; !whole && part < parts; ++part) {
    int64_t begin = part * blocks / parts * kBlock;
    int64_t end = std::min(extent, (part + 1) * blocks / parts * kBlock);
    memory::dims dims = from.get_dims(), offsets(dims.size(), 0);
    dims[0] = end - begin;
    offsets[0] = begin;
    memory::desc sub_from = from.submemory_desc(dims, offsets, true);
    memory::desc sub_to = packed->desc.submemory_desc(dims, offsets, true);
    whole = !sub_from || !sub_to;
    if (!whole) packed->parts.push_back(MakeReorder(sub_from, sub_to, false));
  }
  if (whole) packed->parts = {MakeReorder(from, packed->desc, false)};
}

// An empty string, or why oneDNN does not take it.
std::string MakePrimitives(Plan* plan) {
  const ConvProblem& p = plan->geometry.p;
  bool wgrad = p.op == Op::kWgrad;
  memory::desc plain = PlainFilter(plan->geometry, wgrad ? DType::kF32 : plan->compute_dtype);
  memory::desc any(FilterDims(p), wgrad ? memory::data_type::f32 : ToDnnl(plan->compute_dtype),
                   memory::format_tag::any);
  std::map<std::array<int64_t, 5>, int> made;  // by what tells pieces apart
  // Largest first: its filter layout is then asked of the others too, so that one packing serves
  // all.
  std::vector<Piece*> pieces;
  for (auto& task : plan->tasks) {
    for (Piece& piece : task) {
      if (piece.sub.n > 0) pieces.push_back(&piece);
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece* a, const Piece* b) {
    return a->sub.y_elements() > b->sub.y_elements();
  });
  for (Piece* piece : pieces) {
    int a = plan->geometry.axis;
    const ConvProblem& sub = piece->sub;
    std::array<int64_t, 5> key{sub.n, sub.in[a], sub.out[a], sub.pad_lo[a], sub.pad_hi[a]};
    auto [entry, inserted] = made.insert({key, static_cast<int>(plan->primitives.size())});
    piece->primitive = entry->second;
    if (!inserted) continue;
    ConvPrimitive primitive;
    bool ok = false;
    if (!plan->packed.empty()) {
      ok = MakePrimitive(*plan, sub, plan->packed[0].desc, false, &primitive);
    } else if (plan->plain_filter && !plan->primitives.empty()) {
      ok = MakePrimitive(*plan, sub, plain,
                         plan->primitives[0].implementation.find("gemm") != std::string::npos,
                         &primitive);
      if (!ok) return "no oneDNN implementation with plain filters for one of the pieces";
    } else if (plan->primitives.empty() && plan->compute_dtype == DType::kF32) {
      if (p.op == Op::kFprop && !plan->geometry.mirrored) {
        // brgconv reads plain filters as well as its own layout while a row of output channels fits
        // a few cache lines; beyond that packing pays once there are enough pixels to use it.
        bool few_pixels = sub.n * sub.out_pixels() * plan->slices < 256;
        if (p.groups == 1 && (p.k <= 128 || few_pixels)) {
          ok = MakePrimitive(*plan, sub, plain, false, &primitive) &&
               primitive.implementation.find("brg") != std::string::npos;
        }
      } else if (p.op == Op::kDgrad && p.groups == 1 && p.c < 8) {
        // Direct kernels fill a vector with input channels; the matrix product with columns does
        // not.
        ok = MakePrimitive(*plan, sub, plain, true, &primitive);
      }
      plan->plain_filter = ok;
    }
    if (!ok) ok = MakePrimitive(*plan, sub, any, false, &primitive);
    if (!ok) {
      return std::string("oneDNN ") + LibraryVersion() +
             " has only its reference implementation, or one that fails";
    }
    if (wgrad) {
      primitive.unpack = MakeReorder(primitive.w, plain, false);
      primitive.unpack_and_add = MakeReorder(primitive.w, plain, true);
    } else if (!plan->plain_filter) {
      for (size_t i = 0; i < plan->packed.size(); ++i) {
        if (plan->packed[i].desc == primitive.w) primitive.packed = static_cast<int>(i);
      }
      if (primitive.packed < 0) {
        primitive.packed = static_cast<int>(plan->packed.size());
        PackedFilter packed;
        packed.desc = primitive.w;
        packed.bytes = AlignUp(primitive.w.get_size());
        MakeParts(*plan, &packed);
        plan->packed.push_back(std::move(packed));
      }
    }
    plan->primitives.push_back(std::move(primitive));
  }
  return "";
}

// An empty string, or why this row does not take the problem. `native`: whether 16-bit operands go
// to oneDNN as they are, or are computed in float32.
std::string MakePlan(const Row& row, const ConvProblem& problem, int64_t slices, bool native,
                     Plan* plan) {
  if (row.op != problem.op) return std::string("computes ") + Name(row.op);
  if (problem.lhs_dtype() != row.dtype || problem.rhs_dtype() != row.dtype) {
    return std::string("takes ") + Name(row.dtype) + " operands, got " + Name(problem.lhs_dtype()) +
           " and " + Name(problem.rhs_dtype());
  }
  DType output = problem.output_dtype();
  if (row.dtype == DType::kS8 ? output != DType::kS32
                              : output != row.dtype && output != DType::kF32) {
    return std::string("gives ") + (row.dtype == DType::kS8 ? "s32" : Name(row.dtype)) +
           (IsFloat16(row.dtype) ? " or f32" : "") + " results, asked for " + Name(output);
  }
  if (std::string reason = PlanGeometry(problem, &plan->geometry); !reason.empty()) return reason;
  const ConvProblem& p = plan->geometry.p;
  if (row.dtype == DType::kS8 && !IsaHas(dnnl::cpu_isa::avx512_core_vnni) &&
      !IsaHas(dnnl::cpu_isa::avx2_vnni)) {
    return std::string("without VNNI (this is ") + IsaName() +
           ") oneDNN's s8 products may saturate";
  }
  plan->kind = row.kind;
  plan->slices = slices;
  bool wgrad = p.op == Op::kWgrad;

  plan->compute_dtype = native ? row.dtype : DType::kF32;
  plan->converted = !native;
  plan->result_dtype = wgrad || !native ? DType::kF32 : output;
  auto reserve_operand = [&](int64_t elements) { return plan->Reserve(elements * sizeof(float)); };
  int64_t x = problem.x_elements(), w = problem.w_elements(), y = problem.y_elements();
  if (!native) {
    plan->lhs_offset = reserve_operand(problem.op == Op::kDgrad ? y : x);
    plan->rhs_offset = reserve_operand(wgrad ? y : w);
  }
  bool mirrored = plan->geometry.mirrored;
  if (mirrored && !wgrad) plan->mirror_offset = plan->Reserve(w * ByteWidth(plan->compute_dtype));
  if (plan->result_dtype != output || (mirrored && wgrad)) {
    int64_t elements = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
    plan->result_offset = plan->Reserve(elements * ByteWidth(plan->result_dtype));
  }

  if (row.kind == Kind::kGemm) {
    if (mirrored) return "the input is dilated";
    if (p.out[2] < kLongRow) {
      int64_t channels = std::min(p.c_per_group(), CeilDiv(p.batch * p.c, slices));
      plan->scratch_stride = AlignUp(kGatheredPixels * channels * int64_t{sizeof(float)});
      plan->scratch_offset = plan->Reserve(plan->scratch_stride * slices);
    }
    return "";
  }
  if (row.kind == Kind::kDepthwise) {
    if (!DepthwiseWgradRuns()) return "needs AVX-512";
    if (p.groups != p.c || p.groups != p.k) {
      return "takes one input and one output channel per group, got " +
             std::to_string(p.c_per_group()) + " and " + std::to_string(p.k_per_group());
    }
    if (mirrored) return "the input is dilated";
  }

  plan->tasks = CutTasks(plan->geometry, slices, MaxPieceRows(plan->geometry, row.kind));
  if (row.kind == Kind::kOnednn) {
    if (std::string reason = MakePrimitives(plan); !reason.empty()) return reason;
    for (PackedFilter& packed : plan->packed) {
      packed.offset = plan->Reserve(packed.bytes * p.batch);
    }
    auto need = [](int64_t* bytes, const memory::desc& desc) {
      *bytes = std::max(*bytes, AlignUp(static_cast<int64_t>(desc.get_size())));
    };
    for (const PackedFilter& packed : plan->packed) {
      for (const Reorder& part : packed.parts) need(&plan->scratch_stride, part.scratch);
    }
    for (const ConvPrimitive& primitive : plan->primitives) {
      need(&plan->scratch_stride, primitive.scratch);
      if (!wgrad) continue;
      need(&plan->scratch_stride, primitive.unpack.scratch);
      need(&plan->scratch_stride, primitive.unpack_and_add.scratch);
      need(&plan->unpack_stride, primitive.w);
    }
    plan->scratch_offset = plan->Reserve(plan->scratch_stride * slices);
    plan->unpack_offset = plan->Reserve(plan->unpack_stride * slices);
  }
  if (wgrad) {
    // The first task that meets an independent convolution writes the result itself.
    int64_t filter_bytes = w / p.batch * sizeof(float);
    int64_t next_batch = 0;
    plan->partials.resize(plan->tasks.size());
    for (size_t task = 0; task < plan->tasks.size(); ++task) {
      for (const Piece& piece : plan->tasks[task]) {
        auto& partials = plan->partials[task];
        if (!partials.empty() && partials.back().batch == piece.batch) continue;
        Partial partial;
        partial.batch = piece.batch;
        if (piece.batch >= next_batch) {
          next_batch = piece.batch + 1;
        } else {
          partial.offset = plan->Reserve(filter_bytes);
        }
        partials.push_back(partial);
      }
    }
  }
  return "";
}

// On processors without bf16 instructions oneDNN emulates them, slower than float32; with them, it
// still has only reference code for some geometries.
std::string MakePlan(const Row& row, const ConvProblem& problem, int64_t slices, Plan* plan) {
  if (!IsFloat16(row.dtype)) return MakePlan(row, problem, slices, true, plan);
  bool instructions = row.dtype == DType::kF16 ? IsaHas(dnnl::cpu_isa::avx512_core_fp16)
                                               : IsaHas(dnnl::cpu_isa::avx512_core_bf16);
  if (row.kind == Kind::kOnednn && instructions) {
    if (MakePlan(row, problem, slices, true, plan).empty()) return "";
    *plan = Plan();
  }
  return MakePlan(row, problem, slices, false, plan);
}

int64_t ChooseSlices(const ConvProblem& p, Kind kind, int64_t threads) {
  int64_t bytes = p.x_elements() * ByteWidth(p.x_dtype) + p.w_elements() * ByteWidth(p.w_dtype) +
                  p.y_elements() * ByteWidth(p.y_dtype);
  int64_t work = p.flops() + 16 * bytes;
  int64_t slices = std::clamp<int64_t>(work / kOperationsPerTask, 1, std::max<int64_t>(threads, 1));
  if (kind == Kind::kGemm) {
    // Tasks own rows of the result, which are input channels: 64 of them keep a product efficient.
    return std::min(slices, std::max<int64_t>(1, p.batch * p.c / 64));
  }
  int axis = 3 - p.rank;
  // In the mirrored case the rows of x and y change places; the smaller count serves both.
  int64_t rows = p.op == Op::kWgrad || p.lhs_dilation != Spatial{1, 1, 1}
                     ? std::min(p.in[axis], p.out[axis])
                 : p.op == Op::kDgrad ? CeilDiv(p.in[axis], p.stride[axis])
                                      : p.out[axis];
  slices = std::min(slices, p.batch * p.n * rows);
  if (p.op == Op::kWgrad) {
    int64_t partial = 2 * p.w_elements() / p.batch * static_cast<int64_t>(sizeof(float));
    slices = std::min(slices, std::max<int64_t>(1, kMaxPartialBytes / partial));
  }
  return slices;
}

// Why "auto" passes over a row that could run: another one, or XLA, is faster.
std::string NotWorthIt(const Row& row, const ConvProblem& p) {
  if (row.kind == Kind::kGemm) {
    bool few_pixels = p.n * p.out_pixels() <= kFewPixels && p.taps() > 1;
    if (!few_pixels && (p.rank != 1 || p.out[2] < kLongRow)) {
      return "pays for long one-dimensional rows or few pixels only";
    }
    if (p.c_per_group() < 64 || p.k_per_group() < 64) return "pays from 64 channels per group on";
  }
  return "";
}

// Whether oneDNN meets a depthwise convolution with a kernel made for it: few filter sizes and
// paddings.
bool HasDepthwiseKernel(const Plan& plan) {
  return !plan.primitives.empty() &&
         plan.primitives[0].implementation.find("_dw") != std::string::npos;
}

// The plan cache's key: every field of the problem, the row and the number of tasks.
using PlanKey = std::array<int64_t, 37>;

PlanKey MakeKey(const ConvProblem& p, size_t row, int64_t slices) {
  PlanKey key{};
  size_t at = 0;
  for (int64_t value : {static_cast<int64_t>(row), slices, static_cast<int64_t>(p.op),
                        static_cast<int64_t>(p.x_dtype), static_cast<int64_t>(p.w_dtype),
                        static_cast<int64_t>(p.y_dtype), static_cast<int64_t>(p.precision),
                        static_cast<int64_t>(p.rank), p.batch, p.n, p.groups, p.c, p.k}) {
    key[at++] = value;
  }
  for (const Spatial* axes :
       {&p.in, &p.filter, &p.out, &p.stride, &p.lhs_dilation, &p.dilation, &p.pad_lo, &p.pad_hi}) {
    for (int64_t value : *axes) key[at++] = value;
  }
  return key;
}

PlanCache<PlanKey, Plan>& Plans() {
  // A plan is some 10 KB and its generated code up to 100 KB a primitive; a network has at most a
  // few hundred different convolutions.
  static auto* const plans = new PlanCache<PlanKey, Plan>(256);
  return *plans;
}

// Runs `body`, which may throw dnnl::error, and turns what is thrown into a Status.
template <typename Body>
Status Guarded(const Body& body) {
  try {
    return body();
  } catch (const dnnl::error& error) {
    return Status::Internal(std::string("oneDNN: ") + error.what() + " (status " +
                            std::to_string(static_cast<int>(error.status)) + ")");
  } catch (const std::exception& error) {
    return Status::Internal(std::string("CPU convolution: ") + error.what());
  }
}

// Plan or refusal; an error only where oneDNN itself failed.
Status FindPlan(const ConvProblem& problem, size_t row, int64_t slices,
                std::shared_ptr<const Plan>* plan, std::string* refusal) {
  if (const Status layout = problem.RequireRsck(); !layout.ok()) {
    *refusal = layout.message();
    return {};
  }
  PlanKey key = MakeKey(problem, row, slices);
  *plan = Plans().Find(key);
  if (*plan != nullptr) return {};
  return Guarded([&]() -> Status {
    SingleThreaded single_threaded;
    auto made = std::make_shared<Plan>();
    *refusal = MakePlan(kRows[row], problem, slices, made.get());
    if (refusal->empty()) *plan = Plans().Insert(key, made);
    return {};
  });
}

using Arguments = std::unordered_map<int, memory>;

// One execution: the plan and where its operands are.
class Execution {
 public:
  Execution(const Plan& plan, const ConvProblem& problem, const void* lhs, const void* rhs,
            void* out, char* workspace, const ParallelFor& parallel_for)
      : plan_(plan),
        p_(plan.geometry.p),
        problem_(problem),
        lhs_(lhs),
        rhs_(rhs),
        out_(out),
        workspace_(workspace),
        parallel_for_(parallel_for) {}

  Status Run() {
    JAXCONV_RETURN_IF_ERROR(ConvertOperands());
    bool wgrad = problem_.op == Op::kWgrad;
    result_ = plan_.result_offset >= 0 ? workspace_ + plan_.result_offset : out_;
    // The caller's operands by name; in the mirrored convolution x and y change places.
    const void* x = problem_.op == Op::kDgrad ? result_ : lhs_;
    const void* y = wgrad ? rhs_ : problem_.op == Op::kDgrad ? lhs_ : result_;
    if (plan_.geometry.mirrored) std::swap(x, y);
    x_ = static_cast<const char*>(x);
    y_ = static_cast<const char*>(y);
    w_ = static_cast<const char*>(wgrad ? nullptr : rhs_);
    if (!wgrad) {
      JAXCONV_RETURN_IF_ERROR(MirrorFilter());
      JAXCONV_RETURN_IF_ERROR(PackFilters());
    }
    if (plan_.kind == Kind::kGemm) {
      JAXCONV_RETURN_IF_ERROR(Each(plan_.slices, [&](int64_t task) { return GemmTask(task); }));
    } else {
      JAXCONV_RETURN_IF_ERROR(Each(
          plan_.slices, [&](int64_t task) { return wgrad ? WgradTask(task) : DataTask(task); }));
      if (wgrad) JAXCONV_RETURN_IF_ERROR(ReducePartials());
    }
    return Finish();
  }

 private:
  // Runs body(0) .. body(tasks - 1) with single-threaded primitives; the first failure, by number.
  template <typename Body>
  Status Each(int64_t tasks, const Body& body) {
    auto guarded = [&](int64_t task) {
      return Guarded([&] {
        SingleThreaded single_threaded;
        return body(task);
      });
    };
    if (tasks == 1) return guarded(0);
    std::vector<Status> statuses(tasks);
    parallel_for_(tasks, [&](int64_t task) { statuses[task] = guarded(task); });
    for (Status& status : statuses) {
      if (!status.ok()) return std::move(status);
    }
    return {};
  }

  // body(begin, end) over [0, count), in as many ranges as the plan has tasks.
  template <typename Body>
  Status EachRange(int64_t count, const Body& body) {
    // Less than this is copied before a second thread has woken up.
    constexpr int64_t kMinElements = 32 << 10;
    int64_t tasks = std::clamp<int64_t>(count / kMinElements, 1, plan_.slices);
    return Each(tasks, [&](int64_t task) -> Status {
      body(task * count / tasks, (task + 1) * count / tasks);
      return {};
    });
  }

  Status ConvertOperands() {
    if (!plan_.converted) return {};
    auto convert = [&](int64_t offset, DType dtype, int64_t count, const void** operand) -> Status {
      const void* from = *operand;
      float* to = reinterpret_cast<float*>(workspace_ + offset);
      *operand = to;
      return EachRange(count,
                       [&](int64_t begin, int64_t end) { ToFloat(dtype, from, to, begin, end); });
    };
    int64_t x = problem_.x_elements(), w = problem_.w_elements(), y = problem_.y_elements();
    JAXCONV_RETURN_IF_ERROR(
        convert(plan_.lhs_offset, problem_.lhs_dtype(), problem_.op == Op::kDgrad ? y : x, &lhs_));
    return convert(plan_.rhs_offset, problem_.rhs_dtype(), problem_.op == Op::kWgrad ? y : w,
                   &rhs_);
  }

  // Copies a filter with its taps in reverse order.
  void ReverseTaps(const char* from, char* to, int64_t element_bytes) const {
    int64_t taps = p_.taps();
    int64_t tap_bytes = p_.w_elements() / p_.batch / taps * element_bytes;
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t t = 0; t < taps; ++t) {
        std::memcpy(to + (b * taps + taps - 1 - t) * tap_bytes, from + (b * taps + t) * tap_bytes,
                    tap_bytes);
      }
    }
  }

  Status MirrorFilter() {
    if (plan_.mirror_offset < 0) return {};
    char* to = workspace_ + plan_.mirror_offset;
    ReverseTaps(w_, to, ByteWidth(plan_.compute_dtype));
    w_ = to;
    return {};
  }

  int64_t FilterElements() const { return p_.w_elements() / p_.batch; }

  Status PackFilters() {
    int64_t width = ByteWidth(plan_.compute_dtype);
    for (const PackedFilter& packed : plan_.packed) {
      int64_t parts = static_cast<int64_t>(packed.parts.size());
      int64_t all = parts * p_.batch;
      int64_t tasks = p_.w_elements() * width < kMinPackBytes ? 1 : std::min(all, plan_.slices);
      JAXCONV_RETURN_IF_ERROR(Each(tasks, [&](int64_t task) -> Status {
        for (int64_t i = task * all / tasks; i < (task + 1) * all / tasks; ++i) {
          int64_t b = i / parts;
          RunReorder(task, packed.parts[i % parts], w_ + b * FilterElements() * width,
                     workspace_ + packed.offset + b * packed.bytes);
        }
        return {};
      }));
    }
    return {};
  }

  void RunReorder(int64_t task, const Reorder& reorder, const void* from, void* to) {
    Arguments arguments{{DNNL_ARG_FROM, memory(reorder.from, CpuEngine(), const_cast<void*>(from))},
                        {DNNL_ARG_TO, memory(reorder.to, CpuEngine(), to)},
                        {DNNL_ARG_SCRATCHPAD, memory(reorder.scratch, CpuEngine(), Scratch(task))}};
    reorder.primitive.execute(ThreadStream(), arguments);
  }

  Status DataTask(int64_t task) {
    bool fprop = p_.op == Op::kFprop;
    int64_t operand_width = ByteWidth(plan_.compute_dtype);
    int64_t result_width = ByteWidth(plan_.result_dtype);
    int64_t x_width = fprop ? operand_width : result_width;
    int64_t y_width = fprop ? result_width : operand_width;
    for (const Piece& piece : plan_.tasks[task]) {
      char* x = Mutable(x_ + piece.x_offset * x_width);
      char* y = Mutable(y_ + piece.y_offset * y_width);
      if (piece.primitive < 0) {
        std::memset(fprop ? y : x, 0, piece.zero_elements * result_width);
        continue;
      }
      const ConvPrimitive& primitive = plan_.primitives[piece.primitive];
      const char* w = w_ + piece.batch * FilterElements() * operand_width;
      if (primitive.packed >= 0) {
        const PackedFilter& packed = plan_.packed[primitive.packed];
        w = workspace_ + packed.offset + piece.batch * packed.bytes;
      }
      Arguments arguments{
          {fprop ? DNNL_ARG_SRC : DNNL_ARG_DIFF_SRC, memory(primitive.x, CpuEngine(), x)},
          {fprop ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, memory(primitive.y, CpuEngine(), y)},
          {DNNL_ARG_WEIGHTS, memory(primitive.w, CpuEngine(), Mutable(w))},
          {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, CpuEngine(), Scratch(task))}};
      primitive.primitive.execute(ThreadStream(), arguments);
    }
    return {};
  }

  Status WgradTask(int64_t task) {
    auto partial = plan_.partials[task].begin();
    bool empty = true;
    auto finish_partial = [&] {
      if (empty) std::memset(PartialSum(*partial), 0, FilterElements() * sizeof(float));
    };
    for (const Piece& piece : plan_.tasks[task]) {
      if (piece.batch != partial->batch) {
        finish_partial();
        ++partial;
        empty = true;
      }
      if (plan_.kind == Kind::kDepthwise) {
        finish_partial();  // the kernel adds
        AddDepthwise(piece, PartialSum(*partial));
        empty = false;
      } else if (piece.primitive >= 0) {
        AddPrimitive(task, piece, PartialSum(*partial), empty);
        empty = false;
      }
    }
    if (partial != plan_.partials[task].end()) finish_partial();
    return {};
  }

  void AddDepthwise(const Piece& piece, float* sum) const {
    const float* x = reinterpret_cast<const float*>(x_);
    const float* y = reinterpret_cast<const float*>(y_);
    for (int64_t i = piece.image; i < piece.image + piece.images; ++i) {
      DepthwiseWgradAdd(p_, x + i * p_.in_pixels() * p_.c, y + i * p_.out_pixels() * p_.k, sum,
                        piece.row_begin, piece.row_end);
    }
  }

  void AddPrimitive(int64_t task, const Piece& piece, float* sum, bool overwrite) {
    const ConvPrimitive& primitive = plan_.primitives[piece.primitive];
    int64_t width = ByteWidth(plan_.compute_dtype);
    memory own(primitive.w, CpuEngine(),
               workspace_ + plan_.unpack_offset + task * plan_.unpack_stride);
    Arguments arguments{
        {DNNL_ARG_SRC, memory(primitive.x, CpuEngine(), Mutable(x_ + piece.x_offset * width))},
        {DNNL_ARG_DIFF_DST, memory(primitive.y, CpuEngine(), Mutable(y_ + piece.y_offset * width))},
        {DNNL_ARG_DIFF_WEIGHTS, own},
        {DNNL_ARG_SCRATCHPAD, memory(primitive.scratch, CpuEngine(), Scratch(task))}};
    if (primitive.clears_scratch) std::memset(Scratch(task), 0, primitive.scratch.get_size());
    primitive.primitive.execute(ThreadStream(), arguments);
    RunReorder(task, overwrite ? primitive.unpack : primitive.unpack_and_add, own.get_data_handle(),
               sum);
  }

  Status ReducePartials() {
    std::vector<std::pair<float*, const float*>> sums;  // into, from, in the order of the tasks
    for (const auto& task : plan_.partials) {
      for (const Partial& partial : task) {
        if (partial.offset < 0) continue;
        sums.push_back({PartialSum({partial.batch, -1}), PartialSum(partial)});
      }
    }
    if (sums.empty()) return {};
    return EachRange(FilterElements(), [&](int64_t begin, int64_t end) {
      for (auto [into, from] : sums) {
        for (int64_t i = begin; i < end; ++i) into[i] += from[i];
      }
    });
  }

  // dw[tap] = x[tap]^T dy, rows of x being `stride` pixels apart: one matrix product per tap and
  // row of output pixels. A task owns a range of input channels of all taps, so nothing is left to
  // add up.
  // dw += x' dy for `rows` input channels of one group, tap by tap; x' are the pixels of x that the
  // tap brings together with dy's, copied to scratch, zero where they lie in the padding.
  Status GatheredTaps(int64_t task, const float* x, const float* dy, int64_t rows, float* dw) {
    float* gathered = reinterpret_cast<float*>(Scratch(task));
    int64_t pixels = p_.n * p_.out_pixels();
    for (int64_t first = 0; first < pixels; first += kGatheredPixels) {
      int64_t count = std::min(kGatheredPixels, pixels - first);
      for (int64_t t = 0; t < p_.taps(); ++t) {
        int64_t tap[3] = {t / (p_.filter[1] * p_.filter[2]), t / p_.filter[2] % p_.filter[1],
                          t % p_.filter[2]};
        for (int64_t i = 0; i < count; ++i) {
          int64_t rest = first + i;
          int64_t at[3];
          for (int a = 2; a >= 0; --a) {
            at[a] = rest % p_.out[a] * p_.stride[a] + tap[a] * p_.dilation[a] - p_.pad_lo[a];
            rest /= p_.out[a];
          }
          bool inside = true;
          for (int a = 0; a < 3; ++a) inside &= at[a] >= 0 && at[a] < p_.in[a];
          float* to = gathered + i * rows;
          if (inside) {
            int64_t pixel = ((rest * p_.in[0] + at[0]) * p_.in[1] + at[1]) * p_.in[2] + at[2];
            std::memcpy(to, x + pixel * p_.c, rows * sizeof(float));
          } else {
            std::memset(to, 0, rows * sizeof(float));
          }
        }
        JAXCONV_RETURN_IF_ERROR(AddProduct(rows, count, gathered, rows, dy + first * p_.k,
                                           dw + t * p_.c_per_group() * p_.k));
      }
    }
    return {};
  }

  // dw (rows, K) += x^T dy over `pixels`; consecutive pixels of x lie x_stride apart, those of dy
  // K.
  Status AddProduct(int64_t rows, int64_t pixels, const float* x, int64_t x_stride, const float* dy,
                    float* dw) {
    dnnl_status_t status = dnnl_sgemm('T', 'N', rows, p_.k_per_group(), pixels, 1.0f, x, x_stride,
                                      dy, p_.k, 1.0f, dw, p_.k);
    if (status == dnnl_success) return {};
    return Status::Internal("oneDNN: sgemm failed (status " + std::to_string(status) + ")");
  }

  Status GemmTask(int64_t task) {
    // A chunk of dy (512 pixels) is used by every tap while it is in the second-level cache.
    constexpr int64_t kChunk = 512;
    int64_t c_per_group = p_.c_per_group(), k_per_group = p_.k_per_group();
    const float* x = reinterpret_cast<const float*>(x_);
    const float* y = reinterpret_cast<const float*>(y_);
    int64_t all = p_.batch * p_.c;
    int64_t begin = task * all / plan_.slices, end = (task + 1) * all / plan_.slices;
    while (begin < end) {
      int64_t b = begin / p_.c, c = begin % p_.c, g = c / c_per_group;
      int64_t rows = std::min(end - begin, c_per_group - c % c_per_group);
      float* dw = static_cast<float*>(result_) + b * FilterElements() + (c % c_per_group) * p_.k +
                  g * k_per_group;
      int64_t tap_stride = c_per_group * p_.k;
      for (int64_t t = 0; t < p_.taps(); ++t) {
        for (int64_t r = 0; r < rows; ++r) {
          std::memset(dw + t * tap_stride + r * p_.k, 0, k_per_group * sizeof(float));
        }
      }
      if (p_.out[2] < kLongRow) {
        JAXCONV_RETURN_IF_ERROR(
            GatheredTaps(task, x + b * p_.n * p_.in_pixels() * p_.c + c,
                         y + b * p_.n * p_.out_pixels() * p_.k + g * k_per_group, rows, dw));
        begin += rows;
        continue;
      }
      for (int64_t row = 0; row < p_.n * p_.out[0] * p_.out[1]; ++row) {
        int64_t n = row / (p_.out[0] * p_.out[1]);
        int64_t p0 = row / p_.out[1] % p_.out[0], p1 = row % p_.out[1];
        const float* dy = y + (b * p_.n * p_.out[0] * p_.out[1] + row) * p_.out[2] * p_.k;
        for (int64_t q = 0; q < p_.out[2]; q += kChunk) {
          for (int64_t t = 0; t < p_.taps(); ++t) {
            int64_t r0 = t / (p_.filter[1] * p_.filter[2]);
            int64_t r1 = t / p_.filter[2] % p_.filter[1], r2 = t % p_.filter[2];
            int64_t i0 = p0 * p_.stride[0] + r0 * p_.dilation[0] - p_.pad_lo[0];
            int64_t i1 = p1 * p_.stride[1] + r1 * p_.dilation[1] - p_.pad_lo[1];
            if (i0 < 0 || i0 >= p_.in[0] || i1 < 0 || i1 >= p_.in[1]) continue;
            int64_t shift = r2 * p_.dilation[2] - p_.pad_lo[2];
            int64_t q_begin = std::max(q, CeilDiv(-shift, p_.stride[2]));
            int64_t q_end =
                std::min({q + kChunk, p_.out[2], FloorDiv(p_.in[2] - 1 - shift, p_.stride[2]) + 1});
            if (q_begin >= q_end) continue;
            int64_t pixel = (((b * p_.n + n) * p_.in[0] + i0) * p_.in[1] + i1) * p_.in[2] +
                            q_begin * p_.stride[2] + shift;
            JAXCONV_RETURN_IF_ERROR(
                AddProduct(rows, q_end - q_begin, x + pixel * p_.c + c, p_.stride[2] * p_.c,
                           dy + q_begin * p_.k + g * k_per_group, dw + t * tap_stride));
          }
        }
      }
      begin += rows;
    }
    return {};
  }

  Status Finish() {
    if (plan_.result_offset < 0) return {};
    bool wgrad = problem_.op == Op::kWgrad;
    const float* result = static_cast<const float*>(result_);
    if (wgrad && plan_.geometry.mirrored) {
      int64_t taps = p_.taps();
      int64_t tap_elements = FilterElements() / taps;
      return Each(1, [&](int64_t) -> Status {
        for (int64_t b = 0; b < p_.batch; ++b) {
          for (int64_t t = 0; t < taps; ++t) {
            const float* from = result + (b * taps + taps - 1 - t) * tap_elements;
            char* to = static_cast<char*>(out_) +
                       (b * taps + t) * tap_elements * ByteWidth(problem_.output_dtype());
            FromFloat(problem_.output_dtype(), from, to, 0, tap_elements);
          }
        }
        return {};
      });
    }
    int64_t count = wgrad                       ? problem_.w_elements()
                    : problem_.op == Op::kDgrad ? problem_.x_elements()
                                                : problem_.y_elements();
    return EachRange(count, [&](int64_t begin, int64_t end) {
      FromFloat(problem_.output_dtype(), result, out_, begin, end);
    });
  }

  // oneDNN's memory objects take no const pointers; operands are only read.
  static char* Mutable(const char* pointer) { return const_cast<char*>(pointer); }

  char* Scratch(int64_t task) const {
    return workspace_ + plan_.scratch_offset + task * plan_.scratch_stride;
  }

  float* PartialSum(const Partial& partial) const {
    if (partial.offset >= 0) return reinterpret_cast<float*>(workspace_ + partial.offset);
    return static_cast<float*>(result_) + partial.batch * FilterElements();
  }

  const Plan& plan_;
  const ConvProblem& p_;        // what is computed
  const ConvProblem& problem_;  // what the caller asked for
  const void* lhs_;
  const void* rhs_;
  void* out_;
  char* workspace_;
  const ParallelFor& parallel_for_;
  void* result_ = nullptr;
  const char* x_ = nullptr;
  const char* y_ = nullptr;
  const char* w_ = nullptr;
};

// The caller's buffer need not be aligned: room for moving its start up.
int64_t WorkspaceBytes(const Plan& plan) {
  return plan.workspace_bytes == 0 ? 0 : plan.workspace_bytes + kAlignment;
}

// XLA's allocator hands a large workspace back to the system after every run, and touching 27 MB of
// it anew costs 7000 page faults, about 1 ms: as huge pages it costs 14. A hint; failure changes
// nothing.
void AdviseHugePages([[maybe_unused]] char* begin, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage;
  uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

Status Select(const ConvProblem& problem, std::string_view algorithm, int64_t threads,
              Selection* selection) {
  *selection = {};
  JAXCONV_RETURN_IF_ERROR(problem.Validate());
  bool is_auto = algorithm == "auto";
  bool known = is_auto;
  for (const char* family : kFamilies) known |= algorithm == family;
  for (const Row& row : kRows) known |= algorithm == row.name;
  if (!known) {
    return Status::InvalidArgument("algorithm: '" + std::string(algorithm) +
                                   "' is no kernel of the CPU");
  }
  for (size_t i = 0; i < std::size(kRows); ++i) {
    const Row& row = kRows[i];
    bool by_name = algorithm == row.name;
    if (!by_name && !is_auto && algorithm != kFamilies[static_cast<int>(row.kind)]) continue;
    // Rows of other operations and types would only fill the list of refusals.
    if (!by_name && (row.op != problem.op || row.dtype != problem.lhs_dtype())) continue;
    std::string refusal = is_auto ? NotWorthIt(row, problem) : "";
    std::shared_ptr<const Plan> plan;
    int64_t slices = ChooseSlices(problem, row.kind, threads);
    if (refusal.empty()) JAXCONV_RETURN_IF_ERROR(FindPlan(problem, i, slices, &plan, &refusal));
    if (is_auto && row.kind == Kind::kDepthwise && plan != nullptr) {
      size_t onednn = i;
      while (kRows[onednn].kind != Kind::kOnednn || kRows[onednn].op != row.op ||
             kRows[onednn].dtype != row.dtype) {
        ++onednn;
      }
      std::shared_ptr<const Plan> other;
      std::string ignored;
      JAXCONV_RETURN_IF_ERROR(FindPlan(problem, onednn, slices, &other, &ignored));
      if (other != nullptr && HasDepthwiseKernel(*other)) {
        plan = nullptr;
        refusal = "oneDNN has a depthwise kernel for this filter and padding";
      }
    }
    if (plan == nullptr) {
      selection->refusals.push_back({row.name, refusal});
      continue;
    }
    selection->instance = row.name;
    selection->slices = slices;
    selection->workspace_bytes = WorkspaceBytes(*plan);
    return {};
  }
  if (selection->refusals.empty()) {
    selection->refusals.push_back(
        {std::string(algorithm), std::string("no CPU kernel for ") + Name(problem.op) + " of " +
                                     Name(problem.lhs_dtype()) + " operands"});
  }
  return {};
}

Status Execute(const ConvProblem& problem, std::string_view instance, int64_t slices,
               const void* lhs, const void* rhs, void* out, void* workspace,
               int64_t workspace_bytes, const ParallelFor& parallel_for) {
  size_t row = 0;
  while (row < std::size(kRows) && instance != kRows[row].name) ++row;
  if (row == std::size(kRows)) {
    return Status::InvalidArgument("instance: '" + std::string(instance) +
                                   "' is no kernel of the CPU");
  }
  std::shared_ptr<const Plan> plan;
  std::string refusal;
  JAXCONV_RETURN_IF_ERROR(FindPlan(problem, row, slices, &plan, &refusal));
  if (plan == nullptr) {
    return Status::Unimplemented(std::string(instance) + ": " + refusal + " (" +
                                 problem.ToString() + ")");
  }
  if (workspace_bytes < WorkspaceBytes(*plan)) {
    return Status::InvalidArgument("workspace: expected at least " +
                                   std::to_string(WorkspaceBytes(*plan)) + " bytes, got " +
                                   std::to_string(workspace_bytes));
  }
  auto address = reinterpret_cast<uintptr_t>(workspace);
  char* aligned = static_cast<char*>(workspace) + (AlignUp(address) - address);
  AdviseHugePages(aligned, WorkspaceBytes(*plan));
  return Execution(*plan, problem, lhs, rhs, out, aligned, parallel_for).Run();
}

std::vector<std::string> FamilyNames() { return {std::begin(kFamilies), std::end(kFamilies)}; }

std::vector<std::string> KernelNames() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.push_back(row.name);
  return names;
}

std::string LibraryVersion() {
  const dnnl_version_t* version = dnnl_version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch) + " (" + IsaName() + ")";
}

void SetPlanCapacity(size_t capacity) { Plans().SetCapacity(capacity); }
size_t PlanCount() { return Plans().size(); }

}  // namespace jaxconv::cpu
