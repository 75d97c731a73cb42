#include "cuda/select/kernel_table.h"

#include <iterator>

#include "cuda/kernels/igemm_simt.h"
#include "cuda/kernels/igemm_wgmma.h"
#include "cuda/kernels/igemm_wmma.h"
#include "cuda/kernels/igemm_wmma_patch.h"
#include "cuda/kernels/padded_channels.h"

namespace jaxconv {

const std::vector<KernelRow>& KernelTable() {
  static const std::vector<KernelRow> table = [] {
    std::vector<KernelRow> rows = IgemmWgmmaRows();
    for (auto family : {IgemmWmmaRows, IgemmWmmaPatchRows, IgemmSimtRows}) {
      std::vector<KernelRow> more = family();
      std::move(more.begin(), more.end(), std::back_inserter(rows));
    }
    std::vector<KernelRow> padded = PaddedRows(rows);
    std::move(padded.begin(), padded.end(), std::back_inserter(rows));
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
