"""All tests of this folder lower kernels quickly."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _quick_lowering(quick_lowering):
    pass
