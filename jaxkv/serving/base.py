"""What `Engine` and `Replicas` share: the stream of tokens, and how they continue after an exception."""

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Concatenate, Unpack

from jaxkv.serving.request import Request, RequestOptions
from jaxkv.serving.stats import EngineStats


def restores[E: "EngineBase", **P, T](method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Decorates a method of an engine so that the engine can continue after an exception of any kind in it.

    Such a method changes requests, blocks and the cache together.  If an exception is raised between two of these
    changes, which a KeyboardInterrupt can do anywhere, requests, blocks and the cache are at different steps.  They are
    then made again from the tokens of the requests, before the caller gets the exception.  If that is interrupted too,
    the next call does it.

    Decorated methods must not call each other on the same engine.
    """

    @wraps(method)
    def guarded(self: E, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_usable()
        try:
            self.changing = True
            result = method(self, *args, **kwargs)
            self.changing = False
            return result
        except BaseException as error:
            # Frames may hold a later cache than the engine, and there may be memory for one cache only.
            traceback.clear_frames(error.__traceback__)
            self._recover()
            raise

    return guarded


class EngineBase(ABC):
    """An engine that serves requests in steps.

    After an exception in a step, whatever its kind, the engine is restored (`_restore`).  If that fails, the engine has
    ended: all later calls raise a RuntimeError.
    """

    def __init__(self):
        self.changing = False
        """Whether a decorated method runs, or has raised an exception since which the engine has not been restored."""
        self._ended_by: Exception | None = None

    @property
    @abstractmethod
    def unfinished(self) -> Sequence[Request]:
        """The requests that run or wait."""

    @property
    @abstractmethod
    def _streams(self) -> Sequence[deque[tuple[Request, int]]]:
        """Tokens that have been read, and that `step` has not returned and `run` has not yielded yet: requests, and
        indices of their `tokens`."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Numbers of the engine, now.  May be read at any time, also while another thread steps the engine."""

    @abstractmethod
    def new_request(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> Request:
        """Makes a request, which `add` queues.  May be called at any time, also while another thread steps the engine.

        The options and errors are those of `Engine.new_request`.
        """

    @abstractmethod
    def add(self, request: Request) -> None:
        """Queues a request that `new_request` has made.  RuntimeError if an exception has ended the engine."""

    def submit(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> Request:
        """Makes a request and queues it.  `step` and `run` append its tokens.

        The options and errors are those of `Engine.new_request`, and RuntimeError if an exception has ended the engine.
        """
        self.check_usable()
        request = self.new_request(prompt, **options)
        self.add(request)
        return request

    @abstractmethod
    def cancel(self, request: Request, *, finish_reason: str = "cancelled") -> None:
        """Ends a waiting or running request; arguments and errors are those of `Engine.cancel`."""

    @abstractmethod
    def _step(self) -> None:
        """Runs a step and adds its new tokens to the streams."""

    @abstractmethod
    def _restore(self) -> None:
        """Has all unfinished requests wait with the tokens that were read, and makes everything else as at the start.

        It must work whatever state the exception has left, and may itself be interrupted and called again.  An
        Exception means that the engine cannot continue.
        """

    @abstractmethod
    def _release(self) -> None:
        """Has all unfinished requests wait, and returns all blocks and the memory of the cache.

        It must work whatever state the exception has left, and may itself be interrupted and called again.
        """

    @restores
    def _advance(self) -> None:
        self._step()

    def step(self) -> list[tuple[Request, int]]:
        """Runs a step; returns the new tokens with their requests.

        If the logits of a request are NaN, it ends with `finish_reason` "nan" and no further token; the others
        continue.

        After an exception of any kind in this call, the next call continues all requests with the tokens that they
        would have had, up to rounding.  It also returns tokens that were read before the exception.

        Raises:
          RuntimeError: the engine has ended, because it could not be restored after an earlier exception.
        """
        self._advance()
        new = [(request, request.tokens[index]) for stream in self._streams for request, index in _wanted(stream)]
        for stream in self._streams:
            stream.clear()
        return new

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until all requests have ended; yields each new token with its request.

        The loop may be left at any time, also by an exception of any kind in a step: the next call of `run` or `step`
        continues with the next token.

        Raises:
          RuntimeError: the engine has ended, because it could not be restored after an earlier exception.
        """
        self.check_usable()
        return self._run()

    def _run(self) -> Iterator[tuple[Request, int]]:
        while True:
            for stream in self._streams:
                while stream:
                    for request, index in _wanted([stream.popleft()]):
                        yield request, request.tokens[index]
            self.check_usable()
            if not self._continues:
                return
            self._advance()

    @property
    def steps_with_others(self) -> bool:
        """Whether every step waits for engines of other processes, so that it is also needed without requests."""
        return False

    @property
    def _continues(self) -> bool:
        """Whether `run` runs another step."""
        return bool(self.unfinished)

    def check_usable(self) -> None:
        """Restores the engine if an earlier call could not; RuntimeError if the engine has ended."""
        self._recover()
        if self._ended_by is None:
            return
        self._release()  # the earlier call may have been interrupted
        raise RuntimeError(
            "this engine has ended, because it could not be restored after an exception: "
            f"{type(self._ended_by).__name__}: {self._ended_by}.  Make a new one; the model and its connectors "
            "can be used again.  Requests that had not finished are in `waiting`.  Their `tokens` are right as far as "
            "they go, and can be prompts of the new engine"
        ) from self._ended_by

    def _recover(self) -> None:
        """Restores the engine if an exception has interrupted a change; ends the engine if that fails."""
        if not self.changing or self._ended_by is not None:
            return
        try:
            self._restore()
            self.changing = False
        except Exception as error:
            self.end(error)

    def end(self, error: Exception) -> None:
        """Ends the engine, which cannot be restored because of this error.

        All its blocks are free then, and the memory of its cache is released, on the host as well.  Requests that have
        not finished keep `finish_reason` None and stay in `waiting`, without blocks.
        """
        self._ended_by = error
        self._release()


def _wanted(stream: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
    """Without the tokens of requests that the caller has cancelled since they were read."""
    return [(request, index) for request, index in stream if not request.cancelled]
