"""What `Engine` and `Replicas` share: the stream of tokens, and the end after an exception."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Concatenate, Unpack

from jaxkv.serving.request import Request, RequestOptions
from jaxkv.serving.stats import EngineStats


def ends_engine[E: "EngineBase", **P, T](method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Decorates a method of an engine so that an exception of any kind in it ends the engine.

    Such a method changes requests, blocks and the cache together.  If an exception is raised between two of these
    changes, which a KeyboardInterrupt can do anywhere, requests, blocks and the cache are at different steps.  An
    engine that continued from there would generate wrong tokens.
    """

    @wraps(method)
    def guarded(self: E, *args: P.args, **kwargs: P.kwargs) -> T:
        self.check_usable()
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.end(error)
            raise

    return guarded


class EngineBase(ABC):
    """An engine that serves requests in steps.

    An exception in a step, whatever its kind, ends the engine (`end`).  All later calls raise a RuntimeError.
    """

    def __init__(self):
        self._ended_by: BaseException | None = None
        self._new: deque[tuple[Request, int]] = deque()
        """Tokens that have been read, and that `step` has not returned and `run` has not yielded yet."""

    @property
    @abstractmethod
    def unfinished(self) -> Sequence[Request]:
        """The requests that run or wait."""

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
        """Runs a step and adds its new tokens to `_new`."""

    @abstractmethod
    def _release(self, error: BaseException) -> None:
        """Returns all blocks and the memory of the cache, whatever state the exception has left them in.

        It may be called several times, because it may be interrupted, too.
        """

    @ends_engine
    def _advance(self) -> None:
        self._step()

    def step(self) -> list[tuple[Request, int]]:
        """Runs a step; returns the new tokens with their requests.

        If the logits of a request are NaN, it ends with `finish_reason` "nan" and no further token; the others
        continue.

        Raises:
          RuntimeError: an exception has ended the engine.  An exception of any kind in this call does.
        """
        self._advance()
        return self.take()

    def run(self) -> Iterator[tuple[Request, int]]:
        """Steps until all requests have ended; yields each new token with its request.

        The loop may be left at any time: the next call of `run` or `step` continues with the next token.

        Raises:
          RuntimeError: an exception has ended the engine.  An exception of any kind in a step does.
        """
        self.check_usable()
        return self._run()

    def _run(self) -> Iterator[tuple[Request, int]]:
        while True:
            while self._new:
                request, token = self._new.popleft()
                if not request.cancelled:  # the caller may have cancelled it since the token was read
                    yield request, token
            self.check_usable()
            if not self.unfinished:
                return
            self._advance()

    def take(self) -> list[tuple[Request, int]]:
        """Removes and returns the tokens of `_new`, without those of cancelled requests."""
        new = [(request, token) for request, token in self._new if not request.cancelled]
        self._new.clear()
        return new

    def check_usable(self) -> None:
        """RuntimeError if an exception has ended the engine."""
        if self._ended_by is None:
            return
        self._release(self._ended_by)  # the earlier call may have been interrupted
        raise RuntimeError(
            f"this engine has ended, because a step raised {type(self._ended_by).__name__}: make a new one; the model "
            "and the pools of `offload` can be used again.  Requests that had not finished are in `waiting`.  Their "
            "`tokens` are right as far as they go, and can be prompts of the new engine"
        ) from self._ended_by

    def end(self, error: BaseException) -> None:
        """Ends the engine because of an exception.

        All its blocks are free then, and the memory of its cache is released.  Requests that have not finished keep
        `finish_reason` None and stay in `waiting`, without blocks.  They have the tokens that were read before, also
        those that `step` has not returned.
        """
        if self._ended_by is None:
            self._ended_by = error
        self._release(self._ended_by)
