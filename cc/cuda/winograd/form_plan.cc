#include "cuda/winograd/form_plan.h"

#include <algorithm>
#include <cmath>

#include "cuda/common/rates.h"
#include "cuda/winograd/row_filter.h"

namespace jaxconv::winograd {
namespace {

// The DRAM share of F(6x6)'s output transform from float16 products: 64 loads of 4 bytes a thread, and
// few threads.
constexpr double kHalfOutputShare6 = 0.66;

int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

double Activations(const LaunchParams& launch, bool in) {
  const Geometry& g = launch.geometry;
  const double pixels =
      in ? double{1} * g.images * g.in_h * g.in_w : double{1} * g.images * g.out_h * g.out_w;
  return pixels * (in ? g.in_channels() * launch.element_bytes()
                      : g.out_channels() * (launch.out_is_f32 ? 4 : 2));
}

int64_t Chunks(const LaunchParams& launch) {
  return CeilDiv(launch.geometry.tiles, launch.chunk_tiles);
}

}  // namespace

int64_t InputBytes(const LaunchParams& launch) {
  return int64_t{2} * launch.points() * launch.geometry.in_channels();
}
int64_t ProductBytes(const LaunchParams& launch) {
  const int64_t bytes = launch.half_products ? 2 : 4;
  return bytes * launch.points() * launch.geometry.out_channels();
}
int64_t FilterBytes(const LaunchParams& launch) {
  const Geometry& g = launch.geometry;
  if (launch.one_dimensional) {
    return 2 * g.groups * RowFilter(launch.points(), g.cols, g.red).elements();
  }
  return int64_t{2} * launch.points() * g.out_channels() * g.red;
}

void PlaceWorkspace(bool has_v, bool has_m, LaunchParams* launch) {
  Workspace& workspace = launch->workspace;
  workspace = Workspace();
  auto place = [&](bool present, int64_t bytes, int64_t* offset) {
    *offset = workspace.bytes;
    if (present) workspace.bytes += AlignUp(bytes);
  };
  constexpr int64_t kPartialBytes = kMaxPartials * int64_t{sizeof(uint32_t)};
  place(launch->scaled(), kPartialBytes, &workspace.input_partials);
  place(launch->scaled() && !launch->prepared, kPartialBytes, &workspace.filter_partials);
  place(!launch->prepared, FilterBytes(*launch), &workspace.u);
  place(has_v, launch->chunk_tiles * InputBytes(*launch), &workspace.v);
  place(has_m, launch->chunk_tiles * ProductBytes(*launch), &workspace.m);
}

double MemoryMicroseconds(const Gpu& gpu, double bytes) {
  return gpu.launch_us + bytes / (gpu.dram_bytes_per_us * kPassShare);
}

double FilterMicroseconds(const LaunchParams& launch, const Gpu& gpu) {
  const double filter_bytes = static_cast<double>(launch.filter_elements) * launch.element_bytes();
  double microseconds = 0;
  if (launch.measured()) {
    // The kernels that clear the maxima and repair are small and overlap their neighbours.
    microseconds = gpu.launch_us * (launch.assumes() ? 1.0 : 1.0 / 2);
  } else if (launch.scaled()) {
    const double bytes = Activations(launch, /*in=*/true) + (launch.prepared ? 0 : filter_bytes);
    microseconds = MemoryMicroseconds(gpu, bytes);
  }
  if (launch.prepared) return microseconds;
  return microseconds +
         MemoryMicroseconds(gpu, filter_bytes + static_cast<double>(FilterBytes(launch)));
}

double TransformMicroseconds(const LaunchParams& launch, const Gpu& gpu) {
  const double tiles = launch.geometry.tiles, launches = 2 * static_cast<double>(Chunks(launch));
  const double in =
      Activations(launch, /*in=*/true) + tiles * static_cast<double>(InputBytes(launch));
  const double out =
      Activations(launch, /*in=*/false) + tiles * static_cast<double>(ProductBytes(launch));
  const double share = launch.half_products && launch.m == 6 ? kHalfOutputShare6 : kPassShare;
  return launches * gpu.launch_us + (in / kPassShare + out / share) / gpu.dram_bytes_per_us;
}

TimeTerms TermsWithGemms(const LaunchParams& launch, const Gpu& gpu, double cycles) {
  const double bytes = double{1} * launch.chunk_tiles *
                           static_cast<double>(InputBytes(launch) + ProductBytes(launch)) +
                       static_cast<double>(FilterBytes(launch));
  const auto chunks = static_cast<double>(Chunks(launch));
  TimeTerms terms;
  terms.tensor_cores = chunks * cycles / gpu.cycles_per_us();
  terms.dram = chunks * bytes / gpu.dram_bytes_per_us;
  terms.launch =
      chunks * gpu.launch_us + FilterMicroseconds(launch, gpu) + TransformMicroseconds(launch, gpu);
  return terms;
}

}  // namespace jaxconv::winograd
