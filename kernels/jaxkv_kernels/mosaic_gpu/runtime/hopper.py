"""Hardware limits of the H100 and H200, for which the kernels are built."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 232_448
"""The most bytes of shared memory per CTA."""
