"""Hardware limits of Hopper GPUs, for which the kernels are built."""

import jax

MULTIPROCESSORS = 132
"""Of an H100 SXM and an H200, which programs that are lowered without a GPU are for.  An H100 PCIe has 114."""

# The value is part of the key of jit's caches, so that a function traced for one number is traced again for another.
assumed_multiprocessors = jax.make_user_context(default_value=None)
"""`with assumed_multiprocessors(114):` builds kernels for a GPU with that many multiprocessors, for tests."""


def multiprocessors() -> int:
    """The number of multiprocessors of the GPU; `MULTIPROCESSORS` where there is none."""
    if assumed_multiprocessors.value is not None:
        return assumed_multiprocessors.value
    return jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else MULTIPROCESSORS


SHARED_MEMORY = 232_448
"""The most bytes of shared memory per CTA."""
REGISTERS = 65_536
"""Of a multiprocessor."""


def consumer_registers(producer_registers: int, consumers: int = 2) -> int:
    """Registers per lane of each consumer warpgroup beside a producer warpgroup: a multiple of 8.

    At launch, all lanes have equally many, a multiple of 8.  A kernel that requests more than these together hangs.
    """
    warpgroups = consumers + 1
    at_launch = REGISTERS // (128 * warpgroups) // 8 * 8
    return (at_launch * warpgroups - producer_registers) // consumers // 8 * 8
