"""Whether kernels are built for the GPU or run by Triton's interpreter."""

import jax

# The value is part of the keys of jit's caches, so a function is traced once for the GPU and once for the interpreter.
interpreting = jax.make_user_context(default_value=False)
"""`with interpreting(True):` runs the kernels in the interpreter: slow, on any machine, for tests.

Triton decides whether to interpret a kernel when the kernel is defined, so TRITON_INTERPRET=1 must be set before the
kernels are imported.
"""
