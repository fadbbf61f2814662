"""What the application needs of an engine, wherever that runs: `EngineProcess` and `RayEngine` have it."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from jaxkv.serving import EngineInfo, EngineStats, Output


class EngineEnded(RuntimeError):
    """The engine has ended, and answers no more requests."""


class Outputs(Protocol):
    """The outputs of a request: an asynchronous iterator, which ends after the one with the finish reason."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Itself; it raises EngineEnded if the engine ends before the request."""
        ...

    def cancel(self, finish_reason: str = "cancelled") -> None:
        """Ends the request, unless it has ended.  The last output, with this reason, comes at once."""
        ...


class EngineClient(Protocol):
    """An engine."""

    async def started(self) -> EngineInfo:
        """Waits until the engine serves; EngineEnded if it has ended."""
        ...

    async def submit(self, prompt: Sequence[int], **options: Any) -> Outputs:
        """Queues a request, with the options and errors of `Engine.new_request`, and EngineEnded."""
        ...

    async def stats(self) -> EngineStats:
        """Numbers of the engine; EngineEnded if it has ended."""
        ...
