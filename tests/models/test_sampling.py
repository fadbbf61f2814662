"""Tokens drawn from logits: the frequencies are the probabilities, and nothing outside the nucleus is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.sampling import Sampling, draw, likeliest, sample

P = np.asarray([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 4000


def frequencies(temperature, top_p):
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(P, jnp.float32)), (DRAWS, len(P)))
    full = jnp.full(DRAWS, 1.0, jnp.float32)
    seeds, positions = jnp.arange(DRAWS, dtype=jnp.uint32) % 40, jnp.arange(DRAWS, dtype=jnp.int32) // 40
    tokens = jax.jit(sample)(logits, temperature * full, top_p * full, seeds, positions)
    return np.bincount(np.asarray(tokens), minlength=len(P)) / DRAWS


@pytest.mark.parametrize(
    ("temperature", "top_p", "kept"),
    [
        (1.0, 1.0, [0, 1, 2, 3, 4]),
        (2.0, 1.0, [0, 1, 2, 3, 4]),
        (1.0, 0.75, [1, 3, 4]),
        (1.0, 0.65, [1, 3]),
        (1, 0.01, [1]),
    ],
)
def test_frequencies_are_the_probabilities(temperature, top_p, kept):
    right = np.zeros(len(P))
    right[kept] = P[kept] ** (1 / temperature)
    right /= right.sum()
    deviation = np.sqrt(right * (1 - right) / DRAWS)
    found = frequencies(temperature, top_p)
    assert np.all(np.abs(found - right) <= 4 * deviation), (found, right)


def test_rows_are_drawn_each_in_its_way():
    logits = jnp.log(jnp.asarray(np.stack([P, P, P, P]), jnp.float32)).at[3, 2].set(jnp.nan)
    options = [
        np.float32([0, 0.7, 0.7, 0]),
        np.float32([1, 1, 0.3, 1]),
        np.uint32([1, 2, 3, 4]),
        np.int32([5, 6, 7, 8]),
    ]
    tokens = sample(logits, *options)
    assert (tokens[0], tokens[2], tokens[3]) == (1, 1, -1)
    alone = sample(logits[1:2], *(option[1:2] for option in options))
    assert tokens[1] == alone[0]


def tokens_of(logits, temperature, top_p=1.0, function=sample):
    """A token per row of `logits`."""
    rows = len(logits)
    options = (jnp.full(rows, value, jnp.float32) for value in (temperature, top_p))
    seeds, positions = jnp.arange(rows, dtype=jnp.uint32), jnp.arange(rows, dtype=jnp.int32)
    return np.asarray(JITTED[function](jnp.asarray(logits, jnp.float32), *options, seeds, positions))


JITTED = {function: jax.jit(function) for function in (sample, draw)}


@pytest.mark.parametrize("function", [sample, draw])
@pytest.mark.parametrize("shift", [0, -1000])
def test_low_temperatures_select_the_most_likely_token(function, shift):
    """Of logits whose quotients overflow, as well; the second and third are as far from infinity as the first."""
    logits = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32) * 8
    logits[np.arange(64), np.arange(64) + 500] = 60
    logits[np.arange(64), np.arange(64)] = 55
    logits += np.float32(shift)
    for temperature in (1e-2, 1e-10, 1e-30, 1e-36, 5e-37, 1e-37, 2e-38, 1e-38, 1e-40, 1e-45, 5e-324):
        Sampling(temperature=temperature, top_p=0.9)  # accepted
        for top_p in (0.9, 1):
            assert np.array_equal(tokens_of(logits, temperature, top_p, function), logits.argmax(-1)), temperature


@pytest.mark.parametrize("temperature", [1.2e-38, 1.0, 1e38, 3.4e38])
def test_large_logits(temperature):
    """Differences that overflow, and infinite logits: tokens that equal the largest are drawn, or all if T is as large.

    At temperature 3.4e38, a logit of -3e38 is drawn as well: it has 0.17 times the probability of 3e38.
    """
    rows = np.tile(np.float32([3e38, -3e38, 3e38, -np.inf]), (400, 1))
    share = np.bincount(tokens_of(rows, temperature), minlength=4) / 400
    with np.errstate(over="ignore"):  # to -inf
        weights = np.exp((rows[0].astype(np.float64) - rows[0].max()) / temperature)
    right = weights / weights.sum()
    assert np.all(np.abs(share - right) <= 4 * np.sqrt(right * (1 - right) / 400)), (share, right)
    infinite = np.tile(np.float32([0, np.inf, 1, np.inf]), (60, 1))
    assert set(tokens_of(infinite, temperature)) == {1, 3}
    assert not tokens_of(np.full((3, 5), -np.inf), temperature).any()


@pytest.mark.parametrize(("top_p", "last"), [(1, 3), (0.9, 0), (0.5, 0)])
def test_with_top_p_1_every_token_of_nonzero_probability_is_drawn(monkeypatch, top_p, last):
    """Although the probabilities before the last ones sum to 1, as they are rounded."""

    def least_likely(key, logits):
        del key
        return jnp.argmin(jnp.where(logits > -jnp.inf, logits, jnp.inf))

    monkeypatch.setattr(jax.random, "categorical", least_likely)
    logits = jnp.asarray([[0, -20, -40, -60, -jnp.inf]])
    options = (jnp.full(1, value, jnp.float32) for value in (1, top_p))
    assert draw(logits, *options, jnp.zeros(1, jnp.uint32), jnp.zeros(1, jnp.int32)).tolist() == [last]


def test_subnormal_logits_are_ordered():
    smallest = np.finfo(np.float32).smallest_subnormal
    logits = np.asarray([[0, 1, 3, 2], [-1, -0.0, -2, -3], [5, 5, 4, 0]], np.float32) * smallest
    assert likeliest(jnp.asarray(logits)).tolist() == [2, 1, 0]
    assert tokens_of(logits, 0.0).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "`temperature` is -0.5: expected a finite number, 0 .greedy. to 3.4e.38"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": 1e39}, r"`temperature` is 1e\+39: expected .* to 3.4e\+38"),
        ({"temperature": 10**400}, "`temperature` is 1000"),
        ({"top_p": 0}, "`top_p` is 0: expected more than 0, at most 1"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"temperature": True}, "`temperature` is True"),
        ({"temperature": "1"}, "`temperature` is '1'"),
        ({"top_p": True}, "`top_p` is True"),
        ({"top_p": None}, "`top_p` is None"),
        ({"seed": -1}, "`seed` is -1: expected an int, 0 to"),
        ({"seed": 2**32}, "`seed` is 4294967296: expected an int, 0 to"),
        ({"seed": 1.5}, "`seed` is 1.5: expected an int"),
        ({"seed": 1.0}, "`seed` is 1.0: expected an int"),
        ({"seed": True}, "`seed` is True: expected an int"),
        ({"seed": "1"}, "`seed` is '1': expected an int"),
    ],
)
def test_meaningless_settings_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_numbers_of_numpy_are_numbers():
    found = Sampling(np.float32(0.5), np.float64(0.25), np.uint32(7))
    assert found == Sampling(0.5, 0.25, 7)
    assert type(found.seed) is int
