"""Triton kernels, for NVIDIA GPUs from Ampere (sm_80) on."""
