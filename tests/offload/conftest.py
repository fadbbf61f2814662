"""A pool on disk and a block of it."""

import pytest

from offload.pools import LAYOUT, filled, reopened


@pytest.fixture
def row():
    return filled(LAYOUT)[1][3]


@pytest.fixture
def disk(tmp_path):
    return reopened(tmp_path)
