// Rates of an SM that the plans of several families use: architecture facts, and measured rates.
#ifndef JAXCONV_CUDA_COMMON_RATES_H_
#define JAXCONV_CUDA_COMMON_RATES_H_

#include <cstdint>

namespace jaxconv {

constexpr int64_t kLanes = 32;            // threads of a warp
constexpr int64_t kSchedulers = 4;        // of an SM; each issues one instruction of a warp a cycle
constexpr int64_t kProductsOfMma = 2048;  // multiply-adds of mma.sync m16n8k16
constexpr int64_t kFloatBytes = 4;
constexpr int64_t kMmaRows = 16, kMmaColumns = 8;       // of mma.sync m16n8k16
constexpr int64_t kWgmmaRows = 64, kWgmmaReduced = 16;  // of wgmma m64nNk16
constexpr int64_t kChunkBytes = 16;                     // of a copy or a store of a thread
constexpr int64_t ProductsOf(bool three_tf32) { return three_tf32 ? 3 : 1; }  // for one of float32
constexpr int64_t kLineBytes = 128, kSectorBytes = 32;  // of L2, and of a transfer to it

// Shared memory, bytes a cycle; a kernel that does nothing else reaches 127.7
// (notes/igemm_wmma.md).
constexpr int64_t kSharedBytesPerCycle = 128;
// L2 for rows of tiles that many SMs read at about the same time, bytes a cycle and SM: measured 43
// to 55 (notes/igemm_wmma.md).
constexpr double kTileL2BytesPerCycle = 43;
// L2 for other reads, relative to DRAM: 5.5 and 4.3 TB/s on an H200.
constexpr double kL2Rate = 1.28;
// Elementwise kernels and transforms around a convolution, relative to a large copy's DRAM rate:
// 0.75 to 0.9 for Winograd's (notes/winograd.md), 0.92 for XLA's.
constexpr double kPassShare = 0.83;
// Partial sums of split-K, which mostly stay in L2, written or read, bytes a cycle and SM. Fitted.
constexpr double kPartialBytesPerCycle = 15;
// Results of an SM through shared memory to global memory, and the loads and stores of a pass,
// bytes a cycle: half of an H200's SMs reach its DRAM rate. Fitted.
constexpr double kStoreBytesPerCycle = 32;
// Cycles of an SM for a warp's copy of one chunk a lane: addresses, masks and cp.async. Instances
// of igemm_wmma that copy 4 and 8 bytes at a time reach 0.27 and 0.5 of the tensor cores' rate.
constexpr double kWarpCopyCycles = 8;
// Instructions of a warp that copies 16 bytes for each lane into shared memory by cp.async (14 and
// 22 in the SASS of two families for sm_90), and that requantises and stores an output for each
// lane.
constexpr double kCopyInstructions = 18, kRequantizeInstructions = 8;
// Cycles in which a CTA fills its pipeline: decoding the tile's rows, and a DRAM latency. Resident
// CTAs hide each other's. Fitted to igemm_wmma.
constexpr double kTileLatency = 4000;
// The time of a single CTA on an SM relative to that of one among several, which hide each other's
// waits. Fitted to block_diagonal.
constexpr double kAlone = 1.3;
// What bytes cost beside their number where written ones exceed the L2, and where lines are written
// or read in parts: XLA's pointwise 64 -> 256 channels on 128x56x56 takes 74.0 us, 256 -> 64 takes
// 63.6. Fitted.
constexpr double kWrittenExcess = 0.3;

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_RATES_H_
