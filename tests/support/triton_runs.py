"""Where and how the Triton kernels run in tests."""

import os
from importlib.util import find_spec

import pytest

from jaxkv_kernels.triton.runtime.available import unavailable_reasons

INTERPRETS = "TRITON_INTERPRET" in os.environ

on_gpu = pytest.mark.skipif(bool(unavailable_reasons()), reason="; ".join(unavailable_reasons()))
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or not INTERPRETS,
    reason="needs Triton and TRITON_INTERPRET=1: its interpreter takes a process of its own",
)
compiles = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETS,
    reason="needs Triton, which makes its kernels for the interpreter where TRITON_INTERPRET is set",
)


class Triton:
    """What every suite of these kernels says of itself."""

    implementation = "triton"
    gaps = ("`logit_cap` of",)  # too large for tanh by way of exp2
