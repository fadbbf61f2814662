"""Plans for attention in Triton: every token of every request lies in one item, and cut requests are listed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv_kernels.triton.attention.decode_tiles import Tiles
from jaxkv_kernels.triton.attention.plan_decode import LEAST, make_plan
from support.cases import slow

TILES = Tiles(rows=16, keys=32, columns=128, warps=4, stages=2, programs=2)


def planned(lengths, longest, *, groups=1, tokens=1, window=None, processors=132):
    return make_plan(
        jnp.asarray(lengths, jnp.int32), tiles=TILES, groups=groups, tokens=tokens, window=window, longest=longest,
        processors=processors,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 700])
@pytest.mark.parametrize("seed", [0, 1, 2, *(slow(seed) for seed in range(3, 20))])
def test_items_cover_every_request(seed, window):
    rng = np.random.default_rng(seed)
    batch, longest, groups = int(rng.integers(1, 40)), int(rng.integers(1, 4000)), int(rng.integers(1, 5))
    lengths = rng.integers(-3, longest + 100, batch) * (rng.random(batch) > 0.2)
    tokens = int(rng.integers(1, 4))
    plan = planned(lengths, longest, groups=groups, tokens=tokens, window=window, processors=int(rng.integers(1, 70)))
    items = np.asarray(plan.items)
    ends = np.clip(lengths, 0, longest)
    begins = np.zeros_like(ends) if window is None else np.clip(ends - tokens + 1 - window, 0, ends)
    cuts = {int(request): (int(first), int(count)) for request, first, count in plan.cuts[: int(plan.number[0])]}
    for request in range(batch):
        (places,) = np.nonzero(items[:, 0] == request)
        found = items[places]
        edges = [*found[:, 1], found[-1, 2]]
        assert edges[0] == begins[request]
        assert edges[-1] == ends[request]
        assert (found[1:, 1] == found[:-1, 2]).all()
        assert (np.diff(edges) > 0).all() or len(found) == 1
        assert (found[:, 3] == (len(found) > 1)).all()
        assert plan.counts[request] == len(found)
        assert (request in cuts) == (len(found) > 1)
        if len(found) > 1:
            assert cuts[request] == (places[0], len(found))
            assert (np.diff(places) == 1).all()
            assert ((found[:-1, 2] - found[:-1, 1]) % LEAST == 0).all()
    assert plan.cutting or not cuts


@pytest.mark.parametrize(
    ("batch", "length", "groups", "pieces"),
    [(1, 65536, 2, 128), (64, 4096, 1, 4), (128, 8192, 1, 2), (256, 8192, 2, 1)],
)
def test_requests_of_one_length_fill_the_program_slots_once(batch, length, groups, pieces):
    plan = planned([length] * batch, length, groups=groups)
    assert (np.asarray(plan.counts) == pieces).all()


def test_a_long_request_among_short_ones_is_cut():
    plan = planned([65536] + [64] * 31, 65536)
    assert plan.counts[0] > 50
    assert (np.asarray(plan.counts)[1:] == 1).all()
