// Shape checks of the arrays of pooling and its gradient.
#ifndef JAXCONV_CUDA_POOLING_POOLED_H_
#define JAXCONV_CUDA_POOLING_POOLED_H_

#include <cstddef>

#include "core/conv_problem.h"
#include "cuda/pooling/windows.h"

namespace jaxconv {

struct Pooled {
  PoolWindows windows;
  ArrayType whole, of_windows, places, vector;

  // Sets the types from an array (batch, one to three spatial axes, channels), an array of its
  // windows with as many axes, and the attributes of every spatial axis.
  template <class Axes>
  void Set(DType dtype, const Extents& x, const Extents& y, const Axes& sizes, const Axes& strides,
           const Axes& padding) {
    const size_t axes = x.rank - 2;
    windows.batch = x.values[0];
    windows.channels = x.values[axes + 1];
    whole = of_windows = {dtype, x};
    for (size_t i = 0; i < axes; ++i) {
      windows.SetAxis(i, axes, x.values[i + 1], sizes[i], y.values[i + 1], strides[i], padding[i]);
      of_windows.shape.values[i + 1] = y.values[i + 1];
    }
    places = {DType::kU8, of_windows.shape};
    vector = {DType::kF32, Extents::Of({windows.channels})};
  }
};

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_POOLING_POOLED_H_
