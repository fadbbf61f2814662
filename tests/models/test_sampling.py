"""Tokens drawn from logits: the frequencies are the probabilities, and nothing outside the nucleus is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.sampling import Sampling, sample

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
