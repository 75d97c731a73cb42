#include "core/conv_problem.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <utility>

#include "core/activation_names.h"

namespace jaxconv {
namespace {

constexpr const char* kOpNames[] = {"fprop", "dgrad", "wgrad"};
constexpr const char* kDTypeNames[] = {"f32", "f16", "bf16", "s8", "s32", "u8"};
constexpr const char* kPrecisionNames[] = {"default", "high", "highest"};
constexpr const char* kFilterLayoutNames[] = {"rsck",      "krsc",      "packed",     "winograd2",
                                              "winograd4", "winograd6", "winograd4x3"};
constexpr const char* kActivationLayoutNames[] = {"nhwc", "nchw32"};
constexpr const char* kScaleNames[] = {"", "scale", "image_scale"};

// A channel block of nchw32.
constexpr int64_t ChannelBlock(int64_t channels) { return channels == 4 ? 4 : 32; }

constexpr int64_t kMaxElements = int64_t{1} << 48;
constexpr int64_t kMaxOffset = int64_t{1} << 60;
constexpr int64_t kMaxInt32Coordinate = int64_t{1} << 30;
constexpr int64_t kMaxInt32Extent = (int64_t{1} << 31) - (1 << 16);

// Reads a problem key token by token; keeps the first failure and skips the rest.
class KeyReader {
 public:
  explicit KeyReader(std::string_view key) : rest_(key) {}

  template <typename Enum, size_t kCount>
  void ReadEnum(const char* const (&names)[kCount], const char* what, char end, Enum* value) {
    std::string_view word = Take(end);
    for (size_t i = 0; i < kCount; ++i) {
      if (word == names[i]) {
        *value = static_cast<Enum>(i);
        return;
      }
    }
    Fail(std::string(what) + ": '" + std::string(word) + "' is not known");
  }

  void ReadInt(char key, int64_t* value) {
    std::string_view word = TakeKey(key);
    if (!ok()) return;
    if (!ToInt(word, value))
      Fail(std::string(1, key) + ": '" + std::string(word) + "' is no integer");
  }

  // "56x56" into the right-aligned axes; returns the number of axes.
  int ReadSpatial(char key, Spatial* value) {
    return ReadAxes(key,
                    [&](int axis, std::string_view word) { return ToInt(word, &(*value)[axis]); });
  }

  int ReadPadding(Spatial* lo, Spatial* hi) {
    return ReadAxes('p', [&](int axis, std::string_view word) {
      size_t split = word.find('_');
      return split != std::string_view::npos && ToInt(word.substr(0, split), &(*lo)[axis]) &&
             ToInt(word.substr(split + 1), &(*hi)[axis]);
    });
  }

  // Reads the layouts that differ from the default, in this order.
  void ReadLayouts(FilterLayout* filter, ActivationLayout* activation) {
    ReadWord(kFilterLayoutNames, filter);
    if (TakeWord(Name(ActivationLayout::kNchw32))) *activation = ActivationLayout::kNchw32;
  }

  void ReadEpilogue(Epilogue* epilogue) {
    ReadWord(kScaleNames, &epilogue->scale);
    epilogue->offset = TakeWord("offset");
    epilogue->bias = TakeWord("bias");
    epilogue->residual = TakeWord("residual");
    ReadActivation(epilogue);
    if (!rest_.empty() && rest_[0] == 'z') ReadInt('z', &epilogue->zero_point);
    epilogue->pre = TakeWord("pre");
    epilogue->statistics = TakeWord("statistics");
  }

  bool ok() const { return status_.ok(); }
  Status Finish() {
    if (ok() && !rest_.empty()) Fail("unexpected '" + std::string(rest_) + "' at the end");
    return status_;
  }

 private:
  static bool ToInt(std::string_view word, int64_t* value) {
    auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
    return error == std::errc() && end == word.data() + word.size();
  }

  static bool ToSlope(std::string_view word, float* value) {
    if (word.substr(0, 1) != ":") return false;
    word.remove_prefix(1);
    const bool negative = word.substr(0, 1) == "-";
    if (negative) word.remove_prefix(1);
    if (word.substr(0, 2) != "0x") return false;
    const char* last = word.data() + word.size();
    auto [end, error] = std::from_chars(word.data() + 2, last, *value, std::chars_format::hex);
    if (error != std::errc() || end != last || !std::isfinite(*value)) return false;
    *value = std::copysign(*value, negative ? -1.0f : 1.0f);
    return true;
  }

  // Consumes the next word if it equals `word`.
  bool TakeWord(std::string_view word) {
    if (!ok() || rest_.substr(0, rest_.find(' ')) != word) return false;
    Take(' ');
    return true;
  }

  // Consumes the next word if it is one of these; the first means none.
  template <typename Enum, size_t kCount>
  void ReadWord(const char* const (&names)[kCount], Enum* value) {
    for (size_t i = 1; i < kCount; ++i) {
      if (TakeWord(names[i])) {
        *value = static_cast<Enum>(i);
        return;
      }
    }
  }

  // Reads an activation's name; leaky_relu includes the slope, for example leaky_relu:0x1p-2.
  void ReadActivation(Epilogue* epilogue) {
    constexpr std::string_view kLeaky = "leaky_relu";
    if (!ok() || rest_.substr(0, kLeaky.size()) != kLeaky) {
      ReadWord(kActivationNames, &epilogue->activation);
      return;
    }
    const std::string_view word = Take(' ').substr(kLeaky.size());
    epilogue->activation = Activation::kLeakyRelu;
    if (!ToSlope(word, &epilogue->negative_slope)) {
      Fail("leaky_relu: expected a finite slope such as :0x1p-2, got '" + std::string(word) + "'");
    }
  }

  std::string_view Take(char end) {
    size_t stop = rest_.find(end);
    std::string_view word = rest_.substr(0, stop);
    rest_ = stop == std::string_view::npos ? std::string_view() : rest_.substr(stop + 1);
    return word;
  }

  std::string_view TakeKey(char key) {
    if (!ok()) return {};
    std::string_view word = Take(' ');
    if (word.empty() || word[0] != key) {
      Fail("expected the field '" + std::string(1, key) + "', got '" + std::string(word) + "'");
      return {};
    }
    return word.substr(1);
  }

  template <typename ReadAxis>
  int ReadAxes(char key, ReadAxis read_axis) {
    std::string_view word = TakeKey(key);
    if (!ok()) return 0;
    int rank = 1;
    for (char letter : word) rank += letter == 'x';
    if (rank > 3) {
      Fail(std::string(1, key) + ": at most 3 axes, got '" + std::string(word) + "'");
      return 0;
    }
    for (int axis = 3 - rank; axis < 3; ++axis) {
      size_t stop = word.find('x');
      if (!read_axis(axis, word.substr(0, stop))) {
        Fail(std::string(1, key) + ": cannot read '" + std::string(word) + "'");
        return 0;
      }
      word = stop == std::string_view::npos ? std::string_view() : word.substr(stop + 1);
    }
    return rank;
  }

  void Fail(std::string message) {
    if (ok()) status_ = Status::InvalidArgument("convolution problem: " + std::move(message));
  }

  std::string_view rest_;
  Status status_;
};

Status RequirePositive(const char* name, int64_t value) {
  if (value >= 1) return {};
  return Status::InvalidArgument(std::string(name) + ": expected at least 1, got " +
                                 std::to_string(value));
}

// Sums and products of non-negative values saturate at the largest int64.
constexpr int64_t kSaturated = std::numeric_limits<int64_t>::max();

int64_t Sum(std::initializer_list<int64_t> terms) {
  int64_t sum = 0;
  for (int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) return kSaturated;
  }
  return sum;
}

int64_t Product(std::initializer_list<int64_t> factors) {  // all positive
  int64_t product = 1;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return kSaturated;
  }
  return product;
}

int64_t Magnitude(int64_t value) {
  return value == std::numeric_limits<int64_t>::min() ? kSaturated : std::abs(value);
}

// A bound on every coordinate of the axis and on every sum of terms in the tensors' relation.
int64_t Reach(const ConvProblem& p, int axis) {
  return Sum({Product({p.in[axis], p.lhs_dilation[axis]}), Product({p.out[axis], p.stride[axis]}),
              Product({p.filter[axis], p.dilation[axis]}), Magnitude(p.pad_lo[axis]),
              Magnitude(p.pad_hi[axis])});
}

Status TooLarge(const std::string& what, int64_t value, const char* limit) {
  return Status::Unimplemented(what + ": expected less than " + limit + ", got " +
                               (value == kSaturated ? "2^63 or more" : std::to_string(value)));
}

// Like C's %a, independent of the locale: exact, and short.
std::string SlopeText(float slope) {
  char digits[32];
  const auto end =
      std::to_chars(digits, digits + sizeof(digits), std::fabs(slope), std::chars_format::hex);
  return std::string(std::signbit(slope) ? ":-0x" : ":0x") + std::string(digits, end.ptr);
}

std::string OnAxis(const ConvProblem& p, int axis) {
  return " of spatial axis " + std::to_string(axis - (3 - p.rank));
}

}  // namespace

const char* Name(Op op) { return kOpNames[static_cast<int>(op)]; }
const char* Name(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
const char* Name(Precision precision) { return kPrecisionNames[static_cast<int>(precision)]; }
const char* Name(FilterLayout layout) { return kFilterLayoutNames[static_cast<int>(layout)]; }
const char* Name(ActivationLayout layout) {
  return kActivationLayoutNames[static_cast<int>(layout)];
}

int64_t ByteWidth(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS8:
    case DType::kU8:
      return 1;
  }
  return 0;
}

int64_t WinogradPoints(FilterLayout layout) {
  switch (layout) {
    case FilterLayout::kWinograd2:
      return 4 * 4;
    case FilterLayout::kWinograd4:
      return 6 * 6;
    case FilterLayout::kWinograd6:
      return 8 * 8;
    case FilterLayout::kWinograd4x3:
      return 3 * 6;
    default:
      return 0;
  }
}

int64_t ConvProblem::winograd_elements() const {
  int64_t columns = k_per_group(), reduction = c_per_group();
  if (filter_layout == FilterLayout::kWinograd4x3) {
    columns = (columns + 127) / 128 * 128;
    reduction = (reduction + 31) / 32 * 32;
  }
  return kWinogradRecordBytes / 2 + WinogradPoints(filter_layout) * groups * columns * reduction;
}

int64_t OutputExtent(int64_t in, int64_t filter, int64_t stride, int64_t lhs_dilation,
                     int64_t dilation, int64_t pad_lo, int64_t pad_hi) {
  int64_t dilated_in = in == 0 ? 0 : (in - 1) * lhs_dilation + 1;
  int64_t dilated_filter = filter == 0 ? 0 : (filter - 1) * dilation + 1;
  int64_t span = dilated_in + pad_lo + pad_hi - dilated_filter;
  return span < 0 ? 0 : span / stride + 1;
}

double ConvProblem::PartOfX() const {
  double part = 1;
  for (int axis = 0; axis < 3; ++axis) {
    part *= std::min(1.0, static_cast<double>(filter[axis]) / static_cast<double>(stride[axis]));
  }
  return part;
}

Extents ConvProblem::Shape(Role role, bool with_batch) const {
  Extents extents;
  const bool activation = role != Role::kW;
  const bool blocked = activation && activation_layout == ActivationLayout::kNchw32;
  const int64_t channels = role == Role::kX ? c : k;
  const Spatial& spatial = role == Role::kX ? in : role == Role::kY ? out : filter;
  if (with_batch) extents.Append(batch);
  if (!activation && filter_layout == FilterLayout::kPacked) {
    extents.Append(k);
    extents.Append(packed_row());
    return extents;
  }
  if (!activation && WinogradPoints(filter_layout) > 0) {
    extents.Append(winograd_elements());
    return extents;
  }
  if (activation) extents.Append(n);
  if (blocked) extents.Append(channels / ChannelBlock(channels));
  for (int axis = 3 - rank; axis < 3; ++axis) extents.Append(spatial[axis]);
  if (!activation) extents.Append(c_per_group());
  extents.Append(blocked ? ChannelBlock(channels) : channels);
  return extents;
}

namespace {

Status CheckPrepared(const ConvProblem& p) {
  const std::string name = Name(p.filter_layout);
  if (p.op != Op::kFprop || p.w_dtype != DType::kF16) {
    return Status::InvalidArgument(name + " filter: expected fprop and f16, got " + Name(p.op) +
                                   " and " + Name(p.w_dtype));
  }
  if (p.rank != 2 || p.filter != Spatial{1, 3, 3} || p.stride != Spatial{1, 1, 1} ||
      p.lhs_dilation != Spatial{1, 1, 1} || p.dilation != Spatial{1, 1, 1} || p.batch != 1) {
    return Status::InvalidArgument(
        name + " filter: expected one batch of a 3x3 window of stride and dilation 1");
  }
  return {};
}

Status CheckLayouts(const ConvProblem& p) {
  if (p.op == Op::kWgrad && p.filter_layout != FilterLayout::kRsck) {
    return Status::InvalidArgument(std::string("filter layout: wgrad writes rsck, got ") +
                                   Name(p.filter_layout));
  }
  if (p.filter_layout == FilterLayout::kPacked && (p.op != Op::kFprop || p.w_dtype != DType::kS8)) {
    return Status::InvalidArgument(std::string("packed filter: expected fprop and s8, got ") +
                                   Name(p.op) + " and " + Name(p.w_dtype));
  }
  if (WinogradPoints(p.filter_layout) > 0) JAXCONV_RETURN_IF_ERROR(CheckPrepared(p));
  if (p.activation_layout == ActivationLayout::kChannelsLast) return {};
  if (p.rank != 2) {
    return Status::InvalidArgument("nchw32: expected 2 spatial axes, got " +
                                   std::to_string(p.rank));
  }
  const bool few = p.groups == 1 && p.c == 4;
  if ((p.c_per_group() % 32 != 0 && !few) || p.k_per_group() % 32 != 0) {
    return Status::InvalidArgument(
        "nchw32: expected channels of a group in multiples of 32, or 4 input channels, got " +
        std::to_string(p.c_per_group()) + " and " + std::to_string(p.k_per_group()));
  }
  return {};
}

bool EightBit(DType dtype) { return dtype == DType::kS8 || dtype == DType::kU8; }

bool Float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

Status CheckFloatEpilogue(const ConvProblem& p) {
  const Epilogue& e = p.epilogue;
  if (!Float(p.y_dtype)) {
    return Status::InvalidArgument(
        std::string("epilogue: expected a floating-point output of such operands, got ") +
        Name(p.y_dtype));
  }
  if (p.batch != 1) {
    return Status::InvalidArgument("epilogue: expected one batch, got " + std::to_string(p.batch));
  }
  if (e.scale == ScaleKind::kImage || e.offset || e.zero_point != 0) {
    return Status::InvalidArgument(
        "epilogue: expected neither image_scale, offset nor zero point of floating-point operands");
  }
  if (e.pre && e.activation == Activation::kNone) {
    return Status::InvalidArgument("epilogue: expected an activation beside pre");
  }
  return {};
}

Status CheckEpilogue(const ConvProblem& p) {
  const Epilogue& e = p.epilogue;
  if (e.Plain()) return {};
  const bool eight_bit = EightBit(p.x_dtype) && p.w_dtype == DType::kS8;
  if (p.op != Op::kFprop || (!eight_bit && !(Float(p.x_dtype) && Float(p.w_dtype)))) {
    return Status::InvalidArgument(
        std::string("epilogue: expected fprop of 8-bit or floating-point operands, got ") +
        Name(p.op) + " of " + Name(p.x_dtype) + " and " + Name(p.w_dtype));
  }
  if (!eight_bit) return CheckFloatEpilogue(p);
  if (e.pre || e.statistics) {
    return Status::InvalidArgument(
        "epilogue: expected neither pre nor statistics of 8-bit operands");
  }
  if (e.scale == ScaleKind::kNone) {
    return Status::InvalidArgument("epilogue: expected a scale beside the other terms");
  }
  if (e.activation > Activation::kRelu6) {  // exp and erf differ in their last bits between
                                            // platforms
    return Status::InvalidArgument(
        std::string("epilogue: expected relu or relu6 for 8-bit operands, got ") +
        kActivationNames[static_cast<int>(e.activation)]);
  }
  const bool is_signed = p.y_dtype == DType::kS8;
  const int least = is_signed ? -128 : 0, largest = is_signed ? 127 : EightBit(p.y_dtype) ? 255 : 0;
  if (e.zero_point < least || e.zero_point > largest) {
    return Status::InvalidArgument(std::string("epilogue: expected a zero point of ") +
                                   Name(p.y_dtype) + ", " + std::to_string(least) + " to " +
                                   std::to_string(largest) + ", got " +
                                   std::to_string(e.zero_point));
  }
  return {};
}

}  // namespace

Status ConvProblem::Validate() const {
  if (rank < 1 || rank > 3) {
    return Status::InvalidArgument("rank: expected 1 to 3, got " + std::to_string(rank));
  }
  JAXCONV_RETURN_IF_ERROR(RequirePositive("batch", batch));
  JAXCONV_RETURN_IF_ERROR(RequirePositive("n", n));
  JAXCONV_RETURN_IF_ERROR(RequirePositive("groups", groups));
  JAXCONV_RETURN_IF_ERROR(RequirePositive("input channels", c));
  JAXCONV_RETURN_IF_ERROR(RequirePositive("output channels", k));
  if (c % groups != 0 || k % groups != 0) {
    return Status::InvalidArgument("groups: " + std::to_string(groups) + " does not divide the " +
                                   std::to_string(c) + " input and " + std::to_string(k) +
                                   " output channels");
  }
  for (int axis = 0; axis < 3; ++axis) {
    JAXCONV_RETURN_IF_ERROR(RequirePositive("input extent", in[axis]));
    JAXCONV_RETURN_IF_ERROR(RequirePositive("filter extent", filter[axis]));
    JAXCONV_RETURN_IF_ERROR(RequirePositive("output extent", out[axis]));
    JAXCONV_RETURN_IF_ERROR(RequirePositive("stride", stride[axis]));
    JAXCONV_RETURN_IF_ERROR(RequirePositive("lhs dilation", lhs_dilation[axis]));
    JAXCONV_RETURN_IF_ERROR(RequirePositive("dilation", dilation[axis]));
    if (int64_t reach = Reach(*this, axis); reach >= kMaxOffset) {
      return TooLarge("largest coordinate" + OnAxis(*this, axis), reach, "2^60");
    }
    int64_t expected = OutputExtent(in[axis], filter[axis], stride[axis], lhs_dilation[axis],
                                    dilation[axis], pad_lo[axis], pad_hi[axis]);
    if (out[axis] != expected) {
      return Status::InvalidArgument("output extent" + OnAxis(*this, axis) + ": expected " +
                                     std::to_string(expected) + ", got " +
                                     std::to_string(out[axis]));
    }
  }
  JAXCONV_RETURN_IF_ERROR(CheckLayouts(*this));
  JAXCONV_RETURN_IF_ERROR(CheckEpilogue(*this));
  int64_t x = Product({batch, n, in[0], in[1], in[2], c});
  int64_t w = Product({batch, filter[0], filter[1], filter[2], c_per_group(), k});
  int64_t y = Product({batch, n, out[0], out[1], out[2], k});
  if (int64_t largest = std::max({x, w, y}); largest >= kMaxElements) {
    return TooLarge("elements of the largest tensor", largest, "2^48");
  }
  int64_t offset =
      Product({batch, n, std::max(c, k), Reach(*this, 0), Reach(*this, 1), Reach(*this, 2)});
  if (offset >= kMaxOffset)
    return TooLarge("elements of the dilated and padded tensors", offset, "2^60");
  int64_t operations = Product({2, y, filter[0], filter[1], filter[2], c_per_group()});
  if (operations >= kMaxOffset) return TooLarge("operations", operations, "2^60");
  return {};
}

Status ConvProblem::RequireInt32() const {
  for (int axis = 0; axis < 3; ++axis) {
    if (int64_t reach = Reach(*this, axis); reach >= kMaxInt32Coordinate) {
      return TooLarge("largest coordinate" + OnAxis(*this, axis), reach, "2^30");
    }
  }
  // In a krsc filter, consecutive groups are K / groups output channels apart.
  int64_t group_distance =
      filter_layout == FilterLayout::kKrsc ? k_per_group() * taps() * c_per_group() : 1;
  for (int64_t extent : {n * in_pixels(), n * out_pixels(), taps() * c_per_group(), taps() * k,
                         batch * groups, c, k, group_distance}) {
    if (extent >= kMaxInt32Extent) return TooLarge("GEMM extent", extent, "2^31 - 2^16");
  }
  return {};
}

Status ConvProblem::RequireRsck() const {
  if (filter_layout == FilterLayout::kRsck) return {};
  return Status::Unimplemented(std::string("reads filters stored as rsck, got ") +
                               Name(filter_layout));
}

Status ConvProblem::RequireRsckOrKrsc() const {
  if (filter_layout == FilterLayout::kRsck || filter_layout == FilterLayout::kKrsc) return {};
  return Status::Unimplemented(std::string("reads filters stored as rsck or krsc, got ") +
                               Name(filter_layout));
}

Status ConvProblem::RequireChannelsLast() const {
  if (activation_layout == ActivationLayout::kChannelsLast) return {};
  return Status::Unimplemented(std::string("reads activations stored channels-last, got ") +
                               Name(activation_layout));
}

std::string ConvProblem::ToString() const {
  std::string key = Name(op);
  key += std::string(" ") + Name(x_dtype) + ":" + Name(w_dtype) + ":" + Name(y_dtype);
  key += std::string(" ") + Name(precision);
  auto add = [&](char field, int64_t value) {
    key += std::string(" ") + field + std::to_string(value);
  };
  add('b', batch);
  add('n', n);
  add('g', groups);
  add('c', c);
  add('k', k);
  auto add_axes = [&](char field, auto text) {
    key += std::string(" ") + field;
    for (int axis = 3 - rank; axis < 3; ++axis) key += (axis > 3 - rank ? "x" : "") + text(axis);
  };
  auto add_spatial = [&](char field, const Spatial& value) {
    add_axes(field, [&](int axis) { return std::to_string(value[axis]); });
  };
  add_spatial('i', in);
  add_spatial('f', filter);
  add_spatial('o', out);
  add_spatial('s', stride);
  add_spatial('l', lhs_dilation);
  add_spatial('d', dilation);
  add_axes('p', [&](int axis) {
    return std::to_string(pad_lo[axis]) + "_" + std::to_string(pad_hi[axis]);
  });
  if (filter_layout != FilterLayout::kRsck) key += std::string(" ") + Name(filter_layout);
  if (activation_layout != ActivationLayout::kChannelsLast) {
    key += std::string(" ") + Name(activation_layout);
  }
  auto add_word = [&](bool present, const char* word) {
    if (present) key += std::string(" ") + word;
  };
  add_word(epilogue.scale != ScaleKind::kNone, kScaleNames[static_cast<int>(epilogue.scale)]);
  add_word(epilogue.offset, "offset");
  add_word(epilogue.bias, "bias");
  add_word(epilogue.residual, "residual");
  add_word(epilogue.activation != Activation::kNone,
           kActivationNames[static_cast<int>(epilogue.activation)]);
  if (epilogue.activation == Activation::kLeakyRelu) key += SlopeText(epilogue.negative_slope);
  if (epilogue.zero_point != 0) add('z', epilogue.zero_point);
  add_word(epilogue.pre, "pre");
  add_word(epilogue.statistics, "statistics");
  return key;
}

Status ConvProblem::Parse(std::string_view key, ConvProblem* problem) {
  ConvProblem parsed;
  KeyReader reader(key);
  reader.ReadEnum(kOpNames, "operation", ' ', &parsed.op);
  reader.ReadEnum(kDTypeNames, "dtype of x", ':', &parsed.x_dtype);
  reader.ReadEnum(kDTypeNames, "dtype of w", ':', &parsed.w_dtype);
  reader.ReadEnum(kDTypeNames, "dtype of y", ' ', &parsed.y_dtype);
  reader.ReadEnum(kPrecisionNames, "precision", ' ', &parsed.precision);
  reader.ReadInt('b', &parsed.batch);
  reader.ReadInt('n', &parsed.n);
  reader.ReadInt('g', &parsed.groups);
  reader.ReadInt('c', &parsed.c);
  reader.ReadInt('k', &parsed.k);
  parsed.rank = reader.ReadSpatial('i', &parsed.in);
  bool same_rank = true;
  for (auto [field, value] : {std::pair{'f', &parsed.filter},
                              {'o', &parsed.out},
                              {'s', &parsed.stride},
                              {'l', &parsed.lhs_dilation},
                              {'d', &parsed.dilation}}) {
    same_rank &= reader.ReadSpatial(field, value) == parsed.rank;
  }
  same_rank &= reader.ReadPadding(&parsed.pad_lo, &parsed.pad_hi) == parsed.rank;
  reader.ReadLayouts(&parsed.filter_layout, &parsed.activation_layout);
  reader.ReadEpilogue(&parsed.epilogue);
  JAXCONV_RETURN_IF_ERROR(reader.Finish());
  if (!same_rank) {
    return Status::InvalidArgument("convolution problem: the spatial fields differ in rank");
  }
  JAXCONV_RETURN_IF_ERROR(parsed.Validate());
  *problem = parsed;
  return {};
}

}  // namespace jaxconv
