"""How tests, and the processes they start, compile: they do so far more than they compute."""

from importlib.metadata import version

FAST = "--xla_backend_optimization_level=0"  # without LLVM's optimisations: a third of the time
if version("jax").startswith("0.10."):  # without MLIR's emitters, half of it; later versions have nothing else
    FAST += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
