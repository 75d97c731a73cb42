#include "cuda/select/kernel_table.h"

#include "cuda/kernels/igemm_simt.h"

namespace jaxconv {

const std::vector<KernelRow>& KernelTable() {
  static const std::vector<KernelRow> table = IgemmSimtRows();
  return table;
}

const KernelRow* FindKernel(std::string_view name) {
  for (const KernelRow& row : KernelTable()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace jaxconv
