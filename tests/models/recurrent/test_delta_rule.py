"""The gated delta rule by chunks and token by token, and the convolution, compared with float64 NumPy loops."""

import jax
import numpy as np
import pytest
from jax import lax

from jaxkv.models.layers.delta_rule import gated_delta_rule
from jaxkv_kernels.delta_rule import advance, convolve, unit_queries_and_keys
from support.cases import further
from support.compare import assert_close, assert_same_bits

ROUNDINGS = 32
"""Rounding errors of a token decay, or are corrected by later tokens, so that they do not grow with the length."""


def truth(q, k, v, decay, rate, state):
    """The rule token by token, in float64."""
    q, k, v, decay, rate, state = (np.asarray(part, np.float64) for part in (q, k, v, decay, rate, state))
    (batch, tokens, heads, _), group = v.shape, v.shape[2] // k.shape[2]
    state, out = state.copy(), np.zeros(v.shape)
    for b, h, t in np.ndindex(batch, heads, tokens):
        key, query = k[b, t, h // group], q[b, t, h // group]
        key = key / np.sqrt(key @ key + 1e-6)
        query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(len(query))
        held = np.exp(decay[b, t, h])[:, None] * state[b, h]
        state[b, h] = held + np.outer(key, rate[b, t, h] * (v[b, t, h] - key @ held))
        out[b, t, h] = query @ state[b, h]
    return out, state


def drawn(tokens, *, batch=2, heads=4, remember=0.02, alike=0.0, decays=1):
    """Arguments of the rule: decays of up to `remember` per token; keys are all the same if `alike` is 1."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    keys = normal(batch, tokens, 2, 16) * (1 - alike) + alike
    rate = 1 / (1 + np.exp(-2 * normal(batch, tokens, heads)))
    decay = -remember * random.uniform(0, 1, (batch, tokens, heads, decays)).astype(np.float32)
    queries, values = normal(batch, tokens, 2, 16), normal(batch, tokens, heads, 12)
    return queries, keys, values, decay, rate, normal(batch, heads, 16, 12)


def assert_both_close(found, right):
    for name, one, other in zip(("out", "state"), found, right, strict=True):
        assert_close(one, other, roundings=ROUNDINGS, what=name)


def token_by_token(q, k, v, decay, rate, state):
    """`gated_delta_rule`, by a step of the rule per token."""

    def step(state, token):
        q, k, v, decay, rate = token
        out, state = advance(*unit_queries_and_keys(q, k, v.shape[-2]), v, decay, rate, state)
        return state, out

    state, out = lax.scan(step, state, [part.swapaxes(0, 1) for part in (q, k, v, decay, rate)])
    return out.swapaxes(0, 1), state


FORMS = {form.__name__: form for form in (token_by_token, gated_delta_rule)}
run = jax.jit(gated_delta_rule)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {}),
        further(64, {"heads": 2}),
        further(65, {}),
        further(200, {"remember": 0.0}),
        (200, {"remember": 20.0}),  # exp of the sum of the decays is 0, and of its negative infinite
        (130, {"alike": 1.0}),  # powers of the matrix that is inverted would be as large as 1e17
        further(130, {"alike": 0.9, "remember": 0.0}),
        # A decay per value of a key.
        (1, {"decays": 16}),
        (65, {"decays": 16}),
        further(200, {"decays": 16, "remember": 20.0}),
        (130, {"decays": 16, "alike": 1.0}),
    ],
)
def test_both_forms_equal_float64(form, tokens, options):
    arguments = drawn(tokens, **options)
    assert_both_close(jax.jit(FORMS[form])(*arguments), truth(*arguments))


@pytest.mark.parametrize("sizes", [(1,) * 5, (100, 1, 29)])
def test_parts_one_after_the_other_equal_all_at_once(sizes):
    *new, state = drawn(sum(sizes))
    outs, start = [], 0
    for size in sizes:
        out, state = run(*(part[:, start : start + size] for part in new), state)
        outs.append(out)
        start += size
    assert_both_close((np.concatenate(outs, axis=1), state), truth(*drawn(sum(sizes))))


@pytest.mark.parametrize("tokens", [1, 70])
def test_a_token_without_decay_and_rate_changes_nothing(tokens):
    q, k, v, decay, rate, state = drawn(tokens)
    still = (np.arange(tokens) < tokens // 2)[:, None]
    decay, rate = np.where(still[..., None], 0, decay), np.where(still, 0, rate)
    if tokens == 1:
        assert_same_bits(run(q, k, v, np.zeros_like(decay), np.zeros_like(rate), state)[1], state)
        return
    part = slice(tokens // 2, None)
    out, after = run(q, k, v, decay, rate, state)
    right = truth(*(one[:, part] for one in (q, k, v, decay, rate)), state)
    assert_both_close((out[:, part], after), right)


@pytest.mark.parametrize("q_len", [1, 2, 7])
def test_the_convolution_with_rows_of_different_lengths(q_len):
    """Rows are aligned to the end; what is before them, here NaN, is not seen."""
    random, width, channels = np.random.default_rng(0), 4, 5
    count = np.arange(q_len + 1, dtype=np.int32)
    whole = random.normal(size=(len(count), width - 1 + q_len, channels)).astype(np.float32)
    weight = random.normal(size=(channels, width)).astype(np.float32)
    x = np.full((len(count), q_len, channels), np.nan, np.float32)
    for row, n in enumerate(count):
        x[row, q_len - n :] = whole[row, width - 1 : width - 1 + n]
    out, state = jax.jit(convolve)(x, whole[:, : width - 1], weight, count)
    for row, n in enumerate(count):
        windows = [whole[row, t : t + width].astype(np.float64) for t in range(n)]
        right = np.array([(window.T * weight).sum(axis=1) for window in windows]).reshape(n, channels)
        assert_close(out[row, q_len - n :], right, what=f"{n} tokens")
        assert_same_bits(state[row], whole[row, n : n + width - 1])
