// The definition of a convolution and of its two gradients as seven loops, the reference of the
// tests.
#ifndef JAXCONV_TESTS_CC_NAIVE_CONV_H_
#define JAXCONV_TESTS_CC_NAIVE_CONV_H_

#include <array>
#include <cstdint>
#include <vector>

#include "core/conv_problem.h"

namespace jaxconv {

// `lhs` and `rhs` are the operation's operands as dense arrays, as is the result. The filter has
// the problem's layout. Index relations are those of core/conv_problem.h; sums are in double.
inline std::vector<double> NaiveConv(const ConvProblem& p, const std::vector<double>& lhs,
                                     const std::vector<double>& rhs) {
  bool fprop = p.op == Op::kFprop, dgrad = p.op == Op::kDgrad;
  int64_t results = fprop ? p.y_elements() : dgrad ? p.x_elements() : p.w_elements();
  std::vector<double> result(results, 0.0);
  int64_t c_per_group = p.c_per_group(), k_per_group = p.k_per_group();
  auto pixel = [](const Spatial& extent, const Spatial& at) {
    return (at[0] * extent[1] + at[1]) * extent[2] + at[2];
  };
  auto each = [](const Spatial& extent, auto body) {
    Spatial at;
    for (at[0] = 0; at[0] < extent[0]; ++at[0]) {
      for (at[1] = 0; at[1] < extent[1]; ++at[1]) {
        for (at[2] = 0; at[2] < extent[2]; ++at[2]) body(at);
      }
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t n = 0; n < p.n; ++n) {
      each(p.out, [&](const Spatial& out) {
        each(p.filter, [&](const Spatial& tap) {
          Spatial in;
          for (int a = 0; a < 3; ++a) {
            int64_t at = out[a] * p.stride[a] + tap[a] * p.dilation[a] - p.pad_lo[a];
            if (at < 0 || at % p.lhs_dilation[a] != 0) return;
            in[a] = at / p.lhs_dilation[a];
            if (in[a] >= p.in[a]) return;
          }
          int64_t image = b * p.n + n;
          int64_t x0 = (image * p.in_pixels() + pixel(p.in, in)) * p.c;
          int64_t y0 = (image * p.out_pixels() + pixel(p.out, out)) * p.k;
          bool krsc = p.filter_layout == FilterLayout::kKrsc;
          int64_t to_k = krsc ? p.taps() * c_per_group : 1, to_c = krsc ? 1 : p.k;
          int64_t w0 = b * p.taps() * c_per_group * p.k + pixel(p.filter, tap) * c_per_group * to_c;
          for (int64_t k = 0; k < p.k; ++k) {
            const int64_t x = x0 + k / k_per_group * c_per_group, y = y0 + k, w = w0 + k * to_k;
            if (fprop) {
              double sum = result[y];
              for (int64_t c = 0; c < c_per_group; ++c) sum += lhs[x + c] * rhs[w + c * to_c];
              result[y] = sum;
            } else if (dgrad) {
              const double dy = lhs[y];
              for (int64_t c = 0; c < c_per_group; ++c) result[x + c] += dy * rhs[w + c * to_c];
            } else {
              const double dy = rhs[y];
              for (int64_t c = 0; c < c_per_group; ++c) result[w + c * to_c] += lhs[x + c] * dy;
            }
          }
        });
      });
    }
  }
  return result;
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_NAIVE_CONV_H_
