// The one-dimensional Winograd transforms on registers, for all kernels of the family and, in
// float, for the host.
//
//     input    v = B^T d     m + 2 -> m + 2
//     filter   u = G g           3 -> m + 2
//     output   y = A^T M     m + 2 -> m
//
// A two-dimensional transform applies one of them along the rows of a tile, then along its columns.
// Coefficients are immediate constants: 0 costs nothing, +1 and -1 cost an addition.
//
// The arithmetic of the input transform is not hidden behind its memory traffic, so two points p
// and q share theirs. Let h be the product of (x - l) over the other finite points l. The rows of p
// and q in B^T hold the coefficients of (x - q) h and (x - p) h, so both follow from h . d and from
// h . d shifted by one element. One transform takes 8 instructions for m = 2, 25 for m = 4 and 32
// for m = 6 (by rows of B^T: 8, 26, 44).
#ifndef JAXCONV_CUDA_COMMON_WINOGRAD_TRANSFORM_CUH_
#define JAXCONV_CUDA_COMMON_WINOGRAD_TRANSFORM_CUH_

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include <cmath>

#include "core/fast_divmod.h"
#include "core/winograd.h"

#ifdef __CUDACC__
#define JAXCONV_WINOGRAD_UNROLL _Pragma("unroll")
#else
#define JAXCONV_WINOGRAD_UNROLL
#endif

namespace jaxconv::winograd {

// coefficient * value + sum, with the type's rounding.
JAXCONV_HOST_DEVICE float ScaledSum(float coefficient, float value, float sum) {
  return fmaf(coefficient, value, sum);
}
JAXCONV_HOST_DEVICE float Scaled(float coefficient, float value) { return coefficient * value; }
#ifdef __CUDACC__
__device__ __forceinline__ __half2 ScaledSum(float coefficient, __half2 value, __half2 sum) {
  return __hfma2(__float2half2_rn(coefficient), value, sum);
}
__device__ __forceinline__ __half2 Scaled(float coefficient, __half2 value) {
  return __hmul2(__float2half2_rn(coefficient), value);
}
#endif

// The host compiler evaluates it: device code may not call constexpr host functions.
template <class Row, int k>
inline constexpr float kCoefficient = Row::At(k);

// The sum of Row::At(k) * value[k] over 0 <= k < kCount, in the order of k. Row::At is constexpr.
template <class Row, int kCount, int k, typename T>
JAXCONV_HOST_DEVICE T AddTerms(const T* value, T sum) {
  if constexpr (k == kCount) {
    return sum;
  } else {
    constexpr float c = kCoefficient<Row, k>;
    if constexpr (c == 1.0f) {
      sum = sum + value[k];
    } else if constexpr (c == -1.0f) {
      sum = sum - value[k];
    } else if constexpr (c != 0.0f) {
      sum = ScaledSum(c, value[k], sum);
    }
    return AddTerms<Row, kCount, k + 1>(value, sum);
  }
}
template <class Row, int kCount, int k = 0, typename T>
JAXCONV_HOST_DEVICE T Dot(const T* value) {
  constexpr float c = kCoefficient<Row, k>;
  if constexpr (c == 0.0f) {
    return Dot<Row, kCount, k + 1>(value);
  } else if constexpr (c == 1.0f) {
    return AddTerms<Row, kCount, k + 1>(value, value[k]);
  } else {
    return AddTerms<Row, kCount, k + 1>(value, Scaled(c, value[k]));
  }
}

// The index of the term with this rank, in ascending order of coefficient magnitude; -1 past the
// last.
template <class Row, int kCount>
constexpr int AscendingTerm(int rank) {
  auto magnitude = [](int k) { return Row::At(k) < 0 ? -Row::At(k) : Row::At(k); };
  for (int k = 0; k < kCount; ++k) {
    int smaller = 0;
    for (int l = 0; l < kCount; ++l) {
      const bool before = l < k ? magnitude(l) <= magnitude(k) : magnitude(l) < magnitude(k);
      if (Row::At(l) != 0 && before) ++smaller;
    }
    if (Row::At(k) != 0 && smaller == rank) return k;
  }
  return -1;
}
template <class Row, int kCount, int rank>
inline constexpr int kAscendingTerm = AscendingTerm<Row, kCount>(rank);

// Dot in ascending order of the coefficients' magnitudes: in float16 the sums before the largest
// term are small, and so are their rounding errors.
template <class Row, int kCount, int rank = 0, typename T>
JAXCONV_HOST_DEVICE T DotAscending(const T* value, T sum = T()) {
  constexpr int k = kAscendingTerm<Row, kCount, rank>;
  if constexpr (k < 0) {
    return sum;
  } else if constexpr (rank == 0) {
    return DotAscending<Row, kCount, 1>(value, Scaled(kCoefficient<Row, k>, value[k]));
  } else {
    return DotAscending<Row, kCount, rank + 1>(value,
                                               ScaledSum(kCoefficient<Row, k>, value[k], sum));
  }
}

// The rows of the matrices.
template <int m, int i>
struct InputRow {
  static constexpr float At(int k) { return kTransform<m>.bt[i][k]; }
};
template <int m, int i>
struct FilterRow {
  static constexpr float At(int k) { return kTransform<m>.g[i][k]; }
};
template <int m, int i>
struct OutputRow {
  static constexpr float At(int k) { return kTransform<m>.at[i][k]; }
};

// The common factor h of the finite points i and i + 1 of F(m, 3), scaled by the smaller of the two
// powers of two that balance their rows of B^T.
template <int m, int i>
struct PointPair {
  static constexpr int kTerms = m;  // alpha - 1 finite points less two, plus the constant term
  // Rows of B^T are balanced products of m factors x - l: the last coefficient is the scale.
  static constexpr Rational Scale(int row) { return Matrices<m>().bt[row][m]; }
  static constexpr Rational Common() { return Scale(i) < Scale(i + 1) ? Scale(i) : Scale(i + 1); }
  static constexpr float At(int k) {
    Rational h[kTerms] = {Common()};
    int degree = 0;
    for (int l = 0; l <= m; ++l) {
      if (l == i || l == i + 1) continue;
      for (int c = ++degree; c >= 0; --c) {
        h[c] = (c > 0 ? h[c - 1] : Rational()) - Points<m>::kFinite[l] * h[c];
      }
    }
    return h[k].ToFloat();
  }
  // The row of point `own` from (h shifted by one, h): the factor x - other.
  template <int own, int other>
  struct Row {
    static constexpr float At(int k) {
      const Rational scale = Scale(own) / Common();
      return (k == 0 ? scale : -(scale * Points<m>::kFinite[other])).ToFloat();
    }
  };
};

template <int m, int i = 1, typename T>
JAXCONV_HOST_DEVICE void TransformPairs(const T (&d)[m + 2], T (&v)[m + 2]) {
  if constexpr (i < m) {
    using Pair = PointPair<m, i>;
    const T parts[2] = {Dot<Pair, m>(d + 1), Dot<Pair, m>(d)};
    v[i] = Dot<typename Pair::template Row<i, i + 1>, 2>(parts);
    v[i + 1] = Dot<typename Pair::template Row<i + 1, i>, 2>(parts);
    TransformPairs<m, i + 2>(d, v);
  }
}

// v = B^T d. T: float, or on the device __half2, which rounds every operation to float16.
template <int m, typename T>
JAXCONV_HOST_DEVICE void TransformInput(const T (&d)[m + 2], T (&v)[m + 2]) {
  v[0] = Dot<InputRow<m, 0>, m + 2>(d);
  TransformPairs<m>(d, v);
  v[m + 1] = Dot<InputRow<m, m + 1>, m + 2>(d);
}

// The first or the second half of the m + 2 points of v = B^T d. Each point is computed by its row,
// except the points 1/2 and -2 of F(4, 3), which are a pair: 13 and 11 instructions for F(4, 3).
// The float16 error of V is 1.2 times that of a single rounding (1.4 times for inputs of both
// signs); with pairs throughout it is 1.4 (1.7) times.
template <int m, int kHalf, int i = 0, typename T>
JAXCONV_HOST_DEVICE void TransformInputHalf(const T (&d)[m + 2], T (&v)[(m + 2) / 2]) {
  constexpr int kOwn = (m + 2) / 2;
  if constexpr (m == 4 && kHalf == 1 && i == 0) {
    T all[m + 2];
    TransformPairs<m, 3>(d, all);
    v[0] = all[3];
    v[1] = all[4];
    TransformInputHalf<m, kHalf, 2>(d, v);
  } else if constexpr (i < kOwn) {
    v[i] = DotAscending<InputRow<m, kHalf * kOwn + i>, m + 2>(d);
    TransformInputHalf<m, kHalf, i + 1>(d, v);
  }
}

// u = G g.
template <int m, int i = 0>
JAXCONV_HOST_DEVICE void TransformFilter(const float (&g)[kTaps], float (&u)[m + 2]) {
  if constexpr (i < m + 2) {
    u[i] = Dot<FilterRow<m, i>, kTaps>(g);
    TransformFilter<m, i + 1>(g, u);
  }
}

// y = A^T M.
template <int m, int i = 0>
JAXCONV_HOST_DEVICE void TransformOutput(const float (&products)[m + 2], float (&y)[m]) {
  if constexpr (i < m) {
    y[i] = Dot<OutputRow<m, i>, m + 2>(products);
    TransformOutput<m, i + 1>(products, y);
  }
}

// V = B^T d B in place.
template <int m, typename T>
JAXCONV_HOST_DEVICE void TransformInputTile(T (&tile)[m + 2][m + 2]) {
  JAXCONV_WINOGRAD_UNROLL
  for (int j = 0; j < m + 2; ++j) {
    T column[m + 2], transformed[m + 2];
    JAXCONV_WINOGRAD_UNROLL
    for (int i = 0; i < m + 2; ++i) column[i] = tile[i][j];
    TransformInput<m>(column, transformed);
    JAXCONV_WINOGRAD_UNROLL
    for (int i = 0; i < m + 2; ++i) tile[i][j] = transformed[i];
  }
  JAXCONV_WINOGRAD_UNROLL
  for (int i = 0; i < m + 2; ++i) {
    T transformed[m + 2];
    TransformInput<m>(tile[i], transformed);
    JAXCONV_WINOGRAD_UNROLL
    for (int j = 0; j < m + 2; ++j) tile[i][j] = transformed[j];
  }
}

// U = G g G^T: first along r, then along s.
template <int m>
JAXCONV_HOST_DEVICE void TransformFilterTile(const float (&g)[kTaps][kTaps],
                                             float (&u)[m + 2][m + 2]) {
  float rows[m + 2][kTaps];
  JAXCONV_WINOGRAD_UNROLL
  for (int s = 0; s < kTaps; ++s) {
    const float column[kTaps] = {g[0][s], g[1][s], g[2][s]};
    float transformed[m + 2];
    TransformFilter<m>(column, transformed);
    JAXCONV_WINOGRAD_UNROLL
    for (int i = 0; i < m + 2; ++i) rows[i][s] = transformed[i];
  }
  JAXCONV_WINOGRAD_UNROLL
  for (int i = 0; i < m + 2; ++i) TransformFilter<m>(rows[i], u[i]);
}

// Y = A^T M A.
template <int m>
JAXCONV_HOST_DEVICE void TransformOutputTile(const float (&products)[m + 2][m + 2],
                                             float (&y)[m][m]) {
  float rows[m][m + 2];
  JAXCONV_WINOGRAD_UNROLL
  for (int j = 0; j < m + 2; ++j) {
    float column[m + 2], transformed[m];
    JAXCONV_WINOGRAD_UNROLL
    for (int i = 0; i < m + 2; ++i) column[i] = products[i][j];
    TransformOutput<m>(column, transformed);
    JAXCONV_WINOGRAD_UNROLL
    for (int i = 0; i < m; ++i) rows[i][j] = transformed[i];
  }
  JAXCONV_WINOGRAD_UNROLL
  for (int i = 0; i < m; ++i) TransformOutput<m>(rows[i], y[i]);
}

}  // namespace jaxconv::winograd

#undef JAXCONV_WINOGRAD_UNROLL

#endif  // JAXCONV_CUDA_COMMON_WINOGRAD_TRANSFORM_CUH_
