"""Serve random requests that come and are cancelled at several times saturation, and compare each with a second engine.

Many more requests wait than run, with priorities, so that running ones are preempted.  Prompts repeat the beginnings of
earlier requests and of their answers, some requests draw their tokens at random, and some are cancelled, whether they
wait or run.  Afterwards no block may be held, and every request must have ended for a reason, with all its tokens.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.models import Sampling
from jaxkv.serving import Engine, Request
from jaxkv.serving.request import TokenLogprobs

WAITING = 3
"""How many requests wait, relative to those that run at once."""
CANCELLED, SAMPLED, REPEATED = 0.1, 0.25, 0.5
"""Parts of all requests: those that are cancelled, that draw tokens, and whose prompts begin as earlier requests."""
ROUNDINGS = 64
"""How many roundings of the model's dtype the logarithms of the probabilities of two tokens may differ if one engine
chose the first and another one the second."""
MOST_LIKELY = 20
"""Of how many tokens log probabilities are compared."""


@dataclass
class Soaked:
    """How requests were served."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    """All requests, and the tokens that the engine returned for each."""
    preempted: set[Request] = field(default_factory=set)
    """Requests that waited after their first token."""
    seconds: float = 0.0
    """Until the last request ended."""

    @property
    def ended(self) -> dict[str, int]:
        """How many requests have ended for each reason."""
        return dict(Counter(str(request.finish_reason) for request in self.tokens))

    @property
    def lost(self) -> list[Request]:
        """Requests that have ended without a reason, without all their tokens, or with others than were returned."""
        return [request for request, returned in self.tokens.items() if not _is_complete(request, returned)]

    @property
    def greedy(self) -> list[Request]:
        """Requests that have all their tokens, which are the most likely ones."""
        return [r for r in self.tokens if r.finish_reason == "length" and r.sampling.temperature == 0]

    def summary(self) -> dict[str, Any]:
        """Numbers for a file of measurements."""
        return {
            "seconds": self.seconds,
            "requests": len(self.tokens),
            "ended": self.ended,
            "output_tokens": sum(map(len, self.tokens.values())),
            "preempted": len(self.preempted),
            "lost": [request.number for request in self.lost],
        }


def _is_complete(request: Request, returned: Sequence[int]) -> bool:
    if request.finish_reason == "cancelled":
        return request.generated[: len(returned)] == [*returned]
    return request.finish_reason == "length" and len(returned) == request.max_tokens and request.generated == returned


def soak(
    engine: Engine,
    prompts: Sequence[int],
    outputs: Sequence[int],
    seconds: float,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Soaked:
    """Submits and cancels requests for so many seconds, and then steps until all have ended.

    Args:
      engine: without requests.
      prompts: lengths of prompts in tokens, of one request after the other, and then from the start again.
      outputs: the tokens that each of these requests generates.
      seconds: how long requests are submitted.
      seed: of the requests.
      clock: gives the time in seconds.
    """
    rng, soaked, start = np.random.default_rng(seed), Soaked(), clock()
    submitting, submitted = True, list[Request]()
    while submitting or engine.unfinished:
        submitting = submitting and clock() - start < seconds
        while submitting and len(engine.waiting) < WAITING * engine.max_requests:
            number = len(submitted) % len(prompts)
            request = _submit(engine, rng, submitted, int(prompts[number]), int(outputs[number]))
            submitted.append(request)
            soaked.tokens[request] = []
            if rng.random() < CANCELLED:
                engine.cancel(engine.unfinished[rng.integers(len(engine.unfinished))])
        for request, token in engine.step():
            soaked.tokens[request].append(token)
        soaked.preempted.update(request for request in engine.waiting if request.first_token_time is not None)
    soaked.seconds = clock() - start
    return soaked


def _submit(engine: Engine, rng: np.random.Generator, earlier: Sequence[Request], prompt: int, output: int) -> Request:
    """Submits a random request with a prompt of `prompt` tokens."""
    tokens: list[int] = []
    if earlier and rng.random() < REPEATED:
        repeated = earlier[int(rng.integers(len(earlier)))].tokens
        tokens = repeated[: rng.integers(min(prompt, len(repeated)) + 1)]
    tokens += rng.integers(0, engine.model.config.vocab_size, prompt - len(tokens)).tolist()
    return engine.submit(
        tokens,
        max_tokens=output,
        sampling=Sampling(0.8, seed=len(earlier)) if rng.random() < SAMPLED else Sampling(),
        stop=(),
        priority=int(rng.integers(3)),
        cache_salt=[None, "tenant"][rng.integers(2)],
    )


@dataclass
class Compared:
    """How many requests have the tokens of a second engine."""

    equal: int = 0
    rounded: int = 0
    """Requests that differ where two tokens are equally likely, up to rounding, and nowhere else."""
    wrong: list[int] = field(default_factory=list)
    """The numbers of all others."""

    def add(self, request: Request, differences: int | None) -> None:
        """Counts a request that differs in so many places by rounding, or that is wrong if None."""
        if differences is None:
            self.wrong.append(request.number)
        elif differences:
            self.rounded += 1
        else:
            self.equal += 1


def compare(engine: Engine, requests: Iterable[Request]) -> Compared:
    """Compares greedy requests with those of an engine that reuses no prefixes, and of which none is cancelled.

    Args:
      engine: another one, without requests and without drafts, because it needs log probabilities.
      requests: requests that have ended with all their tokens.
    """
    found, differences = Compared(), dict.fromkeys(requests, 0)
    known, logprobs = dict(differences), None  # which only the requests that differ need
    while known:
        others = {request: _again(engine, request, count, logprobs) for request, count in known.items()}
        list(engine.run())
        known, before = {}, known
        for request, other in others.items():
            tokens = request.generated[before[request] :]
            place = next(
                (i for i, pair in enumerate(zip(tokens, other.generated, strict=True)) if len({*pair}) > 1), None
            )
            if place is None:
                found.add(request, differences[request])
            elif logprobs is None:
                known[request] = 0
            elif not _is_rounding(engine, other.logprobs[place], tokens[place]):
                found.add(request, None)
            else:  # from here on it is compared with what follows its own token
                differences[request] += 1
                known[request] = before[request] + place + 1
                if known[request] == request.max_tokens:
                    found.add(request, differences[request])
                    del known[request]
        logprobs = MOST_LIKELY
    return found


def _again(engine: Engine, request: Request, known: int, logprobs: int | None = None) -> Request:
    """Submits a request with its first generated tokens as part of the prompt."""
    prompt = request.tokens[: len(request.prompt) + known]
    salt = f"{request.number} {known} {logprobs}"  # of no other request, so that nothing is found
    options = {"max_tokens": request.max_tokens - known, "stop": (), "logprobs": logprobs, "cache_salt": salt}
    return engine.submit(prompt, **options)


def _is_rounding(engine: Engine, about: TokenLogprobs, token: int) -> bool:
    """Whether a token is as likely as the one that was chosen instead, up to rounding."""
    tolerance = ROUNDINGS * float(jnp.finfo(engine.model.dtype).eps)
    return about.logprob - dict(about.top).get(token, -np.inf) <= tolerance
