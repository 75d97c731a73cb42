// Max pooling and its gradient against the definitions in their headers.
#ifndef JAXCONV_TESTS_CC_MAX_POOL_CASES_CUH_
#define JAXCONV_TESTS_CC_MAX_POOL_CASES_CUH_

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "pass_test.cuh"

namespace jaxconv {

// Batch and channels; for each axis the input elements, the window's size and stride, the padding
// before the first element, and the number of windows.
struct PooledShape {
  int64_t batch, channels;
  int64_t in[kPoolAxes], size[kPoolAxes], stride[kPoolAxes], low[kPoolAxes], out[kPoolAxes];

  PoolWindows windows() const {
    PoolWindows w;
    w.batch = batch, w.channels = channels;
    for (int i = 0; i < kPoolAxes; ++i) {
      w.in[i] = in[i], w.size[i] = size[i], w.stride[i] = stride[i], w.low[i] = low[i];
      w.out[i] = out[i];
    }
    return w;
  }
  std::string name() const {
    std::string text = std::to_string(batch) + "x" + std::to_string(channels);
    for (const auto* each : {in, size, stride, low, out}) {
      text += "_" + std::to_string(each[0]) + "x" + std::to_string(each[1]) + "x" +
              std::to_string(each[2]);
    }
    return text;
  }
};

// The shapes cover: fewer threads than a CTA has, and several CTAs; windows in all parts of the
// padding, also in padding alone; windows that overlap by one kept row, by two, by more, and not at
// all; outputs in one batch of columns and in several; one axis and three; a single window;
// elements in no window.
constexpr PooledShape kPooledShapes[] = {
    {2, 24, {13, 1, 10}, {3, 1, 3}, {2, 1, 2}, {1, 0, 1}, {7, 1, 5}},
    {3, 64, {9, 1, 7}, {3, 1, 3}, {1, 1, 1}, {1, 0, 1}, {9, 1, 7}},
    {2, 16, {12, 1, 9}, {2, 1, 2}, {2, 1, 2}, {0, 0, 0}, {6, 1, 4}},
    {1, 8, {11, 1, 9}, {5, 1, 4}, {2, 1, 3}, {2, 0, 1}, {6, 1, 3}},
    {2, 8, {7, 1, 7}, {7, 1, 7}, {7, 1, 7}, {0, 0, 0}, {1, 1, 1}},
    {1, 40, {23, 1, 1}, {5, 1, 1}, {4, 1, 1}, {3, 0, 0}, {6, 1, 1}},
    {2, 8, {6, 7, 5}, {3, 2, 3}, {2, 2, 1}, {1, 0, 1}, {3, 3, 5}},
    {1, 16, {5, 6, 4}, {2, 3, 2}, {2, 1, 2}, {0, 1, 0}, {2, 6, 2}},
    {1, 8, {5, 1, 6}, {2, 1, 2}, {2, 1, 2}, {3, 0, 2}, {6, 1, 6}},
    {1, 8, {9, 1, 9}, {7, 1, 7}, {1, 1, 1}, {3, 0, 3}, {9, 1, 9}},
    {1, 8, {11, 1, 11}, {2, 1, 2}, {4, 1, 3}, {0, 0, 0}, {3, 1, 4}},
};

// Calls `visit` for each element of each window in order: with the number of the window's output,
// the element's offset in the operand (-1 in the padding), and its place in the window.
template <class Visit>
void VisitWindows(const PoolWindows& w, Visit visit) {
  int64_t output = 0;
  for (int64_t n = 0; n < w.batch; ++n) {
    for (int64_t p = 0; p < w.out[0]; ++p) {
      for (int64_t o = 0; o < w.out[1]; ++o) {
        for (int64_t q = 0; q < w.out[2]; ++q) {
          for (int64_t c = 0; c < w.channels; ++c, ++output) {
            for (int64_t r = 0; r < w.size[0]; ++r) {
              for (int64_t t = 0; t < w.size[1]; ++t) {
                for (int64_t s = 0; s < w.size[2]; ++s) {
                  const int64_t h = p * w.stride[0] - w.low[0] + r,
                                d = o * w.stride[1] - w.low[1] + t,
                                v = q * w.stride[2] - w.low[2] + s;
                  const bool inside =
                      0 <= h && h < w.in[0] && 0 <= d && d < w.in[1] && 0 <= v && v < w.in[2];
                  const int64_t at =
                      (((n * w.in[0] + h) * w.in[1] + d) * w.in[2] + v) * w.channels + c;
                  visit(output, inside ? at : -1,
                        r * w.weight(0) + t * w.weight(1) + s * w.weight(2));
                }
              }
            }
          }
        }
      }
    }
  }
}

inline int64_t Windows(const PoolWindows& w) {
  return w.batch * w.out[0] * w.out[1] * w.out[2] * w.channels;
}
inline int64_t Elements(const PoolWindows& w) {
  return w.batch * w.in[0] * w.in[1] * w.in[2] * w.channels;
}

struct MaxPoolCase {
  DType dtype;
  PooledShape shape;
  bool affine, places, operands, nan, sm90;
  int64_t walk;
};

inline void RunMaxPool(const MaxPoolCase& c, PassTest& test) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const PoolWindows w = c.shape.windows();
  std::vector<double> x = test.Drawn(Elements(w), -2, 2);
  for (size_t i = 0; c.nan && i < x.size(); ++i) {
    if (i % 7 == 3) x[i] = std::nan("");
    if (i % 5 == 1) x[i] = -kInfinity;
  }
  const std::vector<double> mean = test.Drawn(w.channels, -1, 1),
                            scale = test.Drawn(w.channels, -2, 2),
                            offset = test.Drawn(w.channels, -1, 1);
  const DeviceArray operand(c.dtype, x), means(DType::kF32, mean), scales(DType::kF32, scale),
      offsets(DType::kF32, offset), maxima(c.dtype, Windows(w)), places(DType::kU8, Windows(w)),
      operands(c.dtype, Windows(w));
  MaxPool pool = {};
  pool.windows = w;
  pool.x = operand.data();
  if (c.affine) {
    pool.mean = means.as<float>(), pool.scale = scales.as<float>();
    pool.offset = offsets.as<float>();
  }
  pool.maxima = maxima.data();
  if (c.places) pool.places = places.as<uint8_t>();
  if (c.operands) pool.operands = operands.data();
  pool.walk = c.walk;
  test.Launched(LaunchMaxPool(c.dtype, pool, c.sm90, nullptr));

  struct Defined {
    std::vector<double> maxima, places, operands;
  };
  auto define = [&] {
    const size_t count = static_cast<size_t>(Windows(w));
    Defined defined = {std::vector<double>(count, -kInfinity), std::vector<double>(count),
                       std::vector<double>(count, -kInfinity)};
    std::vector<double> taken(count, -kInfinity);
    VisitWindows(w, [&](int64_t at, int64_t from, int64_t number) {
      const int64_t k = at % w.channels;
      double z = from < 0 ? -kInfinity : x[from];
      if (c.affine && from >= 0) {
        z = (z - mean[k]) * scale[k] + offset[k];
        z = z < 0 ? 0 : z;  // keeps NaN
      }
      double& maximum = defined.maxima[at];
      if (std::isnan(z) || maximum < z) maximum = z;
      if (taken[at] >= z) return;
      taken[at] = z;
      defined.places[at] = static_cast<double>(number);
      defined.operands[at] = from < 0 ? -kInfinity : x[from];
    });
    for (size_t i = 0; c.affine && i < count; ++i) {
      if (defined.maxima[i] > 0) continue;
      defined.places[i] = kNoPlace, defined.operands[i] = 0;
    }
    return defined;
  };
  test.Result("maxima", maxima, [&] { return define().maxima; });
  if (c.places) test.Result("places", places, [&] { return define().places; });
  if (c.operands) test.Result("operands", operands, [&] { return define().operands; });
}

inline void MaxPoolCases(PassTest& test) {
  struct Form {
    bool affine, places, operands;
  };
  constexpr Form kForms[] = {
      {false, false, false}, {false, true, true}, {true, false, false},
      {true, true, true},    {true, true, false},
  };
  int number = 0;
  for (const PooledShape& shape : kPooledShapes) {
    for (const Form& form : kForms) {
      for (const int64_t walk : {1, 2, 5}) {
        const DType dtype = TypeOf(number / 3 + number);
        const bool nan = ++number % 4 == 0;
        test.Begin(std::string(Name(dtype)) + "_" + shape.name() + (form.affine ? "_affine" : "") +
                   (form.places ? "_places" : "") + (form.operands ? "_operands" : "") + "_walk" +
                   std::to_string(walk) + (nan ? "_nan" : ""));
        RunMaxPool(
            {dtype, shape, form.affine, form.places, form.operands, nan, number % 3 == 0, walk},
            test);
      }
    }
  }
}

struct MaxPoolGradientCase {
  DType dtype;
  PooledShape shape;
  bool two, affine;
};

inline void RunMaxPoolGradient(const MaxPoolGradientCase& c, PassTest& test) {
  const PoolWindows w = c.shape.windows();
  const int64_t count = Windows(w);
  const std::vector<double> dy = test.Drawn(count), dy2 = test.Drawn(count);
  // Draws the places of the maxima, ties and masked windows included, independently of any input.
  const int64_t in_window = w.size[0] * w.size[1] * w.size[2];
  std::vector<double> places(count);
  VisitWindows(w, [&](int64_t at, int64_t from, int64_t number) {
    const int64_t drawn = (at * 7 + at / 5) % (in_window + 1);
    if (drawn == in_window) {
      places[at] = kNoPlace;
    } else if (at % 11 != 0 ? from >= 0 && number * 31 % 17 >= drawn % 17 : number == 0) {
      places[at] = static_cast<double>(number);
    }
  });
  const DeviceArray gradient(c.dtype, dy), gradient2(c.dtype, dy2), place(DType::kU8, places),
      dx(c.dtype, Elements(w));
  const std::vector<double> y = test.Drawn(Elements(w)), scale = test.Drawn(w.channels, -2, 2),
                            y_scale = test.Drawn(w.channels, -2, 2),
                            offset = test.Drawn(w.channels, -2, 2);
  const DeviceArray of_y(c.dtype, y), scales(DType::kF32, scale), y_scales(DType::kF32, y_scale),
      offsets(DType::kF32, offset);
  MaxPoolGradient p = {};
  p.windows = w;
  p.dy = gradient.data();
  if (c.two) p.dy2 = gradient2.data();
  p.places = place.as<uint8_t>();
  if (c.affine) {
    p.y = of_y.data(), p.scale = scales.as<float>();
    p.y_scale = y_scales.as<float>(), p.offset = offsets.as<float>();
  }
  p.dx = dx.data();
  test.Launched(LaunchMaxPoolGradient(c.dtype, p, nullptr));
  test.Result("dx", dx, [&] {
    std::vector<double> expected(Elements(w));
    VisitWindows(w, [&](int64_t at, int64_t from, int64_t number) {
      if (from < 0 || places[at] != static_cast<double>(number)) return;
      expected[from] += dy[at] + (c.two ? dy2[at] : 0);
    });
    for (size_t i = 0; c.affine && i < expected.size(); ++i) {
      const size_t k = i % scale.size();
      expected[i] = expected[i] * scale[k] + y[i] * y_scale[k] + offset[k];
    }
    return expected;
  });
}

inline void MaxPoolGradientCases(PassTest& test) {
  for (const PooledShape& shape : kPooledShapes) {
    for (const bool two : {false, true}) {
      for (const bool affine : {false, true}) {
        for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
          test.Begin(std::string(Name(dtype)) + "_" + shape.name() + (two ? "_two" : "") +
                     (affine ? "_affine" : ""));
          RunMaxPoolGradient({dtype, shape, two, affine}, test);
        }
      }
    }
  }
}

}  // namespace jaxconv

#endif  // JAXCONV_TESTS_CC_MAX_POOL_CASES_CUH_
