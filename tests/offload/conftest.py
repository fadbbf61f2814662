"""A pool on disk and a block of it, and writes that keep every bit."""

import jax
import pytest

from jaxkv.offload import transfers
from jaxkv.ops import rows
from offload.pools import LAYOUT, filled, reopened
from support.emitters import DEFAULT_EMITTERS

_write_rows = jax.jit(
    rows._write_rows.__wrapped__, static_argnums=(3, 4), donate_argnums=0, compiler_options=DEFAULT_EMITTERS
)
_write_converted = jax.jit(
    transfers.write_converted.__wrapped__,
    static_argnames="self",
    donate_argnames="cache",
    compiler_options=DEFAULT_EMITTERS,
)


@pytest.fixture(autouse=True)
def _all_bits_are_kept(monkeypatch):
    """The tests compare blocks of random bytes, signalling NaNs among them."""
    monkeypatch.setattr(rows, "_write_rows", _write_rows)
    monkeypatch.setattr(transfers, "write_converted", _write_converted)


@pytest.fixture
def row():
    return filled(LAYOUT)[1][3]


@pytest.fixture
def disk(tmp_path):
    return reopened(tmp_path)
