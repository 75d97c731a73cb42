// Passes over arrays without a convolution: sums, moments, normalisation, pooling. A kernel of a
// pass is a line of its family's kernels.def. A plan holds the division of an array and the
// predicted time, or the reason why no kernel accepts the array.
//
// A line of kernels.def is
//
//     PASS(masked_sums, F32_BF16_F16, result_g1_y1, (MaskBy::kResult, 1, 1))
//
// the pass, types, the variant that ends the instance's name, and its form. It declares one
// instance for each type, named <pass>_<type>_<variant>. PASS_SM90 declares code for sm_90a, with
// names that end in _sm90. A form has one instance on a GPU and follows from a call's arrays. So
// calls name no instance, and exported programs keep working across versions.
#ifndef JAXCONV_CUDA_COMMON_PASS_H_
#define JAXCONV_CUDA_COMMON_PASS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/conv_problem.h"
#include "core/selection.h"
#include "core/status.h"
#include "cuda/common/gpu.h"

namespace jaxconv {

// The numbers of an instance's form; each pass defines their meaning.
using PassForm = std::array<int, 4>;

// An entry of a family's table, without its device code.
struct PassKernel {
  const char* name = "";    // also the name in a profiler
  const char* family = "";  // the folder
  const char* pass = "";    // the custom call's name without jaxconv_
  DType dtype = DType::kF32;
  PassForm form = {};
  bool sm90 = false;
};

// The entry of a form, or null. Code for sm_90a is preferred where it runs.
const PassKernel* FindForm(const std::vector<PassKernel>& kernels, std::string_view pass,
                           DType dtype, const PassForm& form, bool sm90 = false);

// The key of a pass: its name, the arrays' type, and words in any order: numbers such as "c64",
// extents by axis such as "i56x56", flags.
//
//     masked_sums bf16 s1 r802816 c256 g2 y1 bits stores
//     max_pool bf16 b256 c64 i112x112 f3x3 o56x56 s2x2 p0x0 affine places
class PassKey {
 public:
  static Status Parse(std::string_view text, PassKey* key);

  const std::string& pass() const { return words_[0]; }
  DType dtype() const { return dtype_; }
  bool Has(std::string_view word) const;
  // The number or the extents after a letter; without such a word, `otherwise` or none.
  int64_t Number(char letter, int64_t otherwise) const;
  std::vector<int64_t> Extents(char letter) const;
  // The rest of the word with this prefix; empty if there is none.
  std::string_view Behind(std::string_view prefix) const;

 private:
  std::vector<std::string> words_;
  DType dtype_ = DType::kF32;
};

// The cost of a pass: the bytes that it moves, the instructions of its threads, its CTAs, and the
// CTAs that run on an SM.
struct PassCost {
  double bytes = 0, instructions = 0;
  int64_t ctas = 1;
  int ctas_of_sm = 2;
};

// Predicted time: a launch, plus the longest of the times of DRAM, of the occupied SMs and of their
// schedulers.
double PassMicroseconds(const PassCost& cost, const Gpu& gpu);

// Unimplemented if an array's address is no multiple of 16 bytes.
Status CheckAligned(std::initializer_list<const void*> arrays);

// M(dtype, ...) for every type of a line, as tokens such as bf16.
#define JAXCONV_PASS_TYPES_F32(M, ...) M(f32, __VA_ARGS__)
#define JAXCONV_PASS_TYPES_BF16_F16(M, ...) M(bf16, __VA_ARGS__) M(f16, __VA_ARGS__)
#define JAXCONV_PASS_TYPES_F32_BF16_F16(M, ...) \
  M(f32, __VA_ARGS__) M(bf16, __VA_ARGS__) M(f16, __VA_ARGS__)
#define JAXCONV_PASS_DTYPE_f32 ::jaxconv::DType::kF32
#define JAXCONV_PASS_DTYPE_bf16 ::jaxconv::DType::kBF16
#define JAXCONV_PASS_DTYPE_f16 ::jaxconv::DType::kF16
#define JAXCONV_PASS_UNPACK(...) __VA_ARGS__

// In a family's plan.cc, with JAXCONV_PASS_FAMILY its name as a string: the entries of a line.
#define JAXCONV_PASS_KERNELS(pass, types, variant, sm90, form) \
  JAXCONV_PASS_TYPES_##types(JAXCONV_PASS_KERNEL, pass, variant, sm90, JAXCONV_PASS_UNPACK form)
#define JAXCONV_PASS_KERNEL(dtype, pass, variant, sm90, ...)  \
  {#pass "_" #dtype "_" #variant, JAXCONV_PASS_FAMILY, #pass, \
   JAXCONV_PASS_DTYPE_##dtype,    {__VA_ARGS__},       sm90},

// In the .cu file of a pass: the tag type of an instance, Form<T, numbers of the form>, and its
// entry in a table of launches.
#define JAXCONV_PASS_TAG(dtype, name, variant, Form, ...) \
  struct name##_##dtype##_##variant                       \
      : Form<ElementOf<JAXCONV_PASS_DTYPE_##dtype>::Type, __VA_ARGS__> {};
#define JAXCONV_PASS_ROW(dtype, name, variant, Launch, ...) \
  {JAXCONV_PASS_DTYPE_##dtype, {__VA_ARGS__}, Launch<name##_##dtype##_##variant>},

template <class Operands>
struct PassLaunch {
  DType dtype;
  PassForm form;
  Status (*launch)(const Operands& operands, void* stream);
};

// Launches the instance of a form.
template <class Operands, size_t kCount>
Status LaunchOfForm(const PassLaunch<Operands> (&launches)[kCount], DType dtype,
                    const PassForm& form, const Operands& operands, void* stream) {
  for (const PassLaunch<Operands>& row : launches) {
    if (row.dtype == dtype && row.form == form) return row.launch(operands, stream);
  }
  return Status::Unimplemented("no kernel has this form of arrays of this type");
}

}  // namespace jaxconv

#endif  // JAXCONV_CUDA_COMMON_PASS_H_
