// The GPU model with which every family predicts microseconds, so that selection can compare
// families with each other and with XLA's convolution.
#ifndef JAXCONV_CUDA_COMMON_GPU_H_
#define JAXCONV_CUDA_COMMON_GPU_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace jaxconv {

struct Gpu {
  std::string name;
  std::string_view product;  // the target name of the line in calibration/gpus.def with its rates
  int cc_major = 0, cc_minor = 0;
  int sm_count = 0;
  int64_t smem_per_block_optin = 0;  // bytes
  int64_t l2_bytes = 0;

  double clock_ghz = 1;            // boost
  double dram_bytes_per_us = 1e6;  // in a large copy, bytes read and written
  // Time from the end of a kernel to the start of the next, if the host runs ahead of the stream.
  double launch_us = 1;
  // Multiply-adds per clock and SM: FP32 FMA; 16-bit operands through mma.sync; 16-bit operands
  // through wgmma (0 if the GPU has none). TF32 operands run at half the rate of 16-bit ones.
  double fma_per_clock = 0, mma_sync_per_clock = 0, wgmma_per_clock = 0;
  bool measured = false;  // rates measured by this project; otherwise from the data sheet

  int compute_capability() const { return cc_major * 10 + cc_minor; }
  double cycles_per_us() const { return clock_ghz * 1e3; }
  double dram_bytes_per_cycle() const { return dram_bytes_per_us / cycles_per_us(); }  // all SMs
};

// The model of a product ("h200", "a100", ...; see gpu.cc) or of a capability ("sm_90", "sm_90a":
// its usual data-centre part). Returns false if `target` is neither.
bool ModelOf(std::string_view target, Gpu* gpu);

// Fills the rates of a present GPU, whose name and limits the driver has reported: those of a known
// product by name, otherwise those of the nearest capability, scaled to the clock and DRAM
// bandwidth from the driver (0: unknown).
void FillRates(double driver_clock_ghz, double driver_dram_bytes_per_us, Gpu* gpu);

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_GPU_H_
