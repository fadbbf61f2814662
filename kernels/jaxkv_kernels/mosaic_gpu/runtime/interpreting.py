"""Whether kernels are built for the GPU or for Pallas's interpreter."""

import jax

# The value is part of the key of jit's caches, so that a function traced for one is traced again for the other.
interpreting = jax.make_user_context(default_value=False)
"""`with interpreting(True):` runs the kernels in the interpreter: slow, on any machine, for tests."""
