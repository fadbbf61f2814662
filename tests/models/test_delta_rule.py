"""The gated delta rule in both of its forms, and the convolution, compared with float64 NumPy loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.layers import delta_rule
from jaxkv.models.layers.delta_rule import convolve, gated_delta_rule

EPS = float(np.finfo(np.float32).eps)


def truth(q, k, v, decay, rate, state):
    """The rule token by token, in float64."""
    q, k, v, decay, rate, state = (np.asarray(part, np.float64) for part in (q, k, v, decay, rate, state))
    (batch, tokens, heads, _), group = v.shape, v.shape[2] // k.shape[2]
    state, out = state.copy(), np.zeros(v.shape)
    for b, h, t in np.ndindex(batch, heads, tokens):
        key, query = k[b, t, h // group], q[b, t, h // group]
        key = key / np.sqrt(key @ key + 1e-6)
        query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(len(query))
        held = np.exp(decay[b, t, h]) * state[b, h]
        state[b, h] = held + np.outer(key, rate[b, t, h] * (v[b, t, h] - key @ held))
        out[b, t, h] = query @ state[b, h]
    return out, state


def drawn(batch, tokens, groups=2, heads=4, key=16, value=12, *, remember=0.02, alike=0.0, seed=0):
    """Arguments of the rule, with decays of up to about `remember` per token, and keys that are more or less alike."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    keys = normal(batch, tokens, groups, key) * (1 - alike) + alike
    rate = 1 / (1 + np.exp(-2 * normal(batch, tokens, heads)))
    decay = -remember * random.uniform(0, 1, (batch, tokens, heads)).astype(np.float32)
    queries, values = normal(batch, tokens, groups, key), normal(batch, tokens, heads, value)
    return queries, keys, values, decay, rate, normal(batch, heads, key, value)


def assert_close(found, right, tolerance):
    for name, one, other in zip(("out", "state"), found, right, strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
        assert error < tolerance, (name, error)


run = jax.jit(gated_delta_rule)
FORMS = {form.__name__: form for form in (delta_rule.recurrent, delta_rule.chunked)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {}),
        (2, {}),
        (64, {}),
        (65, {}),
        (200, {}),
        (200, {"remember": 0.0}),
        (200, {"remember": 20.0}),
        (130, {"alike": 1.0}),
        (130, {"alike": 0.9, "remember": 0.0, "heads": 2}),
    ],
)
def test_both_forms_equal_float64(form, tokens, options, monkeypatch):
    for name in FORMS:
        monkeypatch.setattr(delta_rule, name, FORMS[form])
    arguments = drawn(2, tokens, **options)
    # Rounding errors of a token decay or are corrected by later ones, so that they do not grow with the length.
    assert_close(jax.jit(partial(gated_delta_rule))(*arguments), truth(*arguments), 16 * EPS)
