// Models of GPUs: products are found by name, other GPUs by compute capability.
#include "cuda/common/gpu.h"

#include <cstdio>
#include <string>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/common/predicted_time.h"

namespace jaxconv {
namespace {

Gpu Present(const char* name, int major, int minor, double clock_ghz, double dram_bytes_per_us) {
  Gpu gpu;
  gpu.name = name;
  gpu.cc_major = major;
  gpu.cc_minor = minor;
  gpu.sm_count = 132;
  FillRates(clock_ghz, dram_bytes_per_us, &gpu);
  return gpu;
}

void TestTargets() {
  for (const char* target : {"a100", "l40s", "rtx4090", "h100", "h200", "b200", "sm_80", "sm_86",
                             "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"}) {
    const Gpu gpu = Model(target);
    Expect(gpu.sm_count > 0 && gpu.smem_per_block_optin >= 99 << 10 && gpu.l2_bytes > 0 &&
               gpu.clock_ghz > 1 && gpu.dram_bytes_per_us > 1e5 && gpu.launch_us > 0 &&
               gpu.mma_sync_per_clock > 0,
           std::string(target) + " has all its rates");
    Expect((gpu.wgmma_per_clock > 0) == (gpu.compute_capability() == 90),
           std::string(target) + ": wgmma is of sm_90 alone");
  }
  Expect(Model("sm_90a").compute_capability() == 90, "the suffix changes nothing");
  Expect(Model("h200").measured && !Model("a100").measured, "what was measured is marked");
  Expect(Model("sm_91").compute_capability() == 91 && Model("sm_91").sm_count == 132,
         "an unknown capability has the nearest part below");
  Expect(Model("sm_75").sm_count == Model("a100").sm_count, "anything older is as the oldest");
  Gpu gpu;
  for (const char* target : {"", "sm_", "sm_90b", "sm_x", "h300", "90"}) {
    Expect(!ModelOf(target, &gpu), std::string("'") + target + "' is no target");
  }
}

void TestPresent() {
  const Gpu h200 = Present("NVIDIA H200", 9, 0, 1.1, 1e6);
  Expect(h200.measured && h200.clock_ghz == Model("h200").clock_ghz &&
             h200.dram_bytes_per_us == Model("h200").dram_bytes_per_us,
         "a known product has its own rates, whatever the driver reports");
  const Gpu other = Present("NVIDIA GeForce RTX 4060", 8, 9, 2.46, 272e3);
  Expect(!other.measured && other.clock_ghz == 2.46 && other.dram_bytes_per_us < 272e3 &&
             other.mma_sync_per_clock == Model("rtx4090").mma_sync_per_clock,
         "another product has its capability's rates at the driver's clock and bandwidth");
  const Gpu silent = Present("NVIDIA Something", 8, 0, 0, 0);
  Expect(silent.clock_ghz == Model("a100").clock_ghz,
         "a driver that does not tell changes nothing");
  Expect(h200.product == "h200" && other.product == "l40s" && silent.product == "a100",
         "the rates are of a line of gpus.def");
}

void TestCalibration() {
  auto says = [](const Gpu& gpu, const char* text) {
    const std::string found = CalibrationOf(gpu);
    Expect(found.find(text) != std::string::npos, found + " lacks " + text);
  };
  says(Present("NVIDIA H200", 9, 0, 0, 0), "fitted to times of this GPU");
  Gpu fewer = Present("NVIDIA H200", 9, 0, 0, 0);
  fewer.sm_count = 66;
  says(fewer, "h200.def, scaled by this GPU's rates (0.50 x the SMs, 1.00 x the clock");
  // An H100 may have its own file.
  const std::string of_h100 = CalibrationOf(Present("NVIDIA H100 80GB HBM3", 9, 0, 0, 0));
  Expect(of_h100 == "h100.def, fitted to times of this GPU" ||
             of_h100.find("h200.def, scaled by this GPU's rates (1.00 x the SMs, 1.01 x the "
                          "clock, 0.70 x the memory rate)") == 0,
         of_h100);
  says(Model("a100"), "0.82 x the SMs");
  says(Model("a100"), "no GPU of this architecture was measured");
  Expect(CalibrationOf(Model("h100")).find("architecture") == std::string::npos,
         "an H100 has the architecture of the H200");
}

void TestForms() {
  const char* const names[] = {"igemm_wgmma", "fprop, dgrad", "16-bit"};
  auto line = [&](const char* target) {
    return FindFormTime(names[0], names[1], names[2], Model(target));
  };
  Expect(line("a100") == line("h200") && line("h200") != nullptr,
         "a GPU without a file has the H200's lines");
  const Gpu a100 = Model("a100"), h100 = Model("h100");
  Expect(FindFormTime("igemm_wmma", "wgrad", "16-bit", a100) ==
             FindFormTime("igemm_wmma", "wgrad", "tf32", a100),
         "LIKE names the line of another form");
  Expect(FindFormTime("igemm_wmma", "wgrad", "16-bit", h100) ==
             FindFormTime("igemm_wmma", "wgrad", "tf32", h100),
         "and of the GPU's own file");
  Expect(FindFormTime("igemm_wgmma", "fprop", "16-bit", h100) == nullptr, "there is no such form");
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestTargets();
  jaxconv::TestPresent();
  jaxconv::TestCalibration();
  jaxconv::TestForms();
  std::printf("gpu_test: %d failures\n", jaxconv::failures);
  return jaxconv::failures != 0;
}
