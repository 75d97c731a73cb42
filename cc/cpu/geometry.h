// The geometry of a convolution in the CPU kernels. A convolution with a dilated input becomes one
// without.
//
// With stride 1 and reversed taps r', the relation of ConvProblem
//
//     i * lhs_dilation = p + r * dilation - pad_lo
//
// becomes p = i * lhs_dilation + r' * dilation - ((R - 1) * dilation - pad_lo), a strided
// convolution from y to x, called the transposed convolution. The forward operation of one is the
// data gradient of the other. The weight gradients are equal, with operands swapped and taps
// reversed.
#ifndef JAXCONV_CPU_GEOMETRY_H_
#define JAXCONV_CPU_GEOMETRY_H_

#include <cstdint>
#include <string>

#include "core/conv_problem.h"
#include "core/status.h"

namespace jaxconv::cpu {

struct Geometry {
  ConvProblem p;  // the computed convolution: the caller's, or its transposed one
  bool transposed = false;
  int axis = 1;  // the outermost spatial axis; positions along it are called rows
};

// Fails if no CPU kernel computes the geometry of this valid problem.
Status MakeGeometry(const ConvProblem& problem, Geometry* geometry);

// " on spatial axis 1", for messages; `axis` is an index into a Spatial.
std::string OnAxis(const ConvProblem& p, int axis);

// Quotients rounded up and down, for positive b.
inline int64_t CeilDiv(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
inline int64_t FloorDiv(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

}  // namespace jaxconv::cpu

#endif  // JAXCONV_CPU_GEOMETRY_H_
