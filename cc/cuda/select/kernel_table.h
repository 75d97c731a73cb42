// The one table of all CUDA kernels. It is defined beside the kernels (kernels/kernel_table.cc), so
// that selection depends on rows only and a test may link it with launches of its own.
#ifndef JAXCONV_CUDA_SELECT_KERNEL_TABLE_H_
#define JAXCONV_CUDA_SELECT_KERNEL_TABLE_H_

#include <string_view>
#include <vector>

#include "cuda/select/kernel_row.h"

namespace jaxconv {

const std::vector<KernelRow>& KernelTable();

// Null where no row has that name.
const KernelRow* FindKernel(std::string_view name);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_SELECT_KERNEL_TABLE_H_
