"""`Request`: a prompt with its options and its progress."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxkv.models.sampling import Sampling


@dataclass(eq=False)
class Request:
    """One prompt and its continuation.  Made by `Engine.submit`; only the engine changes it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    tokens: list[int] = field(init=False)
    """The prompt and the generated tokens."""
    blocks: list[int] = field(default_factory=list, init=False)
    """Its blocks, in order."""
    cached: int = field(default=0, init=False)
    """The number of leading tokens that have entries in its blocks."""
    keys: list[bytes] = field(default_factory=list, init=False)
    """Keys of its full blocks, in order; updated when it joins and when it fills a block."""
    finish_reason: str | None = field(default=None, init=False)
    """None while it waits or runs; then "stop" (its last token is a stop token), "length", "cancelled", or "nan" (its
    logits are NaN)."""

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The generated tokens, including a final stop token."""
        return self.tokens[len(self.prompt) :]

    @property
    def missing(self) -> int:
        """The number of tokens without entries: 1 if the next step decodes, more if it prefills."""
        return len(self.tokens) - self.cached

    def append(self, token: int) -> None:
        """Appends the next token; sets `finish_reason` if it is a stop token, or the last of `max_tokens`."""
        self.tokens.append(token)
        if token in self.stop:
            self.finish_reason = "stop"
        elif len(self.tokens) == len(self.prompt) + self.max_tokens:
            self.finish_reason = "length"


def uncancelled(drawn: Iterable[tuple[Request, int]]) -> Iterator[tuple[Request, int]]:
    """Yields the new tokens of a step, except those of requests that are cancelled while the caller iterates."""
    return ((request, token) for request, token in drawn if request.finish_reason != "cancelled")
