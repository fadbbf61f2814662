"""Strict JAX, quick compilations, a repeatable hypothesis."""

import os

# Tests compile hundreds of small programs and run each for microseconds.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

# Pallas's GPU interpreter runs warpgroups as threads that wait for each other inside callbacks: a pool of as many
# threads as a small machine has cores would never finish.
os.environ.setdefault("NPROC", "16")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "standard")
hypothesis.settings.register_profile("jaxkv", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.load_profile("jaxkv")
