// One model of a GPU, on which every family predicts microseconds and by which selection compares
// them with each other and with XLA's convolution.
#ifndef JAXCONV_CUDA_COMMON_GPU_H_
#define JAXCONV_CUDA_COMMON_GPU_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace jaxconv {

struct Gpu {
  std::string name;
  int cc_major = 0, cc_minor = 0;
  int sm_count = 0;
  int64_t smem_per_block_optin = 0;  // bytes
  int64_t l2_bytes = 0;

  double clock_ghz = 1;            // boost
  double dram_bytes_per_us = 1e6;  // of a large copy, bytes read and written
  // From the end of a kernel to the start of the next in a stream whose host is ahead.
  double launch_us = 1;
  // Multiply-adds per clock and SM: of FP32 FMA, of 16-bit operands through mma.sync, and through
  // wgmma (0 where the GPU has none). TF32 operands run at half the rate of 16-bit ones.
  double fma_per_clock = 128, mma_sync_per_clock = 0, wgmma_per_clock = 0;
  bool measured = false;  // rates measured by this project; else from the vendor's data sheet

  int compute_capability() const { return cc_major * 10 + cc_minor; }
  double cycles_per_us() const { return clock_ghz * 1e3; }
  double dram_bytes_per_cycle() const { return dram_bytes_per_us / cycles_per_us(); }  // all SMs
};

// The model of a product ("h200", "a100", ...; see gpu.cc) or of a capability ("sm_90", "sm_90a":
// its usual data-centre part). False where `target` is neither.
bool ModelOf(std::string_view target, Gpu* gpu);

// Fills the rates of a GPU that is present, whose name and limits were asked of the driver: a known
// product's by name, else those of the nearest capability, scaled to the clock and the DRAM
// bandwidth that the driver reports (0: unknown).
void FillRates(double driver_clock_ghz, double driver_dram_bytes_per_us, Gpu* gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_GPU_H_
