#include "cuda/common/gpu.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace jaxconv {
namespace {

struct Product {
  const char* target;   // the user's name for it
  const char* in_name;  // part of the driver's name
  int cc_major, cc_minor, sm_count;
  int64_t smem_kib, l2_mib;
  double clock_ghz, dram_tb_s, launch_us, mma_sync, wgmma;
  bool measured;
};

// The first line of each capability is its usual part. The data sheets state peak DRAM rates; a
// large copy reaches 0.9 of an H200's 4.8 TB/s and of an H100's 3.35, and the model assumes 0.9 for
// all. mma.sync on Hopper issues m16n8k16 every 1.5 clocks, two thirds of wgmma's throughput. The
// launch time was measured on an H200 and is assumed for all.
constexpr double kCopyShare = 0.9;
constexpr double kLaunchUs = 1.7;
constexpr Product kProducts[] = {
    {"a100", "A100", 8, 0, 108, 163, 40, 1.41, 2.039, kLaunchUs, 1024, 0, false},
    {"sm_86", "RTX 3090", 8, 6, 82, 99, 6, 1.70, 0.936, kLaunchUs, 512, 0, false},
    {"sm_87", "Orin", 8, 7, 16, 163, 4, 1.30, 0.205, kLaunchUs, 1024, 0, false},
    {"l40s", "L40S", 8, 9, 142, 99, 96, 2.52, 0.864, kLaunchUs, 512, 0, false},
    {"rtx4090", "RTX 4090", 8, 9, 128, 99, 72, 2.52, 1.008, kLaunchUs, 512, 0, false},
    {"h100", "H100", 9, 0, 132, 227, 50, 1.98, 3.35, kLaunchUs, 1365, 2048, false},
    {"h200", "H200", 9, 0, 132, 227, 60, 1.97, 4.8, kLaunchUs, 1365, 2048, true},
    {"b200", "B200", 10, 0, 148, 227, 126, 1.97, 8.0, kLaunchUs, 1024, 0, false},
    {"sm_120", "RTX 5090", 12, 0, 170, 99, 96, 2.41, 1.792, kLaunchUs, 512, 0, false},
};

void SetRates(const Product& product, Gpu* gpu) {
  gpu->clock_ghz = product.clock_ghz;
  gpu->dram_bytes_per_us = product.dram_tb_s * 1e6 * kCopyShare;
  gpu->launch_us = product.launch_us;
  gpu->fma_per_clock = product.cc_major == 8 && product.cc_minor == 0 ? 64 : 128;
  gpu->mma_sync_per_clock = product.mma_sync;
  gpu->wgmma_per_clock = product.wgmma;
  gpu->measured = product.measured;
}

Gpu Model(const Product& product) {
  Gpu gpu;
  gpu.name = product.target;
  gpu.cc_major = product.cc_major;
  gpu.cc_minor = product.cc_minor;
  gpu.sm_count = product.sm_count;
  gpu.smem_per_block_optin = product.smem_kib << 10;
  gpu.l2_bytes = product.l2_mib << 20;
  SetRates(product, &gpu);
  return gpu;
}

// The usual part of the nearest capability at or below; the oldest for anything older.
const Product& Nearest(int compute_capability) {
  const Product* best = &kProducts[0];
  for (const Product& product : kProducts) {
    const int capability = product.cc_major * 10 + product.cc_minor;
    if (capability <= compute_capability && capability > best->cc_major * 10 + best->cc_minor) {
      best = &product;
    }
  }
  return *best;
}

}  // namespace

bool ModelOf(std::string_view target, Gpu* gpu) {
  for (const Product& product : kProducts) {
    if (target == product.target) {
      *gpu = Model(product);
      return true;
    }
  }
  constexpr std::string_view kPrefix = "sm_";
  if (target.substr(0, kPrefix.size()) != kPrefix) return false;
  const std::string_view digits = target.substr(kPrefix.size());
  int capability = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), capability);
  const std::string_view rest(end, digits.data() + digits.size() - end);
  if (error != std::errc() || !(rest.empty() || rest == "a") || capability < 10) return false;
  *gpu = Model(Nearest(capability));
  gpu->name = "portable sm_" + std::to_string(capability);
  gpu->cc_major = capability / 10;
  gpu->cc_minor = capability % 10;
  return true;
}

void FillRates(double driver_clock_ghz, double driver_dram_bytes_per_us, Gpu* gpu) {
  const auto named =
      std::find_if(std::begin(kProducts), std::end(kProducts), [gpu](const Product& product) {
        return gpu->name.find(product.in_name) != std::string::npos &&
               gpu->cc_major == product.cc_major && gpu->cc_minor == product.cc_minor;
      });
  if (named != std::end(kProducts)) {
    SetRates(*named, gpu);
    return;
  }
  SetRates(Nearest(gpu->compute_capability()), gpu);
  gpu->measured = false;
  if (driver_clock_ghz > 0) gpu->clock_ghz = driver_clock_ghz;
  if (driver_dram_bytes_per_us > 0) gpu->dram_bytes_per_us = driver_dram_bytes_per_us * kCopyShare;
}

}  // namespace jaxconv
