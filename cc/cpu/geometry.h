// The geometry of a convolution as the CPU kernels compute it. A convolution whose input is dilated
// becomes one whose input is not.
//
// With stride 1 and the taps counted backwards, the relation of ConvProblem
//
//     i * lhs_dilation = p + r * dilation - pad_lo
//
// reads p = i * lhs_dilation + r' * dilation - ((R - 1) * dilation - pad_lo): a strided convolution
// from y to x. The forward operation of the one is the data gradient of the other. The weight
// gradients are the same, with operands exchanged and taps reversed. The strided one is called the
// transposed convolution.
#ifndef JAXCONV_CPU_GEOMETRY_H_
#define JAXCONV_CPU_GEOMETRY_H_

#include <cstdint>
#include <string>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct Geometry {
  ConvProblem p;  // what is computed: the caller's convolution, or its transposed one
  bool transposed = false;
  int axis = 1;  // the outermost spatial axis; positions along it are called rows
};

// Fails where no CPU kernel computes this (valid) problem's geometry.
Status MakeGeometry(const ConvProblem& problem, Geometry* geometry);

// " on spatial axis 1", for messages; `axis` is an index into a Spatial.
std::string OnAxis(const ConvProblem& p, int axis);

// Quotients rounded up and down, for positive b.
inline int64_t CeilDiv(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
inline int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_GEOMETRY_H_
