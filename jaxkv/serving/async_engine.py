"""`AsyncEngine`: an engine in a thread of its own, which any thread or event loop uses.

Only that thread touches the engine.  Others send commands through a queue, which it takes between two steps, and read
the tokens of a request from its `Stream`.
"""

import asyncio
import atexit
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, Unpack

from jaxkv.serving.base import EngineBase
from jaxkv.serving.request import Request, RequestOptions, TokenLogprobs
from jaxkv.serving.stats import EngineStats

_log = logging.getLogger("jaxkv")


class AsyncEngine:
    """Steps an engine in a thread, and serves requests of any threads and event loops.

        with AsyncEngine(engine) as served:
            stream = served.submit(prompt, max_tokens=100)
            async for token in stream:  # or `for`, which blocks
                ...

    If a step raises an exception, this ends, although the engine could continue: the exception might come again in
    every step.  Every stream that has not ended raises a RuntimeError after its last token, and so does `submit`; the
    exception is its cause.

    The thread has its own contexts of JAX, such as that of `jax.default_matmul_precision`: set what the engine needs by
    `jax.config.update`.

    Args:
      engine: an `Engine` or `Replicas` without requests.  Nothing else may use it until `close`.  Call its `warm_up`
        before.

    Raises:
      ValueError: the engine has requests that have not ended, or steps together with those of other processes.
    """

    def __init__(self, engine: EngineBase):
        if engine.unfinished:
            raise ValueError(f"`engine` has {len(engine.unfinished)} requests that have not ended: expected none")
        if engine.steps_with_others:
            raise ValueError(
                "`engine` steps together with those of other processes: expected one that does not, because a thread "
                "steps it only while it has requests; call `run` in all processes"
            )
        self._engine = engine
        self._commands = SimpleQueue[Callable[[], None]]()
        """What the thread does between two steps.  Finalizers may add to it, because its `put` is reentrant."""
        self._channels: dict[Request, _Channel] = {}
        """Channels of requests that have not ended.  Only the thread uses it."""
        self._lock = Lock()
        """Held to add a request, so that none is added after the end."""
        self._open = True
        """Whether requests may be added."""
        self._error: BaseException | None = None
        """The exception that a step has raised."""
        self._running = True
        """Whether the thread continues."""
        self._thread = Thread(target=self._serve, name="jaxkv-engine", daemon=True)
        atexit.register(self.close)  # a thread that runs JAX must end before the interpreter does
        self._thread.start()

    def submit(self, prompt: Sequence[int], **options: Unpack[RequestOptions]) -> "Stream":
        """Queues a request, and returns the stream of its tokens without waiting for the engine.

        The options and errors are those of `Engine.new_request`, and RuntimeError if this is closed or a step has
        raised an exception.
        """
        channel = _Channel(self._engine.new_request(prompt, **options))
        self._put(partial(self._add, channel))
        return Stream(channel, lambda reason: self._commands.put(partial(self._cancel, channel, reason)))

    def call[T](self, function: Callable[[EngineBase], T]) -> Future[T]:
        """Has the engine's thread call a function between two steps, without waiting for it.

        For what else an engine does, such as `served.call(lambda engine: engine.export(prompt))`.  All requests wait
        while the function runs.  It must not submit requests or step the engine.

        Args:
          function: a function of the engine.

        Returns:
          Its result, or the exception that it raises; RuntimeError if a step has raised one before.  In an event loop,
          use `asyncio.wrap_future`.

        Raises:
          RuntimeError: this is closed, or a step has raised an exception.
        """
        future = Future[T]()
        self._put(partial(self._call, function, future))
        return future

    def check_open(self) -> None:
        """Raises a RuntimeError if this is closed, or a step has raised an exception, which is its cause then."""
        if not self._open:
            raise RuntimeError("this AsyncEngine is closed, or its engine has ended: make a new one") from self._error

    def _put(self, command: Callable[[], None]) -> None:
        with self._lock:
            self.check_open()
            self._commands.put(command)

    @property
    def stats(self) -> EngineStats:
        """Numbers of the engine, now."""
        return self._engine.stats

    def close(self) -> None:
        """Cancels all requests that have not ended, and waits for the end of the thread.

        The thread ends after the step that it is in.  Streams end.  The engine may be used without this object then.
        If a step has raised an exception, the engine still has the requests.  May be called again.
        """
        with self._lock:
            if self._open:
                self._open = False
                self._commands.put(self._stop)
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # The thread runs the methods below.

    def _serve(self) -> None:
        try:
            while self._running:
                # Without requests, it waits for a command.
                for _ in range(max(self._commands.qsize(), 0 if self._channels else 1)):
                    self._commands.get()()
                if self._channels:
                    self._step()
        except BaseException as error:
            _log.error("a step raised an exception, which ends the AsyncEngine", exc_info=error)
            with self._lock:
                self._open, self._error = False, error
            _wake(waiter for channel in self._channels.values() for waiter in channel.end(error))
            self._channels.clear()
            while not self._commands.empty():
                self._commands.get()()

    def _step(self) -> None:
        waiters = []
        for request, token in self._engine.step():
            if channel := self._channels.get(request):  # else it ended before, in a `run` that was left
                waiters += channel.put(token)
        for request in [request for request in self._channels if request.finish_reason is not None]:
            waiters += self._channels.pop(request).end()
        _wake(waiters)

    def _add(self, channel: "_Channel") -> None:
        if self._error is not None:
            _wake(channel.end(self._error))
            return
        self._channels[channel.request] = channel
        self._engine.add(channel.request)

    def _call(self, function: Callable[[EngineBase], Any], future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._error is not None:
                raise RuntimeError(f"the engine has ended, because of {type(self._error).__name__}") from self._error
            future.set_result(function(self._engine))
        except BaseException as error:  # it belongs to whoever waits for the result
            future.set_exception(error)

    def _cancel(self, channel: "_Channel", finish_reason: str) -> None:
        if channel.request in self._channels:  # else it has ended
            self._engine.cancel(channel.request, finish_reason=finish_reason)
            _wake(self._channels.pop(channel.request).end())

    def _stop(self) -> None:
        self._running = False
        for channel in list(self._channels.values()):
            self._cancel(channel, "cancelled")


class Output(NamedTuple):
    """New tokens of a request, all that have come since the last ones were taken."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """For each of the tokens, if the request has `num_logprobs`; else empty."""
    finish_reason: str | None
    """That of the request if these are its last tokens, of which there may be none; else None."""


class Stream:
    """The tokens of one request, as they come: an iterator that blocks, and an asynchronous one.

    Each token is returned once, to the first of its consumers.  If a task that waits for a token is cancelled, or if
    this object is dropped before the end, the request is cancelled.

    Made by `AsyncEngine.submit`.

    Attributes:
      request: the request, whose `finish_reason` is set when the stream ends, and before its last token is returned.
    """

    def __init__(self, channel: "_Channel", cancel: Callable[[str], None]):
        self.request = channel.request
        self._channel, self._cancel = channel, cancel
        self._dropped = weakref.finalize(self, cancel, "cancelled")

    def cancel(self, *, finish_reason: str = "cancelled") -> None:
        """Ends the request after the step that the engine is in, unless it has ended; does not wait for it.

        The stream ends then, after tokens that have come in the meantime.  Further calls have no effect.

        Args:
          finish_reason: the request's `finish_reason` then, for example "stop" if its text contains a stop string.
        """
        if self._dropped.detach():
            self._cancel(finish_reason)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> int:
        while (token := self._channel.take(StopIteration)) is None:
            changed = Event()
            if self._channel.wait(changed):
                changed.wait()
        return token

    async def outputs(self) -> AsyncIterator[Output]:
        """The tokens with all that belongs to them, several at a time if they come faster than they are consumed.

        For servers: the last output has the `finish_reason`.  Use this instead of iterating over the stream.
        """
        start, reason = 0, None
        while reason is None:
            tokens = [token] if (token := await anext(self, None)) is not None else []
            rest, ended = self._channel.take_all()
            tokens += rest
            logprobs = self.request.logprobs[start : start + len(tokens)]
            reason, start = self.request.finish_reason if ended else None, start + len(tokens)
            yield Output(tokens, logprobs, reason)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> int:
        while (token := self._channel.take(StopAsyncIteration)) is None:
            changed = asyncio.get_running_loop().create_future()
            if self._channel.wait(changed):
                try:
                    await changed
                except asyncio.CancelledError:
                    self.cancel()
                    raise
        return token


type _Waiter = Event | asyncio.Future[None]
"""What a consumer waits for: an event in a thread, a future in an event loop."""


class _Channel:
    """Passes the tokens of a request from the engine's thread to consumers."""

    def __init__(self, request: Request):
        self.request = request
        self._lock = Lock()
        self._tokens: deque[int] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._waiters: list[_Waiter] = []

    def put(self, token: int) -> list[_Waiter]:
        """Adds a token; returns the waiters to wake."""
        with self._lock:
            self._tokens.append(token)
            waiters, self._waiters = self._waiters, []
        return waiters

    def end(self, error: BaseException | None = None) -> list[_Waiter]:
        """Nothing comes any more, because the request has ended, or because of an exception.

        Returns the waiters to wake.
        """
        with self._lock:
            self._ended, self._error = True, error
            waiters, self._waiters = self._waiters, []
        return waiters

    def take(self, end: type[Exception]) -> int | None:
        """The next token, or None if it has not come yet.  At the end, raises `end`, or RuntimeError after an error."""
        with self._lock:
            if self._tokens:
                return self._tokens.popleft()
            if not self._ended:
                return None
        if self._error is not None:
            name = type(self._error).__name__
            raise RuntimeError(f"this request has not ended, but its engine has, because of {name}") from self._error
        raise end

    def take_all(self) -> tuple[list[int], bool]:
        """The tokens that have come, and whether they are the last."""
        with self._lock:
            tokens, self._tokens = list(self._tokens), deque()
            return tokens, self._ended and self._error is None

    def wait(self, waiter: _Waiter) -> bool:
        """Has a waiter be woken when there is a token, or the end.  False if there already is, so that it is not."""
        with self._lock:
            if self._tokens or self._ended:
                return False
            self._waiters.append(waiter)
            return True


def _wake(waiters: Iterable[_Waiter]) -> None:
    """Wakes consumers; those of an event loop by one call, because every call writes to the loop's socket."""
    futures = defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]](list)
    for waiter in waiters:
        if isinstance(waiter, Event):
            waiter.set()
        else:
            futures[waiter.get_loop()].append(waiter)
    for loop, waiting in futures.items():
        with suppress(RuntimeError):  # the loop is closed, so that nobody waits any more
            loop.call_soon_threadsafe(_resolve, waiting)


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # else its task has been cancelled
            future.set_result(None)
