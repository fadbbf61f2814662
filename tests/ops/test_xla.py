"""Every operation on the XLA implementation, which has no gaps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv_kernels.logit_cap import capped
from support import suites


class TestWrites(suites.Writes):
    implementation = "xla"


class TestGathers(suites.Gathers):
    implementation = "xla"


class TestDecodeMLA(suites.DecodeMLA, suites.UnseenByMLA):
    implementation = "xla"


class TestDecodeKV(suites.DecodeKV, suites.UnseenByKV):
    implementation = "xla"


class TestDecodeMLASparse(suites.DecodeMLASparse):
    implementation = "xla"


class TestIndexer(suites.Indexer):
    implementation = "xla"


class TestMerge(suites.Merge):
    implementation = "xla"


class TestBlocks(suites.Blocks):
    implementation = "xla"


@pytest.mark.parametrize("cap", [2.0**-126, 1e-9, 0.3, 50.0, 1e7, 2.0**126])
def test_scores_are_capped_to_a_few_roundings(cap):
    rng = np.random.default_rng(0)
    ratios = np.r_[0, 2.0 ** rng.uniform(-40, 20, 4000), 2.0**-13 * rng.uniform(0.9, 1.1, 500)]
    scores = np.float32(np.clip(ratios * cap, 2.0**-120, 3e38) * rng.choice([-1, 1], ratios.size))
    found = np.asarray(capped(jnp.asarray(scores), cap), np.float64)
    expected = cap * np.tanh(scores.astype(np.float64) / cap)
    np.testing.assert_allclose(found, expected, rtol=8 * 2.0**-24, atol=2.0**-126)
