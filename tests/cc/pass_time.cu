// Measures passes on this GPU and prints the predicted times beside.
//
//     pass_time tests/cc/passes.tsv [WORD...]
//
// reads a key (cc/cuda/common/pass.h) from each line, its second field or the whole line, and takes
// the keys that contain all words. For each it prints the kernel, predicted and measured
// microseconds (the median of nine replays of a CUDA graph, operands not in L2), and TB/s of the
// bytes that a pass must move. CONTRIBUTING.md says how it is built.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/activation_names.h"
#include "cuda/common/query_gpu.h"
#include "cuda/elementwise/elementwise.h"
#include "cuda/normalisation/activated_sums.h"
#include "cuda/normalisation/masked_sums.h"
#include "cuda/normalisation/moments.h"
#include "cuda/normalisation/normalise.h"
#include "cuda/normalisation/normalise_add.h"
#include "cuda/normalisation/plan.h"
#include "cuda/passes.h"
#include "cuda/pooling/max_pool.h"
#include "cuda/pooling/max_pool_gradient.h"
#include "cuda/pooling/plan.h"
#include "device_program.cuh"

namespace jaxconv {
namespace {

// Ends the program if `status` is an error.
void RequireOk(const Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.message().c_str());
  std::exit(1);
}

using LaunchOnStream = std::function<Status(void* stream)>;

// The arrays of one set of operands. Only the bytes of large arrays are counted.
class Arrays {
 public:
  void* Of(int64_t count, DType dtype) {
    const int64_t size = count * ByteWidth(dtype);
    buffers_.push_back(std::make_unique<Buffer>(size));
    // In any floating-point type about 0.75; as places of maxima 0.
    Require(cudaMemset(buffers_.back()->data(), dtype == DType::kU8 ? 0 : 0x3f, size), "operand");
    bytes_ += size;
    return buffers_.back()->data();
  }
  const float* Numbers(int64_t count) { return static_cast<const float*>(Of(count, DType::kF32)); }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
  int64_t bytes_ = 0;
};

LaunchOnStream SumsOf(const PassKey& key, const PassPlan& plan, Arrays* arrays) {
  MaskedSums p = {};
  p.segments = key.Number('s', 1), p.rows = key.Number('r', 1), p.channels = key.Number('c', 8);
  p.parts = plan.parts;
  const int64_t count = p.segments * p.rows * p.channels, numbers = p.segments * p.channels;
  const int64_t stride = p.segments > 1 ? p.channels : 0;
  const DType dtype = key.dtype();
  p.gradient = arrays->Of(count, dtype);
  if (key.Number('g', 1) == 2) p.gradient2 = arrays->Of(count, dtype);
  for (int64_t a = 0; a < key.Number('y', 0); ++a) {
    p.arrays[a] = arrays->Of(count, dtype), p.means[a] = {arrays->Numbers(numbers), stride};
  }
  if (key.Has("result")) p.result = arrays->Of(count, dtype);
  if (key.Has("bits")) p.bits = static_cast<uint8_t*>(arrays->Of(count / 8, DType::kU8));
  if (key.Has("affine")) {
    p.scale = {arrays->Numbers(numbers), stride}, p.offset = {arrays->Numbers(numbers), stride};
  }
  const std::string_view activation = key.Behind("activation:");
  if (!activation.empty()) RequireOk(ParseDerivative(activation, &p.derivative));
  if (key.Has("values")) p.activation = ActivationOf(p.derivative);
  p.below = 6, p.slope = 0.25f;
  if (key.Has("stores")) p.masked = arrays->Of(count, dtype);
  const int64_t kinds = 1 + key.Number('y', 0) + key.Has("values");
  p.sums = static_cast<float*>(arrays->Of(p.parts * kinds * numbers, DType::kF32));
  return [=](void* stream) { return LaunchMaskedSums(dtype, p, stream); };
}

LaunchOnStream MomentsOf(const PassKey& key, const PassPlan& plan, Arrays* arrays) {
  Moments p = {};
  p.segments = key.Number('s', 1), p.rows = key.Number('r', 1), p.channels = key.Number('c', 8);
  p.parts = plan.parts;
  const DType dtype = key.dtype();
  p.y = arrays->Of(p.segments * p.rows * p.channels, dtype);
  p.moments = static_cast<float*>(arrays->Of(p.segments * p.parts * 3 * p.channels, DType::kF32));
  return [=](void* stream) { return LaunchMoments(dtype, p, stream); };
}

LaunchOnStream ActivatedOf(const PassKey& key, const PassPlan& plan, Arrays* arrays) {
  ActivatedSums p = {};
  p.segments = key.Number('s', 1), p.rows = key.Number('r', 1), p.channels = key.Number('c', 8);
  p.parts = plan.parts;
  const DType dtype = key.dtype();
  p.y = arrays->Of(p.segments * p.rows * p.channels, dtype);
  p.mean = {arrays->Numbers(p.channels), 0}, p.scale = {arrays->Numbers(p.channels), 0};
  p.offset = {arrays->Numbers(p.channels), 0};
  ParseActivation(key.Behind("activation:"), &p.activation);
  const std::string_view derivative = key.Behind("derivative:");
  if (!derivative.empty()) RequireOk(ParseDerivative(derivative, &p.derivative));
  const int64_t kinds = derivative.empty() ? 1 : 3;
  p.sums = static_cast<float*>(arrays->Of(p.segments * p.parts * kinds * p.channels, DType::kF32));
  return [=](void* stream) { return LaunchActivatedSums(dtype, p, stream); };
}

LaunchOnStream NormaliseOf(const PassKey& key, const Gpu& gpu, Arrays* arrays) {
  Normalise p = {};
  p.segments = key.Number('s', 1), p.rows = key.Number('r', 1), p.channels = key.Number('c', 8);
  p.ctas = normalisation::kNormaliseCtas * gpu.sm_count;
  const int64_t count = p.segments * p.rows * p.channels;
  const DType dtype = key.dtype();
  p.y = arrays->Of(count, dtype), p.z = arrays->Of(count, dtype);
  p.mean = {arrays->Numbers(p.channels), 0}, p.scale = {arrays->Numbers(p.channels), 0};
  p.offset = {arrays->Numbers(p.channels), 0};
  ParseActivation(key.Behind("activation:"), &p.activation);
  return [=](void* stream) { return LaunchNormalise(dtype, p, stream); };
}

LaunchOnStream AddOf(const PassKey& key, const Gpu& gpu, Arrays* arrays) {
  NormaliseAdd p = {};
  p.rows = key.Number('r', 1), p.channels = key.Number('c', 8), p.ctas = 2 * gpu.sm_count;
  const int64_t count = p.rows * p.channels, normalised = key.Number('y', 1);
  const DType dtype = key.dtype();
  for (int64_t a = 0; a < normalised; ++a) {
    p.arrays[a] = arrays->Of(count, dtype), p.means[a] = arrays->Numbers(p.channels);
    p.scales[a] = arrays->Numbers(p.channels), p.offsets[a] = arrays->Numbers(p.channels);
  }
  if (normalised == 1) p.shortcut = arrays->Of(count, dtype);
  p.below = key.Has("bounded") ? 6 : __builtin_nanf("");
  p.result = arrays->Of(count, dtype);
  p.bits = static_cast<uint8_t*>(arrays->Of(count / 8, DType::kU8));
  return [=](void* stream) { return LaunchNormaliseAdd(dtype, p, stream); };
}

LaunchOnStream PoolOf(const PassKey& key, const Gpu& gpu, Arrays* arrays) {
  PoolWindows w;
  const std::vector<int64_t> in = key.Extents('i'), size = key.Extents('f'), out = key.Extents('o'),
                             stride = key.Extents('s'), low = key.Extents('p');
  w.batch = key.Number('b', 1), w.channels = key.Number('c', 8);
  int64_t elements = w.batch * w.channels, windows = elements;
  for (size_t i = 0; i < in.size(); ++i) {
    w.SetAxis(i, in.size(), in[i], size[i], out[i], stride[i], low[i]);
    elements *= in[i], windows *= out[i];
  }
  const DType dtype = key.dtype();
  const bool affine = key.Has("affine");
  const auto numbers = [&] { return affine ? arrays->Numbers(w.channels) : nullptr; };
  if (key.pass() == "max_pool_gradient") {
    MaxPoolGradient p = {};
    p.windows = w;
    p.dy = arrays->Of(windows, dtype);
    if (key.Number('g', 1) == 2) p.dy2 = arrays->Of(windows, dtype);
    p.places = static_cast<uint8_t*>(arrays->Of(windows, DType::kU8));
    if (affine) p.y = arrays->Of(elements, dtype);
    p.scale = numbers(), p.y_scale = numbers(), p.offset = numbers();
    p.dx = arrays->Of(elements, dtype);
    return [=](void* stream) { return LaunchMaxPoolGradient(dtype, p, stream); };
  }
  MaxPool p = {};
  p.windows = w;
  p.x = arrays->Of(elements, dtype);
  p.mean = numbers(), p.scale = numbers(), p.offset = numbers();
  p.maxima = arrays->Of(windows, dtype);
  if (key.Has("places")) p.places = static_cast<uint8_t*>(arrays->Of(windows, DType::kU8));
  if (key.Has("operands")) p.operands = arrays->Of(windows, dtype);
  p.walk = pooling::WalkOf(w, gpu.sm_count);
  const bool sm90 = gpu.compute_capability() == 90;
  return [=](void* stream) { return LaunchMaxPool(dtype, p, sm90, stream); };
}

// Conversions to bfloat16, of equal sizes.
LaunchOnStream ElementwiseOf(const PassKey& key, Arrays* arrays) {
  auto work = std::make_shared<Elementwise>();
  work->functions = 1, work->function[0] = {1, 0, 0, {}, {}};
  work->results = static_cast<int>(key.Number('n', 1));
  const int64_t elements = key.Number('b', 6) / 6 / work->results;
  for (int i = 0; i < work->results; ++i) {
    ElementwiseResult& of = work->of[i];
    of = {};
    of.operand[0] = arrays->Of(elements, DType::kF32), of.operand_type[0] = DType::kF32;
    of.result = arrays->Of(elements, DType::kBF16), of.type = DType::kBF16;
    of.elements = static_cast<uint32_t>(elements);
  }
  return [=](void* stream) { return LaunchElementwise(work.get(), stream); };
}

LaunchOnStream LaunchOf(const PassKey& key, const PassPlan& plan, const Gpu& gpu, Arrays* arrays) {
  if (key.pass() == "masked_sums") return SumsOf(key, plan, arrays);
  if (key.pass() == "activated_sums") return ActivatedOf(key, plan, arrays);
  if (key.pass() == "elementwise") return ElementwiseOf(key, arrays);
  if (key.pass() == "moments") return MomentsOf(key, plan, arrays);
  if (key.pass() == "normalise") return NormaliseOf(key, gpu, arrays);
  if (key.pass() == "normalise_add") return AddOf(key, gpu, arrays);
  return PoolOf(key, gpu, arrays);
}

// Measures one pass. Returns false if it fails.
bool Time(const std::string& text, const Gpu& gpu, cudaStream_t stream) {
  PassKey key;
  PassPlan plan;
  if (!PassKey::Parse(text, &key).ok() || !PlanPass(text, gpu, &plan).ok()) return false;
  if (plan.kernel.empty()) return true;
  std::vector<std::unique_ptr<Arrays>> sets;
  std::vector<LaunchOnStream> launches;
  size_t count = 1;
  while (sets.size() < count) {
    sets.push_back(std::make_unique<Arrays>());
    launches.push_back(LaunchOf(key, plan, gpu, sets.back().get()));
    count = static_cast<size_t>(SetsToTime(sets[0]->bytes()));
  }
  double microseconds = 0;
  const auto all = [&] {
    for (const LaunchOnStream& launch : launches) JAXCONV_RETURN_IF_ERROR(launch(stream));
    return Status();
  };
  const Status status = TimeReplays(stream, text.c_str(), all, &microseconds);
  if (!status.ok()) {
    std::printf("%s: %s\n", text.c_str(), status.message().c_str());
    return false;
  }
  microseconds /= static_cast<double>(sets.size());
  std::printf("%-78s %-44s %8.1f %8.1f us %6.2f TB/s\n", text.c_str(), plan.kernel.c_str(),
              plan.microseconds, microseconds,
              static_cast<double>(sets[0]->bytes()) / microseconds / 1e6);
  return true;
}

int Main(int argc, char** argv) {
  Gpu gpu;
  if (argc < 2 || !QueryGpu(0, &gpu).ok()) {
    std::printf("pass_time FILE [WORD...], on a GPU\n");
    return 2;
  }
  cudaStream_t stream;
  Require(cudaStreamCreate(&stream), "stream");
  std::ifstream file(argv[1]);
  std::set<std::string> seen;
  int failures = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t tab = line.find('\t');
    const std::string key =
        tab == std::string::npos ? line : line.substr(tab + 1, line.find('\t', tab + 1) - tab - 1);
    bool wanted = seen.insert(key).second;
    for (int i = 2; i < argc; ++i) wanted = wanted && key.find(argv[i]) != std::string::npos;
    if (wanted && !Time(key, gpu, stream)) ++failures;
  }
  return failures != 0;
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) { return jaxconv::Main(argc, argv); }
