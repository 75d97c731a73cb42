#include "cuda/kernels/padded_channels.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

namespace jaxconv {
namespace {

// The tiles worth a padded row, in float16 and bfloat16: what selection takes for large, medium and
// small layers.
struct PaddedTile {
  std::string_view family, tile;
};
constexpr PaddedTile kTiles[] = {
    {"igemm_wgmma", "128x256x64"},
    {"igemm_wgmma", "256x128x64"},
    {"igemm_wgmma", "192x128x64"},
    {"igemm_wgmma", "192x128x64_pingpong"},
    {"igemm_wgmma", "128x64x64_pingpong"},
    {"igemm_wgmma", "128x128x64_pingpong"},
    {"igemm_wgmma", "256x64x64_columns"},
    {"igemm_wgmma", "256x64x64_columns_rows"},
    {"igemm_wgmma", "128x64x64_columns_resident"},
    {"igemm_wgmma", "192x64x128_rows"},
    {"igemm_wmma", "128x128x64_3stage"},
    {"igemm_wmma", "128x64x64_3stage"},
    {"igemm_wmma", "256x16x64_3stage"},
};
// Elements of 16 bytes, which rows of other families copy at a time, and of a sector: tensors that
// are padded anyway have rows of whole sectors, which the copy engine brings half as fast again.
constexpr int64_t kCopied = 8;
constexpr int64_t kSector = 16;
constexpr int64_t kAlignment = 1024;
// Of padded copies, beside the workspace of the row itself; their elements have 32-bit numbers.
constexpr int64_t kMaxBytes = int64_t{1} << 29;
// A launch, and bytes read and written in a microsecond, measured: unaligned rows cost half of what
// memory gives.
constexpr double kLaunchMicroseconds = 1.8;
constexpr double kBytesPerMicrosecond = 2e6;

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

int64_t PaddedChannels(int64_t channels) {
  return channels % kCopied == 0 ? channels : RoundUp(channels, kSector);
}

ConvProblem Padded(const ConvProblem& problem) {
  ConvProblem padded = problem;
  padded.c = PaddedChannels(problem.c);
  padded.k = PaddedChannels(problem.k);
  return padded;
}

// A tensor of a problem as it is copied.
struct Tensor {
  int64_t elements, padded_elements;
  int64_t rows, padded_rows;  // of a block
  int64_t columns, padded_columns;

  bool Copied() const { return elements != padded_elements; }
  // Of its place in the workspace.
  int64_t Bytes() const { return Copied() ? RoundUp(padded_elements * 2, kAlignment) : 0; }
  double Traffic() const {
    return Copied() ? 2.0 * static_cast<double>(elements + padded_elements) : 0;
  }
  PitchedCopy Pad(const void* from, void* to) const {
    return {from,
            to,
            padded_elements,
            static_cast<int32_t>(rows),
            static_cast<int32_t>(columns),
            FastDivmod(padded_rows),
            FastDivmod(padded_columns)};
  }
  PitchedCopy Unpad(const void* from, void* to) const {
    return {from,
            to,
            elements,
            static_cast<int32_t>(padded_rows),
            static_cast<int32_t>(padded_columns),
            FastDivmod(rows),
            FastDivmod(columns)};
  }
};

struct Tensors {
  Tensor lhs, rhs, out;

  explicit Tensors(const ConvProblem& problem) {
    const ConvProblem padded = Padded(problem);
    const Tensor x{problem.x_elements(), padded.x_elements(), 1, 1, problem.c, padded.c};
    const Tensor w{
        problem.w_elements(), padded.w_elements(), problem.c, padded.c, problem.k, padded.k};
    const Tensor y{problem.y_elements(), padded.y_elements(), 1, 1, problem.k, padded.k};
    lhs = problem.op == Op::kDgrad ? y : x;
    rhs = problem.op == Op::kWgrad ? y : w;
    out = problem.op == Op::kFprop ? y : problem.op == Op::kDgrad ? x : w;
  }
  int64_t Bytes() const { return lhs.Bytes() + rhs.Bytes() + out.Bytes(); }
};

Status CanPad(const ConvProblem& problem) {
  if (problem.c % kCopied == 0 && problem.k % kCopied == 0) {
    return Status::Unimplemented("C and K are multiples of 8: nothing to pad");
  }
  JAXCONV_RETURN_IF_ERROR(problem.RequireRsck());
  if (problem.groups != 1) return Status::Unimplemented("pads the channels of one group only");
  for (DType dtype : {problem.x_dtype, problem.w_dtype, problem.y_dtype}) {
    if (ByteWidth(dtype) != 2) {
      return Status::Unimplemented(std::string("pads tensors of 16 bits, got ") + Name(dtype));
    }
  }
  const Tensors tensors(problem);
  if (tensors.Bytes() > kMaxBytes) {
    return Status::Unimplemented("padded copies take " + std::to_string(tensors.Bytes()) +
                                 " bytes, expected at most " + std::to_string(kMaxBytes));
  }
  return {};
}

Status Launch(const KernelRow& row, const ConvProblem& problem, const KernelArgs& args) {
  JAXCONV_RETURN_IF_ERROR(CanPad(problem));
  const ConvProblem padded = Padded(problem);
  JAXCONV_RETURN_IF_ERROR(row.can_implement(padded));
  const Tensors tensors(problem);
  const int64_t row_bytes = row.workspace_bytes(padded, args.slices);
  JAXCONV_RETURN_IF_ERROR(CheckBuffers(args, tensors.Bytes() + row_bytes));
  char* lhs = static_cast<char*>(args.workspace);
  char* rhs = lhs + tensors.lhs.Bytes();
  char* out = rhs + tensors.rhs.Bytes();
  KernelArgs inner = args;
  inner.workspace = row_bytes > 0 ? out + tensors.out.Bytes() : nullptr;
  inner.workspace_bytes = row_bytes;
  PitchedCopy copies[2];
  if (tensors.lhs.Copied()) copies[0] = tensors.lhs.Pad(args.lhs, lhs), inner.lhs = lhs;
  if (tensors.rhs.Copied()) copies[1] = tensors.rhs.Pad(args.rhs, rhs), inner.rhs = rhs;
  if (tensors.out.Copied()) inner.out = out;
  JAXCONV_RETURN_IF_ERROR(LaunchPitchedCopies(copies[0], copies[1], args.stream));
  JAXCONV_RETURN_IF_ERROR(row.launch(padded, inner));
  if (!tensors.out.Copied()) return {};
  return LaunchPitchedCopies(tensors.out.Unpad(out, args.out), PitchedCopy(), args.stream);
}

}  // namespace

std::vector<KernelRow> PaddedRows(const std::vector<KernelRow>& rows) {
  std::vector<KernelRow> result;
  for (const KernelRow& row : rows) {
    const auto named = [&row](const PaddedTile& tile) {
      if (row.family != tile.family) return false;
      for (DType dtype : {DType::kF16, DType::kBF16}) {
        const std::string name = std::string(Name(row.op)) + "_" + row.family + "_" + Name(dtype) +
                                 "_" + std::string(tile.tile);
        if (row.name == name) return true;
      }
      return false;
    };
    if (std::none_of(std::begin(kTiles), std::end(kTiles), named)) continue;
    KernelRow padded = row;
    padded.name += "_padded";
    padded.can_implement = [row](const ConvProblem& problem) {
      JAXCONV_RETURN_IF_ERROR(CanPad(problem));
      return row.can_implement(Padded(problem));
    };
    padded.slices = [row](const ConvProblem& problem, const DeviceInfo& device) {
      return row.slices(Padded(problem), device);
    };
    padded.workspace_bytes = [row](const ConvProblem& problem, int64_t slices) {
      return Tensors(problem).Bytes() + row.workspace_bytes(Padded(problem), slices);
    };
    padded.cost = [row](const ConvProblem& problem, const DeviceInfo& device, int64_t slices) {
      const Tensors tensors(problem);
      const double bytes = tensors.lhs.Traffic() + tensors.rhs.Traffic() + tensors.out.Traffic();
      return row.cost(Padded(problem), device, slices) + bytes / kBytesPerMicrosecond +
             kLaunchMicroseconds * (tensors.out.Copied() ? 2 : 1);
    };
    padded.launch = [row](const ConvProblem& problem, const KernelArgs& args) {
      return Launch(row, problem, args);
    };
    result.push_back(std::move(padded));
  }
  return result;
}

}  // namespace jaxconv
