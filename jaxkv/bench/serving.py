"""An engine under load: throughput, and the latencies of requests that arrive at random."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxkv.bench import model_steps
from jaxkv.models import Model
from jaxkv.serving import Engine, Request

SPREAD = 0.7
"""The standard deviation of the logarithm of drawn lengths: their 95th percentile is 2.5 times their mean."""
LONGEST = 4
"""Drawn lengths are at most this many times their mean."""
PREFILL_TOKENS = 8192
"""Tokens of the prefill that is timed, which are enough for its best rate."""
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


@dataclass(frozen=True)
class Rates:
    """What a model does per second if it does nothing else."""

    prefill: float
    """Prompt tokens per second."""
    decode: float
    """Output tokens per second."""

    def allowed(self, lengths: Lengths) -> float:
        """Output tokens per second of requests of these lengths, if prefills and decode steps alternate."""
        per_output = lengths.prompts.mean() / lengths.outputs.mean()
        return 1 / (per_output / self.prefill + 1 / self.decode)


class Alone:
    """A prefill of prompts of mean length, and a decode step of `max_requests` requests in the middle of their outputs.

    Args:
      model: the model.
      lengths: those of the requests.
      max_requests: requests that run at once.
    """

    def __init__(self, model: Model, lengths: Lengths, max_requests: int):
        prompts, prompt = self._prefilled(lengths, max_requests)
        cache = model_steps.filled(model, self.num_blocks(model, lengths, max_requests))
        self._decode = model_steps.Steps(model, cache, requests=max_requests, tokens=lengths.running)
        self._prefill = model_steps.Steps(model, cache, requests=prompts, tokens=prompt, new_tokens=prompt)

    @classmethod
    def num_blocks(cls, model: Model, lengths: Lengths, max_requests: int) -> int:
        """Blocks of the cache that both use."""
        prompts, prompt = cls._prefilled(lengths, max_requests)
        decoded = max_requests * model_steps.blocks_for(model, lengths.running)
        return max(decoded, prompts * model_steps.blocks_for(model, prompt, prompt))

    @staticmethod
    def _prefilled(lengths: Lengths, max_requests: int) -> tuple[int, int]:
        """The number of prompts of the prefill, and the tokens of each."""
        prompt = max(round(lengths.prompts.mean()), 1)
        return max(min(PREFILL_TOKENS // prompt, max_requests), 1), prompt

    def compile(self) -> None:
        """Compiles both, which may be done in a thread."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(model_steps.Steps.compile, (self._decode, self._prefill)))

    def measure(self) -> Rates:
        """Times consecutive steps of each."""
        decode = self._decode.new_tokens / self._decode.seconds()
        self._prefill.cache = self._decode.cache  # which the steps have donated
        return Rates(prefill=self._prefill.new_tokens / self._prefill.seconds(), decode=decode)


@dataclass(frozen=True)
class Served:
    """How requests were served.  Times are in seconds since the start."""

    arrivals: np.ndarray
    """[N]."""
    tokens: list[list[float]]
    """The time of each token of each request."""
    saturated: tuple[float, float]
    """From when as many requests had ended as may run at once, until none waited any more."""

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


def serve(engine: Engine, lengths: Lengths, arrivals: np.ndarray, *, seed: int = 0) -> Served:
    """Submits a request at each of the arrival times, and steps the engine until all have ended.

    Prompts are random, so that they share no prefixes, and no token ends a request early.
    """
    rng, vocabulary = np.random.default_rng(seed), engine.model.config.vocab_size
    prompts = [rng.integers(0, vocabulary, count).tolist() for count in lengths.prompts]
    numbers: dict[Request, int] = {}
    tokens: list[list[float]] = [[] for _ in prompts]
    first, last, start = math.inf, 0.0, time.perf_counter()
    while len(numbers) < len(prompts) or engine.waiting or engine.running:
        now = time.perf_counter() - start
        while (number := len(numbers)) < len(prompts) and arrivals[number] <= now:
            numbers[engine.submit(prompts[number], max_tokens=int(lengths.outputs[number]), stop=())] = number
        if not engine.waiting and not engine.running:
            time.sleep(max(arrivals[number] - now, 0))
            continue
        new = engine.step()
        now = time.perf_counter() - start
        for request, _ in new:
            tokens[numbers[request]].append(now)
        if engine.waiting:
            last = now
        if len(numbers) - len(engine.waiting) - len(engine.running) >= engine.max_requests:
            first = min(first, now)
    if any(request.finish_reason != "length" for request in numbers):
        raise RuntimeError("the logits of a request are NaN, so that it ended early")
    return Served(arrivals, tokens, (first, last))
