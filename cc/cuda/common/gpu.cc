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
  double clock_ghz, dram_tb_s, fma, mma_sync, wgmma;
  bool measured;
};

// A large copy reaches this share of the peak DRAM rate: measured on an H200 and an H100, assumed for
// all.
constexpr double kCopyShare = 0.9;
// Microseconds; measured on an H200, assumed for all.
constexpr double kLaunchUs = 1.7;
constexpr Product kProducts[] = {
#define GPU(...) {__VA_ARGS__},
#include "cuda/calibration/gpus.def"
};

void SetRates(const Product& product, Gpu* gpu) {
  gpu->product = product.target;
  gpu->clock_ghz = product.clock_ghz;
  gpu->dram_bytes_per_us = product.dram_tb_s * 1e6 * kCopyShare;
  gpu->launch_us = kLaunchUs;
  gpu->fma_per_clock = product.fma;
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
