// Random problems with tiny tensors whose strides, dilations and paddings may be huge, so that
// arithmetic on coordinates overflows.
#ifndef JAXCONV_TESTS_CC_HUGE_WINDOWS_H_
#define JAXCONV_TESTS_CC_HUGE_WINDOWS_H_

#include <algorithm>
#include <cstdint>
#include <random>

#include "core/conv_problem.h"

namespace jaxconv {

// Sets the window and the extents of one axis. Values are up to 2^max_bits, most of them near a
// power of two; paddings are often near the stride or the dilation, or opposite to each other.
inline void DrawHugeWindow(int max_bits, int axis, std::mt19937_64* random, ConvProblem* problem) {
  auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*random);
  };
  int64_t power = int64_t{1} << draw(1, max_bits);
  int64_t huge = draw(0, 2) == 0 ? draw(power / 2, power) : power + draw(-1, 3);
  int64_t near = std::max<int64_t>(1, huge + draw(-4, 4));
  int64_t& in = problem->in[axis];
  int64_t& filter = problem->filter[axis];
  int64_t& stride = problem->stride[axis];
  int64_t& lhs_dilation = problem->lhs_dilation[axis];
  int64_t& dilation = problem->dilation[axis];
  int64_t& pad_lo = problem->pad_lo[axis];
  int64_t& pad_hi = problem->pad_hi[axis];
  in = draw(1, 6);
  filter = draw(1, 4);
  stride = draw(1, 3);
  lhs_dilation = 1;
  dilation = draw(0, 2) == 0 ? draw(1, 3) : 1;
  pad_lo = draw(0, 3);
  pad_hi = draw(0, 3);
  switch (draw(0, 9)) {
    case 0:
      stride = huge, pad_lo = near;
      break;
    case 1:
      stride = huge, pad_hi = near;
      break;
    case 2:
      stride = huge;
      break;
    case 3:
      dilation = huge;
      pad_lo = near * draw(0, filter - 1), pad_hi = near * draw(0, filter - 1);
      break;
    case 4:
      lhs_dilation = huge, dilation = draw(0, 1) == 0 ? near : dilation;
      pad_lo = -draw(0, huge), pad_hi = -draw(0, huge);
      break;
    case 5:
      lhs_dilation = huge, stride = draw(0, 1) == 0 ? huge : draw(1, huge);
      break;
    case 6:
      lhs_dilation = dilation = huge, stride = 1;
      pad_lo = -draw(0, 3), pad_hi = -huge * draw(0, 2);
      break;
    case 7:
      pad_lo = huge, pad_hi = draw(-2, 4) - huge, stride = draw(1, huge);
      break;
    case 8:
      pad_hi = huge, pad_lo = draw(-2, 4) - huge, stride = draw(1, huge);
      break;
    default:  // an ordinary axis
      break;
  }
  problem->out[axis] = OutputExtent(in, filter, stride, lhs_dilation, dilation, pad_lo, pad_hi);
}

// Draws windows for all axes until no output extent is larger than 40 and none is 0.
inline void DrawHugeWindows(int max_bits, std::mt19937_64* random, ConvProblem* problem) {
  bool small = false;
  while (!small) {
    small = true;
    for (int a = 3 - problem->rank; a < 3; ++a) {
      DrawHugeWindow(max_bits, a, random, problem);
      small = small && problem->out[a] >= 1 && problem->out[a] <= 40;
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_HUGE_WINDOWS_H_
