"""Kernels that JAX can neither differentiate nor batch."""

from jaxkv_kernels.xla.kernels import XLA


class Opaque(XLA):
    """Those of `xla`, which say that they are not plain JAX."""

    transformable = False
