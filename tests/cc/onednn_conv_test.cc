// Compares the CPU kernels bit for bit with the definition, on small integers.
//
//   onednn_conv_test [random problems] [seed]
//
// Every instance is forced by name on every problem that it accepts. Outputs and workspaces are
// filled with NaN patterns first. Failures are printed with the problem key.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cc/cpu_runs.h"
#include "cc/huge_windows.h"
#include "cpu/convert.h"
#include "cpu/onednn.h"
#include "cpu/select.h"

namespace jaxconv {
namespace {

std::map<std::string, int> ran;                      // counts by instance
std::map<std::string, std::string> refusal_example;  // an instance by reason

void CheckInstance(const ConvProblem& p, const std::string& instance, int64_t threads,
                   const Data& data) {
  std::string what = instance + " on " + std::to_string(threads) + " threads: " + p.ToString();
  Selection s;
  Status status = cpu::Select(p, instance, threads, &s);
  if (!status.ok()) return Expect(false, what + ": " + status.message());
  if (s.instance.empty()) {
    EXPECT(s.refusals.size() == 1 && !s.refusals[0].reason.empty(), what);
    if (s.refusals[0].reason.find("computes ") != 0 && s.refusals[0].reason.find("takes ") != 0 &&
        s.refusals[0].reason.find("gives ") != 0) {
      std::string reason = s.refusals[0].reason;  // numbers are removed: each kind is listed once
      reason.erase(std::remove_if(reason.begin(), reason.end(),
                                  [](unsigned char letter) { return std::isdigit(letter); }),
                   reason.end());
      refusal_example.insert({reason, p.ToString()});
    }
    return;
  }
  EXPECT(s.instance == instance && s.slices >= 1 && s.slices <= std::max<int64_t>(threads, 1),
         what);
  std::vector<char> out, again;
  status = RunInstance(p, s, data, &out);
  if (!status.ok()) return Expect(false, what + ": " + status.message());
  if (out != data.expected) {
    int64_t width = ByteWidth(p.output_dtype());
    size_t at = 0;
    while (out[at] == data.expected[at]) ++at;
    return Expect(false, what + ": first difference at element " + std::to_string(at / width) +
                             " of " + std::to_string(out.size() / width));
  }
  status = RunInstance(p, s, data, &again);
  EXPECT(status.ok() && out == again, what + ": second run");
  ++ran[instance];
}

constexpr Types kTypes[] = {{DType::kF32, DType::kF32},  {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32}, {DType::kF16, DType::kF16},
                            {DType::kF16, DType::kF32},  {DType::kS8, DType::kS32},
                            {DType::kS8, DType::kS8},    {DType::kU8, DType::kS32}};

// Checks all operations, types and instances on one geometry. Returns false if it is no valid
// convolution.
bool CheckGeometry(ConvProblem p, const std::vector<int64_t>& threads, bool all_types,
                   std::mt19937* random) {
  for (int a = 0; a < 3; ++a) {
    p.out[a] = OutputExtent(p.in[a], p.filter[a], p.stride[a], p.lhs_dilation[a], p.dilation[a],
                            p.pad_lo[a], p.pad_hi[a]);
  }
  if (!p.Validate().ok()) return false;
  for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
    for (Types types : kTypes) {
      if (!all_types && types.operand != DType::kF32 && (*random)() % 4 != 0) continue;
      SetTypes(op, types, &p);
      Data data = MakeData(p, random);
      for (const std::string& instance : cpu::KernelNames()) {
        for (int64_t t : threads) CheckInstance(p, instance, t, data);
      }
    }
  }
  return true;
}

void CheckList(std::mt19937* random) {
  std::vector<ConvProblem> list;
  list.push_back(Geometry2d(2, 14, 14, 32, 64, 3, 3, 1, 1));
  list.push_back(Geometry2d(5, 9, 11, 64, 32, 3, 3, 1, 1));
  list.push_back(Geometry2d(2, 15, 15, 32, 32, 3, 3, 2, 1));
  list.push_back(Geometry2d(3, 14, 14, 64, 128, 1, 1, 2, 0));
  list.push_back(Geometry2d(2, 12, 12, 64, 256, 1, 1, 1, 0));
  list.push_back(Geometry2d(1, 32, 32, 3, 64, 7, 7, 2, 3));       // a first layer
  list.push_back(Geometry2d(2, 7, 7, 192, 192, 3, 3, 1, 1));      // filter packed by several tasks
  list.push_back(Geometry2d(2, 14, 14, 48, 48, 7, 7, 1, 3, 48));  // depthwise
  list.push_back(Geometry2d(3, 13, 10, 20, 20, 3, 3, 2, 1, 20));  // 20 channels, no multiple of 16
  list.push_back(Geometry2d(1, 13, 13, 32, 32, 11, 11, 1, 5, 32));  // a filter wider than a strip
  list.push_back(Geometry2d(2, 12, 12, 32, 64, 3, 3, 1, 1, 32));    // depth multiplier 2
  list.push_back(Geometry2d(2, 14, 14, 64, 64, 3, 3, 1, 1, 16));    // 4 channels a group
  list.push_back(Geometry2d(2, 10, 10, 10, 15, 3, 3, 1, 1, 5));
  list.push_back(Geometry2d(2, 16, 16, 32, 32, 3, 3, 1, 2, 1, 2));
  list.push_back(Geometry2d(1, 16, 16, 32, 32, 3, 3, 2, 3, 1, 3));
  list.push_back(Geometry2d(1, 8, 8, 1, 1, 2, 2, 1, 0));
  list.push_back(Geometry2d(1, 8, 8, 5, 7, 3, 3, 1, 1));
  list.push_back(Geometry2d(1, 8, 8, 16, 16, 3, 3, 3, 1));
  list.push_back(Geometry2d(2, 32, 32, 3, 96, 4, 4, 4, 0));  // patches
  list.push_back(Geometry2d(2, 9, 21, 37, 3, 5, 5, 1, 2));   // few output channels
  list.push_back(Geometry2d(1, 12, 40, 64, 1, 3, 3, 2, 1));
  list.push_back(Geometry2d(4, 7, 7, 40, 33, 7, 7, 1, 0));  // one output pixel
  list.push_back(Geometry2d(8, 1, 1, 50, 70, 1, 1, 1, 0));
  list.push_back(Geometry2d(1, 1, 3, 17, 100, 1, 3, 2, 0));
  list.push_back(Geometry2d(1, 10, 3, 9, 4, 1, 1, 1, 0));  // odd channels, 30 pixels
  list.push_back(Geometry2d(2, 6, 10, 13, 7, 1, 1, 1, 0));
  for (const Spatial& stride : {Spatial{1, 1, 2}, Spatial{1, 3, 1}, Spatial{1, 2, 2}}) {
    ConvProblem gathered = Geometry2d(2, 9, 8, 5, 12, 1, 1, 1, 0);  // strided 1x1, odd channels
    gathered.stride = stride;
    list.push_back(gathered);
  }
  ConvProblem asymmetric = Geometry2d(2, 12, 13, 16, 32, 4, 3, 2, 1);
  asymmetric.pad_lo = {0, 2, 0};
  asymmetric.pad_hi = {0, 1, 3};
  list.push_back(asymmetric);
  ConvProblem cropped = Geometry2d(3, 16, 14, 16, 16, 3, 3, 1, 1);
  cropped.pad_lo = {0, -2, 1};
  cropped.pad_hi = {0, -3, 1};
  list.push_back(cropped);
  ConvProblem far_padded = Geometry2d(2, 6, 6, 16, 16, 3, 3, 1, 5);
  list.push_back(far_padded);
  for (int64_t stride : {2, 3}) {  // transposed convolutions
    ConvProblem transposed = Geometry2d(2, 9, 8, 32, 16, 4, 4, 1, 2);
    transposed.lhs_dilation = {1, stride, stride};
    transposed.pad_hi = {0, 3, 2};
    list.push_back(transposed);
    transposed.groups = 2;
    list.push_back(transposed);
  }
  ConvProblem audio;
  audio.rank = 1, audio.n = 2, audio.c = 128, audio.k = 64;
  audio.in = {1, 1, 600};
  audio.filter = {1, 1, 3};
  audio.pad_lo = audio.pad_hi = {0, 0, 1};
  list.push_back(audio);
  audio.stride = {1, 1, 2};
  audio.dilation = {1, 1, 4};
  audio.groups = 2;
  list.push_back(audio);
  ConvProblem video;
  video.rank = 3, video.n = 2, video.c = 16, video.k = 32;
  video.in = {5, 7, 6};
  video.filter = {3, 3, 3};
  video.pad_lo = video.pad_hi = {1, 1, 1};
  list.push_back(video);
  video.stride = {2, 1, 2};
  video.groups = 16;
  video.k = 16;
  list.push_back(video);
  for (ConvProblem p : list) {
    EXPECT(CheckGeometry(p, {1, 2, 7}, true, random), "invalid: " + p.ToString());
    p.batch = 3;
    p.n = 1;
    CheckGeometry(p, {2, 5, 64}, false, random);
  }
}

ConvProblem RandomProblem(std::mt19937* random) {
  auto pick = [&](std::initializer_list<int64_t> values) {
    return values.begin()[(*random)() % values.size()];
  };
  ConvProblem p;
  p.rank = static_cast<int>(pick({1, 2, 2, 2, 3}));
  p.batch = pick({1, 1, 1, 2});
  p.n = pick({1, 1, 2, 3, 5});
  p.groups = pick({1, 1, 1, 2, 4, 16, 17});
  bool depthwise = (*random)() % 2;
  p.c = p.groups * (depthwise && p.groups > 4 ? 1 : pick({1, 3, 4, 8, 16, 32}));
  p.k = p.groups * (depthwise && p.groups > 4 ? 1 : pick({1, 2, 4, 8, 16, 32}));
  bool transposed = (*random)() % 6 == 0;
  bool pointwise = (*random)() % 4 == 0;
  for (int a = 3 - p.rank; a < 3; ++a) {
    p.in[a] = 1 + (*random)() % (p.rank == 1 ? 300 : p.rank == 2 ? 17 : 8);
    p.filter[a] = pick({1, 1, 2, 3, 3, 4, 5, 7});
    p.dilation[a] = pick({1, 1, 1, 2, 3});
    (transposed ? p.lhs_dilation : p.stride)[a] = pick({1, 1, 2, 3, 4});
    if (pointwise) p.filter[a] = 1;
    if (pointwise && (*random)() % 4 != 0) continue;
    p.pad_lo[a] = static_cast<int64_t>((*random)() % (p.filter[a] + 2)) - ((*random)() % 8 == 0);
    p.pad_hi[a] = static_cast<int64_t>((*random)() % (p.filter[a] + 2)) - ((*random)() % 8 == 0);
  }
  return p;
}

void CheckRandom(int count, std::mt19937* random) {
  for (int i = 0; i < count;) {
    const ConvProblem p = RandomProblem(random);
    i += CheckGeometry(p, {1 + static_cast<int64_t>((*random)() % 8)}, false, random);
  }
}

// The largest operands: all equal, of random signs, or differing in the last bit. Their sums exceed
// 2^24, beyond which float32 does not hold every integer.
Data ExtremeData(const ConvProblem& p, std::mt19937* random) {
  const bool u8 = p.lhs_dtype() == DType::kU8;
  const int most = u8 ? 255 : 127, kind = static_cast<int>((*random)() % 3);
  auto draw = [&](int64_t count, int least, int largest) {
    std::vector<double> values(count, largest);
    for (double& v : values) {
      if (kind == 1 && (*random)() % 4 == 0) v = least;
      if (kind == 2) v -= (*random)() % 2;
    }
    return values;
  };
  const std::vector<double> x = draw(p.x_elements(), u8 ? 0 : -128, most);
  const std::vector<double> w = draw(p.w_elements(), -128, 127);
  return {Encode(p.lhs_dtype(), x), Encode(p.rhs_dtype(), w),
          Encode(p.output_dtype(), NaiveConv(p, x, w))};
}

// 8-bit convolutions with sums of 500 to about 3,000 terms.
void CheckLongSums(int count, std::mt19937* random) {
  constexpr Types kEightBits[] = {
      {DType::kS8, DType::kS32}, {DType::kS8, DType::kS8}, {DType::kU8, DType::kS32}};
  const int64_t before = ran["fprop_onednn_s8"];
  for (int i = 0; i < count;) {
    ConvProblem p = RandomProblem(random);
    const int64_t terms = 500 + (*random)() % 1500;
    p.groups = std::min<int64_t>(p.groups, 4);
    p.c = p.groups * (terms / p.taps() + 1);
    p.k = p.groups * (1 + (*random)() % 20);
    for (int a = 3 - p.rank; a < 3; ++a) {
      p.in[a] = std::min<int64_t>(p.in[a], 9);
      p.out[a] = OutputExtent(p.in[a], p.filter[a], p.stride[a], p.lhs_dilation[a], p.dilation[a],
                              p.pad_lo[a], p.pad_hi[a]);
    }
    SetTypes(Op::kFprop, kEightBits[(*random)() % std::size(kEightBits)], &p);
    if ((*random)() % 4 == 0) p.filter_layout = FilterLayout::kKrsc;
    if (!p.Validate().ok()) continue;
    const Data data = ExtremeData(p, random);
    for (const char* instance : {"fprop_onednn_s8", "fprop_onednn_u8"}) {
      CheckInstance(p, instance, 1 + static_cast<int64_t>((*random)() % 4), data);
    }
    ++i;
  }
  const bool vnni =
      cpu::IsaHas(dnnl::cpu_isa::avx512_core_vnni) || cpu::IsaHas(dnnl::cpu_isa::avx2_vnni);
  if (!vnni) std::printf("8-bit sums beyond 2^24: not run, the CPU has no VNNI\n");
  EXPECT(!vnni || ran["fprop_onednn_s8"] - before > count / 4, "few of the long sums ran");
}

// Strides, dilations and paddings far larger than the tensors are computed correctly or refused, in
// bounded time and workspace.
void CheckHugeWindows(int count, unsigned seed) {
  auto workspace_bytes = [](const char* key) {
    ConvProblem p;
    Selection s;
    EXPECT(ConvProblem::Parse(key, &p).ok() && cpu::Select(p, "auto", 2, &s).ok(), key);
    EXPECT(s.instance.empty() == !s.refusals.empty(), key);
    return s.instance.empty() ? -1 : s.workspace_bytes;
  };
  // On these keys oneDNN crashes, computes a wrong sum, and on CPUs with AMX allocates 22 GB of
  // scratch.
  for (const char* key :
       {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i5 f3 o2 s1200000000 l1 d1 p1200000000_0",
        "fprop s8:s8:s32 default b1 n1 g1 c2 k1 i2 f2 o1 s2147483646 l1 d1 p4_0",
        "fprop bf16:bf16:f32 default b1 n3 g1 c1 k1 i6x1x5 f4x4x4 o4x1x2 s2x32765x8193 l1x1x1 "
        "d1x1x1 p3_2x0_32764x8196_1"}) {
    EXPECT(workspace_bytes(key) == -1, key);
  }
  // Parameters no larger than the tensors are not refused for their size.
  EXPECT(workspace_bytes("fprop f32:f32:f32 default b1 n1 g1 c1 k1 i20000 f2 o20000 s1 l1 d16384 "
                         "p16384_0") >= 0,
         "a dilation of 2^14");

  std::mt19937_64 random(seed);
  auto pick = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  std::mt19937 data_random(seed);
  for (int i = 0; i < count; ++i) {
    ConvProblem p;
    p.rank = static_cast<int>(pick({1, 2, 3}));
    p.batch = pick({1, 1, 2});
    p.n = pick({1, 2, 3});
    p.groups = pick({1, 1, 2, 16});
    p.c = p.groups * pick({1, 1, 3, 8, 16});
    p.k = p.groups * pick({1, 1, 2, 8, 16});
    DrawHugeWindows(static_cast<int>(pick({8, 12, 20, 33, 50})), &random, &p);
    if (!p.Validate().ok()) continue;
    SetTypes(static_cast<Op>(random() % 3), kTypes[random() % std::size(kTypes)], &p);
    Data data = MakeData(p, &data_random);
    for (const std::string& instance : cpu::KernelNames()) {
      CheckInstance(p, instance, pick({1, 3}), data);
    }
  }
}

void CheckConversions() {
  using cpu::FloatToBF16;
  EXPECT(
      FloatToBF16(1.0f) == 0x3f80 && FloatToBF16(257.0f) == 0x4380 && FloatToBF16(259.0f) == 0x4382,
      "ties to even");
  EXPECT(FloatToBF16(std::numeric_limits<float>::infinity()) == 0x7f80, "");
  EXPECT(std::isnan(cpu::BF16ToFloat(FloatToBF16(std::nanf("")))), "");
  std::vector<float> values{0.f,    -0.f,   1.f, 65504.f, 65520.f, 1e-7f,
                            2049.f, 2051.f, 3.f, -5.5f,   7.f};
  std::vector<uint16_t> halves(values.size());
  cpu::FromFloat(DType::kF16, values.data(), halves.data(), 0, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    auto half = static_cast<_Float16>(values[i]);
    EXPECT(std::memcmp(&half, &halves[i], 2) == 0, std::to_string(values[i]));
  }
}

}  // namespace
}  // namespace jaxconv

int main(int argc, char** argv) {
  using namespace jaxconv;
  int count = argc > 1 ? std::atoi(argv[1]) : 150;
  unsigned seed = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 20240607;
  std::printf("oneDNN %s, %d random problems, seed %u\n", cpu::LibraryVersion().c_str(), count,
              seed);
  std::mt19937 random(seed);
  CheckConversions();
  CheckList(&random);
  CheckRandom(count, &random);
  CheckLongSums(count, &random);
  CheckHugeWindows(4 * count, seed);
  for (const auto& [instance, runs] : ran) std::printf("%6d exact  %s\n", runs, instance.c_str());
  for (const auto& [reason, line] : refusal_example) {
    std::printf("refused: %s\n         e.g. %s\n", reason.c_str(), line.c_str());
  }
  EXPECT(cpu::PlanCount() <= 256, "");
  std::printf(failures == 0 ? "PASSED\n" : "FAILED: %d\n", failures);
  return failures != 0;
}
