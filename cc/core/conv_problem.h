// ConvProblem: one convolution, or one of its two gradients, with every size explicit.
//
// The three tensors are related on every spatial axis by
//
//     i * lhs_dilation = p * stride + r * dilation - pad_lo
//
// where i indexes the input x, p the output y and r the filter w. The three operations are
//
//     fprop   y[b,n,p,k]    = sum over r, c of x[b,n,i,c] w[b,r,c,k]
//     dgrad   dx[b,n,i,c]   = sum over r, k of dy[b,n,p,k] w[b,r,c,k]
//     wgrad   dw[b,r,c,k]   = sum over n, p of x[b,n,i,c] dy[b,n,p,k]
//
// (c runs over the C / groups channels of one group, k over its K / groups). `b` counts independent
// convolutions of the same shape, each with its own filter; vmap over both operands makes them.
//
// Physical layouts are row-major and dense: x (batch, n, spatial, C), y (batch, n, spatial, K), w
// (batch, spatial, C / groups, K), where the K of w is ordered by group. Some kernels also read the
// operand w as (batch, K, spatial, C / groups). In the activation layout nchw32, x is (batch, n, C
// / 32, spatial, 32) and y likewise, which is no permutation of the axes above; if C is 4, x is
// (batch, n, 1, spatial, 4). A packed filter is a matrix (K, L) of int8: row k holds the reduction
// of output channel k in the order (spatial, C / groups), in nchw32 (C / groups / 32, spatial, 32),
// and zeros up to L, the next multiple of 32.
//
// A filter prepared for Winograd's F(m, 3) is a vector of L float16 elements: a record of 256
// bytes, then the transform U (point, K, C / groups). The record begins with two powers of two as
// float32: the first multiplied the filter, the second brings the largest magnitude of U's input
// into [2^13, 2^14). For the one-dimensional F(4, 3) along W, U has the order of
// cuda/winograd/row_filter.h, with a group's K padded to a multiple of 128 and its C to a multiple
// of 32.
//
// Sizes. Validate bounds every size, so that the arithmetic of all kernels and of selection stays
// within 64 bits; RequireInt32 tests whether 32 bits suffice. Further checks are needed only for
// values that a kernel or a library computes in fewer bits.
#ifndef JAXCONV_CORE_CONV_PROBLEM_H_
#define JAXCONV_CORE_CONV_PROBLEM_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/epilogue.h"
#include "core/status.h"

namespace jaxconv {

enum class Op { kFprop, kDgrad, kWgrad };
enum class DType { kF32, kF16, kBF16, kS8, kS32, kU8 };
// Like jax.lax.Precision: the least accuracy that the caller accepts for float32 operands.
enum class Precision { kDefault, kHigh, kHighest };
// The order of the filter's axes in memory, outermost first.
enum class FilterLayout {
  kRsck,
  kKrsc,
  kPacked,
  kWinograd2,    // prepared for F(2x2, 3x3)
  kWinograd4,    // F(4x4, 3x3)
  kWinograd6,    // F(6x6, 3x3)
  kWinograd4x3,  // F(4, 3) along W
};
// The layout of x and y in memory.
enum class ActivationLayout { kChannelsLast, kNchw32 };
// The three tensors of a convolution, in every operation.
enum class Role { kX, kW, kY };

// The extents of an array, without an allocation.
struct Extents {
  std::array<int64_t, 7> values{};  // batch, n, channel blocks, three spatial axes, channels
  size_t rank = 0;

  // At most seven values.
  template <class Values = std::initializer_list<int64_t>>
  static Extents Of(const Values& extents) {
    Extents of;
    for (const int64_t extent : extents) of.Append(extent);
    return of;
  }

  void Append(int64_t value) { values[rank++] = value; }
  const int64_t* begin() const { return values.data(); }
  const int64_t* end() const { return values.data() + rank; }
  bool operator==(const Extents& other) const {
    return rank == other.rank && values == other.values;
  }
};

struct ArrayType {
  DType dtype;
  Extents shape;
};

const char* Name(Op op);
const char* Name(DType dtype);
const char* Name(Precision precision);
const char* Name(FilterLayout layout);
const char* Name(ActivationLayout layout);
int64_t ByteWidth(DType dtype);
// The number of points of a prepared filter's transform (in a one-dimensional transform, over all
// filter rows); 0 for other layouts.
int64_t WinogradPoints(FilterLayout layout);

// Spatial values by axis, right-aligned: a 2-D convolution uses {1, H, W}, so that one index
// algebra serves ranks 1 to 3. Unused axes hold the neutral value (size 1, stride 1, padding 0).
using Spatial = std::array<int64_t, 3>;

// The record that precedes a filter prepared for Winograd.
inline constexpr int64_t kWinogradRecordBytes = 256;

struct ConvProblem {
  Op op = Op::kFprop;
  DType x_dtype = DType::kF32;  // of x or dx
  DType w_dtype = DType::kF32;  // of w or dw
  DType y_dtype = DType::kF32;  // of y or dy
  Precision precision = Precision::kDefault;
  int rank = 2;  // spatial axes, 1 to 3
  int64_t batch = 1;
  int64_t n = 1;
  int64_t groups = 1;
  int64_t c = 1;  // all input channels
  int64_t k = 1;  // all output channels
  Spatial in{1, 1, 1};
  Spatial filter{1, 1, 1};
  Spatial out{1, 1, 1};
  Spatial stride{1, 1, 1};
  Spatial lhs_dilation{1, 1, 1};
  Spatial dilation{1, 1, 1};
  Spatial pad_lo{0, 0, 0};
  Spatial pad_hi{0, 0, 0};                           // may be negative, like pad_lo
  FilterLayout filter_layout = FilterLayout::kRsck;  // always for dw
  ActivationLayout activation_layout = ActivationLayout::kChannelsLast;
  Epilogue epilogue;

  int64_t c_per_group() const { return c / groups; }
  int64_t k_per_group() const { return k / groups; }
  int64_t in_pixels() const { return in[0] * in[1] * in[2]; }
  int64_t out_pixels() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return filter[0] * filter[1] * filter[2]; }

  int64_t x_elements() const { return batch * n * in_pixels() * c; }
  // The share of x's pixels that lie in a window: strides wider than the filter skip pixels.
  double PartOfX() const;
  int64_t w_elements() const { return batch * taps() * c_per_group() * k; }
  int64_t y_elements() const { return batch * n * out_pixels() * k; }
  // Bytes of a packed filter's row.
  int64_t packed_row() const { return (taps() * c_per_group() + 31) / 32 * 32; }
  // Elements of a filter prepared for Winograd.
  int64_t winograd_elements() const;
  // Multiplications and additions in the definition, padding included.
  int64_t flops() const { return 2 * batch * n * out_pixels() * taps() * c_per_group() * k; }

  DType output_dtype() const {
    return op == Op::kFprop ? y_dtype : op == Op::kDgrad ? x_dtype : w_dtype;
  }
  // The two inputs, in the order of the operation's arguments: (x, w), (dy, w), (x, dy).
  DType lhs_dtype() const { return op == Op::kDgrad ? y_dtype : x_dtype; }
  DType rhs_dtype() const { return op == Op::kWgrad ? y_dtype : w_dtype; }

  // The extents of a tensor's array, with `rank` spatial entries: x (batch, n, spatial, C) or, in
  // nchw32, (batch, n, C / 32, spatial, 32); y likewise with K; w (batch, spatial, C / groups, K),
  // also if it is stored as krsc; packed (batch, K, L); prepared for Winograd (batch, L).
  // `with_batch`: false for unbatched calls, whose arrays lack the batch axis.
  Extents Shape(Role role, bool with_batch = true) const;

  // InvalidArgument unless sizes are positive, groups divides both channel counts, `out` is the
  // extent that the window implies, layouts suit the operation and the channels, and the epilogue's
  // terms suit each other and the types. Unimplemented if a tensor has 2^48 elements or more, or if
  // the flops, or an element offset in the dilated and padded input of all images, reach 2^60.
  // (These limits exceed every address space; the remaining bits allow for bytes of an element,
  // padded channels, slices, and sums of these terms.)
  Status Validate() const;
  // Unimplemented unless 32 bits hold every coordinate and GEMM extent of a valid problem:
  // coordinates must stay below 2^30, so that the sum of two does not overflow, and extents below
  // 2^31 - 2^16, so that rounding up to tiles does not.
  Status RequireInt32() const;
  // For kernels that read only rsck.
  Status RequireRsck() const;
  Status RequireRsckOrKrsc() const;
  Status RequireChannelsLast() const;

  // The problem key: attribute of the custom call, cache key, and repro of a failing test.
  //   fprop f32:f32:f32 default b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1
  // (dtypes of x, w, y; precision; p is lo_hi by axis), then " krsc", " packed" or " winograd4" (2,
  // 4, 6 or 4x3), " nchw32" for these layouts, then the epilogue's terms: " scale" or
  // " image_scale", " offset", " bias", " residual", the activation (" relu",
  // " leaky_relu:0x1p-2"), " z3" for a zero point, " pre", " statistics".
  std::string ToString() const;
  // The inverse of ToString; validates.
  static Status Parse(std::string_view key, ConvProblem* problem);
};

// a / b, rounded up, for a >= 0 and b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// floor((dilated_in + pad_lo + pad_hi - dilated_filter) / stride) + 1, and 0 if the span is
// negative. Terms beyond 2^60 overflow.
int64_t OutputExtent(int64_t in, int64_t filter, int64_t stride, int64_t lhs_dilation,
                     int64_t dilation, int64_t pad_lo, int64_t pad_hi);

}  // namespace jaxconv

#endif  // JAXCONV_CORE_CONV_PROBLEM_H_
