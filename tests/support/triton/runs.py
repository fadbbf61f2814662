"""Where and how the Triton kernels run in tests."""

import os
from importlib.util import find_spec

import pytest

from jaxkv_kernels.generations import GENERATIONS
from jaxkv_kernels.triton.available import unavailable_reasons

INTERPRETS = "TRITON_INTERPRET" in os.environ


def _missing(*packages, interprets):
    """Why tests that need these packages, and TRITON_INTERPRET set or not, cannot run here."""
    absent = (f"needs {name}, which is not installed" for name in packages if find_spec(name) is None)
    # Triton reads the variable when it is imported: its interpreter takes a process of its own.
    setting = () if interprets == INTERPRETS else (f"needs TRITON_INTERPRET {'set' if interprets else 'unset'}",)
    return *absent, *setting


on_gpu = pytest.mark.gpu(missing=tuple(unavailable_reasons(GENERATIONS)))
interpreted = pytest.mark.triton(missing=_missing("triton", interprets=True))
compiles = pytest.mark.triton(missing=_missing("triton", interprets=False))
lowers = pytest.mark.triton(missing=_missing("triton", "jax_triton", interprets=False))


class Triton:
    """What every suite of these kernels says of itself."""

    implementation = "triton"
    gaps = (
        "`logit_cap` of",  # too large for tanh by way of exp2
        "entries of format",
        "`mask`, a function",  # without intervals
        "`q` of float16: supports bfloat16 and float32 with entries of format 'int8'",
        "part of 0 values",  # gathers would have a result of no values
        "no slots",  # likewise reads
    )
