// Lines of kernels.def, and functions shared by their plans. Plain C++.
#ifndef JAXCONV_CUDA_BLOCK_DIAGONAL_INSTANCE_H_
#define JAXCONV_CUDA_BLOCK_DIAGONAL_INSTANCE_H_

#include <cstdint>

#include "core/conv_problem.h"
#include "core/status.h"
#include "cuda/block_diagonal/params.h"
#include "cuda/common/kernel.h"

namespace jaxconv::block_diagonal {

// A line of kernels.def.
struct Instance {
  int64_t block;
  int64_t ctas_per_sm;
  bool three_tf32;                // float32 as three TF32 products
  int64_t element_bytes = 0;      // of the operands
  int64_t blocks_m = 0;           // of gather.cuh
  int64_t rows = 0, columns = 0;  // taps of a CTA of wgrad.cuh
  // For runs_sm90.cuh, phases_sm90.cuh, rows_sm90.cuh (1 row) and wgrad_runs_sm90.cuh.
  int64_t run_rows = 0, stride = 1;
  bool phases = false;
  int64_t stages = 0;  // of rows_sm90.cuh, else 0
  constexpr Instance OfElements(int64_t bytes) const {
    Instance line = *this;
    line.element_bytes = bytes;
    return line;
  }
  constexpr bool runs() const { return run_rows > 0; }
  constexpr int min_cc() const { return runs() ? 90 : 80; }
  constexpr int max_cc() const { return runs() ? 90 : 1000; }
  bool strided() const { return stride == 2 && !phases; }
  bool wgrad() const { return rows > 0; }
  // wgrad in parts: a CTA has taps of one filter row.
  bool parts() const { return rows == 1; }
  int64_t channels() const { return TileChannels(static_cast<int>(element_bytes)); }
  // Channels in the reduction of a product.
  int64_t step_channels() const { return 32 / element_bytes; }
  int64_t strips() const { return kWarps / (channels() / (wgrad() ? 16 : block)); }
};

// Refuses problems that no kernel of the family accepts.
Status Check(const KernelDesc& kernel, const Instance& instance, const ConvProblem& problem);

// Bytes of x and y, written ones with their excess.
double DramBytes(const Instance& instance, const ConvProblem& problem, const Gpu& gpu);

// Sets the parameters that depend only on the problem.
void DescribeOperands(const ConvProblem& problem, Params* params);

}  // namespace jaxconv::block_diagonal

#endif  // JAXCONV_CUDA_BLOCK_DIAGONAL_INSTANCE_H_
