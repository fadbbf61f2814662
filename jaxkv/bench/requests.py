"""Requests of a load: their lengths, prompts and arrivals, and the times of their tokens."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.terminal.options import positive

SPREAD = 0.7
"""The standard deviation of the logarithm of drawn lengths: their 95th percentile is 2.5 times their mean."""
LONGEST = 4
"""Drawn lengths are at most this many times their mean."""
PERCENTILES = {"median": 50, "p99": 99}


class Lengths(NamedTuple):
    """Lengths of requests in tokens."""

    prompts: np.ndarray
    """int [N]."""
    outputs: np.ndarray
    """int [N]."""

    @classmethod
    def drawn(cls, count: int, prompt: int, output: int, *, seed: int = 0) -> "Lengths":
        """Log-normal lengths of `count` requests with the given means, as observed in conversations."""
        rng = np.random.default_rng(seed)

        def draw(mean: int) -> np.ndarray:
            values = np.minimum(rng.lognormal(-(SPREAD**2) / 2, SPREAD, count), LONGEST)
            return np.maximum(np.rint(values * (mean / values.mean())), 1).astype(int)

        return cls(draw(prompt), draw(output))

    @classmethod
    def read(cls, path: Path, count: int) -> "Lengths":
        """Lengths of `count` requests from a file, from the start again if it has fewer.

        Raises:
          ValueError: the file is empty or not UTF-8, or a line does not have two positive integers (prompt and output
            tokens) below 2**31, separated by a comma or spaces.  The message names the file and the line.
        """
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8: expected a line of two numbers for each request") from None
        pairs = []
        for number, line in enumerate(lines, 1):
            words = line.replace(",", " ").split()
            # Ten digits at most: Python does not convert thousands of them.
            known = [word.isdecimal() and len(word) <= 10 and 0 < int(word) < 2**31 for word in words]
            if len(words) != 2 or not all(known):
                raise ValueError(f"{path}, line {number}: {line!r} is not the prompt and output tokens of a request")
            pairs.append([int(word) for word in words])
        if not pairs:
            raise ValueError(f"{path} is empty: expected a line with prompt and output tokens for each request")
        return cls(*np.resize(np.asarray(pairs), (count, 2)).T)

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return int((self.prompts + self.outputs).max())

    @property
    def running(self) -> int:
        """The mean number of cached tokens of running requests: those with more outputs run for longer."""
        return int(np.average(self.prompts + self.outputs / 2, weights=self.outputs))


def poisson(count: int, rate: float, *, seed: int = 0) -> np.ndarray:
    """Times in seconds of `count` arrivals, `rate` per second on average."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options about lengths."""
    parser.add_argument("--prompt", type=positive, default=512, metavar="N", help="mean tokens of a prompt (512)")
    parser.add_argument("--output", type=positive, default=256, metavar="N", help="mean tokens of an answer (256)")
    lengths = "file with a line for each request: its prompt and output tokens; instead of drawn lengths"
    parser.add_argument("--lengths", type=Path, metavar="FILE", help=lengths)


def lengths_of(args: argparse.Namespace, count: int) -> Lengths:
    """The lengths of `count` requests, by the options; ValueError if the file with lengths cannot be read."""
    return Lengths.read(args.lengths, count) if args.lengths else Lengths.drawn(count, args.prompt, args.output)


def random_prompts(lengths: Lengths, vocabulary: int, *, seed: int | Sequence[int] = 0) -> list[list[int]]:
    """Prompts of random tokens, which share no prefixes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, count).tolist() for count in lengths.prompts]


@dataclass(frozen=True)
class TokenTimes:
    """When requests arrived and got their tokens.  Times are in seconds since the start."""

    arrivals: np.ndarray
    """[N]."""
    tokens: list[list[float]]
    """The time of each token of each request."""

    def throughput(self, start: float, end: float) -> float:
        """Output tokens per second between two times; 0 if the second is not later."""
        if end <= start:
            return 0.0
        times = np.concatenate([np.asarray(times) for times in self.tokens])
        return float(((start < times) & (times <= end)).sum() / (end - start))

    @property
    def first(self) -> np.ndarray:
        """Seconds from each request's arrival to its first token."""
        return np.asarray([times[0] for times in self.tokens]) - self.arrivals

    @property
    def between(self) -> np.ndarray:
        """Seconds between consecutive tokens of a request, of all requests."""
        return np.concatenate([np.diff(times) for times in self.tokens])


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """Percentiles in milliseconds."""
    return {name: 1e3 * float(np.percentile(seconds, q)) if seconds.size else 0.0 for name, q in PERCENTILES.items()}
