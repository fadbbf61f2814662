"""The numbers of an H100 or H200 that kernels are built for."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 232_448
"""Bytes per CTA."""
