"""Where the Mosaic GPU kernels run, and what programs have them do."""

import re

import pytest

from jaxkv_kernels import mosaic_gpu

on_hopper = pytest.mark.skipif(bool(mosaic_gpu.unavailable()), reason="; ".join(mosaic_gpu.unavailable()))


def kernel_operands(program: str) -> list[list[str]]:
    """Names of the operands of each kernel in the text of a lowered program."""
    return [operands.split(", ") for operands in re.findall(r"custom_call @mosaic_gpu\w*\(([^)]*)\)", program)]
