"""XLA flags with which small CPU programs compile several times as fast."""

# They disable the MLIR-based fusion emitters, which compile a layout copy 15 times as slowly, and
# split the LLVM module no further. Both settings concern code generation of XLA; kernels do not
# change. XLA ignores an unknown extra option, but would abort on an unknown flag.
QUICK_TO_COMPILE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
