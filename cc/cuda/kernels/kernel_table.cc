#include "cuda/select/kernel_table.h"

#include <iterator>

#include "cuda/kernels/igemm_simt.h"
#include "cuda/kernels/igemm_wmma.h"

namespace jaxconv {

const std::vector<KernelRow>& KernelTable() {
  static const std::vector<KernelRow> table = [] {
    std::vector<KernelRow> rows = IgemmWmmaRows();
    std::vector<KernelRow> simt = IgemmSimtRows();
    std::move(simt.begin(), simt.end(), std::back_inserter(rows));
    return rows;
  }();
  return table;
}

const KernelRow* FindKernel(std::string_view name) {
  for (const KernelRow& row : KernelTable()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace jaxconv
