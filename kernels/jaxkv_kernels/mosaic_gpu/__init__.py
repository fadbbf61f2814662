"""Kernels in Pallas Mosaic GPU, for NVIDIA Hopper."""
