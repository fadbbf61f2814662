"""Hardware limits of the H100 and H200, for which the kernels are built."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 232_448
"""The most bytes of shared memory per CTA."""
REGISTERS = {3: 504, 4: 512}
"""Registers per lane that three or four warpgroups have together; a kernel that requests more hangs."""


def consumer_registers(producer_registers: int, producers: int = 1) -> int:
    """Registers per lane of each of two consumer warpgroups beside one or two producer warpgroups."""
    return (REGISTERS[2 + producers] - producers * producer_registers) // 2
