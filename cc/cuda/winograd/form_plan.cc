#include "cuda/winograd/form_plan.h"

#include <algorithm>

#include "cuda/winograd/row_filter.h"

namespace jaxconv::winograd {
namespace {

// Of the DRAM rate of a large copy, by kernels that read and write several streams.
constexpr double kDramShare = 0.8;

int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

double Activations(const LaunchParams& launch, bool in) {
  const Geometry& g = launch.geometry;
  const double pixels =
      in ? double{1} * g.images * g.in_h * g.in_w : double{1} * g.images * g.out_h * g.out_w;
  return pixels * (in ? g.in_channels() * 2 : g.out_channels() * (launch.out_is_f32 ? 4 : 2));
}

int64_t Chunks(const LaunchParams& launch) {
  return CeilDiv(launch.geometry.tiles, launch.chunk_tiles);
}

}  // namespace

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t InputBytes(const LaunchParams& launch) {
  return int64_t{2} * launch.points() * launch.geometry.in_channels();
}
int64_t ProductBytes(const LaunchParams& launch) {
  return int64_t{4} * launch.points() * launch.geometry.out_channels();
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
  return gpu.launch_us + bytes / (gpu.dram_bytes_per_us * kDramShare);
}

double FilterMicroseconds(const LaunchParams& launch, const Gpu& gpu) {
  double microseconds = 0;
  const double filter_bytes = static_cast<double>(launch.filter_elements) * 2;
  if (launch.scaled()) microseconds += MemoryMicroseconds(gpu, Activations(launch, /*in=*/true));
  if (launch.prepared) return microseconds;
  if (launch.scaled()) microseconds += MemoryMicroseconds(gpu, filter_bytes);
  return microseconds +
         MemoryMicroseconds(gpu, filter_bytes + static_cast<double>(FilterBytes(launch)));
}

double TransformMicroseconds(const LaunchParams& launch, const Gpu& gpu, double rate) {
  const double tiles = launch.geometry.tiles;
  const double bytes =
      Activations(launch, /*in=*/true) + Activations(launch, /*in=*/false) +
      tiles * static_cast<double>(InputBytes(launch) + ProductBytes(launch)) / rate;
  return MemoryMicroseconds(gpu, bytes) + (2 * Chunks(launch) - 1) * gpu.launch_us;
}

double GemmMicroseconds(const Instance& instance, const LaunchParams& launch, const Gpu& gpu,
                        double multiply_adds, double share, double rate) {
  const Geometry& g = launch.geometry;
  const int64_t chunks = Chunks(launch);
  const int64_t ctas = CeilDiv(launch.chunk_tiles, instance.tile_m) *
                       CeilDiv(g.cols, instance.tile_n) * g.groups * launch.points();
  const double waves = static_cast<double>(CeilDiv(ctas, gpu.sm_count));
  constexpr int64_t kBlock = 64;  // of the reduction
  const double cycles = waves * instance.tile_m * instance.tile_n *
                        static_cast<double>(CeilDiv(g.red, kBlock) * kBlock) /
                        (multiply_adds * share);
  const double bytes = double{1} * launch.chunk_tiles *
                           static_cast<double>(InputBytes(launch) + ProductBytes(launch)) / rate +
                       static_cast<double>(FilterBytes(launch)) / rate;
  const double memory = bytes / (gpu.dram_bytes_per_us * kDramShare);
  return static_cast<double>(chunks) *
         (gpu.launch_us + std::max(cycles / gpu.cycles_per_us(), memory));
}

}  // namespace jaxconv::winograd
