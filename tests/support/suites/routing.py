"""Top-k routing of experts."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from support.arrays import on_device
from support.suites.base import Suite

V2 = {"per_token": 6}
V2_IN_GROUPS = {"per_token": 6, "groups": 4, "groups_per_token": 2, "scale": 16.0}
V3 = {"per_token": 8, "scoring": "sigmoid", "groups": 8, "groups_per_token": 4, "normalize": True, "scale": 2.5}


def expected(logits, bias, *, per_token, scoring="softmax", groups=1, groups_per_token=1, normalize=False, scale=1.0):
    """Ids and weights of one token in float64, from the definition."""
    logits = logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max())
    scores = {
        "softmax": exponentials / exponentials.sum(),
        "sigmoid": 1 / (1 + np.exp(-logits)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(logits))),
    }[scoring]
    choice = scores + bias
    members = choice.reshape(groups, -1)
    leaders = np.sort(members, axis=1)[:, -1 if scoring == "softmax" else -2 :].sum(axis=1)
    kept = np.argsort(-leaders, kind="stable")[:groups_per_token]
    allowed = np.isin(np.arange(len(logits)) // members.shape[1], kept)
    ids = np.argsort(np.where(allowed, -choice, np.inf), kind="stable")[:per_token]
    weights = scores[ids]
    return ids, (weights / weights.sum() if normalize else weights) * scale


class RoutingChecks(Suite):
    """How a result is checked."""

    def check(self, logits, bias=None, *, per_token, **options):
        """Ids and weights are those of float64."""
        logits = np.asarray(logits, np.float32)
        given = None if bias is None else jnp.asarray(bias, jnp.float32)
        found = self.run(jaxkv.select_experts, on_device(logits), per_token, bias=given, **options)
        ids, weights = map(np.asarray, found)
        assert ids.dtype == np.int32
        assert weights.dtype == np.float32
        offset = np.zeros(logits.shape[1]) if bias is None else np.asarray(bias, np.float32).astype(np.float64)
        for token, row in enumerate(logits):
            right, shares = expected(row, offset, per_token=per_token, **options)
            np.testing.assert_array_equal(ids[token], right)
            # Some 200 roundings of float32: a GPU's approximate exponential is off by a few, and sums have up to 256
            # terms.  Results below 1e-30 may be 0, as denormal numbers are on some devices.
            np.testing.assert_allclose(weights[token], shares, rtol=2e-5, atol=1e-30)

    def drawn(self, tokens, experts, *, bias=False, **options):
        """Checks random tokens."""
        rng = np.random.default_rng(0)
        logits = rng.standard_normal((tokens, experts))
        self.check(logits, 0.1 * rng.standard_normal(experts) if bias else None, **options)


class Routing(RoutingChecks):
    """`select_experts`."""

    @pytest.mark.parametrize("tokens", [1, 6, 333])
    def test_experts_of_v2(self, tokens):
        self.drawn(tokens, 64, **V2)

    def test_groups_of_v2(self):
        self.drawn(9, 128, **V2_IN_GROUPS)

    @pytest.mark.parametrize("tokens", [1, 6, 333])
    def test_experts_of_v3(self, tokens):
        self.drawn(tokens, 256, bias=True, **V3)

    @pytest.mark.parametrize(("experts", "per_token"), [(8, 8), (60, 4), (768, 12), (1, 1)])
    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
    def test_numbers_of_experts(self, experts, per_token, scoring):
        self.drawn(5, experts, bias=True, per_token=per_token, scoring=scoring, normalize=True, scale=0.5)

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
    def test_of_equal_scores_lower_ids_come_first(self, scoring):
        rng = np.random.default_rng(1)
        self.check(np.rint(rng.standard_normal((7, 96))), per_token=10, scoring=scoring)
        self.check(np.zeros((3, 96)), per_token=5, scoring=scoring, groups=3, groups_per_token=2)

    def test_a_bias_changes_choices_and_not_weights(self):
        self.check(np.linspace(-1, 1, 40)[None], np.where(np.arange(40) < 3, 9.0, 0.0), per_token=4, scoring="sigmoid")

    def test_scores_below_0(self):
        self.drawn(4, 64, per_token=5, scoring="sigmoid")
        self.check(np.linspace(-4, 4, 64)[None], np.linspace(-3, -2, 64), per_token=7, scoring="sigmoid")

    @pytest.mark.parametrize("options", [V2, V2_IN_GROUPS, V3], ids=["v2", "v2 in groups", "v3"])
    def test_no_tokens(self, options):
        ids, weights = self.run(jaxkv.select_experts, jnp.zeros((0, 64)), **options)
        assert ids.shape == weights.shape == (0, options["per_token"])

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("options", [V2, V3], ids=["v2", "v3"])
    def test_a_token_that_is_not_finite_has_ids_within_range(self, value, options):
        rng = np.random.default_rng(2)
        logits = on_device(rng.standard_normal((5, 256)), jnp.float32).at[2, 7].set(value).at[3].set(value)
        ids, weights = self.run(jaxkv.select_experts, logits, **options)
        assert ((ids >= 0) & (ids < 256)).all()
        others = on_device([0, 1, 4])
        right = self.run(jaxkv.select_experts, logits[others], **options)
        assert (ids[others] == right[0]).all()
        assert (weights[others] == right[1]).all()
