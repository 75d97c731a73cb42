// Macros that read a family's kernels.def.
//
// A line of kernels.def is
//
//     KERNEL(FPROP_DGRAD, BF16_F16, 128x256x64_cooperative, cooperative_sm90, Cooperative,
//            (2, 1, 256, 0, 4))
//
// operations, operand types, the variant that ends the instance's name, the header of its device
// kernel (without .cuh), the template in that header, its arguments, and in some families measured
// shares of a rate. The line declares one instance for each operation and type, named
// <op>_<family>_<dtype>_<variant>. The family's plan.cc computes what it needs, such as the tile,
// from the same arguments. CMake (sources.cmake) and tests/support/kernel_tables.py read the lines
// too; tests/cc/test_kernel_tables.py compares what they read.
//
//     PADDED(FPROP_DGRAD, BF16_F16, 128x256x64_cooperative)
//
// adds the same instances, their names ending in _padded, for channel counts that are not multiples
// of 8 (padded_channels.h).
//
//     FUSED(FPROP, BF16_F16, 128x256x64_cooperative)
//
// compiles the same instances once more with FusedEpilogue (epilogue.cuh), their names ending in
// _fused. They take the problems with an epilogue, and only those.
#ifndef JAXCONV_CUDA_COMMON_INSTANCES_H_
#define JAXCONV_CUDA_COMMON_INSTANCES_H_

#include "core/conv_problem.h"

// M(op, dtype, ...) for every operation and type, as tokens such as fprop and bf16.
#define JAXCONV_FOR_EACH(ops, types, M, ...) \
  JAXCONV_OPS_##ops(JAXCONV_TYPES_##types, M, __VA_ARGS__)

#define JAXCONV_OPS_FPROP(T, ...) T(fprop, __VA_ARGS__)
#define JAXCONV_OPS_DGRAD(T, ...) T(dgrad, __VA_ARGS__)
#define JAXCONV_OPS_WGRAD(T, ...) T(wgrad, __VA_ARGS__)
#define JAXCONV_OPS_FPROP_DGRAD(T, ...) T(fprop, __VA_ARGS__) T(dgrad, __VA_ARGS__)
#define JAXCONV_OPS_FPROP_WGRAD(T, ...) T(fprop, __VA_ARGS__) T(wgrad, __VA_ARGS__)
#define JAXCONV_OPS_FPROP_DGRAD_WGRAD(T, ...) \
  T(fprop, __VA_ARGS__) T(dgrad, __VA_ARGS__) T(wgrad, __VA_ARGS__)

#define JAXCONV_TYPES_F32(op, M, ...) M(op, f32, __VA_ARGS__)
#define JAXCONV_TYPES_F16(op, M, ...) M(op, f16, __VA_ARGS__)
#define JAXCONV_TYPES_BF16_F16(op, M, ...) M(op, bf16, __VA_ARGS__) M(op, f16, __VA_ARGS__)
#define JAXCONV_TYPES_S8(op, M, ...) M(op, s8, __VA_ARGS__)
#define JAXCONV_TYPES_S8_U8(op, M, ...) M(op, s8, __VA_ARGS__) M(op, u8, __VA_ARGS__)
#define JAXCONV_TYPES_F32_BF16_F16(op, M, ...) \
  M(op, f32, __VA_ARGS__) M(op, bf16, __VA_ARGS__) M(op, f16, __VA_ARGS__)

#define JAXCONV_OP_fprop ::jaxconv::Op::kFprop
#define JAXCONV_OP_dgrad ::jaxconv::Op::kDgrad
#define JAXCONV_OP_wgrad ::jaxconv::Op::kWgrad
#define JAXCONV_DTYPE_f32 ::jaxconv::DType::kF32
#define JAXCONV_DTYPE_bf16 ::jaxconv::DType::kBF16
#define JAXCONV_DTYPE_f16 ::jaxconv::DType::kF16
#define JAXCONV_DTYPE_s8 ::jaxconv::DType::kS8
#define JAXCONV_DTYPE_u8 ::jaxconv::DType::kU8

// The instance's name as a string, as an identifier, and its launch. The second level expands
// arguments that are macros.
#define JAXCONV_NAME(op, family, dtype, variant) JAXCONV_NAME_(op, family, dtype, variant)
#define JAXCONV_NAME_(op, family, dtype, variant) #op "_" #family "_" #dtype "_" #variant
#define JAXCONV_TAG(op, family, dtype, variant) JAXCONV_TAG_(op, family, dtype, variant)
#define JAXCONV_TAG_(op, family, dtype, variant) op##_##family##_##dtype##_##variant
#define JAXCONV_LAUNCH(op, family, dtype, variant) JAXCONV_LAUNCH_(op, family, dtype, variant)
#define JAXCONV_LAUNCH_(op, family, dtype, variant) Launch_##op##_##family##_##dtype##_##variant

#define JAXCONV_UNPACK(...) __VA_ARGS__

// Appends the instances of a line to `kernels`, a std::vector<KernelDesc>. The arguments after
// Description initialise the family's description of the line; the capabilities and `plan` may
// refer to it as `instance`.
#define JAXCONV_ADD_KERNELS(kernels, ops, types, family, variant, min_cc, max_cc, plan,        \
                            Description, ...)                                                  \
  {                                                                                            \
    static constexpr Description instance = {__VA_ARGS__};                                     \
    JAXCONV_FOR_EACH(ops, types, JAXCONV_ADD_KERNEL, kernels, family, variant, min_cc, max_cc, \
                     plan)                                                                     \
  }
#define JAXCONV_ADD_KERNEL(op, dtype, kernels, family, variant, min_cc, max_cc, plan)    \
  kernels.push_back({JAXCONV_NAME(op, family, dtype, variant), #family, JAXCONV_OP_##op, \
                     JAXCONV_DTYPE_##dtype, min_cc, max_cc, plan, &instance});

// In a generated translation unit, inside namespace jaxconv: the tag type of an instance, whose
// name appears in a profiler, and its launch. family::form<op, dtype, args...> is a template of the
// kernel's header with a static member function template Launch<Tag>(plan, operands, stream).
#define JAXCONV_INSTANCE(op, family, dtype, variant, form, args, ...)                 \
  struct JAXCONV_TAG(op, family, dtype, variant)                                      \
      : family::form<JAXCONV_OP_##op, JAXCONV_DTYPE_##dtype, JAXCONV_UNPACK args> {}; \
  JAXCONV_INSTANCE_LAUNCH(op, family, dtype, variant)
// The same with the fused epilogue, for a variant whose name ends in _fused.
#define JAXCONV_FUSED_INSTANCE(op, family, dtype, variant, form, args, ...)         \
  struct JAXCONV_TAG(op, family, dtype, variant)                                    \
      : family::form<JAXCONV_OP_##op, JAXCONV_DTYPE_##dtype, JAXCONV_UNPACK args> { \
    using Epilogue = FusedEpilogue;                                                 \
  };                                                                                \
  JAXCONV_INSTANCE_LAUNCH(op, family, dtype, variant)
#define JAXCONV_INSTANCE_LAUNCH(op, family, dtype, variant)                                     \
  Status JAXCONV_LAUNCH(op, family, dtype, variant)(const Plan& plan, const Operands& operands, \
                                                    void* stream) {                             \
    using Tag = JAXCONV_TAG(op, family, dtype, variant);                                        \
    return Tag::template Launch<Tag>(plan, operands, stream);                                   \
  }

#endif  // JAXCONV_CUDA_COMMON_INSTANCES_H_
