// Plans of family winograd on modelled GPUs: refusals, geometry, workspace, chunks, selection;
// compares predictions with the times in winograd_measured.tsv (H200; problem, instance, us).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/registry.h"
#include "cuda/select.h"
#include "cuda/winograd/form_plan.h"
#include "cuda/winograd/fused_row_plan.h"
#include "cuda/winograd/params.h"
#include "cuda/winograd/pingpong_gemm_params.h"
#include "cuda/winograd/pkf_params.h"
#include "cuda/winograd/plan.h"

namespace jaxconv {
namespace {

using winograd::LaunchParams;

constexpr const char* kLayer =
    "fprop bf16:bf16:bf16 default b1 n2 g1 c64 k128 i13x15 f3x3 o13x15 s1x1 l1x1 d1x1 p1_1x1_1";

// The key with one part replaced.
std::string With(const std::string& part, const std::string& other, std::string key = kLayer) {
  const size_t at = key.find(part);
  Expect(at != std::string::npos, "no '" + part + "' in " + key);
  return key.replace(at, part.size(), other);
}

Status PlanOf(const std::string& kernel_name, const std::string& key, Plan* plan,
              const char* target = "h200") {
  const KernelDesc* kernel = FindKernel(kernel_name);
  if (kernel == nullptr) return Status::Internal("no kernel " + kernel_name);
  return kernel->plan(*kernel, Parse(key), Model(target), 0, plan);
}

void TestRefusals() {
  const std::string name = "fprop_winograd_bf16_4x4_four_stage_128x128x64";
  auto refused = [&](const std::string& key, const std::string& reason) {
    Plan plan;
    const Status status = PlanOf(name, key, &plan);
    Expect(!status.ok() && status.message() == reason, key + ": " + status.message());
  };
  Plan plan;
  Expect(PlanOf(name, kLayer, &plan).ok(), kLayer);
  refused(With("bf16:bf16:bf16", "f16:f16:f16"), "expected operands of type bf16, got f16 and f16");
  refused(With("fprop", "dgrad"), "expected fprop, got dgrad");
  refused(With("f3x3 o13x15", "f1x3 o15x15"), "expected a 3x3 filter, extent 3, got 1");
  refused(With("o13x15 s1x1", "o7x15 s2x1"), "expected stride 1, got 2");
  refused(With("i13x15 f3x3 o13x15 s1x1 l1x1", "i13x8 f3x3 o13x15 s1x1 l1x2"),
          "expected no lhs_dilation, got 2");
  refused(With("o13x15 s1x1 l1x1 d1x1", "o13x13 s1x1 l1x1 d1x2"), "expected no dilation, got 2");
  refused(With("b1", "b3"), "expected one batch, got 3");
  refused(With("c64", "c36"), "expected C/groups in multiples of 8, got 36");
  refused(With("k128", "k100"), "expected K/groups in multiples of 8, got 100");
  refused("fprop bf16:bf16:bf16 default b1 n2 g1 c64 k128 i15 f3 o15 s1 l1 d1 p1_1",
          "expected 2 spatial axes, got 1");
  refused(With("bf16:bf16", "bf16:f16") + " winograd2",
          "expected a filter prepared for the instance's tile, got winograd2");
  refused(With("n2", "n10000000"), "expected less than 2^26 tiles, got 160000000");
  // float32 operands are rounded to float16's 11 bits, which precision "default" allows.
  const std::string wide = With("bf16:bf16:bf16", "f32:f32:f32");
  for (const char* tile : {"2x2", "4x4"}) {
    const std::string of_f32 =
        std::string("fprop_winograd_f32_") + tile + "_four_stage_128x128x64_pingpong";
    Expect(PlanOf(of_f32, wide, &plan).ok() && plan.As<LaunchParams>().scaled(), of_f32);
    const Status high = PlanOf(of_f32, With("default", "high", wide), &plan);
    Expect(high.message() ==
               "multiplies float32 rounded to 11 bits, as TF32 does; precision high asks for more",
           high.message());
  }
  // Families other than winograd refuse prepared filters.
  for (const char* layout : {"winograd2", "winograd4", "winograd6", "winograd4x3"}) {
    const ConvProblem problem = Parse(With("bf16:bf16:bf16", "f16:f16:f16") + " " + layout);
    for (const KernelDesc& kernel : Kernels()) {
      const bool takes = kernel.plan(kernel, problem, Model("h200"), 0, &plan).ok();
      Expect(!takes || kernel.family == std::string("winograd"),
             std::string(kernel.name) + " takes " + problem.ToString());
    }
  }
}

void TestGeometry() {
  Plan plan;
  const char* padded =
      "dgrad f32:f16:f16 default b1 n2 g2 c16 k48 i13x15 f3x3 o13x10 s1x1 l1x1 d1x1 p0_2x-1_-2";
  Expect(PlanOf("dgrad_winograd_f16_4x4_four_stage_64x64x64", padded, &plan).ok(), padded);
  if (plan.params == nullptr) return;
  const auto& launch = plan.As<LaunchParams>();
  const winograd::Geometry& g = launch.geometry;
  Expect(g.in_h == 13 && g.in_w == 10 && g.out_h == 13 && g.out_w == 15, "dgrad reads dy");
  Expect(g.pad_h == 2 && g.pad_w == 3, "dgrad's padding is 2 - pad");
  Expect(g.red == 24 && g.cols == 8 && g.groups == 2, "channels of a group");
  Expect(g.tiles == 2 * 4 * 4, "tiles of 4x4 outputs");
  Expect(launch.out_is_f32 && !launch.scaled(), "types");
  const winograd::TilePlace place = g.Place(16 + 4 * 2 + 3);
  Expect(place.image == 1 && place.row == 2 && place.column == 3, "the place of a tile");
  Expect(launch.filter.first == 8 * 8 * 48 && launch.filter.red == 1 && launch.filter.col == 48 &&
             launch.filter.s == -8 * 48 && launch.filter.r == -3 * 8 * 48 &&
             launch.filter.group == 24,
         "dgrad reads rsck along K");
  Plan krsc;
  const std::string key = std::string(kLayer) + " krsc";
  Expect(PlanOf("fprop_winograd_bf16_2x2_chunked_128x128x64", key, &krsc).ok(), key);
  const winograd::FilterStrides& filter = krsc.As<LaunchParams>().filter;
  Expect(filter.first == 0 && filter.red == 1 && filter.col == 9 * 64 && filter.s == 64 &&
             filter.r == 3 * 64,
         "fprop reads krsc along C");
}

void TestWorkspace() {
  // 28x28 images in 4x4 tiles: 49 tiles an image, 36 points; 512 channels.
  const std::string layer =
      "fprop f16:f16:f16 default b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1";
  const int64_t tiles = 32 * 49, u = 36 * 512 * 512 * 2, v = 36 * 512 * 2, m = 36 * 512 * 4;
  Plan plan;
  Expect(PlanOf("fprop_winograd_f16_4x4_four_stage_128x128x64", layer, &plan).ok() &&
             plan.workspace_bytes == u + tiles * (v + m),
         "U, V and M");
  Plan prepared;
  Expect(PlanOf("fprop_winograd_f16_4x4_four_stage_128x128x64", layer + " winograd4", &prepared)
                 .ok() &&
             prepared.workspace_bytes == tiles * (v + m),
         "a prepared filter needs no U");
  Expect(prepared.microseconds < plan.microseconds, "and no transform");
  Plan scaled;
  Expect(PlanOf("fprop_winograd_bf16_4x4_four_stage_128x128x64",
                With("f16:f16:f16", "bf16:bf16:bf16", layer), &scaled)
                 .ok() &&
             scaled.workspace_bytes == 2 * 4 * winograd::kMaxPartials + u + tiles * (v + m),
         "bfloat16 needs partial maxima of both operands");
  Plan of_f32;
  Expect(PlanOf("fprop_winograd_f32_4x4_four_stage_128x128x64_pingpong",
                With("f16:f16:f16", "f32:f32:f32", layer), &of_f32)
                 .ok() &&
             of_f32.workspace_bytes == scaled.workspace_bytes,
         "and so does float32, whose U and V are float16 too");
  Plan chunked;
  Expect(PlanOf("fprop_winograd_f16_4x4_chunked_128x128x64", layer, &chunked).ok(), layer);
  const auto& launch = chunked.As<LaunchParams>();
  Expect(launch.chunk_tiles == 256 && launch.chunk_tiles * (v + m) <= winograd::kChunkBytes &&
             chunked.workspace_bytes == u + launch.chunk_tiles * (v + m),
         "chunks of 256 tiles, got " + std::to_string(launch.chunk_tiles));
  Plan wide;
  const Status status = PlanOf(
      "fprop_winograd_f16_6x6_chunked_128x128x64",
      "fprop f16:f16:f16 default b1 n1 g1 c1280 k1280 i64x64 f3x3 o64x64 s1x1 l1x1 d1x1 p1_1x1_1",
      &wide);
  Expect(!status.ok() && status.message() ==
                             "V and M of 128 tiles take 62914560 bytes, expected at most 33554432",
         status.message());
}

void TestFusedRow() {
  const std::string name = "fprop_winograd_f16_4x3_fused_row_64x128x64";
  // A row of 15 outputs has four tiles and one more position, which is dropped.
  const std::string layer =
      "fprop f16:f16:f16 default b1 n2 g1 c72 k136 i13x15 f3x3 o13x15 s1x1 l1x1 d1x1 p1_1x1_1";
  Plan plan;
  Expect(PlanOf(name, layer, &plan).ok(), layer);
  if (plan.params == nullptr) return;
  const auto& launch = plan.As<LaunchParams>();
  // gemm_n is padded to 256 and the reduction to 96.
  constexpr int64_t kFilterBytes = 2 * 3 * 6 * 256 * 96;
  Expect(plan.workspace_bytes == kFilterBytes, "U alone, filled up");
  int32_t upper[2];
  const winograd::RowParams params = winograd::MakeRowParams(launch, upper);
  Expect(params.row_positions.divisor == 5 && params.rows.divisor == 13 && params.images == 2,
         "positions of a row, rows, images");
  Expect(params.lower_w == -1 && params.lower_h == -1 && params.offset_w == 0 &&
             params.offset_h == 0 && upper[0] == -1 + 5 * 4 - 3 - 15 && upper[1] == -1,
         "base pixels from the padding to the position past the last tile");
  Expect(params.reduction_blocks == 3 &&
             params.filter_columns == kFilterBytes / 2 / winograd::kFilterRowBytes &&
             params.filter_group == kFilterBytes / winograd::kFilterRowBytes,
         "blocks of the filter");
  // 130 positions are two pairs of 64-row tiles, the second almost empty.
  Expect(params.n_tiles.divisor == 2 && params.m_tiles.divisor == 2 && params.tiles == 4 &&
             launch.ctas == 8,
         "a cluster for each tile while there are SMs");
  Plan cropped;
  const std::string negative =
      "dgrad f32:f16:f16 default b1 n1 g2 c16 k128 i13x15 f3x3 o19x11 s1x1 l1x1 d1x1 p4_4x-1_-1";
  Expect(PlanOf("dgrad_winograd_f16_2x3_fused_row_64x128x64", negative, &cropped).ok(), negative);
  if (cropped.params == nullptr) return;
  const winograd::RowParams moved = winograd::MakeRowParams(cropped.As<LaunchParams>(), upper);
  Expect(moved.lower_h == 0 && moved.offset_h == 2 && moved.lower_w == -3 && moved.offset_w == 0 &&
             upper[0] == -3 + 8 * 2 + 1 - 11 && upper[1] == 13 - 19,
         "padding below zero goes to the offsets");
  Plan prepared;
  Expect(PlanOf(name, layer + " winograd4x3", &prepared).ok() && prepared.workspace_bytes == 0,
         "a prepared filter needs no workspace");
  auto refused = [&](const std::string& instance, const std::string& key,
                     const std::string& reason) {
    Plan none;
    const Status status = PlanOf(instance, key, &none);
    Expect(!status.ok() && status.message() == reason, key + ": " + status.message());
  };
  refused(name, With("g1 c72 k136", "g2 c144 k144", layer),
          "expected one group, or groups whose channels are a multiple of 64, got 72");
  refused(name,
          With("i13x15 f3x3 o13x15 s1x1 l1x1 d1x1 p1_1x1_1",
               "i13x15 f3x3 o13x213 s1x1 l1x1 d1x1 p1_1x200_0", layer),
          "padding 200, wider than TMA's fields");
  refused("fprop_winograd_f16_2x3_fused_row_64x128x64", layer + " winograd4x3",
          "expected a filter prepared for the instance's tile, got winograd4x3");
  // With fewer clusters than tiles, each cluster takes several.
  Gpu small = Model("h200");
  small.sm_count = 5;
  const KernelDesc* kernel = FindKernel(name);
  Expect(kernel->plan(*kernel, Parse(layer), small, 0, &plan).ok() &&
             plan.As<LaunchParams>().ctas == 4,
         "clusters of two on five SMs");
}

void TestPingpong() {
  const std::string name = "fprop_winograd_f16_4x4_four_stage_128x128x64_pingpong";
  const std::string layer =
      "fprop f16:f16:f16 default b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1";
  Plan plan, portable;
  Expect(PlanOf(name, layer, &plan).ok() &&
             PlanOf("fprop_winograd_f16_4x4_four_stage_128x128x64", layer, &portable).ok() &&
             plan.workspace_bytes == portable.workspace_bytes &&
             plan.microseconds < portable.microseconds,
         "on wgmma four stages take the same workspace and less time");
  Expect(plan.params != nullptr && plan.As<LaunchParams>().ctas == 132, "a CTA an SM");
  // 13 tiles of rows cannot be paired, but 4 of output channels can; then the reverse.
  const winograd::PingpongGemmTiles columns(1568, 512, 128), rows(8192, 640, 128);
  Expect(!columns.pairs_rows && columns.m_tiles == 13 && columns.n_tiles == 2, "pairs of columns");
  Expect(rows.pairs_rows && rows.m_tiles == 32 && rows.n_tiles == 5, "pairs of rows");
  const winograd::PingpongGemmTiles wide(8192, 320, 160);
  Expect(wide.m_tiles * wide.n_tiles == 64, "320 columns are two tiles of 160");
  winograd::PingpongGemmParams params;
  params.tile_cols = 128;
  params.n_tiles = FastDivmod(2);
  params.m_tiles = FastDivmod(13);
  params.groups = FastDivmod(3);
  const winograd::PingpongGemmPlace place(params, ((5 * 3 + 2) * 13 + 7) * 2 + 1, 1);
  Expect(place.col == (2 * 1 + 1) * 128 && place.row == 7 * 128 && place.group == 2 &&
             place.point == 5,
         "columns fastest, then rows, groups and points");
  const Status status = PlanOf(name, With("k512", "k520", layer), &plan);
  Expect(status.message() == "expected output channels of a group in multiples of 16, got 520",
         status.message());
}

void TestHalfProducts() {
  const std::string name = "fprop_winograd_bf16_4x4_four_stage_128x128x64_pingpong";
  const std::string layer =
      "fprop bf16:bf16:bf16 default b1 n32 g2 c1280 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 "
      "p1_1x1_1";
  Plan plan, half;
  Expect(PlanOf(name, layer, &plan).ok() && PlanOf(name + "_half", layer, &half).ok(), layer);
  if (half.params == nullptr) return;
  const int64_t values = int64_t{36} * 32 * 49 * 512;
  Expect(plan.workspace_bytes - half.workspace_bytes == 2 * values, "M takes half");
  Expect(half.microseconds < plan.microseconds, "and is faster");
  // 640 products of 2^14 times 2^14.
  Expect(winograd::ProductExponent(640) == 13 + 10 && winograd::ProductExponent(1) == 13 &&
             winograd::ProductExponent(1024) == 23,
         "what keeps M below 2^15");
  const std::string f16 = With("bf16:bf16:bf16", "f16:f16:f16", layer);
  const std::string f16_name = "fprop_winograd_f16_6x6_four_stage_128x128x64_pingpong_half";
  Expect(PlanOf(f16_name, f16, &half).ok() && half.As<LaunchParams>().measured(),
         "float16's products are scaled, its operands are not");
  Expect(PlanOf(f16_name, f16 + " winograd6", &half).ok(),
         "a record has the filter's power of two");
  // For bfloat16 the transforms assume constant scales and compute the maxima to check them.
  // Gradients are often too small for these scales and have their own pass.
  Expect(PlanOf(name + "_half", layer, &half).ok() && half.As<LaunchParams>().measured(),
         "activations and filters are multiplied by constants");
  const std::string backward = With("fprop", "dgrad", With("c1280 k512", "c512 k512", layer));
  Expect(PlanOf("dgrad" + name.substr(5) + "_half", backward, &half).ok() &&
             !half.As<LaunchParams>().measured(),
         "gradients have a pass for their largest magnitude");
  const std::string prepared = With("bf16:bf16:bf16", "bf16:f16:bf16", layer) + " winograd4";
  Expect(PlanOf(name + "_half", prepared, &half).ok(), prepared);
  // "winograd" may select the half instance; "winograd_f4x4" asks for the smaller error.
  Selection selection;
  const Gpu h200 = Model("h200");
  Expect(Select(Parse(layer), h200, "winograd", &selection).ok() &&
             selection.instance == name + "_half",
         selection.instance);
  Expect(Select(Parse(layer), h200, "winograd_f4x4", &selection).ok() && selection.instance == name,
         selection.instance);
}

// Among the instances measured on a problem, the one with the shortest prediction takes at most 6 %
// longer than the fastest, for each tile and over all; and every prediction is close.
void TestMeasured() {
  std::string path = __FILE__;
  path = path.substr(0, path.rfind('/') + 1) + "winograd_measured.tsv";
  std::ifstream file(path);
  struct Choice {
    double predicted = 1e30, taken = 0, fastest = 1e30;
    std::string instance;
  };
  std::map<std::string, Choice> choices;
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    std::istringstream fields(line);
    std::string key, instance, measured;
    std::getline(fields, key, '\t');
    std::getline(fields, instance, '\t');
    std::getline(fields, measured, '\t');
    Plan plan;
    Expect(PlanOf(instance, key, &plan).ok(), line);
    const double us = std::stod(measured);
    Expect(std::abs(std::log(plan.microseconds / us)) < std::log(1.2),
           line + ", predicted " + std::to_string(plan.microseconds));
    for (const std::string& name : {std::string("winograd"), std::string(plan.kernel->alias)}) {
      if (name.empty()) continue;
      Choice& choice = choices[key + " " + name];
      choice.fastest = std::min(choice.fastest, us);
      if (plan.microseconds >= choice.predicted) continue;
      choice = {plan.microseconds, us, choice.fastest, instance};
    }
  }
  Expect(lines > 200, path + ": " + std::to_string(lines) + " lines");
  for (const auto& [key, choice] : choices) {
    Expect(choice.taken <= 1.06 * choice.fastest, key + " takes " + choice.instance + ", " +
                                                      std::to_string(choice.taken) + " us, not " +
                                                      std::to_string(choice.fastest));
  }
}

// A layer of the workload in the seed's paper (docs/winograd.md): C = K = 64, 224x224 and larger.
constexpr const char* kSeedLayer =
    "fprop f16:f16:f16 default b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1";

// The seed's limits: V of a CTA's tiles fits in shared memory, V and M of a chunk fit in L2.
void TestCapacities() {
  struct Capacity {
    const char* kernel;
    const char* target;
    int channels;  // the most whose V fits
  };
  for (const auto& [kernel, target, channels] : {Capacity{"2x2_pkf_shmem_16x32", "h200", 416},
                                                 {"2x2_pkf_shmem_16x32", "rtx4090", 160},
                                                 {"2x2_pkf_shmem_32x32", "h200", 192},
                                                 {"2x2_pkf_shmem_32x32", "a100", 128},
                                                 {"4x4_pkf_shmem_16x32", "h200", 160},
                                                 {"4x4_pkf_shmem_32x16", "h200", 64},
                                                 {"4x4_pkf_shmem_32x16", "a100", 32}}) {
    const std::string name = std::string("fprop_winograd_f16_") + kernel;
    auto with_channels = [&](int c) { return With("c64", "c" + std::to_string(c), kSeedLayer); };
    Plan plan;
    Expect(PlanOf(name, with_channels(channels), &plan, target).ok(),
           name + " takes " + std::to_string(channels) + " channels on " + target);
    Expect(!PlanOf(name, with_channels(channels + 8), &plan, target).ok(),
           name + " takes no " + std::to_string(channels + 8) + " channels on " + target);
  }
  Plan plan;
  const Status status =
      PlanOf("fprop_winograd_f16_4x4_pkf_shmem_32x16", With("c64", "c72", kSeedLayer), &plan);
  Expect(status.message() ==
             "V of 32 tiles and 72 channels takes 247808 bytes of shared memory, expected at most "
             "232448",
         status.message());
  // dgrad reduces over K, and a group over its own channels.
  Expect(PlanOf("dgrad_winograd_f16_4x4_pkf_shmem_32x16",
                With("fprop", "dgrad", With("c64", "c640", kSeedLayer)), &plan)
                 .ok() &&
             PlanOf("fprop_winograd_f16_4x4_pkf_shmem_32x16",
                    With("g1 c64 k64", "g2 c128 k64", kSeedLayer), &plan)
                 .ok(),
         "the reduction of a group");
  Expect(!PlanOf("dgrad_winograd_f16_4x4_pkf_shmem_32x16",
                 With("fprop", "dgrad", With("k64", "k640", kSeedLayer)), &plan)
              .ok(),
         "dgrad of 640 output channels");

  // Bytes of V and M of a tile: 16 points of 64 channels.
  constexpr int64_t kTile = 16 * 64 * (2 + 4), kTiles = 112 * 112;
  auto chunk = [&](const char* target) {
    Plan llc;
    Expect(PlanOf("fprop_winograd_f16_2x2_pkf_llc_32x64", kSeedLayer, &llc, target).ok(), target);
    const auto& launch = llc.As<LaunchParams>();
    Expect(llc.workspace_bytes == 16 * 64 * 64 * 2 + launch.chunk_tiles * kTile,
           "U, and V and M of a chunk");
    return static_cast<int64_t>(launch.chunk_tiles);
  };
  const int64_t h200 = chunk("h200"), ampere = chunk("sm_86");
  Expect(h200 % 32 == 0 && h200 * kTile <= winograd::kChunkBytes && h200 > kTiles / 4,
         "three chunks of the 77 MB on an H200, got " + std::to_string(h200) + " tiles");
  Expect(ampere % 32 == 0 && ampere * kTile <= 4 << 20 && ampere * kTile > 3 << 20,
         "less than two thirds of 6 MB of L2, got " + std::to_string(ampere) + " tiles");
}

void TestFusedPlan() {
  const std::string name = "fprop_winograd_f16_2x2_pkf_shmem_16x32";
  Plan plan;
  Expect(PlanOf(name, kSeedLayer, &plan).ok() && plan.workspace_bytes == 16 * 64 * 64 * 2 &&
             plan.As<LaunchParams>().column_parts == 1,
         "U alone; 784 blocks of tiles fill the GPU");
  Expect(
      PlanOf(name, std::string(kSeedLayer) + " winograd2", &plan).ok() && plan.workspace_bytes == 0,
      "a prepared filter needs no workspace");
  // 49 tiles are four blocks, and 264 CTAs run at a time.
  Expect(PlanOf(name, With("k64 i224x224 f3x3 o224x224", "k1280 i14x14 f3x3 o14x14", kSeedLayer),
                &plan)
                 .ok() &&
             plan.As<LaunchParams>().column_parts == 40,
         "each block of channels has a CTA, got " +
             std::to_string(plan.As<LaunchParams>().column_parts));
  // 196 blocks of tiles: two CTAs for each, which take 20 blocks of channels each.
  Expect(
      PlanOf(name, With("k64 i224x224 f3x3 o224x224", "k1248 i112x112 f3x3 o112x112", kSeedLayer),
             &plan)
              .ok() &&
          plan.As<LaunchParams>().column_parts == 2,
      "parts fill the GPU once");
  Expect(!PlanOf("fprop_winograd_f16_2x2_pkf_shmem_16x32",
                 With("c64 k64", "c416 k1300000", kSeedLayer), &plan)
              .ok(),
         "U beyond 32-bit offsets");
  Expect(!PlanOf("fprop_winograd_f16_2x2_sync_free_32x64_16x16x16",
                 With("c64", "c67108864",
                      With("i224x224 f3x3 o224x224", "i4x4 f3x3 o4x4", kSeedLayer)),
                 &plan)
              .ok(),
         "V beyond 32-bit offsets");
  static_assert(winograd::FusedInputBytes(6, 16, 33) == 36 * 16 * 64 * 2);
  static_assert(winograd::ExchangeBytes(4, 32, 32) == 32 << 10);
  // Predictions order the seed's kernels as the seed does on its workload.
  auto microseconds = [&](const char* kernel) {
    Expect(PlanOf(std::string("fprop_winograd_f16_") + kernel, kSeedLayer, &plan).ok(), kernel);
    return plan.microseconds;
  };
  const double fused = microseconds("2x2_pkf_shmem_16x32");
  const double four_stages = microseconds("2x2_four_stage_128x128x64");
  Expect(fused < four_stages && four_stages < microseconds("2x2_elementwise_8x16"),
         "fused in front of four stages, element by element last");
}

void TestSelection() {
  const ConvProblem layer = Parse(
      "fprop f16:f16:f16 default b1 n32 g1 c512 k512 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1");
  const Gpu a100 = Model("a100");
  auto selected = [&](const std::string& algorithm) {
    Selection selection;
    Expect(Select(layer, a100, algorithm, &selection).ok(), algorithm);
    return selection;
  };
  for (const char* algorithm : {"auto", "native"}) {
    const Selection selection = selected(algorithm);
    Expect(selection.instance.find("winograd") == std::string::npos,
           std::string(algorithm) + " chooses " + selection.instance);
    for (const Refusal& refusal : selection.refusals) {
      Expect(refusal.kernel.find("winograd") == std::string::npos,
             "instances on request are not among the refusals: " + refusal.kernel);
    }
  }
  Expect(selected("winograd").instance.find("fprop_winograd_f16_") == 0, "the family");
  Expect(selected("winograd_f2x2").instance.find("fprop_winograd_f16_2x2_") == 0, "F(2x2)");
  Expect(selected("winograd_f4x4").instance.find("fprop_winograd_f16_4x4_") == 0, "F(4x4)");
  Expect(selected("winograd_f6x6").instance.find("fprop_winograd_f16_6x6_") == 0, "F(6x6)");
  Selection row;
  Expect(Select(layer, Model("h200"), "winograd_f4x3", &row).ok() &&
             row.instance == "fprop_winograd_f16_4x3_fused_row_64x128x64",
         "F(4, 3) along W");
  Selection refused;
  Expect(Select(layer, a100, "winograd_f4x3", &refused).ok() && refused.instance.empty(),
         "which takes wgmma");
  const char* name = "fprop_winograd_f16_4x4_four_stage_64x64x64";
  Expect(selected(name).instance == name, name);
  Selection none;
  Expect(Select(Parse(With("f3x3 o13x15", "f1x3 o15x15")), a100, "winograd_f4x4", &none).ok() &&
             none.instance.empty() && !none.refusals.empty(),
         "an alias refuses with reasons");
  Selection unknown;
  const Status status = Select(layer, a100, "winograd_f3x3", &unknown);
  Expect(status.message().find("winograd_f4x4") != std::string::npos, status.message());
  Expect(!Select(layer, a100, "", &unknown).ok(), "no name is no alias");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestRefusals();
  jaxconv::TestGeometry();
  jaxconv::TestWorkspace();
  jaxconv::TestFusedRow();
  jaxconv::TestPingpong();
  jaxconv::TestHalfProducts();
  jaxconv::TestMeasured();
  jaxconv::TestCapacities();
  jaxconv::TestFusedPlan();
  jaxconv::TestSelection();
  std::printf("winograd_plan_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
