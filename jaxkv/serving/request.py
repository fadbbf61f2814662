"""`Request`: a prompt with its options and its progress."""

import operator
import warnings
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, TypedDict

from jaxkv.models.sampling import Sampling
from jaxkv.serving.pool import Predecessor

TOKEN_BYTES = array("i").itemsize
ABSENT = -1
"""Stands for a block that a request does not hold: one that has expired, or that was never needed."""


@dataclass
class Held:
    """What a request holds of one table."""

    blocks: list[int] = field(default_factory=list)
    """Its blocks, in order: ids, or `ABSENT`."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks, in order; updated when it joins and when it fills a block."""
    first: int = 0
    """Blocks before this one have expired."""


class RequestOptions(TypedDict, total=False):
    """The options of a request; `Engine.new_request` describes them."""

    max_tokens: int
    sampling: Sampling
    stop: Collection[int] | None
    priority: int
    logprobs: int | None
    cache_salt: str | bytes | Sequence[str | bytes] | None


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the probabilities of tokens at the position of a generated token.

    They are those of the model, before temperature and filters (vLLM's `raw_logprobs`).
    """

    logprob: float
    """Of the generated token."""
    top: list[tuple[int, float]]
    """The most likely tokens, and the logarithm of each, in descending order.  They may include the generated token."""


@dataclass(eq=False)
class Request:
    """One prompt and its continuation.  Made by `submit` of an engine, which alone changes it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    priority: int = 0
    number: int = 0
    """Counts the requests of an engine, in the order in which they were queued."""
    num_logprobs: int | None = None
    """For how many most likely tokens `logprobs` has entries; None for no `logprobs`."""
    cache_salt: tuple[bytes, ...] = ()
    """Only requests with the same salt share blocks."""
    tokens: list[int] = field(init=False)
    """The prompt and the generated tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    """For each generated token, if `num_logprobs` is not None."""
    held: dict[str, Held] = field(default_factory=dict, init=False)
    """Its blocks, by the name of their table."""
    cached: int = field(default=0, init=False)
    """The number of leading tokens that have entries in its blocks, including those that a launched step writes."""
    filled: int = field(default=0, init=False)
    """The number of leading tokens whose entries have been written, and are not NaN, as far as the host has read."""
    loading: int = field(default=0, init=False)
    """The number of leading tokens whose entries are found, while the blocks are loaded that are not on the device."""
    checkpoint: int = field(default=0, init=False)
    """A step ends after this number of tokens, so that others find the state there; 0 if it makes no difference."""
    unread: int = field(default=0, init=False)
    """The number of tokens after `tokens` that launched steps sample, and that the host has not read yet."""
    drafts: list[int] = field(default_factory=list, init=False)
    """Drafts of the tokens after `tokens`, for the next step to verify."""
    place: int = field(default=-1, init=False)
    """Where its last token is kept on the device while it runs."""
    _token_bytes: bytearray = field(default_factory=bytearray, init=False)
    arrival_time: float = field(init=False)
    """When it was made, in seconds of `time.perf_counter`."""
    first_token_time: float | None = field(default=None, init=False)
    """When the host read its first generated token, in seconds of `time.perf_counter`; None before."""
    finish_time: float | None = field(default=None, init=False)
    """When it ended, in seconds of `time.perf_counter`; None before."""
    finish_reason: str | None = field(default=None, init=False)
    """None while it waits or runs; then "stop" (its last token is a stop token), "length", "nan" (its logits are NaN),
    or the reason that was passed to `cancel`, by default "cancelled".  It stays None if an exception ends the engine,
    because another engine can continue the request."""
    cancelled: bool = field(default=False, init=False)
    """Whether `cancel` has ended it.  Nothing returns further tokens of it then."""

    def __post_init__(self):
        self.tokens = list(self.prompt)
        self.arrival_time = perf_counter()

    @property
    def blocks(self) -> list[int]:
        """The ids of the blocks that it holds, table by table, in order."""
        return [block for held in self.held.values() for block in held.blocks if block != ABSENT]

    def keys_of(self, table: str) -> list[bytes]:
        """The keys of its full blocks of a table."""
        return self.held[table].keys

    def predecessor(self, table: str, index: int) -> Predecessor:
        """What block number `index` of a table follows, if the blocks before it are full."""
        return self.keys_of(table)[index - 1] if index else self.cache_salt

    @property
    def token_bytes(self) -> bytearray:
        """Its tokens, as integers of `TOKEN_BYTES` bytes each."""
        self._token_bytes += array("i", self.tokens[len(self._token_bytes) // TOKEN_BYTES :]).tobytes()
        return self._token_bytes

    @property
    def generated(self) -> list[int]:
        """The generated tokens, including a final stop token."""
        return self.tokens[len(self.prompt) :]

    @property
    def rank(self) -> tuple[int, int]:
        """Requests of lower rank are served first: those of higher priority, and of equal ones the earlier."""
        return -self.priority, self.number

    @property
    def length(self) -> int:
        """The number of tokens, including those that the host has not read yet."""
        return len(self.tokens) + self.unread

    @property
    def most_entries(self) -> int:
        """The most entries that it needs.  Its last token needs none, because no token attends to it."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def missing(self) -> int:
        """The number of tokens without entries that the next steps process: 1 if the next step decodes, more if it
        prefills, and 0 if launched steps sample the last of `max_tokens`, or if blocks are being loaded."""
        length = self.length
        is_last = length == len(self.prompt) + self.max_tokens
        return 0 if is_last or self.loading else length - self.cached

    def reset(self) -> None:
        """Forgets all but its tokens: its place, its blocks, and the steps that have been launched with it."""
        if self.finish_reason is None:
            self._finish_if_complete()  # an interrupt may have come between the last token and this
        self.held, self.checkpoint, self.unread = {}, 0, 0
        self.leave()

    def leave(self) -> None:
        """Forgets its place, how many tokens its blocks have, and its drafts: it no longer runs."""
        self.cached, self.filled, self.loading, self.drafts, self.place = 0, 0, 0, [], -1

    def append(self, token: int) -> None:
        """Appends the next token; ends the request if it is a stop token, or the last of `max_tokens`."""
        if self.first_token_time is None:
            self.first_token_time = perf_counter()
        self.tokens.append(token)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if len(self.tokens) > len(self.prompt) and self.tokens[-1] in self.stop:
            self.finish("stop")
        elif len(self.tokens) == len(self.prompt) + self.max_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the request."""
        self.finish_time = perf_counter()
        self.finish_reason = reason


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """`values` as Python ints; TypeError unless they are integers."""
    if isinstance(values, str):
        raise TypeError(f"`{name}` is {values!r}: expected token ids; tokenize the text first")
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"`{name}` is {values!r}: expected token ids, which are integers") from None


def stop_tokens(stop: Collection[int] | None, stated: Collection[int]) -> frozenset[int]:
    """The tokens that end a request: `stop`, or by default the `stated` ones of the checkpoint.

    If that states none, the first request of the process that relies on it causes a warning.
    """
    if stop is not None:
        return frozenset(token_ids("stop", stop))
    if not stated:
        # Without a `stacklevel`, so that Python shows it once per process.
        warnings.warn(  # noqa: B028
            "the checkpoint states no stop tokens (`eos_token_id` in config.json or generation_config.json), so that "
            "requests end after `max_tokens`: pass `stop`, which may be empty"
        )
    return frozenset(stated)
