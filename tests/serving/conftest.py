"""Engines that run a toy model."""

import pytest

from support import toy_model


@pytest.fixture
def toy(monkeypatch):
    toy_model.install(monkeypatch)
