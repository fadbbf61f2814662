"""Hardware limits of the H100 and H200, for which the kernels are built."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 232_448
"""The most bytes of shared memory per CTA."""
THREE_WARPGROUPS = 504
"""Registers per lane that three warpgroups have together; a kernel that requests more hangs."""


def consumer_registers(producer_registers: int) -> int:
    """Registers per lane of each of two consumer warpgroups beside a producer warpgroup."""
    return (THREE_WARPGROUPS - producer_registers) // 2
