// PTX instructions as functions. A table in translate.py maps each instruction to its function.
// Registers are variables of the calling fiber.
#ifndef JAXCONV_TESTS_EMULATOR_PTX_H_
#define JAXCONV_TESTS_EMULATOR_PTX_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator.h"
#include "round.h"

namespace emulator::ptx {

using namespace emulator;

// An input operand of asm with constraint "r", "l", "h", "f" or "n".
template <char kConstraint, typename T>
auto Input(T value) {
  if constexpr (kConstraint == 'f') {
    static_assert(std::is_same_v<T, float>);
    return value;
  } else if constexpr (std::is_pointer_v<T>) {
    static_assert(kConstraint == 'l');
    return reinterpret_cast<uint64_t>(value);
  } else if constexpr (kConstraint == 'r') {
    static_assert(sizeof(T) <= 4);
    return static_cast<uint32_t>(value);
  } else if constexpr (kConstraint == 'h') {
    static_assert(sizeof(T) == 2);
    return static_cast<uint16_t>(value);
  } else {
    static_assert(kConstraint == 'n' || (kConstraint == 'l' && sizeof(T) == 8));
    return static_cast<int64_t>(value);
  }
}

// A list of registers, {...}.
template <size_t kCount>
struct Registers {
  void* at[kCount];
  int bytes[kCount];

  int32_t Get(int i) const {
    if (bytes[i] == 2) return *static_cast<uint16_t*>(at[i]);
    return *static_cast<int32_t*>(at[i]);
  }
};
template <typename... T>
Registers<sizeof...(T)> List(const T&... registers) {
  return {{const_cast<void*>(static_cast<const void*>(&registers))...},
          {static_cast<int>(sizeof(T))...}};
}
template <size_t kCount>
Registers<kCount> List(const Registers<kCount>& registers) {
  return registers;
}

inline uint32_t Prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selector >> (4 * i) & 0xf;
    uint32_t byte = bytes >> (8 * (s & 7)) & 0xff;
    if ((s & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline float MaxNan(float a, float b) { return a != a || b != b ? NAN : a < b ? b : a; }
inline float MinNan(float a, float b) { return a != a || b != b ? NAN : b < a ? b : a; }
// Approximations have the largest error that the PTX manual allows, upwards. Subnormals are
// flushed.
inline float WithoutSubnormal(float a) { return fabsf(a) < 0x1p-126f ? copysignf(0, a) : a; }
inline float PowerOf2(float a) {
  return WithoutSubnormal(static_cast<float>(exp2(double{WithoutSubnormal(a)}) * (1 + 0x1p-23)));
}
inline float Reciprocal(float a) {
  return WithoutSubnormal(static_cast<float>(1 / double{WithoutSubnormal(a)} * (1 + 0x1p-24)));
}
template <typename Byte>
uint32_t PackSaturated(uint32_t high, uint32_t low, uint32_t upper) {
  const auto byte = [](uint32_t word) -> uint32_t {
    const auto v = static_cast<int32_t>(word);
    constexpr int32_t kLeast = std::is_signed_v<Byte> ? -128 : 0, kMost = kLeast + 255;
    return static_cast<uint32_t>(v < kLeast ? kLeast : v > kMost ? kMost : v) & 0xff;
  };
  return upper << 16 | byte(high) << 8 | byte(low);
}

template <size_t kWords>
void LoadShared(const Registers<kWords>& to, uint32_t address) {
  Interrupt();
  const unsigned char* from = Shared(address, 4 * kWords, 4 * kWords);
  for (size_t i = 0; i < kWords; ++i) std::memcpy(to.at[i], from + 4 * i, 4);
}
template <size_t kWords>
void StoreShared(uint32_t address, const Registers<kWords>& from) {
  Interrupt();
  unsigned char* to = Shared(address, 4 * kWords, 4 * kWords);
  for (size_t i = 0; i < kWords; ++i) std::memcpy(to + 4 * i, from.at[i], 4);
}

// cp.async with ignore-src: writes zeros if `ignore`.
inline void CopyAsyncUnless(uint32_t shared, uint64_t source, uint32_t bytes, bool ignore) {
  CopyAsync(shared, reinterpret_cast<const void*>(source), bytes, !ignore);
}

// One lane's operands of ldmatrix and stmatrix.
struct MatrixOfLane {
  uint32_t address;
  void* const* word;
};
template <int kMatrices, bool kTransposed>
uint16_t* Element(void* const* lanes, int row, int column) {
  const int matrix = row / 8;
  const int r = kTransposed ? column : row % 8, c = kTransposed ? row % 8 : column;
  const auto& owner = *static_cast<const MatrixOfLane*>(lanes[r * 4 + c / 2]);
  return static_cast<uint16_t*>(owner.word[matrix]) + c % 2;
}
template <int kMatrices, bool kTransposed, bool kStore>
void MoveMatrices(const Registers<kMatrices>& registers, uint32_t address) {
  Interrupt();
  MatrixOfLane mine{address, registers.at};
  OverLanes(kStore ? "stmatrix" : "ldmatrix", kAllLanes, &mine, [](void** lanes) {
    for (int row = 0; row < 8 * kMatrices; ++row) {
      unsigned char* line = Shared(static_cast<const MatrixOfLane*>(lanes[row])->address, 16, 16);
      for (int column = 0; column < 8; ++column) {
        uint16_t* element = Element<kMatrices, kTransposed>(lanes, row, column);
        if (kStore) {
          std::memcpy(line + 2 * column, element, 2);
        } else {
          std::memcpy(element, line + 2 * column, 2);
        }
      }
    }
  });
}

// Operand types of mma and wgmma. The tensor core reads the upper 19 bits of a TF32 operand.
struct f16 {
  using Sum = float;
  static constexpr int kBytes = 2;
  static float Of(const unsigned char* at) {
    static const std::array<float, 65536>* const values = [] {
      auto* table = new std::array<float, 65536>;
      for (int i = 0; i < 65536; ++i) (*table)[i] = static_cast<float>(Float16::Value(i));
      return table;
    }();
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return (*values)[bits];
  }
};
struct bf16 {
  using Sum = float;
  static constexpr int kBytes = 2;
  static float Of(const unsigned char* at) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<unsigned char*>(&bits) + 2, at, 2);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};
struct tf32 {
  using Sum = float;
  static constexpr int kBytes = 4;
  static float Of(const unsigned char* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    bits &= 0xffffe000;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};
struct s8 {
  using Byte = int8_t;
  using Sum = uint32_t;  // wraps
  static constexpr int kBytes = 1;
  static uint32_t Of(const unsigned char* at) { return static_cast<int8_t>(*at); }
};
struct u8 {
  using Byte = uint8_t;
  using Sum = uint32_t;
  static constexpr int kBytes = 1;
  static uint32_t Of(const unsigned char* at) { return *at; }
};

// d = a b + c for m16n8 and kPieces times 16 bytes of the reduction.
struct MmaOfLane {
  void *d[4], *a[4], *b[2], *c[4];
};
template <class TypeA, class TypeB, size_t kPieces>
void Mma(const Registers<4>& d, const Registers<2 * kPieces>& a, const Registers<kPieces>& b,
         const Registers<4>& c) {
  MmaOfLane mine;
  for (int i = 0; i < 4; ++i) mine.d[i] = d.at[i], mine.c[i] = c.at[i];
  for (size_t i = 0; i < 2 * kPieces; ++i) mine.a[i] = a.at[i];
  for (size_t i = 0; i < kPieces; ++i) mine.b[i] = b.at[i];
  OverLanes("mma.sync", kAllLanes, &mine, [](void** lanes) {
    using Sum = typename TypeA::Sum;
    constexpr int kBytes = TypeA::kBytes, kDepth = kPieces * 16 / kBytes;
    const auto lane = [&](int i) -> const MmaOfLane& { return *static_cast<MmaOfLane*>(lanes[i]); };
    Sum rows[16][kDepth], columns[8][kDepth];
    for (int k = 0; k < kDepth; ++k) {
      const int byte = k * kBytes, owner = byte % 16 / 4;
      for (int m = 0; m < 16; ++m) {
        const void* word = lane(m % 8 * 4 + owner).a[byte / 16 * 2 + m / 8];
        rows[m][k] = TypeA::Of(static_cast<const unsigned char*>(word) + byte % 4);
      }
      for (int n = 0; n < 8; ++n) {
        const void* word = lane(n * 4 + owner).b[byte / 16];
        columns[n][k] = TypeB::Of(static_cast<const unsigned char*>(word) + byte % 4);
      }
    }
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        const MmaOfLane& owner = lane(m % 8 * 4 + n / 2);
        const int at = m / 8 * 2 + n % 2;
        Sum sum;
        std::memcpy(&sum, owner.c[at], 4);
        for (int k = 0; k < kDepth; ++k) sum += rows[m][k] * columns[n][k];
        std::memcpy(owner.d[at], &sum, 4);
      }
    }
  });
}

}  // namespace emulator::ptx

#endif  // JAXCONV_TESTS_EMULATOR_PTX_H_
