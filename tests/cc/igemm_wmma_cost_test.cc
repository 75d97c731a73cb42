// Properties of igemm_wmma's terms that do not depend on their constants.
#include <cmath>
#include <cstdio>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/igemm_wmma/cost.h"

namespace jaxconv::igemm_wmma {
namespace {

TileCost Tile128() {
  TileCost tile;
  tile.tile_m = tile.tile_n = 128;
  tile.tile_k_bytes = 128;
  tile.warps_m = tile.warps_n = 2;
  tile.ctas_per_sm = 2;
  tile.shared_bytes = 3 * 256 * 128;
  return tile;
}

// At full rates.
double PredictMicroseconds(const TileCost& tile, const TiledWork& work, const Gpu& gpu) {
  return PredictedMicroseconds(TermsOf(tile, work, gpu), FormTime{"", "", "", 1, 1, 0});
}

TiledWork Work(int64_t ctas, double blocks) {
  TiledWork work;
  work.ctas = ctas;
  work.blocks = blocks;
  work.dram_bytes = 1e6;
  return work;
}

void TestResidence() {
  const TileCost tile = Tile128();
  Expect(ResidentCtas(tile, Model("h200")) == 2, "two CTAs of 96 KB fit into 227 KB");
  Expect(ResidentCtas(tile, Model("a100")) == 1, "one fits into 163 KB");
  Expect(ResidentCtas(tile, Model("sm_86")) == 1, "one fits into 99 KB");
  TileCost large = tile;
  large.shared_bytes = 3 * 384 * 128;
  Expect(ResidentCtas(large, Model("sm_86")) == 0, "144 KB do not fit into 99 KB");
}

void TestOrder() {
  const Gpu h200 = Model("h200"), a100 = Model("a100");
  const TileCost tile = Tile128();
  auto time = [&](int64_t ctas, double blocks) {
    return PredictMicroseconds(tile, Work(ctas, blocks), h200);
  };
  Expect(time(264, 100) < time(265, 100), "one CTA more than a wave costs");
  Expect(time(264, 100) == time(200, 100), "a wave costs as much as most of it");
  Expect(time(264, 100) < time(264, 200), "a longer reduction costs");
  Expect(time(264, 100) < PredictMicroseconds(tile, Work(264, 100), a100), "an A100 is slower");

  TiledWork wide = Work(264, 100);
  wide.element_bytes = 4;
  Expect(PredictMicroseconds(tile, wide, h200) > 0.9 * time(264, 100),
         "a stage of 32-bit operands holds half the products at half the rate");

  TiledWork memory = Work(264, 1);
  memory.dram_bytes = 4e9;
  Expect(std::abs(PredictMicroseconds(tile, memory, h200) / 930 - 1) < 0.05,
         "4 GB take 0.93 ms at the rate of an H200's memory, whatever the tiles");

  TiledWork split = Work(264, 50);
  split.partial_bytes = 1e8;
  Expect(PredictMicroseconds(tile, split, h200) > time(264, 50), "partial results cost");
}

}  // namespace
}  // namespace jaxconv::igemm_wmma

int main() {
  jaxconv::igemm_wmma::TestResidence();
  jaxconv::igemm_wmma::TestOrder();
  std::printf("igemm_wmma_cost_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
