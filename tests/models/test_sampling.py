"""Tokens drawn from logits: the frequencies are the probabilities, and nothing that a filter removes is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.sampling import Sampling, SamplingBatch, draw, likeliest, remaining, sample
from models.sampling_oracle import oracle

P = np.asarray([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 4000
CHI_SQUARE = [0, 10.8, 13.8, 16.3, 18.5]
"""Exceeded by chance once in 1,000, by degrees of freedom."""


def test_the_oracle():
    def tokens(**options):
        return oracle(np.log(P), Sampling(1.0, **options))[0].tolist()

    assert tokens() == [1, 3, 4, 2, 0]
    assert tokens(top_k=2) == [1, 3]
    assert tokens(min_p=0.3) == [1, 3, 4]
    assert tokens(top_p=0.8) == [1, 3, 4]
    assert tokens(top_p=0.8, top_k=3) == [1, 3]  # 0.7 of the remaining 0.85
    assert tokens(top_p=0.8, min_p=0.3) == [1, 3]
    p = oracle(np.log(P), Sampling(1.0, top_k=2))[1]
    np.testing.assert_allclose(p, [4 / 7, 3 / 7])


def samplings_of(rng, count):
    """Random options, each filter in half of them."""
    half = rng.random((3, count)) < 0.5
    top_k, top_p = rng.integers(1, 25, count) * half[0], np.where(half[1], rng.uniform(0.01, 1, count), 1)
    min_p = np.where(half[2], rng.uniform(0, 1, count) ** 3, 0)
    return [
        Sampling(t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in zip(rng.uniform(0.1, 3, count), top_k, top_p, min_p, strict=True)
    ]


def test_exactly_those_tokens_remain_that_the_filters_leave():
    """Of 20 tokens, many of which are equally likely."""
    rng, count = np.random.default_rng(0), 2000
    logits, samplings = (rng.integers(-4, 5, (count, 20)) / 2).astype(np.float32), samplings_of(rng, count)
    scaled, tokens = map(np.asarray, jax.jit(jax.vmap(remaining))(logits, SamplingBatch.of(samplings)))
    ties = 0
    for row, sampling, found, order in zip(logits, samplings, scaled, tokens, strict=True):
        right, p = oracle(row, sampling)
        kept = np.isfinite(found)
        assert order[kept].tolist() == right.tolist(), sampling
        weights = np.exp(found[kept].astype(np.float64))
        np.testing.assert_allclose(weights / weights.sum(), p, rtol=1e-5)
        ties += len(right) < 20 and row[order[len(right)]] == row[order[len(right) - 1]]
    assert ties > 500  # the first token that is removed is as likely as the last that remains


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0), 5),
        (Sampling(2.0), 5),
        (Sampling(1.0, 0.75), 3),
        (Sampling(1.0, 0.65), 2),
        (Sampling(1, 0.01), 1),
        (Sampling(1.0, top_k=4), 4),
        (Sampling(1.0, top_k=1), 1),
        (Sampling(1.0, min_p=0.3), 3),
        (Sampling(0.7, 0.9, top_k=4, min_p=0.1), 3),
    ],
)
def test_frequencies_are_the_probabilities(sampling, kept):
    """Chi-square of 4,000 draws, with 40 fixed seeds at 100 positions each."""
    logits = np.broadcast_to(np.log(P).astype(np.float32), (DRAWS, len(P)))
    positions = jnp.arange(DRAWS, dtype=jnp.int32) // 40
    options = SamplingBatch.of([sampling] * DRAWS)._replace(seeds=np.arange(DRAWS, dtype=np.uint32) % 40)
    tokens = JITTED[sample](logits, options, positions)
    seen = np.bincount(np.asarray(tokens), minlength=len(P))
    right, p = oracle(logits[0], sampling)
    assert len(right) == kept
    assert seen[right].sum() == DRAWS
    chi_square = ((seen[right] - DRAWS * p) ** 2 / (DRAWS * p)).sum()
    assert chi_square <= CHI_SQUARE[kept - 1], (chi_square, seen, p)


def test_rows_are_drawn_each_in_its_way():
    logits = jnp.log(jnp.asarray(np.stack([P, P, P, P, P, P]), jnp.float32)).at[3, 2].set(jnp.nan)
    samplings = [
        Sampling(0, seed=1),
        Sampling(0.7, seed=2),
        Sampling(0.7, 0.3, 3),
        Sampling(0, seed=4),
        Sampling(9.0, seed=5, top_k=1),
        Sampling(9.0, seed=6, min_p=1.0),
    ]
    options, positions = SamplingBatch.of(samplings), np.arange(5, 11, dtype=np.int32)
    tokens = sample(logits, options, positions)
    assert tokens[jnp.asarray([0, 2, 3, 4, 5])].tolist() == [1, 1, -1, 1, 1]
    alone = sample(logits[1:2], SamplingBatch.of(samplings[1:2]), positions[1:2])
    assert tokens[1] == alone[0]


def tokens_of(logits, temperature, top_p=1.0, function=sample):
    """A token per row of `logits`."""
    rows = len(logits)
    options = SamplingBatch.of([Sampling(temperature, top_p, seed) for seed in range(rows)])
    return np.asarray(JITTED[function](jnp.asarray(logits, jnp.float32), options, jnp.arange(rows, dtype=jnp.int32)))


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
    options = SamplingBatch.of([Sampling(1, top_p)])
    assert draw(logits, options, jnp.zeros(1, jnp.int32)).tolist() == [last]


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
        ({"min_p": -0.1}, "`min_p` is -0.1: expected 0 .all tokens. to 1"),
        ({"min_p": 1.1}, "`min_p` is 1.1"),
        ({"min_p": float("nan")}, "`min_p` is nan"),
        ({"top_k": -1}, r"`top_k` is -1: expected an int, 0 .all tokens. to 2\*\*31 - 1"),
        ({"top_k": 2**31}, "`top_k` is 2147483648"),
        ({"top_k": 2.0}, "`top_k` is 2.0"),
        ({"top_k": None}, "`top_k` is None"),
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
    found = Sampling(np.float32(0.5), np.float64(0.25), np.uint32(7), top_k=np.int64(3), min_p=np.float32(0.5))
    assert found == Sampling(0.5, 0.25, 7, top_k=3, min_p=0.5)
    assert type(found.seed) is type(found.top_k) is int
