// The CPU kernels against the definition, bit for bit, on small integers.
//
//   onednn_conv_test [random problems] [seed]
//
// Every instance is forced by name on every problem that it accepts. Outputs and workspaces are
// filled with NaN patterns first. The first failures are printed with the problem key.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/huge_windows.h"
#include "cc/naive_conv.h"
#include "cpu/convert.h"
#include "cpu/execution.h"
#include "cpu/onednn.h"
#include "cpu/plan.h"
#include "cpu/primitives.h"
#include "cpu/select.h"

namespace jaxconv {
namespace {

int failures = 0;
std::map<std::string, int> ran;                      // by instance
std::map<std::string, std::string> refusal_example;  // by reason

void Fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAIL %s\n", what.c_str());
}

#define EXPECT(condition, what)                                      \
  do {                                                               \
    if (!(condition)) Fail(std::string(#condition) + ": " + (what)); \
  } while (0)

void RunOnThreads(int64_t tasks, const std::function<void(int64_t)>& body) {
  std::vector<std::thread> threads;
  for (int64_t task = 1; task < tasks; ++task) threads.emplace_back(body, task);
  body(0);
  for (std::thread& thread : threads) thread.join();
}

std::vector<double> RandomIntegers(int64_t count, std::mt19937* random) {
  std::uniform_int_distribution<int> value(-3, 3);
  std::vector<double> values(count);
  for (double& v : values) v = value(*random);
  return values;
}

// The bytes of `values` rounded to `dtype`.
std::vector<char> Encode(DType dtype, const std::vector<double>& values) {
  int64_t count = static_cast<int64_t>(values.size());
  std::vector<char> bytes(count * ByteWidth(dtype));
  if (dtype == DType::kS8 || dtype == DType::kU8 || dtype == DType::kS32) {
    for (int64_t i = 0; i < count; ++i) {
      auto value = static_cast<int32_t>(values[i]);
      if (dtype != DType::kS32) {
        bytes[i] = static_cast<char>(value);
      } else {
        std::memcpy(&bytes[4 * i], &value, 4);
      }
    }
    return bytes;
  }
  std::vector<float> floats(values.begin(), values.end());
  cpu::FromFloat(dtype, floats.data(), bytes.data(), 0, count);
  return bytes;
}

int64_t Elements(const ConvProblem& p, char tensor) {
  return tensor == 'x' ? p.x_elements() : tensor == 'w' ? p.w_elements() : p.y_elements();
}

struct Data {
  std::vector<char> lhs, rhs, expected;
};

Data MakeData(const ConvProblem& p, std::mt19937* random) {
  std::vector<double> lhs = RandomIntegers(Elements(p, p.op == Op::kDgrad ? 'y' : 'x'), random);
  std::vector<double> rhs = RandomIntegers(Elements(p, p.op == Op::kWgrad ? 'y' : 'w'), random);
  if (p.lhs_dtype() == DType::kS8) {  // the extremes too, whose pairwise sums overflow 16 bits
    for (size_t i = 0; i < lhs.size(); i += 3) lhs[i] = i % 2 ? -128 : 127;
    for (size_t i = 0; i < rhs.size(); i += 2) rhs[i] = i % 3 ? -128 : 127;
  }
  if (p.lhs_dtype() == DType::kU8) {
    for (size_t i = 0; i < lhs.size(); ++i) lhs[i] = i % 3 ? std::abs(lhs[i]) : 255;
    for (size_t i = 0; i < rhs.size(); i += 2) rhs[i] = i % 3 ? -128 : 127;
  }
  return {Encode(p.lhs_dtype(), lhs), Encode(p.rhs_dtype(), rhs),
          Encode(p.output_dtype(), NaiveConv(p, lhs, rhs))};
}

Status Run(const ConvProblem& p, const Selection& s, const Data& data, char* out, char* workspace,
           int64_t workspace_bytes) {
  std::shared_ptr<const cpu::Plan> plan;
  JAXCONV_RETURN_IF_ERROR(cpu::FindPlan(p.ToString(), s.instance, s.slices, &plan));
  return cpu::Execute(*plan, data.lhs.data(), data.rhs.data(), out, workspace, workspace_bytes,
                      RunOnThreads);
}

Status RunInstance(const ConvProblem& p, const Selection& s, const Data& data,
                   std::vector<char>* out) {
  out->assign(data.expected.size(), static_cast<char>(0xff));
  std::vector<char> workspace(s.workspace_bytes, static_cast<char>(0xff));
  return Run(p, s, data, out->data(), workspace.data(), s.workspace_bytes);
}

void CheckInstance(const ConvProblem& p, const std::string& instance, int64_t threads,
                   const Data& data) {
  std::string what = instance + " on " + std::to_string(threads) + " threads: " + p.ToString();
  Selection s;
  Status status = cpu::Select(p, instance, threads, &s);
  if (!status.ok()) return Fail(what + ": " + status.message());
  if (s.instance.empty()) {
    EXPECT(s.refusals.size() == 1 && !s.refusals[0].reason.empty(), what);
    if (s.refusals[0].reason.find("computes ") != 0 && s.refusals[0].reason.find("takes ") != 0 &&
        s.refusals[0].reason.find("gives ") != 0) {
      std::string reason = s.refusals[0].reason;  // without its numbers, to list each kind once
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
  if (!status.ok()) return Fail(what + ": " + status.message());
  if (out != data.expected) {
    int64_t width = ByteWidth(p.output_dtype());
    size_t at = 0;
    while (out[at] == data.expected[at]) ++at;
    return Fail(what + ": first difference at element " + std::to_string(at / width) + " of " +
                std::to_string(out.size() / width));
  }
  status = RunInstance(p, s, data, &again);
  EXPECT(status.ok() && out == again, what + ": second run");
  ++ran[instance];
}

struct Types {
  DType operand, result;
};
constexpr Types kTypes[] = {{DType::kF32, DType::kF32},  {DType::kBF16, DType::kBF16},
                            {DType::kBF16, DType::kF32}, {DType::kF16, DType::kF16},
                            {DType::kF16, DType::kF32},  {DType::kS8, DType::kS32},
                            {DType::kS8, DType::kS8},    {DType::kU8, DType::kS32}};

void SetTypes(Op op, Types types, ConvProblem* p) {
  p->op = op;
  p->x_dtype = op == Op::kDgrad ? types.result : types.operand;
  p->w_dtype = op == Op::kWgrad ? types.result : types.operand;
  p->y_dtype = op == Op::kFprop ? types.result : types.operand;
  if (p->w_dtype == DType::kU8) p->w_dtype = DType::kS8;  // beside u8 images
}

// All operations, types and instances on one geometry. False: it is no valid convolution.
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

ConvProblem Geometry2d(int64_t n, int64_t h, int64_t w, int64_t c, int64_t k, int64_t r, int64_t s,
                       int64_t stride, int64_t pad, int64_t groups = 1, int64_t dilation = 1) {
  ConvProblem p;
  p.n = n, p.c = c, p.k = k, p.groups = groups;
  p.in = {1, h, w};
  p.filter = {1, r, s};
  p.stride = {1, stride, stride};
  p.dilation = {1, dilation, dilation};
  p.pad_lo = p.pad_hi = {0, pad, pad};
  return p;
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
  list.push_back(Geometry2d(3, 13, 10, 20, 20, 3, 3, 2, 1, 20));  // its channels no multiple of 16
  list.push_back(Geometry2d(1, 13, 13, 32, 32, 11, 11, 1, 5, 32));  // wider than a strip
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

void CheckRandom(int count, std::mt19937* random) {
  auto pick = [&](std::initializer_list<int64_t> values) {
    return values.begin()[(*random)() % values.size()];
  };
  for (int i = 0; i < count;) {
    ConvProblem p;
    p.rank = static_cast<int>(pick({1, 2, 2, 2, 3}));
    p.batch = pick({1, 1, 1, 2});
    p.n = pick({1, 1, 2, 3, 5});
    p.groups = pick({1, 1, 1, 2, 4, 16, 17});
    bool depthwise = (*random)() % 2;
    p.c = p.groups * (depthwise && p.groups > 4 ? 1 : pick({1, 3, 4, 8, 16, 32}));
    p.k = p.groups * (depthwise && p.groups > 4 ? 1 : pick({1, 2, 4, 8, 16, 32}));
    bool transposed = (*random)() % 6 == 0;
    for (int a = 3 - p.rank; a < 3; ++a) {
      p.in[a] = 1 + (*random)() % (p.rank == 1 ? 300 : p.rank == 2 ? 17 : 8);
      p.filter[a] = pick({1, 1, 2, 3, 3, 4, 5, 7});
      p.dilation[a] = pick({1, 1, 1, 2, 3});
      (transposed ? p.lhs_dilation : p.stride)[a] = pick({1, 1, 2, 3, 4});
      p.pad_lo[a] = static_cast<int64_t>((*random)() % (p.filter[a] + 2)) - ((*random)() % 8 == 0);
      p.pad_hi[a] = static_cast<int64_t>((*random)() % (p.filter[a] + 2)) - ((*random)() % 8 == 0);
    }
    i += CheckGeometry(p, {1 + static_cast<int64_t>((*random)() % 8)}, false, random);
  }
}

// Strides, dilations and paddings far beyond the tensors are computed right or refused, in bounded
// time and workspace.
void CheckHugeWindows(int count, unsigned seed) {
  auto workspace_bytes = [](const char* key) {
    ConvProblem p;
    Selection s;
    EXPECT(ConvProblem::Parse(key, &p).ok() && cpu::Select(p, "auto", 2, &s).ok(), key);
    EXPECT(s.instance.empty() == !s.refusals.empty(), key);
    return s.instance.empty() ? -1 : s.workspace_bytes;
  };
  // A segmentation fault and a wrong sum of oneDNN, and 22 GB of scratch on CPUs with AMX.
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

void CheckSelect() {
  ConvProblem p = Geometry2d(4, 56, 56, 64, 64, 3, 3, 1, 1);
  p.out = p.in;
  Selection s;
  EXPECT(cpu::Select(p, "winograd_of_elsewhere", 2, &s).code() == StatusCode::kInvalidArgument, "");
  for (const char* algorithm : {"auto", "onednn", "fprop_onednn_f32"}) {
    EXPECT(cpu::Select(p, algorithm, 2, &s).ok() && s.instance == "fprop_onednn_f32", algorithm);
    EXPECT(s.slices == 2, algorithm);
  }
  p.filter_layout = FilterLayout::kKrsc;  // after a plan of the same sizes was made
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.filter_layout = FilterLayout::kRsck;
  EXPECT(cpu::Select(p, "wgrad_onednn_f32", 2, &s).ok() && s.instance.empty(), "");
  EXPECT(cpu::Select(p, "depthwise", 2, &s).ok() && s.instance.empty() && !s.refusals.empty(), "");
  p.op = Op::kDgrad;
  SetTypes(Op::kDgrad, {DType::kS8, DType::kS32}, &p);
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty() && !s.refusals.empty(), "");
}

// What oneDNN computes slowly, and what XLA calls faster.
void CheckSmallProblems() {
  struct {
    ConvProblem p;
    const char* chosen;
  } const cases[] = {
      {Geometry2d(4, 32, 32, 64, 3, 7, 7, 1, 3), "fprop_few_outputs_f32"},
      {Geometry2d(4, 32, 32, 64, 1, 3, 3, 1, 1), "fprop_few_outputs_f32"},
      {Geometry2d(4, 32, 32, 64, 16, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 7, 7, 256, 128, 7, 7, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(256, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_onednn_f32"},
      {Geometry2d(64, 1, 1, 512, 1000, 1, 1, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 8, 8, 512, 100, 4, 4, 1, 0), "fprop_few_pixels_f32"},
      {Geometry2d(4, 8, 8, 64, 100, 4, 4, 1, 0), "fprop_onednn_f32"},
      {Geometry2d(1, 7, 7, 512, 512, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 16, 16, 3, 3, 1, 1), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 16), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 1, 1, 1, 0, 8), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 4), "fprop_small_groups_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 1, 1, 1, 0, 4), "fprop_onednn_f32"},
      {Geometry2d(4, 8, 8, 32, 32, 3, 3, 1, 1, 2), "fprop_onednn_f32"},
  };
  const bool avx512 = __builtin_cpu_supports("avx512f");
  Selection s;
  for (auto [p, chosen] : cases) {
    for (int a = 0; a < 3; ++a) p.out[a] = p.pad_lo[a] > 0 ? p.in[a] : p.in[a] - p.filter[a] + 1;
    const std::string expected = avx512 ? chosen : "fprop_onednn_f32";
    for (const char* algorithm : {"auto", "native"}) {
      EXPECT(cpu::Select(p, algorithm, 2, &s).ok() && s.instance == expected,
             p.ToString() + ": " + s.instance);
    }
  }
  ConvProblem p = Geometry2d(4, 8, 8, 16, 16, 1, 1, 1, 0);
  p.out = p.in;
  EXPECT(cpu::Select(p, "native", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  EXPECT(s.xla_microseconds > 0 && s.xla_microseconds < s.microseconds, p.ToString());
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty() && s.xla_microseconds > 0 &&
             s.microseconds > s.xla_microseconds && s.refusals.size() == 1 &&
             s.refusals[0].reason.find("predicted 2.0 us, fprop_onednn_f32 2.9 us") == 0,
         s.refusals.empty() ? "" : s.refusals[0].reason);
  // Few input channels, rows of a multiple of 2 KB: XLA's unless it has an epilogue.
  p = Geometry2d(1, 24, 24, 3, 512, 3, 3, 1, 1);
  p.out = p.in;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.epilogue.bias = true;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(4, 1, 4000, 1, 512, 1, 10, 5, 0);
  p.rank = 1, p.stride[1] = 1, p.out = {1, 1, 799};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p = Geometry2d(1, 224, 224, 3, 1024, 16, 16, 16, 0);  // a sum of many terms
  p.out = {1, 14, 14};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(4, 1, 3200, 2, 512, 1, 25, 1, 0);
  p.rank = 1, p.out = {1, 1, 3176};
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance.empty(), p.ToString());
  p.n = 1;  // 6.5 MB of output
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
  p = Geometry2d(1, 24, 24, 3, 576, 3, 3, 1, 1);
  p.out = p.in;
  EXPECT(cpu::Select(p, "auto", 2, &s).ok() && s.instance == "fprop_onednn_f32", p.ToString());
}

// Weight gradients as matrix products: chosen where every task of oneDNN's would have few pixels,
// and right in any number of tasks, which then share channels and taps.
void CheckGemmWgrad(std::mt19937* random) {
  Selection s;
  auto chosen = [&](int64_t n, int64_t side, int64_t c, int64_t k, int64_t threads) {
    ConvProblem p = Geometry2d(n, side, side, c, k, 1, 1, 1, 0);
    p.out = p.in;
    p.op = Op::kWgrad;
    return cpu::Select(p, "auto", threads, &s).ok() ? s.instance : "";
  };
  EXPECT(chosen(4, 1, 512, 1000, 16) == "wgrad_gemm_f32", s.instance);
  EXPECT(chosen(32, 7, 512, 512, 16) == "wgrad_gemm_f32", s.instance);
  EXPECT(chosen(32, 7, 512, 512, 1) == "wgrad_onednn_f32", s.instance);
  EXPECT(chosen(4, 28, 64, 64, 16) == "wgrad_onednn_f32", s.instance);
  EXPECT(chosen(4, 1, 512, 16, 16) == "wgrad_onednn_f32", s.instance);

  ConvProblem row = Geometry2d(4, 1, 1000, 64, 64, 1, 9, 1, 0);
  row.rank = 1;
  row.out = row.in;
  row.pad_lo[2] = row.pad_hi[2] = 4;
  row.op = Op::kWgrad;
  EXPECT(cpu::Select(row, "auto", 8, &s).ok() && s.instance == "wgrad_gemm_f32" && s.slices == 8,
         s.instance + " in " + std::to_string(s.slices));

  ConvProblem grouped = Geometry2d(2, 5, 6, 70, 10, 3, 2, 1, 1);
  grouped.groups = 2, grouped.batch = 2;
  grouped.out = {1, 5, 7};
  ConvProblem few = Geometry2d(1, 1, 300, 3, 5, 1, 7, 1, 0);
  few.rank = 1;
  few.out = {1, 1, 294};
  row.n = 1, row.c = 130, row.in[2] = row.out[2] = 200;
  for (ConvProblem p : {row, grouped, few}) {
    p.op = Op::kWgrad;
    const Data data = MakeData(p, random);
    for (int64_t slices : {1, 2, 3, 7, 8, 11, 16, 64}) {
      std::shared_ptr<const cpu::Plan> plan;
      EXPECT(cpu::FindPlan(p.ToString(), "wgrad_gemm_f32", slices, &plan).ok(), p.ToString());
      s.instance = "wgrad_gemm_f32", s.slices = slices;
      s.workspace_bytes = plan->workspace_bytes;
      std::vector<char> out;
      EXPECT(RunInstance(p, s, data, &out).ok() && out == data.expected,
             p.ToString() + " in " + std::to_string(slices));
    }
  }
}

void CheckWorkspace(std::mt19937* random) {
  ConvProblem p = Geometry2d(2, 14, 14, 32, 64, 3, 3, 1, 1);
  p.out = p.in;
  p.op = Op::kWgrad;
  Data data = MakeData(p, random);
  Selection s;
  EXPECT(cpu::Select(p, "onednn", 2, &s).ok() && s.workspace_bytes > 0, p.ToString());
  std::vector<char> out(data.expected.size()), workspace(s.workspace_bytes + 4);
  Status status = Run(p, s, data, out.data(), workspace.data(), s.workspace_bytes - 1);
  EXPECT(status.code() == StatusCode::kInvalidArgument &&
             status.message().find(std::to_string(s.workspace_bytes)) != std::string::npos,
         status.message());
  // Any alignment of the buffer will do.
  status = Run(p, s, data, out.data(), workspace.data() + 4, s.workspace_bytes);
  EXPECT(status.ok() && out == data.expected, "unaligned workspace: " + status.message());
}

// What a call may hold that selection has not written.
void CheckCalls() {
  ConvProblem p = Geometry2d(2, 14, 14, 32, 64, 3, 3, 1, 1);
  p.out = p.in;
  std::shared_ptr<const cpu::Plan> plan;
  auto code = [&](const std::string& key, const char* instance, int64_t slices) {
    return cpu::FindPlan(key, instance, slices, &plan).code();
  };
  std::string key = p.ToString();
  EXPECT(code(key, "fprop_onednn_f32", 2) == StatusCode::kOk && plan != nullptr, key);
  EXPECT(cpu::ProblemOf(*plan).ToString() == key, key);
  EXPECT(code(key, "fprop_onednn_f32", 0) == StatusCode::kInvalidArgument, "no task");
  EXPECT(code(key, "no_such_instance", 1) == StatusCode::kInvalidArgument, "no instance");
  EXPECT(code("fprop", "fprop_onednn_f32", 1) == StatusCode::kInvalidArgument, "no key");
  EXPECT(code(key, "dgrad_onednn_f32", 1) == StatusCode::kUnimplemented && plan == nullptr, key);
}

// Several executions at once, with a cache so small that plans are evicted while in use.
void CheckConcurrency(std::mt19937* random) {
  cpu::SetPlanCapacity(2);
  struct Job {
    ConvProblem p;
    Selection s;
    Data data;
  };
  std::vector<Job> jobs;
  for (int64_t k : {16, 32, 48, 64}) {
    for (Op op : {Op::kFprop, Op::kDgrad, Op::kWgrad}) {
      Job job;
      job.p = Geometry2d(3, 12, 12, 32, k, 3, 3, 1, 1);
      job.p.out = job.p.in;
      job.p.op = op;
      job.data = MakeData(job.p, random);
      EXPECT(cpu::Select(job.p, "auto", 2, &job.s).ok(), job.p.ToString());
      jobs.push_back(std::move(job));
    }
  }
  std::vector<int> wrong(6, 0);
  RunOnThreads(6, [&](int64_t thread) {
    for (int i = 0; i < 40; ++i) {
      const Job& job = jobs[(thread * 5 + i) % jobs.size()];
      std::vector<char> out;
      Status status = RunInstance(job.p, job.s, job.data, &out);
      wrong[thread] += !status.ok() || out != job.data.expected;
    }
  });
  for (int count : wrong) EXPECT(count == 0, std::to_string(count) + " wrong concurrent results");
  EXPECT(cpu::PlanCount() <= 2, std::to_string(cpu::PlanCount()) + " plans");
  cpu::SetPlanCapacity(256);
}

bool TakesBrgemm(const ConvProblem& p) {
  Selection s;
  std::shared_ptr<const cpu::Plan> plan;
  EXPECT(cpu::Select(p, "onednn", 2, &s).ok() && !s.instance.empty(), p.ToString());
  EXPECT(cpu::FindPlan(p.ToString(), s.instance, s.slices, &plan).ok(), p.ToString());
  const bool may = s.instance.find("no_brgemm") == std::string::npos;
  const std::vector<cpu::ConvPrimitive>& made = plan->primitives.convolutions;
  const bool has = std::any_of(made.begin(), made.end(), [](const cpu::ConvPrimitive& each) {
    return cpu::UsesBrgemm(each.implementation);
  });
  EXPECT(may || !has, p.ToString() + " has brgemm kernels");
  return has;
}

// oneDNN never frees brgemm kernels: only so many problems have them, and those keep them.
void CheckBrgemmProblems() {
  cpu::SetMaxBrgemmProblems(2);
  std::vector<bool> first, again;
  std::vector<ConvProblem> problems;
  for (int64_t k : {24, 40, 56, 72}) {
    problems.push_back(Geometry2d(2, 13, 13, 32, k, 3, 3, 1, 1));
    problems.back().out = problems.back().in;
  }
  for (const ConvProblem& p : problems) first.push_back(TakesBrgemm(p));
  for (const ConvProblem& p : problems) again.push_back(TakesBrgemm(p));
  const bool has = cpu::IsaHas(dnnl::cpu_isa::avx2);
  EXPECT((first == std::vector<bool>{has, has, false, false}), "the first two problems");
  EXPECT(first == again, "a problem that was met before");
  Selection s;
  EXPECT(
      cpu::Select(problems[3], "fprop_onednn_f32", 2, &s).ok() && s.instance == "fprop_onednn_f32",
      "an instance that is named");
  cpu::SetMaxBrgemmProblems(4096);
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
  CheckSelect();
  CheckSmallProblems();
  CheckGemmWgrad(&random);
  CheckWorkspace(&random);
  CheckCalls();
  CheckBrgemmProblems();
  CheckConcurrency(&random);
  CheckList(&random);
  CheckRandom(count, &random);
  CheckHugeWindows(4 * count, seed);
  for (const auto& [instance, runs] : ran) std::printf("%6d exact  %s\n", runs, instance.c_str());
  for (const auto& [reason, line] : refusal_example) {
    std::printf("refused: %s\n         e.g. %s\n", reason.c_str(), line.c_str());
  }
  EXPECT(cpu::PlanCount() <= 256, "");
  std::printf(failures == 0 ? "PASSED\n" : "FAILED: %d\n", failures);
  return failures != 0;
}
