// The fused epilogue of the tensor-core kernels on a GPU: scale, bias, residual and every
// activation, in bfloat16, float16 and float32, on whole and ragged rows, with NaN and Inf.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/kernels/igemm_wmma.cuh"

namespace jaxconv {
namespace {

int failures = 0;

template <typename T>
double RoundTrip(double value) {
  if constexpr (std::is_same_v<T, __half>) return __half2float(__float2half_rn(float(value)));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(__float2bfloat16_rn(float(value)));
  }
  return float(value);
}

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  explicit DeviceArray(const std::vector<double>& values) {
    std::vector<T> converted(values.size());
    for (size_t i = 0; i < values.size(); ++i) converted[i] = T(float(values[i]));
    cudaMalloc(&data, values.size() * sizeof(T));
    cudaMemcpy(data, converted.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~DeviceArray() { cudaFree(data); }
  std::vector<double> Read(size_t size) const {
    std::vector<T> raw(size);
    cudaMemcpy(raw.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
    return {raw.begin(), raw.end()};
  }
};

double Reference(Activation activation, double slope, double v) {
  switch (activation) {
    case Activation::kNone:
      return v;
    case Activation::kRelu:
      return v < 0 ? 0 : v;
    case Activation::kRelu6:
      return v < 0 ? 0 : v > 6 ? 6 : v;
    case Activation::kLeakyRelu:
      return v < 0 ? v * slope : v;
    case Activation::kGelu:
      return 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)));
    case Activation::kSilu:
      return v / (1 + std::exp(-v));
  }
  return v;
}

// A pointwise convolution of `pixels` pixels, 32 to `k` channels, on small integers.
template <DType kType, WmmaTileId kTile>
void Run(int pixels, int k, Activation activation, bool with_terms) {
  using T = typename ElementOf<kType>::Type;
  constexpr int kC = 32;
  ConvProblem problem;
  problem.x_dtype = problem.w_dtype = problem.y_dtype = kType;
  problem.c = kC;
  problem.k = k;
  problem.in[2] = problem.out[2] = pixels;
  IgemmWmmaParams params;
  if (!MakeImplicitGemm(problem, &params.gemm).ok()) ++failures;
  uint32_t state = 7;
  auto draw = [&](int range) {
    state = state * 1664525u + 1013904223u;
    return int(state >> 16) % (2 * range + 1) - range;
  };
  std::vector<double> x(pixels * kC), w(kC * k), scale(k), bias(k), residual(pixels * k);
  for (double& v : x) v = draw(2);
  for (double& v : w) v = draw(1);
  for (double& v : scale) v = draw(4) * 0.25;
  for (double& v : bias) v = draw(4) * 0.5;
  for (double& v : residual) v = draw(8) * 0.5;
  if (with_terms) residual[3] = NAN, residual[k + 1] = INFINITY, residual[2 * k] = -INFINITY;
  DeviceArray<T> x_device(x), w_device(w), residual_device(residual);
  DeviceArray<T> y_device(std::vector<double>(pixels * k, NAN));
  DeviceArray<float> scale_device(scale), bias_device(bias);
  params.a = x_device.data;
  params.b = w_device.data;
  params.out = y_device.data;
  params.out_is_f32 = kType == DType::kF32;
  params.out_vector = k % (16 / int(sizeof(T))) == 0;
  params.n_tiles = FastDivmod((k + WmmaTileOf<kTile>::kTileN - 1) / WmmaTileOf<kTile>::kTileN);
  const int m_tiles = (pixels + WmmaTileOf<kTile>::kTileM - 1) / WmmaTileOf<kTile>::kTileM;
  params.m_tiles = FastDivmod(m_tiles);
  params.slices = params.batch_groups = FastDivmod(1);
  params.blocks_per_slice = kC;
  int b_copy = 16;
  while (k * int(sizeof(T)) % b_copy != 0) b_copy /= 2;
  params.b_copy_bytes = b_copy;
  if (with_terms) {
    params.epilogue.scale = scale_device.data;
    params.epilogue.bias = bias_device.data;
    params.epilogue.residual = residual_device.data;
  }
  params.epilogue.activation = activation;
  params.epilogue.negative_slope = 0.125f;
  const Status status = LaunchIgemmWmmaWith<Op::kFprop, kType, kTile, FusedEpilogue>(
      params, int64_t{params.n_tiles.divisor} * m_tiles, nullptr);
  const cudaError_t error = cudaDeviceSynchronize();
  if (!status.ok() || error != cudaSuccess) {
    std::printf("FAIL %s %s\n", status.message().c_str(), cudaGetErrorString(error));
    ++failures;
    return;
  }
  const std::vector<double> y = y_device.Read(size_t(pixels) * k);
  // One rounding to the output type, and the single-precision erf or exp before it.
  const double epsilon = kType == DType::kF32 ? 4e-6 : kType == DType::kF16 ? 6e-4 : 5e-3;
  int wrong = 0;
  for (int p = 0; p < pixels; ++p) {
    for (int n = 0; n < k; ++n) {
      double sum = 0;
      for (int c = 0; c < kC; ++c) sum += x[p * kC + c] * w[c * k + n];
      if (with_terms) sum = sum * scale[n] + bias[n] + RoundTrip<T>(residual[p * k + n]);
      const double expected = Reference(activation, 0.125, sum), got = y[p * k + n];
      const bool same = std::isnan(expected) ? std::isnan(got)
                        : std::isinf(expected)
                            ? got == expected
                            : std::abs(got - expected) <= epsilon * (std::abs(expected) + 1e-3);
      wrong += !same;
    }
  }
  if (wrong == 0) return;
  ++failures;
  std::printf("FAIL type %s pixels %d k %d activation %d terms %d: %d wrong\n", Name(kType), pixels,
              k, int(activation), with_terms, wrong);
}

template <DType kType>
void RunType() {
  for (Activation activation : {Activation::kNone, Activation::kRelu, Activation::kRelu6,
                                Activation::kLeakyRelu, Activation::kGelu, Activation::kSilu}) {
    for (bool with_terms : {false, true}) {
      Run<kType, WmmaTileId::k64x64>(200, 96, activation, with_terms);
      Run<kType, WmmaTileId::k128x64Narrow>(150, 37, activation, with_terms);
    }
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::RunType<jaxconv::DType::kBF16>();
  jaxconv::RunType<jaxconv::DType::kF16>();
  jaxconv::RunType<jaxconv::DType::kF32>();
  std::printf("fused_epilogue_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
