"""Attention to expanded keys whose rotary part is shared: interpreted on any machine, and on a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas  # noqa: F401 (its warnings at import are not ours)

from jaxkv_kernels.mosaic_gpu import prefill
from support.arrays import as_float64
from support.cases import further, slow
from support.compare import assert_close
from support.hopper import on_hopper

NOPE, ROPE, VALUE = prefill.SIZES
MASKS = {"window": 70}, {"ahead": 3}, {"window": 1, "ahead": 0}, {"window": 200, "ahead": 5}


def arguments(tokens, keys, heads, lengths, dtype):
    rng, batch = np.random.default_rng(0), len(lengths)
    shapes = (
        (batch, tokens, heads, NOPE + ROPE),
        (batch, keys, heads, NOPE),
        (batch, keys, ROPE),
        (batch, keys, heads, VALUE),
    )
    return *(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes), jnp.asarray(lengths, jnp.int32)


def check(tokens, keys, heads, lengths, dtype="bfloat16", *, splits, offset=None, window=None, ahead=None, cap=None):
    """The splits together are the attention in float64; a split without keys is 0 and -inf."""
    *arrays, lens = arguments(tokens, keys, heads, lengths, dtype)
    options = {"scale": 0.07, "window": window, "ahead": ahead, "logit_cap": cap}
    places = None if offset is None else jnp.asarray(offset, jnp.int32)
    out, lse = jax.jit(lambda *args: prefill.attend_expanded(*args, offset=places, **options))(*arrays, lens)
    assert out.shape == (splits, len(lengths), tokens, heads, VALUE)
    assert out.dtype == dtype
    assert lse.shape == out.shape[:-1]
    q, k_nope, k_pe, v = (as_float64(array) for array in arrays)
    scores = np.einsum("bqhd,bshd->bqhs", q[..., :NOPE], k_nope) + np.einsum("bqhd,bsd->bqhs", q[..., NOPE:], k_pe)
    scores = 0.07 * scores if cap is None else cap * np.tanh(0.07 * scores / cap)
    key = np.arange(keys)
    seen = np.broadcast_to((key < np.asarray(lens)[:, None])[:, None], (len(lengths), tokens, keys)).copy()
    if offset is not None:
        position = (np.asarray(offset)[:, None] + np.arange(tokens))[..., None]
        seen &= (key > position - (2 * keys if window is None else window)) | (window is None)
        seen &= (key <= position + (ahead or 0)) | (ahead is None)
    weights = np.where(seen[:, :, None], np.exp(scores), 0)
    total = weights.sum(axis=-1)
    expected = np.einsum("bqhs,bshd->bqhd", weights, v) / np.where(total, total, 1)[..., None]
    shares = np.exp(np.asarray(lse, np.float64))
    assert_close(jnp.asarray(shares.sum(axis=0), jnp.float32), total, roundings=64)
    parts = as_float64(out) * shares[..., None]
    found = jnp.asarray(parts.sum(axis=0) / np.where(total, total, 1)[..., None], jnp.float32)
    assert_close(found, expected, dtype=dtype, roundings=4)
    empty = np.isneginf(np.asarray(lse))
    assert (np.asarray(out.astype(jnp.float32))[empty] == 0).all()


@on_hopper
class TestExpanded:
    """Published sizes: a part of a tile, several tiles, more keys than tokens, splits without keys."""

    @pytest.mark.parametrize(
        ("tokens", "keys", "heads", "lengths", "splits"),
        [
            (512, 4096, 16, (4096,), 2),
            (300, 4000, 4, (0, 1, 127, 128, 129, 4000), 1),
            (1, 1024, 1, (1000,), 1),
            (128, 1504, 128, (1400,), 1),
        ],
    )
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_attention_is_that_of_float64(self, tokens, keys, heads, lengths, splits, dtype):
        check(tokens, keys, heads, lengths, dtype, splits=splits)

    @pytest.mark.parametrize("mask", [*MASKS, {"window": 1000}, {"ahead": 70, "window": 3000}])
    @pytest.mark.parametrize("cap", [None, 2.0])
    def test_masks_and_caps(self, mask, cap):
        lengths, offset = (0, 1, 128, 129, 4000, 3000), (0, -3, 100, 129, 3700, 2999)
        check(300, 4000, 4, lengths, splits=1, offset=offset, cap=cap, **mask)
        check(1, 4096, 1, (4000,), splits=4, offset=(3999,), cap=cap, **mask)


@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    """Two tiles of rows, the second one in part; splits, one of them without keys."""

    def test_attention_is_that_of_float64(self, monkeypatch):
        monkeypatch.setattr(prefill, "LEAST_KEYS", 128)
        monkeypatch.setattr(prefill, "SPLITS", (1, 2))
        check(130, 264, 1, (260,), splits=2)
        check(3, 256, 1, (0, 100), splits=2)

    @pytest.mark.parametrize(
        ("mask", "cap"), [further({"window": 70}, None), *(slow(mask, cap) for mask in MASKS for cap in (None, 2.0))]
    )
    def test_masks_and_caps(self, mask, cap, monkeypatch):
        monkeypatch.setattr(prefill, "LEAST_KEYS", 256)
        monkeypatch.setattr(prefill, "SPLITS", (1, 2))
        check(130, 520, 1, (500, 300), splits=2, offset=(380, -4), cap=cap, **mask)


@pytest.mark.parametrize(
    ("tiles", "keys", "splits"), [(64, 32768, 2), (1, 32768, 8), (1, 3000, 2), (132, 32768, 1), (1024, 32768, 1)]
)
def test_splits_fill_the_gpu(tiles, keys, splits):
    assert prefill.splits_of(tiles, keys) == splits
