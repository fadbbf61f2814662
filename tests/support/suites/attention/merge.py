"""Merging partial attentions, empty ones included."""

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support import oracle
from support.arrays import on_device
from support.compare import assert_close
from support.suites.base import Suite


class Merge(Suite):
    """`merge_states`."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_parts_make_the_whole(self, dtype):
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal(shape) for shape in ((2, 4, 16), (90, 4, 16), (90, 4, 8)))
        cuts = [0, 0, 13, 13, 64, 90]  # two of the parts are empty
        parts = [oracle.attention(q, k[a:b], v[a:b], 0.5) for a, b in pairwise(cuts)]
        outs = on_device(np.stack([out for out, _ in parts])).astype(dtype)
        lses = on_device(np.stack([lse for _, lse in parts]), jnp.float32)
        out, lse = self.run(jaxkv.merge_states, outs, lses)
        right_out, right_lse = oracle.attention(q, k, v, 0.5)
        assert out.dtype == dtype
        assert_close(out, right_out, roundings=16 if dtype == "float32" else 4, magnitude=2)
        assert_close(lse, right_lse, roundings=16)

    @pytest.mark.parametrize("sign", [-np.inf, np.inf, np.nan])
    def test_empty_parts_weigh_nothing_whatever_they_hold(self, sign):
        outs = [jnp.full((3, 2), jnp.nan), jnp.ones((3, 2)), jnp.full((3, 2), jnp.inf)]
        lses = [jnp.full(3, sign, jnp.float32), on_device([0.5, -2.0, sign], jnp.float32), jnp.full(3, sign)]
        out, lse = self.run(jaxkv.merge_states, outs, lses)
        assert_close(out, np.asarray([[1, 1], [1, 1], [0, 0]], np.float64), roundings=0)
        assert_close(lse, np.asarray([0.5, -2.0, -np.inf]), roundings=0)

    def test_one_part_is_itself(self):
        out, lse = self.run(jaxkv.merge_states, jnp.full((1, 2, 3), 7.0), jnp.full((1, 2), 80.0))
        assert (np.asarray(out) == 7).all()
        assert (np.asarray(lse) == 80).all()
