"""GPU kernels support all windows of both sides."""

import pytest

import jaxkv
from support.available import assume_available
from support.explained import explained

TOKENS = 5


def reasons(implementation, operation, *, tokens=TOKENS, ragged=False, **options):
    """The reasons of an implementation against a call."""
    entry = jaxkv.KVEntry("bf16", head_dim=128) if operation == "decode_kv" else jaxkv.MLAEntry("bf16")
    found = explained(operation, entry, tokens=tokens, ragged=ragged, **options)
    assert not found.reasons["xla"]
    return found.reasons[implementation]


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("operation", ["decode_mla", "decode_kv", "plan_decode"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (127, -1)},
        {"window": (127, 5), "ragged": True},
        {"window": (64, 3), "causal": False},
        {"window": (64, 1), "causal": False, "ragged": True},
        {"window": (64, 64), "causal": False},
        {"window": (-1, 3), "causal": False, "ragged": True},
        {"window": (-1, -1), "causal": False},
        {"window": (127, 64), "causal": False, "tokens": 1},
    ],
)
def test_windows_are_supported(implementation, operation, options, monkeypatch):
    assume_available(monkeypatch, implementation)
    assert not reasons(implementation, operation, **options)
