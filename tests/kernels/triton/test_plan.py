"""Plans for attention in Triton: every token of every request is in one work tile; split requests are listed."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv_kernels.triton.mla import LatentConfig
from jaxkv_kernels.triton.splits import make_plan
from support.cases import slow

CONFIG = LatentConfig(rows=16, keys=32, columns=128, warps=4, stages=2, programs_per_sm=2)


def planned(lengths, longest, *, trailing=None, row_tiles=1, q_len=1, window=None, ahead=0, sms=132):
    return make_plan(
        jnp.asarray(lengths, jnp.int32), None if trailing is None else jnp.asarray(trailing, jnp.int32),
        config=CONFIG, row_tiles=row_tiles, q_len=q_len, window=window, ahead=ahead, longest=longest, sms=sms,
    )  # fmt: skip


@pytest.mark.parametrize(("window", "ahead"), [(None, 0), (1, 0), (700, 0), (700, 40), (1, None), (None, 3)])
@pytest.mark.parametrize("seed", [0, 1, 2, *(slow(seed) for seed in range(3, 20))])
def test_work_tiles_cover_every_request(seed, window, ahead):
    rng = np.random.default_rng(seed)
    batch, longest, row_tiles = int(rng.integers(1, 40)), int(rng.integers(1, 4000)), int(rng.integers(1, 5))
    lengths = rng.integers(-3, longest + 100, batch) * (rng.random(batch) > 0.2)
    q_len = int(rng.integers(1, 4))
    trailing = rng.integers(0, 90, batch) if ahead != 0 and seed % 2 else np.zeros(batch, int)
    keywords = {"trailing": trailing if trailing.any() else None, "window": window, "ahead": ahead}
    plan = planned(lengths, longest, row_tiles=row_tiles, q_len=q_len, sms=int(rng.integers(1, 70)), **keywords)
    work_tiles = np.asarray(plan.work_tiles)
    ends = lengths = np.clip(lengths, 0, longest)
    after_queries = lengths - trailing
    if ahead is not None:
        ends = np.clip(after_queries + ahead, 0, lengths)
    begins = np.zeros_like(ends) if window is None else np.maximum(after_queries - q_len + 1 - window, 0)
    listed = plan.split_requests[: int(plan.num_split[0])]
    splits = {int(request): (int(first), int(count)) for request, first, count in listed}
    for request in range(batch):
        (places,) = np.nonzero(work_tiles[:, 0] == request)
        found = work_tiles[places]
        edges = [*found[:, 1], found[-1, 2]]
        assert edges[0] == begins[request]
        assert edges[-1] == ends[request]
        assert (found[1:, 1] == found[:-1, 2]).all()
        assert (np.diff(edges) > 0).all() or len(found) == 1
        assert (found[:, 3] == (len(found) > 1)).all()
        assert plan.tiles_per_request[request] == len(found)
        assert (request in splits) == (len(found) > 1)
        if len(found) > 1:
            assert splits[request] == (places[0], len(found))
            assert (np.diff(places) == 1).all()
            assert ((found[:-1, 2] - found[:-1, 1]) % CONFIG.split_multiple == 0).all()
    assert plan.may_split or not splits


@pytest.mark.parametrize(
    ("batch", "length", "row_tiles", "splits"),
    [(1, 65536, 2, 128), (64, 4096, 1, 4), (128, 8192, 1, 2), (256, 8192, 2, 1)],
)
def test_requests_of_one_length_fill_the_gpu_once(batch, length, row_tiles, splits):
    plan = planned([length] * batch, length, row_tiles=row_tiles)
    assert (np.asarray(plan.tiles_per_request) == splits).all()


def test_a_long_request_among_short_ones_is_split():
    plan = planned([65536] + [64] * 31, 65536)
    assert plan.tiles_per_request[0] > 50
    assert (np.asarray(plan.tiles_per_request)[1:] == 1).all()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rows", 8, "a power of two from 16 to 1024"),
        ("keys", 48, "a power of two from 16 to 1024"),
        ("columns", 16, "a power of two from 32 to 1024"),
        ("warps", 32, "a power of two from 1 to 16"),
        ("stages", 0, "a positive integer"),
        ("split_multiple", 64.0, "a positive integer"),
    ],
)
def test_an_invalid_config_is_rejected(name, value, expected):
    with pytest.raises(ValueError, match=f"`{name}` is {value}: expected {expected}"):
        replace(CONFIG, **{name: value})
