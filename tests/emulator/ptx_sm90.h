// The instructions of sm_90a: mbarriers, TMA, wgmma. See ptx.h.
#ifndef JAXCONV_TESTS_EMULATOR_PTX_SM90_H_
#define JAXCONV_TESTS_EMULATOR_PTX_SM90_H_

#include <algorithm>
#include <vector>

#include "cuda.h"
#include "ptx.h"

namespace emulator::ptx {

inline bool TryWait(uint32_t barrier, uint32_t parity) {
  MbarrierWait(barrier, parity);
  return true;
}

inline bool Elect(uint32_t mask) {
  OverLanes("elect.sync", mask, nullptr, [](void**) {});
  return (mask & ((1u << emulator::Lane()) - 1)) == 0;
}

// Swizzles of 128, 64 and 32 bytes XOR the index of a 16-byte chunk with higher address bits.
inline uint32_t Swizzled(uint32_t address, uint32_t swizzle_bytes) {
  return swizzle_bytes == 0 ? address : address ^ ((address >> 7 & (swizzle_bytes / 16 - 1)) << 4);
}

// Rounds 32 bits to TF32 as TMA does: to nearest, ties to even.
inline uint32_t RoundedToTf32(uint32_t bits) {
  if ((bits & 0x7f800000) == 0x7f800000) return bits;
  return (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000;
}

// Moves a box between shared memory and a tensor, 16 bytes at a time. `row(i, from)` returns
// whether row i of the box lies inside the tensor in all dimensions but the innermost, and its
// address.
template <bool kStore, typename Row>
void MoveRows(const TensorMap& map, uint32_t shared, int rows, uint32_t row_bytes,
              int64_t first_byte, Row row) {
  const int64_t extent =
      map.interleaved ? row_bytes : static_cast<int64_t>(map.extent[0]) * map.element_bytes;
  for (int i = 0; i < rows; ++i) {
    uint64_t address = 0;
    const bool inside = row(i, &address);
    for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
      unsigned char* at =
          Shared(Swizzled(shared + i * row_bytes + byte, map.swizzle_bytes), 16, 16);
      if (!kStore) std::memset(at, 0, 16);
      if (!inside) continue;
      for (int e = 0; e < 16; e += map.element_bytes) {
        const int64_t from = first_byte + byte + e;
        if (from < 0 || from >= extent) continue;
        auto* element = reinterpret_cast<unsigned char*>(address) + from;
        if (kStore) {
          std::memcpy(element, at + e, map.element_bytes);
        } else if (map.rounds_to_tf32) {
          uint32_t bits;
          std::memcpy(&bits, element, 4);
          bits = RoundedToTf32(bits);
          std::memcpy(at + e, &bits, 4);
        } else {
          std::memcpy(at + e, element, map.element_bytes);
        }
      }
    }
  }
}

struct BoxCopy {
  TensorMap map;
  int rank;
  int32_t at[5], offset[3];
};
template <bool kStore>
void MoveTile(const BoxCopy& copy, uint32_t shared) {
  const TensorMap& map = copy.map;
  int rows = 1;
  for (int i = 1; i < copy.rank; ++i) rows *= map.box[i];
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  MoveRows<kStore>(map, shared, rows, row_bytes, int64_t{copy.at[0]} * map.element_bytes,
                   [&](int row, uint64_t* address) {
                     *address = map.address;
                     bool inside = true;
                     for (int i = 1; i < copy.rank; ++i) {
                       const int64_t at = int64_t{copy.at[i]} + row % map.box[i];
                       row /= map.box[i];
                       inside = inside && at >= 0 && at < map.extent[i];
                       *address += at * map.stride[i];
                     }
                     return inside;
                   });
}
inline void MoveIm2col(const BoxCopy& copy, uint32_t shared) {
  const TensorMap& map = copy.map;
  // Spatial dimensions start at 1. In interleaved maps they start at 0, and the last but one is the
  // channel block.
  const int spatial = copy.rank - 2, first = map.interleaved ? 0 : 1;
  int64_t base[3] = {}, image = copy.at[copy.rank - 1];
  for (int i = 0; i < spatial; ++i) {
    base[i] = copy.at[first + i];
    if (base[i] < map.lower[i] || base[i] >= int64_t{map.extent[first + i]} + map.upper[i]) {
      Fail("im2col: a base pixel %lld along axis %d outside of the box", (long long)base[i], i);
    }
  }
  MoveRows<false>(map, shared, map.box[1], map.box[0],
                  map.interleaved ? 0 : int64_t{copy.at[0]} * map.element_bytes,
                  [&](int, uint64_t* address) {
                    bool inside = image >= 0 && image < map.extent[copy.rank - 1];
                    *address = map.address + image * map.stride[copy.rank - 1];
                    for (int i = 0; i < spatial; ++i) {
                      const int64_t at = base[i] + copy.offset[i];
                      inside = inside && at >= 0 && at < map.extent[first + i];
                      *address += at * map.stride[first + i];
                    }
                    if (map.interleaved) {
                      inside = inside && copy.at[spatial] >= 0 &&
                               copy.at[spatial] < static_cast<int64_t>(map.extent[spatial]);
                      *address += copy.at[spatial] * map.stride[spatial];
                    }
                    for (int i = 0; i < spatial; ++i) {
                      base[i] += map.step[first + i];
                      if (base[i] < int64_t{map.extent[first + i]} + map.upper[i]) return inside;
                      base[i] = map.lower[i];
                    }
                    ++image;
                    return inside;
                  });
}

template <size_t kRank>
BoxCopy BoxOf(uint64_t map, const Registers<kRank>& at, bool im2col) {
  BoxCopy copy{};
  if (map % 64 != 0) Fail("a tensor map that is not aligned to 64 bytes");
  copy.map = MapOf(*reinterpret_cast<const CUtensorMap*>(map));
  if (!copy.map.valid || copy.map.rank != kRank || copy.map.im2col != im2col) {
    Fail("a %s copy of rank %zu through a tensor map of another kind", im2col ? "im2col" : "tiled",
         kRank);
  }
  copy.rank = kRank;
  for (size_t i = 0; i < kRank; ++i) copy.at[i] = at.Get(static_cast<int>(i));
  if (!copy.map.interleaved && copy.at[0] * copy.map.element_bytes % 16 != 0) {
    Fail("TMA: a box that begins at element %d of %d bytes", copy.at[0], copy.map.element_bytes);
  }
  return copy;
}

// Issues move(address) for this CTA, or for the CTAs of `ctas`, and adds its bytes to the mbarrier.
template <typename Move>
void CopyToCluster(uint32_t shared, uint32_t barrier, uint32_t bytes, int64_t ctas, Move move) {
  if (shared % 128 != 0 && bytes % 128 == 0) Fail("TMA: shared address 0x%x", shared);
  for (int rank = 0; rank < 16; ++rank) {
    if (ctas >= 0 && (ctas >> rank & 1) == 0) continue;
    if (ctas < 0 && rank > 0) break;
    const uint32_t to = ctas < 0 ? InCluster(shared) : MapToRank(shared, rank);
    const uint32_t signal = ctas < 0 ? InCluster(barrier) : MapToRank(barrier, rank);
    Later([=] {
      move(to);
      MbarrierComplete(signal, bytes);
    });
  }
}
template <size_t kRank>
void CopyTile(uint32_t shared, uint64_t map, const Registers<kRank>& at, uint32_t barrier,
              int64_t ctas = -1) {
  const BoxCopy copy = BoxOf(map, at, false);
  uint32_t bytes = copy.map.element_bytes;
  for (size_t i = 0; i < kRank; ++i) bytes *= copy.map.box[i];
  CopyToCluster(shared, barrier, bytes, ctas, [=](uint32_t to) { MoveTile<false>(copy, to); });
}
template <size_t kRank, size_t kOffsets>
void CopyIm2col(uint32_t shared, uint64_t map, const Registers<kRank>& at, uint32_t barrier,
                const Registers<kOffsets>& offsets, int64_t ctas = -1) {
  static_assert(kOffsets + 2 == kRank);
  BoxCopy copy = BoxOf(map, at, true);
  const int limit = kRank == 3 ? 65535 : kRank == 4 ? 255 : 31;
  for (size_t i = 0; i < kOffsets; ++i) {
    copy.offset[i] = offsets.Get(static_cast<int>(i)) & 0xffff;
    if (copy.offset[i] > limit) Fail("im2col: an offset of %d", copy.offset[i]);
  }
  CopyToCluster(shared, barrier, copy.map.box[0] * copy.map.box[1], ctas,
                [=](uint32_t to) { MoveIm2col(copy, to); });
}
template <size_t kRank>
void StoreTile(uint64_t map, const Registers<kRank>& at, uint32_t shared) {
  const BoxCopy copy = BoxOf(map, at, false);
  if (shared % 128 != 0) Fail("TMA: shared address 0x%x", shared);
  const uint32_t from = InCluster(shared);
  BulkStore([=] { MoveTile<true>(copy, from); });
}

// wgmma reads operands in chunks of 16 bytes: 16 bytes of one row's reduction (K-major), or 16
// bytes of rows at one index of the reduction (MN-major).
template <class Type, bool kMnMajor, typename Value>
void ReadOperand(uint64_t descriptor, int rows, Value* values) {
  constexpr int kOfChunk = 16 / Type::kBytes, kDepth = 32 / Type::kBytes;
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const auto layout = static_cast<int>(descriptor >> 62);
  const uint32_t width = layout == 0 ? 0 : 256 >> layout;  // 128, 64, 32
  if ((descriptor >> 49 & 7) != 0) Fail("wgmma: a base offset in a descriptor");
  const int of_row = static_cast<int>(width / 16);
  const int lines = kMnMajor ? kDepth : rows, chunks = (kMnMajor ? rows : kDepth) / kOfChunk;
  for (int line = 0; line < lines; ++line) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint32_t at = start + line / 8 * stride;
      if (kMnMajor && layout == 0) {
        at = start + line / 8 * leading + line % 8 * 16 + chunk * stride;
      } else if (kMnMajor) {
        at += line % 8 * width + chunk / of_row * leading + chunk % of_row * 16;
      } else if (layout == 0) {
        at += line % 8 * 16 + chunk * leading;
      } else {
        at += line % 8 * width + chunk * 16;
      }
      const unsigned char* bytes = Shared(Swizzled(at, width), 16, 16);
      for (int e = 0; e < kOfChunk; ++e) {
        const int of_chunk = chunk * kOfChunk + e;
        const int row = kMnMajor ? of_chunk : line, k = kMnMajor ? line : of_chunk;
        values[k * rows + row] = Type::Of(bytes + e * Type::kBytes);
      }
    }
  }
}

template <class TypeA, class TypeB, bool kFromRegisters, bool kMnMajorA, bool kMnMajorB,
          size_t kRegisters>
void RunWgmma(const WarpgroupOperation& operation) {
  using Sum = typename TypeA::Sum;
  constexpr int kDepth = 32 / TypeA::kBytes, kColumns = kRegisters * 2;
  std::vector<Sum> a(64 * kDepth), b(kColumns * kDepth), row(kColumns);
  ReadOperand<TypeB, kMnMajorB>(operation.b, kColumns, b.data());
  if constexpr (kFromRegisters) {
    for (int m = 0; m < 64; ++m) {
      for (int k = 0; k < kDepth; ++k) {
        const int byte = k * TypeA::kBytes;
        const uint32_t& word =
            operation.fragment[m / 16 * 32 + m % 8 * 4 + byte % 16 / 4][byte / 16 * 2 + m % 16 / 8];
        a[k * 64 + m] = TypeA::Of(reinterpret_cast<const unsigned char*>(&word) + byte % 4);
      }
    }
  } else {
    ReadOperand<TypeA, kMnMajorA>(operation.a, 64, a.data());
  }
  for (int m = 0; m < 64; ++m) {
    const auto accumulator = [&](int n) {
      const int thread = m / 16 * 32 + m % 8 * 4 + n % 8 / 2;
      return operation.accumulators[thread * kRegisters + n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
    };
    for (int n = 0; n < kColumns; ++n) {
      row[n] = 0;
      if (operation.accumulate) std::memcpy(&row[n], accumulator(n), 4);
    }
    for (int k = 0; k < kDepth; ++k) {
      const Sum factor = a[k * 64 + m];
      for (int n = 0; n < kColumns; ++n) row[n] += factor * b[k * kColumns + n];
    }
    for (int n = 0; n < kColumns; ++n) std::memcpy(accumulator(n), &row[n], 4);
  }
}
template <size_t kRegisters>
void IssueWgmma(void (*run)(const WarpgroupOperation&), const Registers<kRegisters>& d,
                const uint32_t* fragment, uint64_t a, uint64_t b, bool accumulate) {
  struct Lane {
    const Registers<kRegisters>* d;
    const uint32_t* fragment;
    WarpgroupOperation operation;
  };
  Lane mine{&d, fragment, {}};
  mine.operation.run = run;
  mine.operation.a = a;
  mine.operation.b = b;
  mine.operation.accumulate = accumulate;
  OverLanes("wgmma", kAllLanes, &mine, [](void** lanes) {
    int warp;
    WarpgroupOperation& operation =
        JoinWarpgroup(static_cast<const Lane*>(lanes[0])->operation, &warp);
    operation.accumulators.resize(128 * kRegisters);
    for (int i = 0; i < 32; ++i) {
      const Lane& lane = *static_cast<const Lane*>(lanes[i]);
      const int thread = warp * 32 + i;
      std::copy_n(lane.d->at, kRegisters, &operation.accumulators[thread * kRegisters]);
      if (lane.fragment != nullptr) std::copy_n(lane.fragment, 4, operation.fragment[thread]);
    }
    IssuedToWarpgroup();
  });
}

// d += a b. The trailing operands of the instruction are the signs (1) and, for 16-bit types,
// whether A and B are MN-major. Dispatches to a function for each combination.
template <class TypeA, class TypeB, size_t kRegisters>
void Wgmma(const Registers<kRegisters>& d, uint64_t a, uint64_t b, bool accumulate, int sign_a = 1,
           int sign_b = 1, int mn_major_a = 0, int mn_major_b = 0) {
  if (sign_a != 1 || sign_b != 1) Fail("wgmma: negated operands");
  const auto run = mn_major_a
                       ? (mn_major_b ? RunWgmma<TypeA, TypeB, false, true, true, kRegisters>
                                     : RunWgmma<TypeA, TypeB, false, true, false, kRegisters>)
                       : (mn_major_b ? RunWgmma<TypeA, TypeB, false, false, true, kRegisters>
                                     : RunWgmma<TypeA, TypeB, false, false, false, kRegisters>);
  IssueWgmma(run, d, nullptr, a, b, accumulate);
}
template <class TypeA, class TypeB, size_t kRegisters>
void Wgmma(const Registers<kRegisters>& d, const Registers<4>& a, uint64_t b, bool accumulate,
           int sign_a = 1, int sign_b = 1, int mn_major_b = 0) {
  if (sign_a != 1 || sign_b != 1) Fail("wgmma: negated operands");
  uint32_t fragment[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&fragment[i], a.at[i], 4);
  const auto run = mn_major_b ? RunWgmma<TypeA, TypeB, true, false, true, kRegisters>
                              : RunWgmma<TypeA, TypeB, true, false, false, kRegisters>;
  IssueWgmma(run, d, fragment, 0, b, accumulate);
}

}  // namespace emulator::ptx

#endif  // JAXCONV_TESTS_EMULATOR_PTX_SM90_H_
