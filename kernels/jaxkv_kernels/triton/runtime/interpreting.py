"""Whether kernels are built for the GPU or run by Triton's interpreter."""

import jax

# Part of the keys of jit's caches: a function is traced once for the GPU and once for the interpreter.
interpreting = jax.make_user_context(default_value=False)
"""`with interpreting(True):` runs the kernels in the interpreter: slow, on any machine, for tests.

Triton chooses between the two when a kernel is defined, so TRITON_INTERPRET=1 must be set before the import.
"""
