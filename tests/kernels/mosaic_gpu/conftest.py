"""All tests in this folder lower kernels in less time."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_lowering(quick_lowering):
    pass
