"""XLA flags with which small CPU programs compile several times as fast."""

# They disable the MLIR-based fusion emitters, which take 15 times as long for a layout copy, and
# keep one LLVM module. Both settings concern only XLA's own code generation. XLA ignores an unknown
# extra option, but would abort on an unknown flag.
QUICK_TO_COMPILE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
