// The index algebra of implicit GEMM: it alone defines which elements are multiplied.
//
// Every operation gathers along each spatial axis by one relation between a destination coordinate,
// a filter tap and a source coordinate:
//
//     src * div = dst * mul + tap * step + off
//
//     fprop   dst = p, src = i   mul = stride         step = +dilation   off = -pad_lo   div =
//     lhs_dilation dgrad   dst = i, src = p   mul = lhs_dilation   step = -dilation   off = +pad_lo
//     div = stride wgrad   as fprop: rows are taps, the reduction runs over dst = p
//
// If div > 1, only some taps hit a source element. fprop and dgrad split the destination into
// residue classes (phases), dst = phase + j * period with period = div / gcd(mul, div). Within a
// phase the taps that hit are tap = first_tap + t * tap_period with tap_period = div / gcd(step,
// div), and
//
//     src = src0 + j * src_per_j + t * src_per_t
//
// in integers: each phase is a dense convolution, inserted zeros are never multiplied, and a phase
// without taps has an empty sum. wgrad uses the relation directly and skips the terms that do not
// divide.
//
// GEMM extents, per group (gemm_m x gemm_n x reduction):
//     fprop  (N P Q, K/g, R S C/g)    dgrad  (N H W, C/g, R S K/g)    wgrad  (R S C/g, K/g, N P Q)
// The A operand is the gathered tensor (x, dy, x), the B operand the other one (w, w, dy).
#ifndef JAXCONV_CORE_IMPLICIT_GEMM_H_
#define JAXCONV_CORE_IMPLICIT_GEMM_H_

#include <cstdint>
#include <numeric>
#include <string>

#include "core/conv_problem.h"
#include "core/fast_divmod.h"
#include "core/status.h"

namespace jaxconv {

// A coordinate that fails every bounds check after any addition: ConvProblem::RequireInt32 bounds
// real coordinates by 2^30 in magnitude.
inline constexpr int32_t kInvalidCoordinate = -(1 << 30);

// One phase of one axis. Without initialisers, because kernels keep it in shared memory.
struct AxisPhase {
  int32_t phase;
  int32_t dst_count;  // values of j
  int32_t tap_count;  // values of t
  int32_t first_tap;
  int32_t src0;
};

struct GatherAxis {
  int32_t dst_extent = 1;
  int32_t src_extent = 1;
  int32_t taps = 1;
  int32_t mul = 1;
  int32_t step = 1;
  int32_t off = 0;
  int32_t div = 1;
  int32_t period = 1;
  int32_t phases = 1;       // min(period, dst_extent): further phases have no destination
  int32_t first_phase = 0;  // a phase with the most taps, numbered 0 so that it starts first
  int32_t step_gcd = 1;
  int32_t tap_period = 1;
  int32_t step_inverse = 0;  // of step / step_gcd modulo tap_period
  int32_t src_per_j = 1;
  int32_t src_per_t = 1;
  // dst_count and tap_count of a phase have one of two neighbouring values; the host prepares both
  // divisors.
  FastDivmod dst_count_divmod[2];  // ceil(dst_extent / period), and one less
  FastDivmod tap_count_divmod[2];  // ceil(taps / tap_period), and one less
  FastDivmod dst_divmod;           // by dst_extent
  FastDivmod tap_divmod;           // by taps
  FastDivmod div_divmod;           // by div

  JAXCONV_HOST_DEVICE AxisPhase Phase(int32_t index) const {
    AxisPhase result{};
    int32_t phase = index + first_phase;
    if (phase >= phases) phase -= phases;
    result.phase = phase;
    result.dst_count = (dst_extent - phase + period - 1) / period;
    // Coordinates stay below 2^30 (RequireInt32), so divisions have 32 bits; each takes a GPU a
    // dozen instructions, none if div is 1.
    const int32_t origin = phase * mul + off;
    if (div == 1) {
      result.tap_count = taps;
      result.src0 = origin;
      return result;
    }
    if (origin % step_gcd != 0) {
      result.tap_count = 0;
      return result;
    }
    int32_t residue = -(origin / step_gcd) % tap_period;
    if (residue < 0) residue += tap_period;
    result.first_tap = tap_period < (1 << 15)
                           ? residue * step_inverse % tap_period
                           : static_cast<int32_t>(int64_t{residue} * step_inverse % tap_period);
    result.tap_count =
        result.first_tap < taps ? (taps - result.first_tap + tap_period - 1) / tap_period : 0;
    result.src0 = static_cast<int32_t>((origin + int64_t{result.first_tap} * step) / div);
    return result;
  }

  JAXCONV_HOST_DEVICE const FastDivmod& DstCountDivmod(const AxisPhase& phase) const {
    return dst_count_divmod[phase.dst_count != static_cast<int32_t>(dst_count_divmod[0].divisor)];
  }
  JAXCONV_HOST_DEVICE const FastDivmod& TapCountDivmod(const AxisPhase& phase) const {
    return tap_count_divmod[phase.tap_count != static_cast<int32_t>(tap_count_divmod[0].divisor)];
  }

  JAXCONV_HOST_DEVICE bool InSource(int32_t src) const {
    return static_cast<uint32_t>(src) < static_cast<uint32_t>(src_extent);
  }
};

// The parameters of a problem that a kernel needs, except pointers and tile.
struct ImplicitGemm {
  GatherAxis axis[3];
  int32_t images = 1;
  int32_t gemm_m = 1;           // fprop, dgrad: of the largest phase
  int32_t gemm_n = 1;           // per group
  int32_t reduce_channels = 1;  // fprop, dgrad: channels of one group of the gathered tensor
  int32_t row_channels = 1;     // wgrad: C / groups, the channels under one tap
  FastDivmod reduce_channels_divmod;
  FastDivmod row_channels_divmod;
  int32_t reduce_pixels = 0;  // wgrad: N P Q
  int32_t src_channels = 1;   // distance of neighbouring pixels of the gathered tensor
  int32_t out_channels = 1;   // distance of neighbouring rows of the output
  int32_t groups = 1;
  FastDivmod groups_divmod;
  int64_t batches = 1;
  int32_t phases = 1;
  // Distances in elements.
  int64_t a_batch = 0, b_batch = 0, out_batch = 0;
  int32_t a_group = 0, b_group = 0, out_group = 0;
  int64_t b_tap = 0;  // fprop, dgrad: from one tap of the filter to the next
  int64_t b_reduce =
      0;  // from one reduction index to the next within a tap; wgrad: per pixel of dy
  int64_t b_column = 1;  // from one gemm_n to the next

  JAXCONV_HOST_DEVICE bool InSource(int32_t src0, int32_t src1, int32_t src2) const {
    return axis[0].InSource(src0) && axis[1].InSource(src1) && axis[2].InSource(src2);
  }
  // Row-major pixel index of the gathered tensor within an image; linear, so it also applies to
  // differences.
  JAXCONV_HOST_DEVICE int64_t SourcePixel(int64_t src0, int64_t src1, int64_t src2) const {
    return (src0 * axis[1].src_extent + src1) * axis[2].src_extent + src2;
  }
  JAXCONV_HOST_DEVICE int64_t SourceImage() const {
    return int64_t{axis[0].src_extent} * axis[1].src_extent * axis[2].src_extent;
  }
  JAXCONV_HOST_DEVICE int32_t TapIndex(int32_t tap0, int32_t tap1, int32_t tap2) const {
    return (tap0 * axis[1].taps + tap1) * axis[2].taps + tap2;
  }

  // The phase of an axis in a phase index; the last axis runs fastest.
  JAXCONV_HOST_DEVICE AxisPhase PhaseOfAxis(int32_t index, int a) const {
    int32_t index2 = index % axis[2].phases;
    index /= axis[2].phases;
    // Not an array indexed by `a`, which a GPU would keep in local memory.
    return axis[a].Phase(a == 0   ? index / axis[1].phases
                         : a == 1 ? index % axis[1].phases
                                  : index2);
  }
  JAXCONV_HOST_DEVICE static int32_t Rows(int32_t images, const AxisPhase (&phase)[3]) {
    return images * phase[0].dst_count * phase[1].dst_count * phase[2].dst_count;
  }
  JAXCONV_HOST_DEVICE static int32_t TapCount(const AxisPhase (&phase)[3]) {
    return phase[0].tap_count * phase[1].tap_count * phase[2].tap_count;
  }

  // fprop, dgrad: decodes row m of a phase to image and j.
  JAXCONV_HOST_DEVICE void DecodeRow(const AxisPhase (&phase)[3], int32_t m, int32_t* image,
                                     int32_t (&j)[3]) const {
    axis[2].DstCountDivmod(phase[2]).Divmod(m, &m, &j[2]);
    axis[1].DstCountDivmod(phase[1]).Divmod(m, &m, &j[1]);
    axis[0].DstCountDivmod(phase[0]).Divmod(m, image, &j[0]);
  }
  // fprop, dgrad: decodes the linear number of a phase's tap to t.
  JAXCONV_HOST_DEVICE void DecodeTap(const AxisPhase (&phase)[3], int32_t index,
                                     int32_t (&t)[3]) const {
    axis[2].TapCountDivmod(phase[2]).Divmod(index, &index, &t[2]);
    axis[1].TapCountDivmod(phase[1]).Divmod(index, &t[0], &t[1]);
  }
  // wgrad: decodes row m to tap coordinates and channel, and a pixel to image and dst coordinates.
  JAXCONV_HOST_DEVICE void DecodeFilterRow(int32_t m, int32_t (&tap)[3], int32_t* channel) const {
    int32_t index;
    row_channels_divmod.Divmod(m, &index, channel);
    axis[2].tap_divmod.Divmod(index, &index, &tap[2]);
    axis[1].tap_divmod.Divmod(index, &tap[0], &tap[1]);
  }
  JAXCONV_HOST_DEVICE void DecodePixel(int32_t pixel, int32_t* image, int32_t (&dst)[3]) const {
    axis[2].dst_divmod.Divmod(pixel, &pixel, &dst[2]);
    axis[1].dst_divmod.Divmod(pixel, &pixel, &dst[1]);
    axis[0].dst_divmod.Divmod(pixel, image, &dst[0]);
  }
  // wgrad without lhs_dilation: the offsets of rows and pixels add.
  JAXCONV_HOST_DEVICE bool Dense() const {
    return axis[0].div == 1 && axis[1].div == 1 && axis[2].div == 1;
  }
};

// The operation whose kernel reads the problem's filter. An rsck filter is contiguous along the
// columns in fprop and along the reduction in dgrad; for krsc the reverse holds. Geometry and
// strides, the other differences between the two operations, are kernel parameters.
inline Op KernelOp(const ConvProblem& problem) {
  if (problem.filter_layout == FilterLayout::kRsck) return problem.op;
  return problem.op == Op::kFprop ? Op::kDgrad : Op::kFprop;
}

// A krsc filter is read in runs of C / groups elements that lie far apart and cost whole sectors if
// they are not aligned. On an H200 with 16-bit elements, this increases the kernel's time by a
// factor of up to 1.5 for multiples of 8 channels, up to 1.4 for multiples of 16, and not at all
// for multiples of 32.
inline Status CheckKrscLines(const ConvProblem& problem) {
  const int64_t line = 64 / ByteWidth(problem.w_dtype);
  if (problem.c_per_group() % line == 0) return {};
  return Status::Unimplemented("C/groups " + std::to_string(problem.c_per_group()) +
                               " of a filter stored as krsc is not a multiple of " +
                               std::to_string(line));
}

namespace implicit_gemm_internal {

inline int64_t Inverse(int64_t value, int64_t modulus) {  // modulus >= 1, coprime to value
  int64_t a = ((value % modulus) + modulus) % modulus, b = modulus, x = 1, y = 0;
  while (b != 0) {
    int64_t q = a / b, r = a - q * b, z = x - q * y;
    a = b, b = r, x = y, y = z;
  }
  return ((x % modulus) + modulus) % modulus;
}

inline GatherAxis MakeAxis(int64_t dst_extent, int64_t src_extent, int64_t taps, int64_t mul,
                           int64_t step, int64_t off, int64_t div) {
  GatherAxis axis;
  axis.dst_extent = static_cast<int32_t>(dst_extent);
  axis.src_extent = static_cast<int32_t>(src_extent);
  axis.taps = static_cast<int32_t>(taps);
  axis.mul = static_cast<int32_t>(mul);
  axis.step = static_cast<int32_t>(step);
  axis.off = static_cast<int32_t>(off);
  axis.div = static_cast<int32_t>(div);
  axis.period = static_cast<int32_t>(div / std::gcd(mul, div));
  axis.phases = axis.period < axis.dst_extent ? axis.period : axis.dst_extent;
  axis.step_gcd = static_cast<int32_t>(std::gcd(step < 0 ? -step : step, div));
  axis.tap_period = axis.div / axis.step_gcd;
  axis.step_inverse = static_cast<int32_t>(Inverse(axis.step / axis.step_gcd, axis.tap_period));
  axis.src_per_j = static_cast<int32_t>(int64_t{axis.period} * mul / div);
  axis.src_per_t = static_cast<int32_t>(int64_t{axis.tap_period} * step / div);
  int64_t dst_count = (dst_extent + axis.period - 1) / axis.period;
  int64_t tap_count = (taps + axis.tap_period - 1) / axis.tap_period;
  for (int less = 0; less < 2; ++less) {
    axis.dst_count_divmod[less] = FastDivmod(dst_count - less);
    axis.tap_count_divmod[less] = FastDivmod(tap_count - less);
  }
  axis.dst_divmod = FastDivmod(dst_extent);
  axis.tap_divmod = FastDivmod(taps);
  axis.div_divmod = FastDivmod(div);
  int32_t most = -1, best = 0;
  // A thousand phases suffice to find one with many taps; the order only affects speed.
  for (int32_t phase = 0; phase < axis.phases && phase < 1000; ++phase) {
    int32_t count = axis.Phase(phase).tap_count;
    if (count > most) most = count, best = phase;
  }
  axis.first_phase = best;
  return axis;
}

}  // namespace implicit_gemm_internal

// For a valid problem. Fails, with the reason, if it exceeds the kernels' 32-bit coordinates.
// Element offsets have 64 bits throughout, so tensors may exceed 2^31 elements.
inline Status MakeImplicitGemm(const ConvProblem& problem, ImplicitGemm* result) {
  JAXCONV_RETURN_IF_ERROR(problem.RequireInt32());
  ImplicitGemm gemm;
  const bool dgrad = problem.op == Op::kDgrad;
  for (int a = 0; a < 3; ++a) {
    gemm.axis[a] =
        dgrad ? implicit_gemm_internal::MakeAxis(problem.in[a], problem.out[a], problem.filter[a],
                                                 problem.lhs_dilation[a], -problem.dilation[a],
                                                 problem.pad_lo[a], problem.stride[a])
              : implicit_gemm_internal::MakeAxis(problem.out[a], problem.in[a], problem.filter[a],
                                                 problem.stride[a], problem.dilation[a],
                                                 -problem.pad_lo[a], problem.lhs_dilation[a]);
  }
  const int64_t cg = problem.c_per_group(), kg = problem.k_per_group();
  gemm.images = static_cast<int32_t>(problem.n);
  gemm.groups = static_cast<int32_t>(problem.groups);
  gemm.groups_divmod = FastDivmod(problem.groups);
  gemm.batches = problem.batch;
  const int64_t x_batch = problem.x_elements() / problem.batch;
  const int64_t w_batch = problem.w_elements() / problem.batch;
  const int64_t y_batch = problem.y_elements() / problem.batch;
  int64_t phases = 1, rows = problem.n;
  for (const GatherAxis& axis : gemm.axis) {
    phases *= axis.phases;
    rows *= axis.dst_count_divmod[0].divisor;
  }
  if (problem.op == Op::kWgrad) {
    gemm.gemm_m = static_cast<int32_t>(problem.taps() * cg);
    gemm.gemm_n = static_cast<int32_t>(kg);
    gemm.row_channels = static_cast<int32_t>(cg);
    gemm.reduce_pixels = static_cast<int32_t>(problem.n * problem.out_pixels());
    gemm.src_channels = static_cast<int32_t>(problem.c);
    gemm.out_channels = static_cast<int32_t>(problem.k);
    gemm.a_batch = x_batch, gemm.b_batch = y_batch, gemm.out_batch = w_batch;
    gemm.a_group = static_cast<int32_t>(cg);
    gemm.b_group = gemm.out_group = static_cast<int32_t>(kg);
    gemm.b_reduce = problem.k;
    gemm.b_column = 1;
  } else {
    gemm.phases = static_cast<int32_t>(phases);
    gemm.gemm_m = static_cast<int32_t>(rows);
    gemm.gemm_n = static_cast<int32_t>(dgrad ? cg : kg);
    gemm.reduce_channels = static_cast<int32_t>(dgrad ? kg : cg);
    gemm.src_channels = static_cast<int32_t>(dgrad ? problem.k : problem.c);
    gemm.out_channels = static_cast<int32_t>(dgrad ? problem.c : problem.k);
    gemm.a_batch = dgrad ? y_batch : x_batch;
    gemm.b_batch = w_batch;
    gemm.out_batch = dgrad ? x_batch : y_batch;
    gemm.a_group = gemm.reduce_channels;
    // Strides along K and along C.
    const bool krsc = problem.filter_layout == FilterLayout::kKrsc;
    const int64_t to_k = krsc ? problem.taps() * cg : 1, to_c = krsc ? 1 : problem.k;
    gemm.b_group = static_cast<int32_t>(kg * to_k);
    gemm.out_group = gemm.gemm_n;
    gemm.b_tap = cg * to_c;
    gemm.b_reduce = dgrad ? to_k : to_c;
    gemm.b_column = dgrad ? to_c : to_k;
  }
  gemm.reduce_channels_divmod = FastDivmod(gemm.reduce_channels);
  gemm.row_channels_divmod = FastDivmod(gemm.row_channels);
  *result = gemm;
  return {};
}

}  // namespace jaxconv

#endif  // JAXCONV_CORE_IMPLICIT_GEMM_H_
