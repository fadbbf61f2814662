"""Numbers of an engine, which may be read at any time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from jaxkv.serving.drafts import AcceptanceStats
from jaxkv.serving.prefix import PrefixCacheStats


class EngineInfo(NamedTuple):
    """What a server needs to know of an engine."""

    max_len: int
    """The most cached tokens of a request."""
    max_requests: int
    """Requests that run at once."""
    stop_tokens: frozenset[int]
    """The tokens that end a request, unless it names others."""


@dataclass
class HostTime:
    """How the host spends the time of steps."""

    steps: int = 0
    """Calls of `step`, and those that `run` makes."""
    seconds: float = 0.0
    """The time of these calls."""
    waited: float = 0.0
    """The part of it in which the host waited for tokens from the device, or for blocks with nothing else to do."""

    @property
    def busy_ms(self) -> float:
        """Milliseconds per step in which the host schedules, launches and reads.  The device works meanwhile, unless
        this takes longer than its step."""
        return 1e3 * (self.seconds - self.waited) / max(self.steps, 1)

    @property
    def step_ms(self) -> float:
        """Milliseconds per step."""
        return 1e3 * self.seconds / max(self.steps, 1)


@dataclass(frozen=True)
class EngineStats:
    """Numbers of an engine at one time.  Counters count from the start of the engine."""

    waiting: int
    """Requests that wait, including preempted ones."""
    running: int
    """Requests that run."""
    num_blocks: int
    """Blocks of the cache."""
    free_blocks: int
    """Blocks that no request holds, including those that can still be found by their content."""
    prefix: PrefixCacheStats
    """Tokens that were found."""
    acceptance: AcceptanceStats
    """Drafts that were accepted."""
    host_time: HostTime
    """The time of steps."""

    @classmethod
    def total(cls, parts: Sequence["EngineStats"]) -> "EngineStats":
        """The sums of the numbers of one or more engines."""
        return _sum(parts)


def _sum(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if not is_dataclass(first):
        return sum(parts)
    return type(first)(*(_sum([getattr(part, field.name) for part in parts]) for field in fields(first)))
