// XLA as a candidate of selection: the problems without a prediction, how the predicted time grows,
// and the choices on measured layers.
#include "cuda/common/xla_cost.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cc/expect.h"
#include "cc/targets_and_keys.h"
#include "cuda/select.h"

namespace jaxconv {
namespace {

double Predict(const std::string& key, const char* target = "h200") {
  return PredictXlaMicroseconds(Parse(key), Model(target));
}

bool LeftToXla(const std::string& key, const char* algorithm = "auto") {
  Selection selection;
  Status status = Select(Parse(key), Model("h200"), algorithm, &selection);
  Expect(status.ok(), key + ": " + status.message());
  return selection.instance.empty();
}

const std::string kOps[] = {"fprop", "dgrad", "wgrad"};
const std::string kOperands[] = {" bf16:bf16:bf16 default ", " f32:f32:f32 default ",
                                 " f32:f32:f32 highest "};
const std::string kDense = "b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1";
const std::string kPointwise = "b1 n64 g1 c64 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0";
const std::string kDepthwise = "b1 n64 g96 c96 k96 i56x56 f7x7 o56x56 s1x1 l1x1 d1x1 p3_3x3_3";
const std::string kGrouped = "b1 n64 g32 c128 k128 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1";
const std::string kStem = "b1 n64 g1 c3 k64 i224x224 f7x7 o112x112 s2x2 l1x1 d1x1 p3_3x3_3";

void TestNoCandidate() {
  for (const std::string& op : kOps) {
    for (const char* shape : {
             "b8 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",  // batched
             "b1 n64 g1 c128 k128 i28x28 f3x3 o55x55 s1x1 l2x2 d1x1 p1_1x1_1",  // x dilated
             "b1 n64 g1 c100 k100 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",  // unaligned
             "b1 n64 g4 c256 k256 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1",  // wide groups
             "b1 n4 g128 c128 k128 i8x28x28 f3x3x3 o8x28x28 s1x1x1 l1x1x1 d1x1x1 p1_1x1_1x1_1",
         }) {
      Expect(Predict(op + kOperands[0] + shape) == 0, op + " was not measured: " + shape);
    }
    const std::string mixed = op == "fprop"   ? " bf16:bf16:f32 default "
                              : op == "dgrad" ? " f32:bf16:bf16 default "
                                              : " bf16:f32:bf16 default ";
    Expect(Predict(op + mixed + kDense) == 0, op + " of two types was not measured");
    Expect(Predict(op + " f32:f32:f32 high " + kDense) == 0, op + " at HIGH: XLA's is TF32");
    Expect(Predict(op + " f32:f32:f32 high " + kDepthwise) > 0, op + " at HIGH: depthwise is FP32");
  }
  Expect(Predict("fprop s8:s8:s32 default " + kDense) == 0, "XLA has no INT8 convolution");
  Expect(Predict("wgrad" + kOperands[2] + kDense) == 0, "FP32 wgrad by Winograd");
  Expect(Predict("wgrad" + kOperands[1] + kDense) > 0, "TF32 wgrad is as accurate as asked for");
}

void TestGrowth() {
  const Gpu h200 = Model("h200");
  for (const std::string& op : kOps) {
    for (const std::string& operands : kOperands) {
      for (const std::string& shape : {kDense, kPointwise, kDepthwise, kGrouped, kStem}) {
        const std::string key = op + operands + shape;
        const ConvProblem problem = Parse(key);
        const double us = PredictXlaMicroseconds(problem, h200);
        if (us == 0) continue;
        ConvProblem more = problem;
        more.n *= 2;
        Expect(PredictXlaMicroseconds(more, h200) > us, "grows with the images: " + key);
        more = problem;
        more.in[1] *= 2;
        more.out[1] *= 2;
        Expect(PredictXlaMicroseconds(more, h200) > us, "grows with the maps: " + key);
        more = problem;
        more.groups *= more.groups > 1 ? 2 : 1;
        more.c *= more.groups > 1 ? 2 : 1;
        more.k *= 2;
        Expect(PredictXlaMicroseconds(more, h200) > us, "grows with the channels: " + key);
        // An A100 has 0.47 of the bandwidth, 0.82 of the SMs and 0.72 of the clock.
        Expect(1.18 * us < Predict(key, "a100"), "H200, A100: " + key);
      }
    }
  }
}

void TestChoices() {
  for (const std::string& op : kOps) {
    for (const std::string& operands : kOperands) {
      const std::string depthwise = op + operands + kDepthwise;
      Expect(!LeftToXla(depthwise), "depthwise kernels are faster: " + depthwise);
      const std::string stem = op + operands + kStem;
      Expect(!LeftToXla(stem), "few_channels is faster: " + stem);
    }
    Expect(!LeftToXla(op + kOperands[0] + kGrouped), op + " with 4 channels a group");
    Expect(!LeftToXla(op + kOperands[0] + kDense), op + ": dense layers are faster here");
  }
}

// A line of measured_times.tsv: a problem, and device times in microseconds inside a program on an
// H200, of lax's convolution and of kernels (docs/notes/xla.md).
struct Measured {
  std::string key;
  double lax = 0;
  std::map<std::string, double> kernels;
};

std::vector<Measured> ReadMeasured() {
  std::string path = __FILE__;
  path = path.substr(0, path.rfind('/') + 1) + "measured_times.tsv";
  std::ifstream file(path);
  std::vector<Measured> found;
  for (std::string line; std::getline(file, line);) {
    if (line[0] == '#') continue;
    std::istringstream fields(line);
    Measured row;
    std::string field;
    std::getline(fields, row.key, '\t');
    std::getline(fields, field, '\t');
    row.lax = std::stod(field);
    while (std::getline(fields, field, '\t')) {
      const size_t at = field.find('=');
      // The slices of an instance do not matter here.
      row.kernels[field.substr(0, std::min(at, field.find('/')))] = std::stod(field.substr(at + 1));
    }
    found.push_back(row);
  }
  return found;
}

// Choices may lose 5 %; times repeat within 1 %.
constexpr double kMostLost = 1.06, kMostLostInMean = 1.01;

// Choices that lose more, by measurement (docs/notes/xla.md gives the reasons).
// clang-format off
const char* const kExceptions[] = {
    "dgrad bf16:bf16:bf16 default b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1",  // seed_224: 1.09
    "dgrad bf16:bf16:bf16 default b1 n256 g1 c144 k24 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.06
    "dgrad bf16:bf16:bf16 default b1 n256 g1 c960 k160 i7x7 f1x1 o7x7 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.08
    "fprop bf16:bf16:bf16 default b1 n1 g1 c64 k64 i224x224 f3x3 o224x224 s1x1 l1x1 d1x1 p1_1x1_1",  // seed_224: 1.08
    "fprop bf16:bf16:bf16 default b1 n128 g1 c96 k192 i56x56 f2x2 o28x28 s2x2 l1x1 d1x1 p0_0x0_0",  //  128 images": 1.06
    "fprop bf16:bf16:bf16 default b1 n256 g1 c24 k144 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.16
    "fprop bf16:bf16:bf16 default b1 n256 g1 c3 k32 i224x224 f3x3 o112x112 s2x2 l1x1 d1x1 p1_1x1_1",  //  256 images": 1.09
    "wgrad bf16:bf16:bf16 default b1 n128 g1 c128 k256 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  //  128 images": 1.07
    "wgrad bf16:bf16:bf16 default b1 n128 g1 c256 k128 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  //  128 images": 1.07
    "dgrad f32:f32:f32 default b1 n128 g1 c192 k384 i28x28 f2x2 o14x14 s2x2 l1x1 d1x1 p0_0x0_0",  //  128 images": 1.07
    "dgrad f32:f32:f32 default b1 n128 g32 c1024 k1024 i14x14 f3x3 o7x7 s2x2 l1x1 d1x1 p1_1x1_1",  //  128 images": 1.08
    "dgrad f32:f32:f32 default b1 n256 g1 c144 k32 i28x28 f1x1 o28x28 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.10
    "fprop f32:f32:f32 default b1 n256 g1 c32 k192 i28x28 f1x1 o28x28 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.10
    "fprop f32:f32:f32 default b1 n64 g1 c64 k64 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  // r50_56_1x1a: 1.10
    "fprop f32:f32:f32 highest b1 n256 g1 c16 k96 i112x112 f1x1 o112x112 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.07
    "fprop f32:f32:f32 highest b1 n256 g1 c32 k16 i112x112 f1x1 o112x112 s1x1 l1x1 d1x1 p0_0x0_0",  //  256 images": 1.11
    "wgrad f32:f32:f32 highest b1 n4 g1 c320 k320 i64x64 f3x3 o64x64 s1x1 l1x1 d1x1 p1_1x1_1",  // unet_64: 1.07
    "wgrad f32:f32:f32 highest b1 n256 g1 c24 k144 i56x56 f1x1 o56x56 s1x1 l1x1 d1x1 p0_0x0_0",  // 256 images: 1.12
    "wgrad f32:f32:f32 default b1 n256 g1 c32 k16 i112x112 f1x1 o112x112 s1x1 l1x1 d1x1 p0_0x0_0",  // 256 images: 1.25
};
// clang-format on

// A choice takes at most kMostLost times the shortest measured time of the kernels and, where it is
// accurate enough, of lax. Choices without a measurement are skipped.
void TestMeasured() {
  double known = 0, sum = 0;
  for (const Measured& row : ReadMeasured()) {
    Selection selection;
    if (!Select(Parse(row.key), Model("h200"), "auto", &selection).ok()) continue;
    const bool left = selection.instance.empty(), candidate = Predict(row.key) > 0;
    Expect(candidate || !left, "no candidate: " + row.key);
    const auto chosen = row.kernels.find(selection.instance);
    if (!left && chosen == row.kernels.end()) continue;
    const double taken = left ? row.lax : chosen->second;
    double best = candidate ? row.lax : HUGE_VAL;
    for (const auto& kernel : row.kernels) best = std::min(best, kernel.second);
    const double lost = taken / best;
    known += 1;
    sum += std::log(lost);
    const auto is_key = [&](const char* key) { return row.key == key; };
    const bool exception = std::any_of(std::begin(kExceptions), std::end(kExceptions), is_key);
    Expect(lost <= kMostLost || exception,
           row.key + (left ? " is left to XLA" : ": " + selection.instance) + ", which costs " +
               std::to_string(lost) + " x");
  }
  std::printf("xla cost: %.0f choices lose %.2f %% in the mean\n", known,
              100 * (std::exp(sum / known) - 1));
  Expect(known > 250, "most of the choices are measured");
  Expect(std::exp(sum / known) <= kMostLostInMean, "choices lose little in the mean");
}

// Device times on an H200 of lax's 1x1 convolutions with stride 1 whose kernels were not measured:
// fprop, dgrad and wgrad, in bf16 and TF32. 0: not measured.
struct MeasuredPointwise {
  const char* input;
  double us[2][3];
};
// clang-format off
constexpr MeasuredPointwise kMeasuredPointwise[] = {
    {"b1 n64 g1 c1536 k384 i14x14", {{0, 27.19, 0}, {54.36, 50.42, 0}}},  // cnx_14_down
    {"b1 n64 g1 c384 k1536 i14x14", {{27.6, 0, 0}, {51.37, 53.73, 0}}},  // cnx_14_up
    {"b1 n64 g1 c768 k192 i28x28", {{0, 0, 36.26}, {59.25, 0, 0}}},  // cnx_28_down
    {"b1 n64 g1 c192 k768 i28x28", {{0, 0, 0}, {0, 58.6, 0}}},  // cnx_28_up
    {"b1 n64 g1 c384 k96 i56x56", {{50.22, 58.57, 55}, {96.49, 0, 0}}},  // cnx_56_down
    {"b1 n64 g1 c96 k384 i56x56", {{59.86, 0, 54.67}, {0, 0, 0}}},  // cnx_56_up
    {"b1 n64 g1 c3072 k768 i7x7", {{22.29, 0, 23.9}, {0, 45.84, 0}}},  // cnx_7_down
    {"b1 n64 g1 c768 k3072 i7x7", {{0, 21.65, 24.55}, {46.83, 0, 0}}},  // cnx_7_up
    {"b1 n128 g1 c32 k16 i112x112", {{47.53, 49.52, 0}, {0, 0, 0}}},  // mnv2_112_pr32_16
    {"b1 n128 g1 c64 k384 i14x14", {{8.43, 8.14, 0}, {0, 17.41, 0}}},  // mnv2_14_ex64
    {"b1 n128 g1 c96 k576 i14x14", {{12.75, 11.37, 0}, {0, 0, 0}}},  // mnv2_14_ex96
    {"b1 n128 g1 c192 k64 i14x14", {{6.12, 5.95, 0}, {0, 0, 0}}},  // mnv2_14_pr192_64
    {"b1 n128 g1 c384 k64 i14x14", {{8.35, 8.13, 0}, {0, 0, 0}}},  // mnv2_14_pr384_64
    {"b1 n128 g1 c384 k96 i14x14", {{9, 0, 0}, {17.71, 0, 0}}},  // mnv2_14_pr384_96
    {"b1 n128 g1 c576 k96 i14x14", {{11.82, 12.42, 0}, {23.76, 0, 0}}},  // mnv2_14_pr576_96
    {"b1 n128 g1 c32 k192 i28x28", {{14.87, 13.09, 0}, {0, 26.21, 0}}},  // mnv2_28_ex32
    {"b1 n128 g1 c144 k32 i28x28", {{11.77, 11.33, 0}, {0, 0, 0}}},  // mnv2_28_pr144_32
    {"b1 n128 g1 c192 k32 i28x28", {{13.3, 15.01, 0}, {0, 0, 0}}},  // mnv2_28_pr192_32
    {"b1 n128 g1 c24 k144 i56x56", {{46.91, 38.78, 47.75}, {0, 0, 0}}},  // mnv2_56_ex24
    {"b1 n128 g1 c144 k24 i56x56", {{38.94, 47.32, 44.41}, {0, 0, 0}}},  // mnv2_56_pr144_24
    {"b1 n128 g1 c96 k24 i56x56", {{29.29, 34.44, 35.54}, {0, 0, 0}}},  // mnv2_56_pr96_24
    {"b1 n128 g1 c160 k960 i7x7", {{8.36, 6.98, 0}, {0, 15.94, 0}}},  // mnv2_7_ex160
    {"b1 n128 g1 c320 k1280 i7x7", {{12.85, 0, 14.62}, {0, 0, 0}}},  // mnv2_7_head
    {"b1 n128 g1 c960 k160 i7x7", {{0, 8.18, 0}, {0, 0, 0}}},  // mnv2_7_pr960_160
    {"b1 n128 g1 c960 k320 i7x7", {{0, 10.28, 14.64}, {0, 18.67, 0}}},  // mnv2_7_pr960_320
    {"b1 n64 g1 c512 k512 i28x28", {{0, 46.46, 0}, {82.12, 81.97, 0}}},  // resnext_14_a0
    {"b1 n64 g1 c512 k1024 i14x14", {{23.33, 21.36, 0}, {43.35, 39.48, 0}}},  // resnext_14_c
    {"b1 n64 g1 c256 k256 i56x56", {{0, 0, 71.1}, {112.59, 111.86, 0}}},  // resnext_28_a0
    {"b1 n64 g1 c256 k512 i28x28", {{0, 0, 28.91}, {0, 47.8, 0}}},  // resnext_28_c
    {"b1 n64 g1 c64 k128 i56x56", {{0, 0, 0}, {0, 42.01, 0}}},  // resnext_56_a0
    {"b1 n64 g1 c128 k256 i56x56", {{0, 0, 49.3}, {0, 77.69, 0}}},  // resnext_56_c
    {"b1 n64 g1 c2048 k1024 i7x7", {{20.25, 0, 21.75}, {46.49, 47.43, 0}}},  // resnext_7_a
    {"b1 n64 g1 c1024 k1024 i14x14", {{38.73, 38.07, 0}, {73.58, 72.65, 0}}},  // resnext_7_a0
    {"b1 n64 g1 c1024 k2048 i7x7", {{0, 19.48, 21.87}, {47.92, 0, 0}}},  // resnext_7_c
};
// clang-format on

// Predictions are within a quarter of the measured time. Here the kernels' times are as close to
// lax's.
void TestPointwise() {
  for (const MeasuredPointwise& layer : kMeasuredPointwise) {
    const std::string input = layer.input;
    const std::string map = input.substr(input.find(" i") + 2);
    const std::string shape = input + " f1x1 o" + map + " s1x1 l1x1 d1x1 p0_0x0_0";
    for (int operands = 0; operands < 2; ++operands) {
      for (int op = 0; op < 3; ++op) {
        const double lax = layer.us[operands][op];
        if (lax == 0) continue;
        // The filters were measured as (k, c), the layout that cuBLAS reads.
        const std::string key = kOps[op] + kOperands[operands] + shape + (op == 0 ? " krsc" : "");
        const double share = Predict(key) / lax;
        Expect(share > 0.75 && share < 1.3, key + ": predicted " + std::to_string(share) + " x");
      }
    }
  }
}

}  // namespace
}  // namespace jaxconv

int main() {
  jaxconv::TestNoCandidate();
  jaxconv::TestGrowth();
  jaxconv::TestChoices();
  jaxconv::TestMeasured();
  jaxconv::TestPointwise();
  if (jaxconv::failures == 0) std::printf("xla cost: ok\n");
  return jaxconv::failures != 0;
}
