"""Hardware limits of the H100 and H200, for which the kernels are built."""

MULTIPROCESSORS = 132
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
