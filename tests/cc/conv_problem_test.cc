// ConvProblem: its key parsed and printed, the problems that it refuses and why, its derived sizes.
#include "core/conv_problem.h"

#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace jaxconv {
namespace {

int checked = 0;
int failures = 0;

void Expect(bool condition, const std::string& what) {
  ++checked;
  if (!condition && ++failures <= 50) std::printf("FAIL %s\n", what.c_str());
}

constexpr char kLine[] =
    "fprop f32:f32:f32 default b1 n64 g1 c64 k64 i56x56 f3x3 o56x56 s1x1 l1x1 d1x1 p1_1x1_1";

bool Equal(const ConvProblem& a, const ConvProblem& b) {
  return a.op == b.op && a.x_dtype == b.x_dtype && a.w_dtype == b.w_dtype &&
         a.y_dtype == b.y_dtype && a.precision == b.precision && a.rank == b.rank &&
         a.batch == b.batch && a.n == b.n && a.groups == b.groups && a.c == b.c && a.k == b.k &&
         a.in == b.in && a.filter == b.filter && a.out == b.out && a.stride == b.stride &&
         a.lhs_dilation == b.lhs_dilation && a.dilation == b.dilation && a.pad_lo == b.pad_lo &&
         a.pad_hi == b.pad_hi && a.filter_layout == b.filter_layout &&
         a.activation_layout == b.activation_layout;
}

Extents Of(std::initializer_list<int64_t> values) {
  Extents extents;
  for (int64_t value : values) extents.Append(value);
  return extents;
}

void CheckOneLine() {
  ConvProblem problem;
  Status status = ConvProblem::Parse(kLine, &problem);
  Expect(status.ok(), status.message());
  Expect(problem.ToString() == kLine, problem.ToString());
  Expect(problem.op == Op::kFprop && problem.rank == 2, "op and rank of the line");
  Expect(problem.in == Spatial{1, 56, 56} && problem.filter == Spatial{1, 3, 3}, "right-aligned");
  Expect(problem.pad_lo == Spatial{0, 1, 1} && problem.pad_hi == Spatial{0, 1, 1}, "padding");
  Expect(problem.Shape(Role::kX) == Of({1, 64, 56, 56, 64}), "extents of x");
  Expect(problem.Shape(Role::kW) == Of({1, 3, 3, 64, 64}), "extents of w");
  Expect(problem.Shape(Role::kY) == Of({1, 64, 56, 56, 64}), "extents of y");
  Expect(problem.Shape(Role::kY, false) == Of({64, 56, 56, 64}), "extents without a batch");
  Expect(problem.flops() == int64_t{2} * 64 * 56 * 56 * 9 * 64 * 64, "flops");

  // Negative padding, three axes, narrow dtypes.
  const char* line =
      "wgrad s8:s32:s8 highest b3 n2 g2 c8 k6 i5x6x7 f1x2x3 o4x5x5 s1x2x1 l1x2x1 d1x1x2 "
      "p-1_0x-2_1x2_0";
  status = ConvProblem::Parse(line, &problem);
  Expect(status.ok(), status.message());
  Expect(problem.ToString() == line, problem.ToString());
  Expect(problem.pad_lo == Spatial{-1, -2, 2}, "negative padding");
  Expect(problem.output_dtype() == DType::kS32 && problem.lhs_dtype() == DType::kS8 &&
             problem.rhs_dtype() == DType::kS8,
         "dtypes by operation");
  Expect(problem.Shape(Role::kW) == Of({3, 1, 2, 3, 4, 6}), "extents of w of a grouped problem");
}

// NCHW32 is no permutation of the channels-last axes: channels are split into blocks of 32.
void CheckActivationLayout() {
  ConvProblem problem;
  const std::string key = std::string(kLine) + " krsc nchw32";
  Expect(ConvProblem::Parse(key, &problem).ok() && problem.ToString() == key, key);
  Expect(problem.Shape(Role::kX) == Of({1, 64, 2, 56, 56, 32}), "extents of x in nchw32");
  Expect(problem.Shape(Role::kY, false) == Of({64, 2, 56, 56, 32}), "extents of y in nchw32");
  Expect(problem.Shape(Role::kW) == Of({1, 3, 3, 64, 64}), "extents of w in nchw32");
  Expect(!problem.RequireChannelsLast().ok(), "nchw32 is not channels-last");
  Expect(ConvProblem::Parse(kLine, &problem).ok() && problem.RequireChannelsLast().ok(),
         "channels-last refused");
  std::string odd = key;
  odd.replace(odd.find("c64"), 3, "c48");
  const Status status = ConvProblem::Parse(odd, &problem);
  Expect(status.message() ==
             "nchw32: expected channels of a group in multiples of 32, or 4 input channels, got 48 "
             "and 64",
         status.message());
  std::string image = key;
  image.replace(image.find("c64"), 3, "c4");
  Expect(ConvProblem::Parse(image, &problem).ok(), image);
  Expect(problem.Shape(Role::kX) == Of({1, 64, 1, 56, 56, 4}), "extents of x of 4 channels");
  Expect(!ConvProblem::Parse(std::string(kLine) + " nchw32 krsc", &problem).ok(), "another order");
}

// 8-bit problems: the packed filter, and the epilogue's terms at the end of the key.
void CheckInt8() {
  std::string plain = kLine;
  plain.replace(plain.find("f32:f32:f32"), 11, "s8:s8:s32");
  ConvProblem problem;
  const std::string packed = plain + " packed";
  Expect(ConvProblem::Parse(packed, &problem).ok() && problem.ToString() == packed, packed);
  Expect(problem.epilogue.Plain(), "plain epilogue");
  Expect(problem.Shape(Role::kW, false) == Of({64, 576}), "extents of a packed filter");
  std::string few = packed;
  few.replace(few.find("c64"), 3, "c4");
  Expect(ConvProblem::Parse(few, &problem).ok() && problem.packed_row() == 64,
         "36 bytes are padded to 64");
  for (const char* terms :
       {" scale", " image_scale offset bias residual relu6", " scale residual", " scale relu"}) {
    for (const char* layout : {"", " packed", " packed nchw32", " krsc"}) {
      const std::string key = plain + layout + terms;
      Expect(ConvProblem::Parse(key, &problem).ok() && problem.ToString() == key, key);
    }
  }
  Expect(problem.epilogue.scale == ScaleKind::kChannel &&
             problem.epilogue.activation == Activation::kRelu && !problem.epilogue.bias,
         "terms read");
  std::string s8 = plain, u8 = plain;
  s8.replace(s8.find("s8:s8:s32"), 9, "u8:s8:s8");
  u8.replace(u8.find("s8:s8:s32"), 9, "s8:s8:u8");
  for (const auto& [key, zero_point] : {std::pair{s8, -128}, {s8, 127}, {u8, 1}, {u8, 255}}) {
    Expect(ConvProblem::Parse(key + " scale z" + std::to_string(zero_point), &problem).ok() &&
               problem.epilogue.zero_point == zero_point,
           "zero point " + std::to_string(zero_point));
  }
  for (const std::string& bad :
       {plain + " bias", plain + " relu", plain + " scale bias offset", plain + " scale gelu",
        plain + " scale z3", s8 + " scale z128", s8 + " scale z-129", u8 + " scale z256",
        u8 + " scale z-1", std::string(kLine) + " packed", plain + " nchw32 packed"}) {
    Expect(!ConvProblem::Parse(bad, &problem).ok(), bad);
  }
}

// The epilogue of floating-point operands.
void CheckFused() {
  ConvProblem problem;
  const std::string plain = kLine;
  for (const char* terms :
       {" scale", " bias", " residual", " relu", " scale bias residual hard_swish pre statistics",
        " bias relu6", " residual leaky_relu:0x1.47ae14p-7", " leaky_relu:-0x1p-2 pre",
        " leaky_relu:0x0p+0", " gelu", " gelu_tanh pre", " silu", " sigmoid", " tanh statistics",
        " statistics"}) {
    for (const char* layout : {"", " krsc"}) {
      const std::string key = plain + layout + terms;
      const Status status = ConvProblem::Parse(key, &problem);
      Expect(status.ok() && problem.ToString() == key, key + ": " + status.message());
      Expect(!problem.epilogue.Plain(), key);
    }
  }
  const std::string all = plain + " scale bias residual leaky_relu:0x1.47ae14p-7 pre statistics";
  Expect(ConvProblem::Parse(all, &problem).ok(), all);
  const Epilogue& e = problem.epilogue;
  Expect(e.scale == ScaleKind::kChannel && e.bias && e.residual && e.pre && e.statistics &&
             e.activation == Activation::kLeakyRelu && e.negative_slope == 0.01f,
         "terms read");
  auto with = [&](const char* from, const char* to) {
    std::string key = plain;
    key.replace(key.find(from), std::string(from).size(), to);
    return key;
  };
  for (const std::string& bad : {plain + " image_scale",
                                 plain + " offset",
                                 plain + " relu z3",
                                 plain + " pre",
                                 plain + " bias scale",
                                 plain + " statistics pre",
                                 plain + " relu pre pre",
                                 plain + " leaky_relu",
                                 plain + " leaky_relu:",
                                 plain + " leaky_relu:0.01",
                                 plain + " leaky_relu:0xinf",
                                 plain + " leaky_relu:0x1p+200",
                                 plain + " leaky_relu:0x1p-2x",
                                 plain + " swish",
                                 with("fprop", "wgrad") + " bias",
                                 with("fprop", "dgrad") + " bias",
                                 with(" b1", " b2") + " bias",
                                 with(":f32 ", ":s32 ") + " bias",
                                 with("f32:f32:f32", "s32:s32:s32") + " bias",
                                 with("f32:f32:f32", "s8:s8:f32") + " scale relu pre",
                                 with("f32:f32:f32", "s8:s8:f32") + " scale statistics"}) {
    Expect(!ConvProblem::Parse(bad, &problem).ok(), bad);
  }
}

// A filter layout other than rsck is part of the key, and only an operand can have one.
void CheckFilterLayout() {
  ConvProblem problem;
  Expect(ConvProblem::Parse(kLine, &problem).ok(), kLine);
  Expect(problem.RequireRsck().ok(), "rsck refused");
  const std::string krsc = std::string(kLine) + " krsc";
  Expect(ConvProblem::Parse(krsc, &problem).ok(), krsc);
  Expect(problem.filter_layout == FilterLayout::kKrsc && problem.ToString() == krsc, krsc);
  Expect(!problem.RequireRsck().ok(), "krsc accepted");
  problem.op = Op::kWgrad;
  const Status status = problem.Validate();
  Expect(status.message() == "filter layout: wgrad writes rsck, got krsc", status.message());
}

// A filter prepared for Winograd is a record and U, which is float16 whatever the type of x.
void CheckPreparedFilters() {
  std::string plain = kLine;
  plain.replace(plain.find("f32:f32:f32"), 11, "bf16:f16:bf16");
  // The one-dimensional layout pads 64 columns to 128.
  const std::pair<const char*, int64_t> kLayouts[] = {
      {"winograd2", 16}, {"winograd4", 36}, {"winograd6", 64}, {"winograd4x3", 18 * 2}};
  for (const auto& [layout, points] : kLayouts) {
    const std::string key = plain + " " + layout;
    ConvProblem problem;
    Expect(ConvProblem::Parse(key, &problem).ok() && problem.ToString() == key, key);
    Expect(problem.Shape(Role::kW) == Of({1, 128 + points * 64 * 64}) &&
               problem.Shape(Role::kW, false) == Of({128 + points * 64 * 64}),
           "extents of a filter prepared as " + key);
    Expect(problem.Shape(Role::kX) == Of({1, 64, 56, 56, 64}), "extents of x beside it");
    const Status status = problem.RequireRsckOrKrsc();
    Expect(status.message() == std::string("reads filters stored as rsck or krsc, got ") + layout,
           status.message());
  }
  auto refused = [&](const char* part, const char* other, const std::string& reason) {
    std::string key = plain + " winograd4";
    key.replace(key.find(part), std::string(part).size(), other);
    ConvProblem problem;
    const Status status = ConvProblem::Parse(key, &problem);
    Expect(status.message() == "winograd4 filter: expected " + reason, status.message());
  };
  refused("fprop", "dgrad", "fprop and f16, got dgrad and f16");
  refused("bf16:f16:bf16", "bf16:bf16:bf16", "fprop and f16, got fprop and bf16");
  const char* window = "one batch of a 3x3 window of stride and dilation 1";
  refused("b1", "b2", window);
  refused("o56x56 s1x1", "o28x28 s2x2", window);
  refused("f3x3 o56x56", "f1x3 o58x56", window);
}

void CheckRandomRoundTrips() {
  std::mt19937 random(7);
  auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int round_trips = 0;
  while (round_trips < 20000) {
    ConvProblem problem;
    problem.op = static_cast<Op>(draw(0, 2));
    problem.x_dtype = static_cast<DType>(draw(0, 4));
    problem.w_dtype = static_cast<DType>(draw(0, 4));
    problem.y_dtype = static_cast<DType>(draw(0, 4));
    problem.precision = static_cast<Precision>(draw(0, 2));
    if (problem.op != Op::kWgrad) {
      problem.filter_layout = static_cast<FilterLayout>(draw(0, 1));
    }
    problem.rank = static_cast<int>(draw(1, 3));
    problem.batch = draw(1, 5);
    problem.n = draw(1, 1000);
    problem.groups = draw(1, 9);
    problem.c = problem.groups * draw(1, 100);
    problem.k = problem.groups * draw(1, 100);
    for (int axis = 3 - problem.rank; axis < 3; ++axis) {
      problem.in[axis] = draw(1, 100);
      problem.filter[axis] = draw(1, 9);
      problem.stride[axis] = draw(1, 4);
      problem.lhs_dilation[axis] = draw(1, 4);
      problem.dilation[axis] = draw(1, 4);
      problem.pad_lo[axis] = draw(-5, 9);
      problem.pad_hi[axis] = draw(-5, 9);
      // Slides the window, to check the closed form that ConvProblem uses.
      int64_t extent = (problem.in[axis] - 1) * problem.lhs_dilation[axis] + 1 +
                       problem.pad_lo[axis] + problem.pad_hi[axis];
      int64_t reach = (problem.filter[axis] - 1) * problem.dilation[axis] + 1;
      problem.out[axis] = 0;
      for (int64_t start = 0; start + reach <= extent; start += problem.stride[axis]) {
        ++problem.out[axis];
      }
    }
    bool empty = problem.out[0] * problem.out[1] * problem.out[2] == 0;
    ConvProblem parsed;
    Status status = ConvProblem::Parse(problem.ToString(), &parsed);
    Expect(status.ok() == !empty, problem.ToString() + ": " + status.message());
    if (empty || !status.ok()) continue;
    Expect(Equal(problem, parsed), problem.ToString());
    Expect(parsed.ToString() == problem.ToString(), problem.ToString());
    ++round_trips;
  }
}

struct Refused {
  const char* from;  // this part of kLine
  const char* to;    // is replaced by this
  const char* word;  // the message must contain it
};

void CheckRefusals() {
  const Refused cases[] = {
      {"fprop", "forward", "operation"},
      {"f32:f32:f32", "f64:f32:f32", "dtype of x"},
      {"f32:f32:f32", "f32:f32", "dtype"},
      {"default", "tf32", "precision"},
      {"b1 ", "", "'b'"},
      {"b1 ", "bx ", "'x' is no integer"},
      {"b1 ", "b1.5 ", "integer"},
      {"b1 ", "b0 ", "batch: expected at least 1, got 0"},
      {"n64", "n-3", "n: expected at least 1, got -3"},
      {"n64", "n", "n"},
      {"n64", "n99999999999999999999", "integer"},
      {"g1", "g5", "groups: 5 does not divide"},
      {"g1", "g0", "groups"},
      {"c64", "k64", "'c'"},
      {"i56x56", "i56", "rank"},
      {"i56x56", "i1x1x1x1", "at most 3"},
      {"i56x56", "i56x", "i: cannot read"},
      {"i56x56", "i0x56", "input extent"},
      {"o56x56", "o55x56", "output extent of spatial axis 0: expected 56, got 55"},
      {"o56x56", "o56x57", "output extent of spatial axis 1: expected 56, got 57"},
      {"s1x1", "s1", "rank"},
      {"s1x1", "s0x1", "stride"},
      {"l1x1", "l1x0", "lhs dilation"},
      {"d1x1", "d1x-1", "dilation"},
      {"p1_1x1_1", "p1x1", "p: cannot read"},
      {"p1_1x1_1", "p1_1", "rank"},
      {"p1_1x1_1", "p1_1x1_1 extra", "unexpected 'extra'"},
      {"p1_1x1_1", "p1_1x1_1 krsc extra", "unexpected 'extra'"},
      {" p1_1x1_1", "", "'p'"},
  };
  for (const Refused& refused : cases) {
    std::string line = kLine;
    size_t at = line.find(refused.from);
    Expect(at != std::string::npos, std::string("no '") + refused.from + "' in the line");
    if (at == std::string::npos) continue;
    line.replace(at, std::string(refused.from).size(), refused.to);
    ConvProblem problem;
    problem.n = 12345;
    Status status = ConvProblem::Parse(line, &problem);
    Expect(!status.ok() && status.code() == StatusCode::kInvalidArgument, line);
    std::string where = line + "\n  expected '" + refused.word + "' in: " + status.message();
    Expect(status.message().find(refused.word) != std::string::npos, where);
    Expect(problem.n == 12345, "a refused line must leave the problem alone: " + line);
  }
}

// Any prefix, and any single damaged character, is either refused or still a problem: no crash, no
// out-of-bounds read (run under a sanitizer to see the latter).
void CheckDamagedLines() {
  const std::string line = kLine;
  for (size_t length = 0; length < line.size(); ++length) {
    ConvProblem problem;
    std::string prefix = line.substr(0, length);
    Status status = ConvProblem::Parse(prefix, &problem);
    Expect(status.ok() ? problem.ToString() == prefix : !status.message().empty(), prefix);
  }
  for (size_t at = 0; at < line.size(); ++at) {
    for (char damage : {' ', 'x', '_', '-', '0', '9', ':', '\0', '\xff'}) {
      std::string damaged = line;
      damaged[at] = damage;
      ConvProblem problem;
      Status status = ConvProblem::Parse(damaged, &problem);
      if (status.ok()) {
        // Only numbers with leading zeros are printed in another spelling.
        ConvProblem again;
        Expect(ConvProblem::Parse(problem.ToString(), &again).ok() && Equal(problem, again),
               damaged);
      } else {
        Expect(!status.message().empty(), damaged);
      }
    }
  }
}

// Sizes beyond 64 bits are Unimplemented, not InvalidArgument, and nothing overflows.
void CheckLimits() {
  struct Limit {
    const char* key;
    const char* word;  // empty: valid, and within 32 bits; "32": valid, but not within 32 bits
  };
  const Limit limits[] = {
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i5 f3 o2 s100000000 l1 d1 p100000000_0", ""},
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i5 f3 o2 s1200000000 l1 d1 p1200000000_0", "32"},
      {"fprop s8:s8:s32 default b1 n1 g1 c2 k1 i2 f2 o1 s2147483646 l1 d1 p4_0", "32"},
      {"dgrad f32:f32:f32 default b1 n1 g1 c1 k1 i1 f1 o1 s1 l1 d1 p-536870912_536870912", "32"},
      {"fprop f32:f32:f32 default b1 n2147418111 g1 c1 k1 i1 f1 o1 s1 l1 d1 p0_0", ""},
      {"fprop f32:f32:f32 default b1 n2147418112 g1 c1 k1 i1 f1 o1 s1 l1 d1 p0_0", "32"},
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i2 f2 o1 s1 l1 d1000000000000 p0_999999999999",
       "32"},
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i1 f1 o1 s1 l9223372036854775807 d1 p0_0",
       "coordinate of spatial axis 0: expected less than 2^60, got 2^63 or more"},
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i2 f1 o1 s9223372036854775807 l1 d1 p0_0",
       "coordinate"},
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i1 f1 o1 s1 l1 d1 "
       "p-9223372036854775808_9223372036854775807",
       "coordinate"},
      {"fprop f32:f32:f32 default b1 n300000000000000 g1 c1 k1 i1 f1 o1 s1 l1 d1 p0_0",
       "largest tensor: expected less than 2^48, got 300000000000000"},
      {"wgrad f32:f32:f32 default b1 n1 g1 c4294967296 k4294967296 i1 f1 o1 s1 l1 d1 p0_0",
       "largest tensor: expected less than 2^48, got 2^63 or more"},
      {"fprop f32:f32:f32 default b1 n1048576 g1 c1048576 k1048576 i16 f1 o16 s1 l1 d1 p0_0",
       "operations"},
      // Tensors of 1 and 8 elements, but 2^63 positions with padding.
      {"fprop f32:f32:f32 default b1 n1 g1 c1 k1 i1x1x1 f1x1x1 o2x2x2 s2000000x2000000x2000000 "
       "l1x1x1 d1x1x1 p2000000_0x2000000_0x2000000_0",
       "padded"},
  };
  for (const Limit& limit : limits) {
    ConvProblem problem;
    const Status status = ConvProblem::Parse(limit.key, &problem);
    const std::string word = limit.word, where = limit.key + (": " + status.message());
    if (word.empty() || word == "32") {
      Expect(status.ok(), where);
      const Status fits = problem.RequireInt32();
      Expect(fits.ok() == word.empty(), where + fits.message());
      Expect(fits.ok() || fits.code() == StatusCode::kUnimplemented, where);
    } else {
      Expect(status.code() == StatusCode::kUnimplemented, where);
      Expect(status.message().find(word) != std::string::npos, where);
    }
  }
}

void CheckOutputExtent() {
  Expect(OutputExtent(5, 3, 1, 1, 1, 0, 0) == 3, "valid");
  Expect(OutputExtent(5, 3, 2, 1, 1, 1, 1) == 3, "strided");
  Expect(OutputExtent(2, 5, 1, 1, 1, 1, 1) == 0, "window beyond the padded input");
  Expect(OutputExtent(2, 4, 3, 1, 1, 1, 1) == 1, "window as large as the padded input");
  Expect(OutputExtent(4, 1, 1, 1, 1, -2, -2) == 0, "everything cropped");
  Expect(OutputExtent(0, 1, 1, 1, 1, 0, 0) == 0, "no input");
  Expect(OutputExtent(0, 1, 1, 1, 1, 1, 1) == 2, "nothing but padding");
  Expect(OutputExtent(3, 2, 1, 3, 2, 0, 0) == 5, "both dilations");
  Expect(OutputExtent(1, 4, 5, 1, 1, 0, 0) == 0,
         "a negative span is no position, whatever the stride");
}

}  // namespace
}  // namespace jaxconv

int main() {
  using namespace jaxconv;
  CheckOneLine();
  CheckActivationLayout();
  CheckInt8();
  CheckFused();
  CheckFilterLayout();
  CheckPreparedFilters();
  CheckRandomRoundTrips();
  CheckRefusals();
  CheckDamagedLines();
  CheckLimits();
  CheckOutputExtent();
  std::printf("%d checks, %d failures\n", checked, failures);
  return failures != 0;
}
