// Plans of family winograd_int8 on modelled GPUs: refusals, geometry, workspace, products,
// selection.
#include <cstdio>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/registry.h"
#include "cuda/select.h"
#include "cuda/winograd_int8/params.h"
#include "cuda/winograd_int8/plan.h"

namespace jaxconv {
namespace {

using winograd_int8::LaunchParams;
using winograd_int8::Rows;

constexpr const char* kLayer =
    "fprop s8:s8:s8 default b1 n2 g1 c64 k96 i13x15 f3x3 o13x15 s1x1 l1x1 d1x1 p1_1x1_1 packed "
    "scale";
constexpr const char* kName = "fprop_winograd_int8_s8_4x4_four_stage";

// The key with one part replaced.
std::string With(const std::string& part, const std::string& other, std::string key = kLayer) {
  const size_t at = key.find(part);
  Expect(at != std::string::npos, "no '" + part + "' in " + key);
  return key.replace(at, part.size(), other);
}

Status PlanOf(const std::string& name, const std::string& key, Plan* plan) {
  const KernelDesc* kernel = FindKernel(name);
  if (kernel == nullptr) return Status::Internal("no kernel " + name);
  return kernel->plan(*kernel, Parse(key), Model("h200"), 0, plan);
}

void TestRefusals() {
  auto refused = [&](const std::string& key, const std::string& reason) {
    Plan plan;
    const Status status = PlanOf(kName, key, &plan);
    Expect(!status.ok() && status.message() == reason, key + ": " + status.message());
  };
  refused(With("s8:s8:s8", "u8:s8:s8"), "expected operands of type s8 and s8, got u8 and s8");
  refused(With("f3x3 o13x15", "f1x3 o15x15"), "expected a 3x3 filter, extent 3, got 1");
  refused(With("o13x15 s1x1", "o7x15 s2x1"), "expected stride 1, got 2");
  refused(With("i13x15 f3x3 o13x15 s1x1 l1x1", "i13x8 f3x3 o13x15 s1x1 l1x2"),
          "expected no lhs_dilation, got 2");
  refused(With("o13x15 s1x1 l1x1 d1x1", "o13x13 s1x1 l1x1 d1x2"), "expected no dilation, got 2");
  refused(With("g1", "g2"), "expected one group, got 2");
  refused(With("c64", "c48"), "expected C in multiples of 32, got 48");
  refused(With("k96", "k80"), "expected K in multiples of 32, got 80");
  refused("fprop s8:s8:s8 default b1 n2 g1 c64 k96 i15 f3 o15 s1 l1 d1 p1_1 packed",
          "expected 2 spatial axes, got 1");
}

// The rows of a pass fit in the CTA, all words are covered, and lanes are a multiple of eight.
void ExpectCovered(const Rows& rows, int64_t count, int64_t channels, int64_t most) {
  const int64_t lanes = rows.lanes.divisor;
  const std::string what = std::to_string(channels) + " channels: ";
  Expect(rows.rows == count && int64_t{rows.ctas()} * rows.rows_of_cta >= count, what + "rows");
  Expect(rows.words * 4 == channels && lanes * rows.passes >= rows.words, what + "words");
  Expect(lanes % 8 == 0 && rows.threads() <= most && rows.rows_of_cta <= winograd_int8::kMaxRows &&
             rows.rows_of_cta * lanes <= rows.threads(),
         what + "threads");
}

void TestGeometry() {
  for (const int64_t channels : {32, 64, 96, 512, 544, 1280, 1312, 2048, 4096}) {
    const std::string key = With("c64", "c" + std::to_string(channels));
    for (const int m : {2, 4}) {
      const std::string name = With("4x4", m == 2 ? "2x2" : "4x4", kName);
      Plan plan;
      const Status status = PlanOf(name, key, &plan);
      Expect(status.ok(), status.message());
      if (!status.ok()) return;
      const auto& launch = plan.As<LaunchParams>();
      const int64_t tiles = m == 2 ? 2 * 7 * 8 : 2 * 4 * 4, points = (m + 2) * (m + 2);
      ExpectCovered(launch.input.rows, tiles, channels, m == 2 ? 512 : 320);
      ExpectCovered(launch.filter.rows, 96, channels, m == 2 ? 512 : 320);
      const bool once = channels <= (m == 2 ? 2048 : 1280);
      Expect((launch.input.rows.passes == 1) == once, key + ": passes");
      // The workspace holds V, its scales, U, its scales, and M, in this order.
      Expect(launch.v_scale - launch.v >= tiles * points * channels &&
                 launch.u - launch.v_scale >= tiles * points * 4 &&
                 launch.u_scale - launch.u >= points * 96 * channels &&
                 launch.m - launch.u_scale >= points * 96 * 4 &&
                 plan.workspace_bytes - launch.m >= tiles * points * 96 * 2,
             key + ": workspace");
      // The power of two is the largest that keeps every sum of products within 2^15.
      const double largest = 128.0 * 128.0 * static_cast<double>(channels);
      Expect(largest * launch.filter.exponent <= 32768 &&
                 (launch.filter.exponent == 1 || largest * launch.filter.exponent * 2 > 32768) &&
                 launch.filter.exponent * launch.input.exponent == 1,
             key + ": exponent");
      const auto& products = launch.products;
      Expect(products.rows == tiles && products.columns == 96 && products.points == points &&
                 products.k_blocks == (channels + 127) / 128 && products.tiles == points &&
                 products.m_point == tiles * 96 && launch.products_ctas == 2 * products.tiles,
             key + ": products");
    }
  }
}

void TestSelection() {
  Selection selected;
  for (const char* algorithm : {"auto", "native"}) {
    Expect(Select(Parse(kLayer), Model("h200"), algorithm, &selected).ok() &&
               selected.instance.find("winograd") == std::string::npos,
           std::string(algorithm) + " takes " + selected.instance);
  }
  Expect(Select(Parse(kLayer), Model("h200"), "winograd_int8", &selected).ok() &&
             selected.instance.rfind("fprop_winograd_int8_s8_", 0) == 0,
         "the family by name takes " + selected.instance);
  Expect(Select(Parse(kLayer), Model("a100"), "winograd_int8", &selected).ok() &&
             selected.instance.empty() && !selected.refusals.empty(),
         "an A100 has no wgmma");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestRefusals();
  jaxconv::TestGeometry();
  jaxconv::TestSelection();
  std::printf("winograd_int8_plan_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
