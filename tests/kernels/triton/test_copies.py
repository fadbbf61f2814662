"""Triton kernels that copy or update states: suites on a GPU (`-m gpu`), most of them also in Triton's interpreter."""

import pytest

from support import suites
from support.triton.runs import Triton, interpreted, on_gpu


@on_gpu
class TestWrites(Triton, suites.Writes, suites.RotatedWrites, suites.WritesInScans, suites.WriteEntries):
    """The whole suite, on the GPU."""


@on_gpu
class TestGathers(Triton, suites.Gathers, suites.GatherEntries):
    """The whole suite, on the GPU."""


@on_gpu
class TestReads(Triton, suites.Reads):
    """The whole suite, on the GPU."""


@on_gpu
class TestBlocks(Triton, suites.Blocks, suites.BlocksInScans):
    """The whole suite, on the GPU."""


@on_gpu
class TestStates(Triton, suites.States):
    """The whole suite, on the GPU."""


@on_gpu
class TestDeltaRule(Triton, suites.DeltaRule):
    """The whole suite, on the GPU."""


@on_gpu
class TestLargeCaches(Triton, suites.LargeCaches):
    """The whole suite, on the GPU."""


@on_gpu
class TestMerge(Triton, suites.Merge):
    """The whole suite, on the GPU."""


@on_gpu
class TestHotRows(Triton, suites.HotRows):
    """The whole suite, on the GPU."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedHotRows(Triton, suites.HotRows):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedWrites(Triton, suites.Writes, suites.RotatedWrites, suites.WritesInScans, suites.WriteEntries):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedGathers(Triton, suites.Gathers, suites.GatherEntries):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedReads(Triton, suites.Reads):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedBlocks(Triton, suites.Blocks, suites.BlocksInScans):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedStates(Triton, suites.States):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedDeltaRule(Triton, suites.DeltaRule):
    """The whole suite."""


@interpreted
@pytest.mark.usefixtures("interpreting")
class TestInterpretedMerge(Triton, suites.Merge):
    """The whole suite."""
