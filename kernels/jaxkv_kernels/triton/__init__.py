"""Triton kernels, for NVIDIA GPUs from Ampere (sm_80) on, and some for AMD GPUs."""
