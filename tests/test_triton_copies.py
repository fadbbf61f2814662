"""Triton kernels that copy: the whole suites on a GPU (`-m gpu`), telling parts of them in Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest

import suites
from jaxkv_kernels import triton as kernels

on_gpu = pytest.mark.skipif(bool(kernels.unavailable()), reason="; ".join(kernels.unavailable()))
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or "TRITON_INTERPRET" not in os.environ,
    reason="needs Triton and TRITON_INTERPRET=1: its interpreter takes a process of its own",
)


@pytest.fixture
def interpreting():
    """Kernels run in Triton's interpreter."""
    with kernels.interpreting(True):
        yield


class Triton:
    """What every suite of these kernels says of itself."""

    implementation = "triton"


@pytest.mark.gpu
@on_gpu
class TestWrites(Triton, suites.Writes, suites.WritesInScans):
    """The whole suite, on the GPU."""


@pytest.mark.gpu
@on_gpu
class TestGathers(Triton, suites.Gathers):
    """The whole suite, on the GPU."""


@pytest.mark.gpu
@on_gpu
class TestBlocks(Triton, suites.Blocks, suites.BlocksInScans):
    """The whole suite, on the GPU."""


@pytest.mark.gpu
@on_gpu
class TestLargeCaches(Triton, suites.LargeCaches):
    """The whole suite, on the GPU."""


@pytest.mark.gpu
@on_gpu
class TestMerge(Triton, suites.Merge):
    """The whole suite, on the GPU."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedWrites(Triton, suites.Writes, suites.WritesInScans):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedGathers(Triton, suites.Gathers):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedBlocks(Triton, suites.Blocks, suites.BlocksInScans):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedMerge(Triton, suites.Merge):
    """The whole suite."""
