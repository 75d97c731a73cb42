#include "core/conv_problem.h"

#include <charconv>
#include <utility>

namespace jaxconv {
namespace {

constexpr const char* kOpNames[] = {"fprop", "dgrad", "wgrad"};
constexpr const char* kDTypeNames[] = {"f32", "f16", "bf16", "s8", "s32"};
constexpr const char* kPrecisionNames[] = {"default", "high", "highest"};
constexpr const char* kFilterLayoutNames[] = {"rsck", "krsc"};

// Reads one line token by token; the first failure is kept and everything after it is skipped.
class LineReader {
 public:
  explicit LineReader(std::string_view line) : rest_(line) {}

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

  bool ok() const { return status_.ok(); }
  bool AtEnd() const { return rest_.empty(); }
  Status Finish() {
    if (ok() && !rest_.empty()) Fail("unexpected '" + std::string(rest_) + "' at the end");
    return status_;
  }

 private:
  static bool ToInt(std::string_view word, int64_t* value) {
    auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), *value);
    return error == std::errc() && end == word.data() + word.size();
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

std::vector<int64_t> Shape(int rank, std::initializer_list<int64_t> leading, const Spatial& spatial,
                           std::initializer_list<int64_t> trailing) {
  std::vector<int64_t> shape(leading);
  shape.insert(shape.end(), spatial.begin() + (3 - rank), spatial.end());
  shape.insert(shape.end(), trailing);
  return shape;
}

Status RequirePositive(const char* name, int64_t value) {
  if (value >= 1) return {};
  return Status::InvalidArgument(std::string(name) + ": expected at least 1, got " +
                                 std::to_string(value));
}

}  // namespace

const char* Name(Op op) { return kOpNames[static_cast<int>(op)]; }
const char* Name(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }
const char* Name(Precision precision) { return kPrecisionNames[static_cast<int>(precision)]; }
const char* Name(FilterLayout layout) { return kFilterLayoutNames[static_cast<int>(layout)]; }

int64_t ByteWidth(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kS32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS8:
      return 1;
  }
  return 0;
}

int64_t OutputExtent(int64_t in, int64_t filter, int64_t stride, int64_t lhs_dilation,
                     int64_t dilation, int64_t pad_lo, int64_t pad_hi) {
  int64_t dilated_in = in == 0 ? 0 : (in - 1) * lhs_dilation + 1;
  int64_t dilated_filter = filter == 0 ? 0 : (filter - 1) * dilation + 1;
  int64_t span = dilated_in + pad_lo + pad_hi - dilated_filter;
  return span < 0 ? 0 : span / stride + 1;
}

std::vector<int64_t> ConvProblem::x_shape() const { return Shape(rank, {batch, n}, in, {c}); }
std::vector<int64_t> ConvProblem::w_shape() const {
  return Shape(rank, {batch}, filter, {c_per_group(), k});
}
std::vector<int64_t> ConvProblem::y_shape() const { return Shape(rank, {batch, n}, out, {k}); }

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
    int64_t expected = OutputExtent(in[axis], filter[axis], stride[axis], lhs_dilation[axis],
                                    dilation[axis], pad_lo[axis], pad_hi[axis]);
    if (out[axis] != expected) {
      return Status::InvalidArgument(
          "output extent of spatial axis " + std::to_string(axis - (3 - rank)) + ": expected " +
          std::to_string(expected) + ", got " + std::to_string(out[axis]));
    }
  }
  if (op == Op::kWgrad && filter_layout != FilterLayout::kRsck) {
    return Status::InvalidArgument(std::string("filter layout: wgrad writes rsck, got ") +
                                   Name(filter_layout));
  }
  return {};
}

Status ConvProblem::RequireRsck() const {
  if (filter_layout == FilterLayout::kRsck) return {};
  return Status::Unimplemented(std::string("reads filters stored as rsck, got ") +
                               Name(filter_layout));
}

std::string ConvProblem::ToString() const {
  std::string line = Name(op);
  line += std::string(" ") + Name(x_dtype) + ":" + Name(w_dtype) + ":" + Name(y_dtype);
  line += std::string(" ") + Name(precision);
  auto add = [&](char key, int64_t value) {
    line += std::string(" ") + key + std::to_string(value);
  };
  add('b', batch);
  add('n', n);
  add('g', groups);
  add('c', c);
  add('k', k);
  auto add_axes = [&](char key, auto text) {
    line += std::string(" ") + key;
    for (int axis = 3 - rank; axis < 3; ++axis) line += (axis > 3 - rank ? "x" : "") + text(axis);
  };
  auto add_spatial = [&](char key, const Spatial& value) {
    add_axes(key, [&](int axis) { return std::to_string(value[axis]); });
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
  if (filter_layout != FilterLayout::kRsck) line += std::string(" ") + Name(filter_layout);
  return line;
}

Status ConvProblem::Parse(std::string_view line, ConvProblem* problem) {
  ConvProblem parsed;
  LineReader reader(line);
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
  for (auto [key, value] : {std::pair{'f', &parsed.filter},
                            {'o', &parsed.out},
                            {'s', &parsed.stride},
                            {'l', &parsed.lhs_dilation},
                            {'d', &parsed.dilation}}) {
    same_rank &= reader.ReadSpatial(key, value) == parsed.rank;
  }
  same_rank &= reader.ReadPadding(&parsed.pad_lo, &parsed.pad_hi) == parsed.rank;
  if (!reader.AtEnd()) {
    reader.ReadEnum(kFilterLayoutNames, "filter layout", ' ', &parsed.filter_layout);
  }
  JAXCONV_RETURN_IF_ERROR(reader.Finish());
  if (!same_rank) {
    return Status::InvalidArgument("convolution problem: the spatial fields differ in rank");
  }
  JAXCONV_RETURN_IF_ERROR(parsed.Validate());
  *problem = parsed;
  return {};
}

}  // namespace jaxconv
