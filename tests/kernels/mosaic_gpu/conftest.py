"""Lowering is quicker here."""

import pytest

from support import quick_jax


@pytest.fixture(autouse=True, scope="session")
def _quick_lowering():
    with quick_jax.lowering():
        yield
