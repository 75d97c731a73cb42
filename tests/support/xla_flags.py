"""Flags of XLA with which it compiles small programs for the CPU several times as fast."""

# The emitters before those through MLIR, which take 15 times as long for a copy between layouts,
# and one module for LLVM. Both are settings of how code is generated; no kernel of ours is changed.
# An extra option that XLA no longer knows is ignored, an unknown flag would end the process.
QUICK_TO_COMPILE = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
